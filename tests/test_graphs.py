"""Packs through graphs: filled up, replayed, and cut out again, without a bit of difference to the plain layers."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from fakes import (
    CPU,
    DeferredLanes,
    FakeGraphs,
    are_equal,
    by_row,
    encode_all,
    flash_installed,
    make_encoder,
    one_thread,
    random_pack,
    random_packs,
    tower_of,
)

from vlmembed.attention.metadata import DevicePack
from vlmembed.batch import PackShape, fill_batch
from vlmembed.graphs import CudaGraphs, GraphRunner
from vlmembed.lanes import DeviceLink, HostLink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vlmembed.encoder import Encoder
    from vlmembed.graphs import ShapeKey
    from vlmembed.lanes import Link
    from vlmembed.towers.base import Tower
    from vlmembed.types import EmbeddingBatch, PackedBatch

    Grids = list[tuple[int, int]]

__all__ = ["one_thread", "tower_of"]

pytestmark = pytest.mark.usefixtures("one_thread", "flash")

BUDGET = 64
"""Patches of the largest graph, in merge blocks."""

SMALL: list[Grids] = [[(2, 3), (1, 2)], [(3, 2), (2, 1)], [(1, 2), (2, 3)], [(1, 1), (2, 3)]]
MIDDLE: list[Grids] = [[(4, 4), (1, 4)], [(2, 2), (8, 2)]]
LARGE: list[Grids] = [
    [(4, 4), (3, 5), (2, 8), (1, 7), (2, 2)],
    [(2, 2), (4, 4), (5, 3), (8, 2), (7, 1)],
    [(4, 4), (4, 4), (3, 3), (2, 2), (1, 1), (1, 1)],
]
STREAM = [*SMALL[:2], *LARGE[:2], *SMALL, *MIDDLE, LARGE[2], SMALL[0], *MIDDLE, *LARGE[::-1], *SMALL[::-1]]
"""Packs of two to six images: small, large and small again, of equal sums with other boundaries, full and less full."""

POOLS = {
    "qwen2_5_vl": ("mean", None),
    "qwen3_vl": (None,),
    "kimi_k25": (None,),
    "dinov2": ("cls", None),
    "dinov2_with_registers": ("mean",),
    "dinov3_vit": ("cls",),
    "siglip2": ("head", None),
}
"""Windows; deepstack features; raster order; a prefix token; several and taps by the smallest side; no table; taps, and
pooling by attention."""

CASES = [(model_type, pool) for model_type, pools in POOLS.items() for pool in pools]

LINKS: dict[str, Callable[[], Link]] = {
    "host": HostLink,
    "late": lambda: DeviceLink(DeferredLanes()),
    "any time": lambda: DeviceLink(DeferredLanes(seed=1)),
}


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlashAttention 2 is installed, so to say."""
    with flash_installed(monkeypatch):
        yield


def graph_encoder(
    tower: Tower, api: FakeGraphs, pool: str | None = "cls", *, link: Link | None = None, **settings: int
) -> tuple[Encoder, GraphRunner]:
    """An encoder that runs its layers through graphs."""
    encoder = make_encoder(tower.use_attention("flash2"), pool, link=link)
    max_patches = BUDGET * tower.layout.merge_size**2
    encoder.graphs = GraphRunner(
        tower, api, max_patches=max_patches, pool=encoder.pool, deepstack=encoder.deepstack, **settings
    )
    return encoder, encoder.graphs


def key_of(tower: Tower, batch: PackedBatch) -> ShapeKey:
    shape = PackShape.holding(batch, tower.layout, max_patches=BUDGET * tower.layout.merge_size**2)
    assert shape is not None
    taps = batch.metadata.interp_indices
    return shape, 0 if taps is None else taps.shape[1], batch.patches.dtype.name


@torch.inference_mode()
def filled_outputs(tower: Tower, batch: PackedBatch, pool: str | None) -> list[np.ndarray]:
    """The plain layers on the filled pack, and what they say of its images."""
    pack = DevicePack.of(fill_batch(batch, key_of(tower, batch)[0], tower.layout), CPU)
    deepstack = pool is None and tower.num_deepstack > 0
    features = tower.features(pack.patches, pack.metadata, pool=pool, deepstack=deepstack)
    images = pack.metadata.of_images(batch.metadata)
    outputs = tower.tokens_of(features, images) if pool is None else [tower.pooled_of(features, images, pool)]
    return [output.numpy() for output in outputs]


def assert_close(found: EmbeddingBatch, expected: EmbeddingBatch, relative: float = 1e-5) -> None:
    assert found.rows.tolist() == expected.rows.tolist()
    for name, vectors in expected.vectors.items():
        largest = float(np.abs(vectors).max())
        np.testing.assert_allclose(found.vectors[name], vectors, rtol=0, atol=relative * largest, err_msg=name)


@pytest.mark.parametrize(("model_type", "pool"), CASES)
def test_graphs_give_what_the_layers_give(model_type: str, pool: str | None, tower_of: Callable[[str], Tower]) -> None:
    tower = tower_of(model_type).use_attention("flash2")
    batches = random_packs(STREAM, tower.layout)
    plain = encode_all(make_encoder(tower, pool, link=HostLink()), batches)
    keys = [key_of(tower, batch) for batch in batches]
    is_first = [key not in keys[:number] for number, key in enumerate(keys)]
    filled = [filled_outputs(tower, batch, pool) for batch in batches]
    for make_link in LINKS.values():
        api = FakeGraphs()
        encoder, runner = graph_encoder(tower, api, pool, link=make_link())
        found = encode_all(encoder, batches)
        for result, expected, first, outputs in zip(found, plain, is_first, filled, strict=True):
            if first:
                assert are_equal(result, expected)
            else:
                assert_close(result, expected)
                for vectors, output in zip(result.vectors.values(), outputs, strict=True):
                    np.testing.assert_array_equal(vectors, output)
        assert runner.fallbacks == {"first of its shape": sum(is_first)}
        assert runner.num_captured == api.num_captures >= 3
        assert api.num_replays == len(batches) - sum(is_first) > api.num_captures + 4


@pytest.mark.parametrize("make_link", LINKS.values(), ids=LINKS.keys())
def test_any_number_of_images_goes_through_the_graph_of_its_shape(
    make_link: Callable[[], Link], tower_of: Callable[[str], Tower]
) -> None:
    tower, api = tower_of("dinov2"), FakeGraphs()
    encoder, runner = graph_encoder(tower, api, link=make_link())
    generator = np.random.default_rng(0)
    sizes = (31, 32, 33, 34, 31, 45, 60)
    grids = [[(1, 1 + int(more)) for more in generator.multinomial(62 - size, [1 / size] * size)] for size in sizes]
    batches = random_packs([[(1, 1), *widths, (1, 1)] for widths in grids], tower.layout)
    found = encode_all(encoder, batches)
    assert len({key_of(tower, batch) for batch in batches}) < len(batches) / 2
    assert runner.num_captured
    for batch, result in zip(batches, found, strict=True):
        assert_close(result, make_encoder(tower, "cls", link=HostLink()).encode(batch))


@pytest.mark.parametrize("seed", range(4))
def test_a_graphs_input_is_no_buffer_that_other_packs_arrive_in(seed: int, tower_of: Callable[[str], Tower]) -> None:
    tower, api = tower_of("dinov2"), FakeGraphs()
    encoder, _ = graph_encoder(tower, api, link=DeviceLink(DeferredLanes(seed=seed)))
    batches = random_packs([SMALL[0]] * 10, tower.layout)
    for batch, result in zip(batches, encode_all(encoder, batches), strict=True):
        assert_close(result, make_encoder(tower, "cls", link=HostLink()).encode(batch))
    assert api.num_replays == 9


def test_a_graph_is_made_when_its_shape_comes_again(tower_of: Callable[[str], Tower]) -> None:
    tower, api = tower_of("dinov2"), FakeGraphs()
    encoder, runner = graph_encoder(tower, api)
    batches = random_packs([SMALL[0]] * 4, tower.layout)
    counts = []
    for batch in batches:
        encoder.encode(batch)
        counts.append((runner.num_captured, api.num_replays, sum(runner.fallbacks.values())))
    assert counts == [(0, 0, 1), (1, 1, 1), (1, 2, 1), (1, 3, 1)]
    assert runner.describe() == {"captured": 1, "kept": 1, "without": {"first of its shape": 1}}


def test_packs_of_other_dtypes_have_other_graphs(tower_of: Callable[[str], Tower]) -> None:
    tower, api = tower_of("dinov2"), FakeGraphs()
    encoder, runner = graph_encoder(tower, api)
    for dtype in (np.uint8, np.float32) * 3:
        batch = random_pack(SMALL[0], tower.layout, dtype=dtype)
        assert_close(encoder.encode(batch), make_encoder(tower, "cls").encode(batch))
    assert runner.num_captured == 2


def test_packs_with_other_taps_have_other_graphs(tower_of: Callable[[str], Tower]) -> None:
    tower, api = tower_of("siglip2"), FakeGraphs()
    encoder, runner = graph_encoder(tower, api, "head")
    wide, square = random_packs([[(2, 8)], [(4, 4)]], tower.layout)
    assert key_of(tower, wide)[0] == key_of(tower, square)[0]
    assert key_of(tower, wide) != key_of(tower, square)
    for batch in (wide, square) * 3:
        assert_close(encoder.encode(batch), make_encoder(tower, "head").encode(batch))
    assert runner.num_captured == 2


def test_the_graph_that_was_used_last_of_all_goes_first(tower_of: Callable[[str], Tower]) -> None:
    tower, api = tower_of("dinov2"), FakeGraphs()
    encoder, runner = graph_encoder(tower, api, max_graphs=2)
    packs = dict(zip("abc", random_packs([SMALL[0], MIDDLE[0], LARGE[0]], tower.layout), strict=True))
    expected = {name: encoder.encode(batch) for name, batch in packs.items()}
    num_captured = []
    for name in "abaccacbbcab":
        assert_close(encoder.encode(packs[name]), expected[name])
        num_captured.append(runner.num_captured)
        assert len(api.kept) == runner.describe()["kept"] <= 2
    assert num_captured == [1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 5, 6]
    assert api.num_captures == 6


def test_a_pack_over_the_budget_runs_without_a_graph(tower_of: Callable[[str], Tower]) -> None:
    tower, api = tower_of("kimi_k25"), FakeGraphs()
    encoder, runner = graph_encoder(tower, api, None)
    batch = random_pack([(8, 8), (1, 1)], tower.layout)
    for _ in range(3):
        assert are_equal(encoder.encode(batch), make_encoder(tower).encode(batch))
    assert runner.fallbacks == {"more patches than the budget": 3}
    assert not api.num_captures


def test_after_a_capture_that_failed_none_is_tried_again(
    tower_of: Callable[[str], Tower], caplog: pytest.LogCaptureFixture
) -> None:
    tower, api = tower_of("dinov2"), FakeGraphs()
    encoder, runner = graph_encoder(tower, api)
    api.troubles = [RuntimeError("not permitted when stream is capturing")]
    batches = random_packs([SMALL[0]] * 4 + [MIDDLE[0]] * 3, tower.layout)
    with caplog.at_level(logging.WARNING):
        found = encode_all(encoder, batches)
    for batch, result in zip(batches, found, strict=True):
        assert_close(result, make_encoder(tower, "cls").encode(batch))
    assert [record.getMessage() for record in caplog.records] == [
        "no CUDA graphs from here on: not permitted when stream is capturing"
    ]
    assert runner.fallbacks == {"first of its shape": 1, "a capture failed": 6}
    assert (api.num_captures, runner.num_captured) == (1, 0)


def test_no_memory_for_a_capture_splits_the_pack(
    tower_of: Callable[[str], Tower], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All graphs go first, for they hold memory too, and for good: made again they would only be in the way again."""
    tower, api, link = tower_of("dinov2"), FakeGraphs(), HostLink()
    num_kept: list[int] = []
    monkeypatch.setattr(link, "make_room", lambda: num_kept.append(len(api.kept)))
    encoder, runner = graph_encoder(tower, api, link=link)
    small, middle = random_packs([SMALL[0], MIDDLE[0]], tower.layout)
    encode_all(encoder, [small, middle, small])
    assert len(api.kept) == 1
    api.troubles = [torch.OutOfMemoryError("CUDA out of memory")]
    halves = encode_all(encoder, [middle])
    assert [len(half.rows) for half in halves] == [1, 1]
    assert (encoder.num_splits, num_kept) == (1, [0])
    (whole,) = encode_all(make_encoder(tower, "cls"), [middle])
    expected = by_row([whole])
    for row, vectors in by_row(halves).items():
        np.testing.assert_allclose(vectors["embedding"], expected[row]["embedding"], rtol=0, atol=1e-5)
    assert encoder.num_splits == 1
    for batch, result in zip((small, middle), encode_all(encoder, [small, middle]), strict=True):
        assert_close(result, make_encoder(tower, "cls").encode(batch))
    assert len(api.kept) == runner.describe()["kept"] == 0
    assert runner.fallbacks["out of memory"] == 4  # the halves, and what came after them


POISONS = {"bytes": 255, "nan": np.nan}


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS.keys())
@pytest.mark.parametrize(("model_type", "pool"), CASES)
def test_the_filling_reaches_no_image(
    model_type: str,
    pool: str | None,
    poison: float,
    tower_of: Callable[[str], Tower],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dtype = np.float32 if np.isnan(poison) else np.uint8
    tower = tower_of(model_type)
    batches = [
        random_pack(grids, tower.layout, first_row=10 * number, dtype=dtype)
        for number, grids in enumerate([SMALL[3], MIDDLE[1], LARGE[2]] * 3)
    ]
    expected = encode_all(graph_encoder(tower, FakeGraphs(), pool)[0], batches)
    encoder, runner = graph_encoder(tower, FakeGraphs(), pool)
    fill, num_filled = runner.fill, []

    def poisoned(batch: PackedBatch, key: ShapeKey) -> PackedBatch:
        filled = fill(batch, key)
        filled.patches[len(batch.patches) :] = poison
        num_filled.append(len(filled.patches) - len(batch.patches))
        return filled

    monkeypatch.setattr(runner, "fill", poisoned)
    found = encode_all(encoder, batches)
    assert len(num_filled) == 6
    assert min(num_filled) > 0
    assert all(map(are_equal, found, expected))


@pytest.mark.parametrize(("model_type", "pool"), [("dinov2", "cls"), ("qwen2_5_vl", None)])
def test_attention_by_lengths_on_the_host_is_refused_in_a_graph(
    model_type: str, pool: str | None, tower_of: Callable[[str], Tower]
) -> None:
    """They would be those of the pack that was captured."""
    tower = tower_of(model_type)
    for backend in ("cpu", "sdpa"):
        encoder, _ = graph_encoder(tower, FakeGraphs(), pool)
        tower.use_attention(backend)
        first, second = random_packs(SMALL[:2], tower.layout)
        encoder.encode(first)
        with pytest.raises(AssertionError, match="a backend that goes by runs was given segments without them"):
            encoder.encode(second)


def test_what_a_graph_has_put_out_is_gone_when_the_next_one_runs(tower_of: Callable[[str], Tower]) -> None:
    """The fake is unkind enough: features that were not copied do not survive."""
    tower, api = tower_of("dinov2"), FakeGraphs()
    runner = GraphRunner(tower.use_attention("flash2"), api, max_patches=BUDGET)
    outputs: list[Sequence[torch.Tensor]] = []
    for grids in (SMALL[0], MIDDLE[0]) * 2:
        batch = random_pack(grids, tower.layout)
        if (key := runner.claim(batch)) is not None:
            filled = runner.fill(batch, key)
            with torch.inference_mode():
                outputs.append(runner.features(torch.from_numpy(filled.block), filled, key))
    assert outputs[0][0].isnan().all()
    assert not outputs[1][0].isnan().any()


@pytest.mark.parametrize("where", ["begin", "work", "end"])
def test_a_capture_that_breaks_leaves_the_stream_as_it_was(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `torch.cuda.graph` is: it makes its own stream the current one, and gives that back only if all went well."""
    current = ["compute"]

    def fail(at: str) -> None:
        if at == where:
            raise RuntimeError(at)

    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        current[0] = "capture"
        fail("begin")
        yield
        fail("end")
        current[0] = "compute"

    def work() -> list[torch.Tensor]:
        if current[0] == "capture":
            fail("work")
        return []

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    with pytest.raises(RuntimeError, match=where):
        CudaGraphs().capture(work)
    assert current == ["compute"]
