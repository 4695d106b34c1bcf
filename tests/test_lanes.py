"""Packs on lanes that run whenever they like: the same results as one after the other, each one pack later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from fakes import (
    GARBAGE,
    DeferredLanes,
    are_equal,
    encode_all,
    make_encoder,
    one_thread,
    random_pack,
    random_packs,
    tower_of,
)

from vlmembed.batch import open_batch
from vlmembed.lanes import DeviceLink, HostLink
from vlmembed.types import EmbeddingBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from vlmembed.encoder import Encoder
    from vlmembed.lanes import Link
    from vlmembed.layout import TowerLayout
    from vlmembed.towers.base import Tower
    from vlmembed.types import PackedBatch

__all__ = ["one_thread", "tower_of"]

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = (1, 3, 3, 8, 2, 2, 2, 12, 5, 1, 1, 7)
"""Images of the packs of a run: growing, shrinking, and as many again."""

EQUAL = (4,) * 7
SEEDS = (None, *range(5))

POOLS = {"qwen2_5_vl": ("mean", None), "qwen3_vl": (None,), "dinov2": ("cls", None)}
CASES = [(model_type, pool) for model_type, pools in POOLS.items() for pool in pools]


def packs(sizes: Iterable[int], layout: TowerLayout) -> list[PackedBatch]:
    """Packs of so many images of mixed grids."""
    grids = [(1, 2), (3, 3), (2, 5), (1, 1)]
    return random_packs([[grids[number % 4] for number in range(size)] for size in sizes], layout)


def seeded(seed: int | None) -> Link:
    return DeviceLink(DeferredLanes(seed=seed))


def all_equal(found: Sequence[EmbeddingBatch], expected: Sequence[EmbeddingBatch]) -> bool:
    return len(found) == len(expected) and all(map(are_equal, found, expected))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("model_type", "pool"), CASES)
def test_lanes_give_what_a_host_gives(
    model_type: str, pool: str | None, seed: int | None, tower_of: Callable[[str], Tower]
) -> None:
    tower = tower_of(model_type)
    for sizes in (SIZES, EQUAL):
        batches = packs(sizes, tower.layout)
        expected = encode_all(make_encoder(tower, pool, link=HostLink()), batches)
        found = encode_all(make_encoder(tower, pool, link=seeded(seed)), batches)
        assert [result.rows.tolist() for result in found] == [batch.rows.tolist() for batch in batches]
        assert all_equal(found, expected)


def test_a_cpu_needs_no_lanes(tower_of: Callable[[str], Tower]) -> None:
    tower = tower_of("dinov2")
    batches = packs(SIZES, tower.layout)
    expected = encode_all(make_encoder(tower, "cls", link=HostLink()), batches)
    assert all_equal(encode_all(make_encoder(tower, "cls"), batches), expected)


def events(encoder: Encoder, batches: Sequence[PackedBatch | None]) -> list[str]:
    """What happens to the packs, and when: ``<3`` is handed over, ``-`` asks for what is on its way, ``3>`` comes."""
    happened: list[str] = []
    number = {int(batch.rows[0]): str(index) for index, batch in enumerate(batches) if batch is not None}

    def handed() -> Iterator[PackedBatch | None]:
        for batch in batches:
            happened.append("-" if batch is None else f"<{number[int(batch.rows[0])]}")
            yield batch

    for result in encoder.stream(handed()):
        assert isinstance(result, EmbeddingBatch)
        happened.append(f"{number[int(result.rows[0])]}>")
    return happened


def test_a_result_comes_when_the_next_pack_was_handed_over(tower_of: Callable[[str], Tower]) -> None:
    tower = tower_of("dinov2")
    batches = packs((2, 3, 1, 2), tower.layout)
    for seed in SEEDS:
        found = events(make_encoder(tower, "cls", link=seeded(seed)), batches)
        assert found == ["<0", "<1", "0>", "<2", "1>", "<3", "2>", "3>"]
    found = events(make_encoder(tower, "cls", link=HostLink()), batches)
    assert found == ["<0", "0>", "<1", "1>", "<2", "2>", "<3", "3>"]


def test_what_is_on_its_way_comes_when_asked_for(tower_of: Callable[[str], Tower]) -> None:
    tower = tower_of("dinov2")
    first, second, third = packs((2, 3, 1), tower.layout)
    stream = [None, first, None, None, second, third, None]
    for seed in SEEDS:
        found = events(make_encoder(tower, "cls", link=seeded(seed)), stream)
        assert found == ["-", "<1", "-", "1>", "-", "<4", "<5", "4>", "-", "5>"]


def test_the_host_waits_only_for_the_pack_before(tower_of: Callable[[str], Tower]) -> None:
    tower, lanes = tower_of("dinov2"), DeferredLanes()
    batches = packs(EQUAL, tower.layout)
    results = make_encoder(tower, "cls", link=DeviceLink(lanes)).stream(batches)
    for number in range(1, len(batches)):
        next(results)
        assert [job.is_done for job in lanes.jobs] == [True] * 3 * number + [False] * 3


class GreedyLink(DeviceLink):
    """Lets more packs be on their way than it has buffers for."""

    lag = 2


def goes_wrong(encoder: Encoder, batches: Sequence[PackedBatch], expected: Sequence[EmbeddingBatch]) -> bool:
    """Garbage that is used as an index is refused by torch, and any other comes out as a wrong value."""
    try:
        found = encode_all(encoder, batches)
    except (IndexError, RuntimeError, ValueError):
        return True
    return not all_equal(found, expected)


BROKEN: dict[str, Callable[[], Link]] = {
    "three packs in two buffers": lambda: GreedyLink(DeferredLanes()),
    "computes before the copy has come": lambda: DeviceLink(DeferredLanes(deaf_to=("in",))),
    "copies out what is not computed": lambda: DeviceLink(DeferredLanes(deaf_to=("compute",))),
    "minds no event": lambda: DeviceLink(DeferredLanes(seed=0, deaf_to=("in", "compute"))),
}


@pytest.mark.parametrize("make_link", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "dinov2"])
def test_a_broken_link_shows(model_type: str, make_link: Callable[[], Link], tower_of: Callable[[str], Tower]) -> None:
    tower = tower_of(model_type)
    batches = packs(EQUAL, tower.layout)
    expected = encode_all(make_encoder(tower, link=HostLink()), batches)
    assert goes_wrong(make_encoder(tower, link=make_link()), batches, expected)
    assert not goes_wrong(make_encoder(tower, link=seeded(None)), batches, expected)


def test_three_packs_in_two_buffers_are_wrong_values(tower_of: Callable[[str], Tower]) -> None:
    """Packs of one layout overwrite each other unnoticed: nothing but their values can tell."""
    tower = tower_of("dinov2")
    batches = packs(EQUAL, tower.layout)
    expected = encode_all(make_encoder(tower, "cls", link=HostLink()), batches)
    found = encode_all(make_encoder(tower, "cls", link=GreedyLink(DeferredLanes())), batches)
    assert [result.rows.tolist() for result in found] == [batch.rows.tolist() for batch in batches]
    vectors = [result.vectors["embedding"] for result in expected]
    assert np.array_equal(found[0].vectors["embedding"], vectors[2])


def blocks(lanes: DeferredLanes) -> list[int]:
    """Sizes of the blocks of bytes that packs are copied through on the host."""
    return [len(block) for block in lanes.pinned_blocks if block.dtype == torch.uint8]


def test_buffers_are_used_again(tower_of: Callable[[str], Tower]) -> None:
    tower, lanes = tower_of("dinov2"), DeferredLanes()
    batches = packs(EQUAL, tower.layout)
    encode_all(make_encoder(tower, "cls", link=DeviceLink(lanes)), batches)
    sizes = [len(batches[0].block)] * 2
    assert blocks(lanes) == [len(block) for block in lanes.device_blocks] == sizes


def test_buffers_grow_and_stay_grown(tower_of: Callable[[str], Tower]) -> None:
    tower, lanes = tower_of("dinov2"), DeferredLanes()
    sizes = (1, 9, 4, 2, 9, 9, 1, 4, 12)
    batches = packs(sizes, tower.layout)
    encode_all(make_encoder(tower, "cls", link=DeviceLink(lanes)), batches)
    grown = [len(batches[number].block) for number in (0, 1, 2, 4, 8)]
    assert blocks(lanes) == [len(block) for block in lanes.device_blocks] == grown


def test_a_pinned_block_is_not_copied_again(tower_of: Callable[[str], Tower]) -> None:
    tower, lanes = tower_of("dinov2"), DeferredLanes()
    encoder = make_encoder(tower, "cls", link=DeviceLink(lanes))
    pinned = []
    for batch in packs(SIZES, tower.layout):
        block = lanes.pinned((len(batch.block) + 1000,), torch.uint8)[: len(batch.block)]
        block.copy_(torch.from_numpy(batch.block))
        pinned.append(open_batch(batch.header, block.numpy()))
    num_blocks = len(blocks(lanes))
    expected = encode_all(make_encoder(tower, "cls", link=HostLink()), pinned)
    assert all_equal(encode_all(encoder, pinned), expected)
    assert len(blocks(lanes)) == num_blocks


def test_results_are_out_of_the_memory_that_the_next_packs_need(tower_of: Callable[[str], Tower]) -> None:
    tower, lanes = tower_of("qwen3_vl"), DeferredLanes()
    batches = packs(SIZES, tower.layout)
    results = encode_all(make_encoder(tower, link=DeviceLink(lanes)), batches)
    kept = [result.vectors["tokens"].copy() for result in results]
    for block in (*lanes.pinned_blocks, *lanes.device_blocks):
        block.view(torch.uint8).fill_(GARBAGE)
    for batch in batches:
        batch.block[:] = GARBAGE
    for result, tokens in zip(results, kept, strict=True):
        np.testing.assert_array_equal(result.vectors["tokens"], tokens)
        assert result.grid_hw.min() > 0
        assert (np.diff(result.rows) == 1).all()
        assert result.offsets is not None
        assert len(tokens) == result.offsets[-1]


def test_one_pack_alone_is_encoded_at_once(tower_of: Callable[[str], Tower]) -> None:
    tower = tower_of("dinov2")
    batch = random_pack([(2, 3), (4, 1)], tower.layout)
    expected = make_encoder(tower, "cls", link=HostLink()).encode(batch)
    assert are_equal(make_encoder(tower, "cls", link=seeded(None)).encode(batch), expected)
