"""Packs: one block of bytes, taken apart and filled up without a change to any image's own entries."""

from __future__ import annotations

import dataclasses
import pickle
from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import tiny_checkpoint
from fakes import random_image, random_pack

from vlmembed.batch import PackCost, PackShape, fill_batch, make_batch, open_batch, split_batch
from vlmembed.slab import ALIGNMENT_BYTES, SlabLayout
from vlmembed.towers import open_tower

if TYPE_CHECKING:
    import numpy.typing as npt

    from vlmembed.layout import TowerLayout
    from vlmembed.types import PackedBatch, Segments

    Arrays = dict[str, np.ndarray[Any, Any]]

MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl", "kimi_k25", "dinov2", "dinov3_vit", "siglip2")
"""Windows; a table in block order; raster order; one prefix token; several and no table; taps by the smallest side."""

MIXED = [(3, 2), (1, 1), (5, 9), (2, 12), (1, 1), (4, 4), (20, 1)]
OF_IMAGES = ("rows", "grid_hw", "size_hw")
PERMUTED = ("window_index", "window_reverse", "merge_index")


@pytest.fixture(scope="module", params=MODEL_TYPES)
def layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TowerLayout:
    """The layout of each family in turn."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny_checkpoint(request.param, folder)
    return open_tower(str(folder)).layout


def arrays_of(batch: PackedBatch) -> Arrays:
    """All arrays of a pack as its fields hold them."""
    metadata = {field.name: getattr(batch.metadata, field.name) for field in dataclasses.fields(batch.metadata)}
    for name in ("segments", "windows"):
        metadata[name] = metadata[name] and metadata[name].cu_seqlens
    arrays = {name: getattr(batch, name) for name in (*OF_IMAGES, "patches")} | metadata
    return {name: array for name, array in arrays.items() if array is not None}


def assert_same(found: PackedBatch, expected: PackedBatch) -> None:
    assert found.header == expected.header
    ours, theirs = arrays_of(found), arrays_of(expected)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype, name
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@lru_cache(maxsize=1)
def fillings(layout: TowerLayout) -> list[tuple[PackedBatch, PackShape, PackedBatch]]:
    """Packs of up to 40 images, their shapes, and what becomes of them; some fill their shapes exactly."""
    generator, unit, made = np.random.default_rng(0), layout.merge_size**2, []
    for number in range(30):
        grids = [(int(h), int(w)) for h, w in generator.integers(1, 8, (generator.integers(1, 41), 2))]
        batch = random_pack(grids, layout, dtype=np.float32 if number % 3 == 0 else np.uint8)
        most = len(batch.patches) + (0, 1, 7, 200)[number % 4] * unit
        shape = PackShape.holding(batch, layout, max_patches=most)
        assert shape is not None
        made.append((batch, shape, fill_batch(batch, shape, layout)))
    return made


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_every_array_is_an_aligned_view_of_one_block(layout: TowerLayout, dtype: npt.DTypeLike) -> None:
    batch = random_pack(MIXED, layout, dtype=dtype)
    arrays = arrays_of(batch)
    assert {field.name for field in batch.header.layout.fields} == arrays.keys()
    assert arrays["patches"].dtype == dtype
    for field in batch.header.layout.fields:
        array = arrays[field.name]
        assert field.start % ALIGNMENT_BYTES == 0
        assert (array.dtype.name, array.shape, array.nbytes) == (field.dtype, field.shape, field.stop - field.start)
        assert array.flags.c_contiguous
        if array.size:
            assert np.shares_memory(array, batch.block)
            assert array.ctypes.data - batch.block.ctypes.data == field.start
    stops = [0, *(field.stop for field in batch.header.layout.fields)]
    assert all(field.start >= stop for field, stop in zip(batch.header.layout.fields, stops, strict=False))
    assert len(batch.block) == batch.header.layout.num_bytes >= stops[-1]


def test_a_slab_places_arrays_one_behind_the_other() -> None:
    slab = SlabLayout.of({"a": (np.uint8, (3,)), "empty": (np.int64, (0, 2)), "b": (np.float32, (65, 2))})
    assert [(field.start, field.stop) for field in slab.fields] == [(0, 3), (256, 256), (256, 776)]
    assert slab.num_bytes == 1024
    views = slab.views(block := np.zeros(slab.num_bytes, np.uint8))
    views["b"][64, 1] = np.float32(np.nan)
    views["a"][:] = 7
    assert (block[:3] == 7).all()
    assert views["empty"].shape == (0, 2)
    assert np.isnan(slab.views(block.copy())["b"][64, 1])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_pack_opens_from_its_bytes_and_its_header(layout: TowerLayout, dtype: npt.DTypeLike) -> None:
    batch = random_pack(MIXED, layout, dtype=dtype)
    block = batch.block.copy()
    opened = open_batch(pickle.loads(pickle.dumps(batch.header)), block)  # noqa: S301  as it travels to a worker
    assert_same(opened, batch)
    assert opened.metadata.segments.runs == batch.metadata.segments.runs
    assert np.shares_memory(opened.patches, block)
    assert not np.shares_memory(opened.patches, batch.block)


def test_a_pack_is_split_down_to_its_images(layout: TowerLayout) -> None:
    for seed, dtype in enumerate((np.uint8, np.float32)):
        order = np.random.default_rng(seed).permutation(len(MIXED))
        side = layout.merge_size
        images = [random_image(int(row), (MIXED[row][0] * side, MIXED[row][1] * side), layout, dtype) for row in order]

        def check(batch: PackedBatch, first: int, stop: int, images: list[Any] = images) -> int:
            assert_same(batch, make_batch(images[first:stop], layout))
            if len(batch.rows) == 1:
                return 1
            left, right = split_batch(batch, layout)
            middle = first + len(left.rows)
            assert not np.shares_memory(left.block, right.block)
            return check(left, first, middle) + check(right, middle, stop)

        assert check(make_batch(images, layout), 0, len(images)) == len(MIXED)


@pytest.mark.parametrize(
    ("grids", "num_left"),
    [
        ([(1, 1)] * 8, 4),
        ([(1, 1)] * 7, 3),
        ([(1, 1), (9, 9)], 1),
        ([(9, 9), (1, 1), (1, 1), (1, 1)], 1),
        ([(1, 1), (1, 1), (1, 1), (9, 9)], 3),
        ([(2, 2), (4, 4), (2, 2), (1, 1)], 2),
    ],
)
def test_the_halves_have_about_equal_tokens(grids: list[tuple[int, int]], num_left: int, layout: TowerLayout) -> None:
    batch = random_pack(grids, layout)
    left, right = split_batch(batch, layout)
    assert len(left.rows) == num_left
    assert left.num_tokens + right.num_tokens == batch.num_tokens
    off = abs(left.num_tokens - right.num_tokens)
    before = np.cumsum(batch.lengths)[:-1]
    assert off == np.abs(2 * before - batch.num_tokens).min()


def test_a_shape_is_a_half_of_the_budget_as_often_as_the_pack_fits(layout: TowerLayout) -> None:
    unit = layout.merge_size**2
    batch = random_pack([(2, 3)] * 5, layout)
    num_patches = len(batch.patches)
    for factor, halves in ((1, 0), (2, 1), (3, 1), (4, 2), (7, 2), (8, 3), (1024, 10)):
        shape = PackShape.holding(batch, layout, max_patches=factor * num_patches)
        assert shape is not None
        expected = factor * num_patches
        for _ in range(halves):
            expected = expected // 2 if expected // 2 % unit == 0 else expected
        assert shape.num_patches == expected
    assert PackShape.holding(batch, layout, max_patches=num_patches - 1) is None


def test_segments_and_lengths_of_a_shape_are_powers_of_two(layout: TowerLayout) -> None:
    for batch, shape, _ in fillings(layout):
        num_segments = len(batch.metadata.segments.cu_seqlens) - 1
        longest = batch.metadata.segments.max_seqlen
        assert shape.max_seqlen.bit_count() == shape.num_slots.bit_count() == 1
        assert longest <= shape.max_seqlen < 2 * longest
        assert num_segments <= shape.num_slots
        windows = batch.metadata.windows
        if windows is None:
            assert (shape.num_window_slots, shape.max_window_seqlen) == (0, 0)
        else:
            assert shape.num_window_slots.bit_count() == 1
            assert len(windows.cu_seqlens) - 1 <= shape.num_window_slots
            assert windows.max_seqlen <= shape.max_window_seqlen


def check_segments(filled: Segments, images: Segments, *, total: int, slots: int, max_seqlen: int) -> None:
    lengths = np.diff(filled.cu_seqlens)
    assert filled.cu_seqlens.dtype == np.int32
    assert len(lengths) == slots
    assert filled.cu_seqlens[0] == 0
    assert filled.cu_seqlens[-1] == total
    assert lengths.min() >= 0
    assert lengths.max() <= filled.max_seqlen == max_seqlen
    assert filled.runs == ()
    np.testing.assert_array_equal(filled.cu_seqlens[: len(images.cu_seqlens)], images.cu_seqlens)


def test_filling_moves_nothing_of_the_images(layout: TowerLayout) -> None:
    for batch, _, filled in fillings(layout):
        before, after = arrays_of(batch), arrays_of(filled)
        assert before.keys() == after.keys()
        for name, array in before.items():
            assert array.dtype == after[name].dtype, name
            np.testing.assert_array_equal(after[name][: len(array)], array, err_msg=name)


def test_filled_segments_cover_all_tokens_and_none_is_too_long(layout: TowerLayout) -> None:
    for batch, shape, filled in fillings(layout):
        metadata, num_prefix = filled.metadata, layout.num_prefix_tokens
        total = shape.num_patches + shape.num_slots * num_prefix
        assert filled.num_tokens == total
        assert len(filled.patches) == shape.num_patches
        assert not filled.patches[len(batch.patches) :].any()
        check_segments(
            metadata.segments,
            batch.metadata.segments,
            total=total,
            slots=shape.num_slots,
            max_seqlen=shape.max_seqlen,
        )
        assert np.diff(metadata.segments.cu_seqlens).min() >= num_prefix
        if metadata.windows is not None:
            assert batch.metadata.windows is not None
            check_segments(
                metadata.windows,
                batch.metadata.windows,
                total=shape.num_patches,
                slots=shape.num_window_slots,
                max_seqlen=shape.max_window_seqlen,
            )


def test_filled_indices_are_permutations(layout: TowerLayout) -> None:
    for _, shape, filled in fillings(layout):
        metadata = filled.metadata
        total = int(metadata.segments.cu_seqlens[-1])
        positions = np.concatenate([metadata.prefix_positions, metadata.patch_positions])
        np.testing.assert_array_equal(np.sort(positions), np.arange(total))
        assert (np.diff(metadata.patch_positions) > 0).all()
        starts = metadata.segments.cu_seqlens[:-1, None] + np.arange(layout.num_prefix_tokens)
        np.testing.assert_array_equal(metadata.prefix_positions, starts.reshape(-1))
        for name in PERMUTED:
            if (index := getattr(metadata, name)) is not None:
                room = shape.num_patches if name == "merge_index" else shape.num_patches // layout.merge_size**2
                np.testing.assert_array_equal(np.sort(index), np.arange(room), err_msg=name)
        if metadata.window_index is not None and metadata.window_reverse is not None:
            np.testing.assert_array_equal(
                metadata.window_index[metadata.window_reverse], np.arange(len(metadata.window_index))
            )
        if metadata.rope_positions is not None:
            assert len(metadata.rope_positions) == total


def test_packs_of_one_shape_have_one_layout(layout: TowerLayout) -> None:
    """Whatever their number of images is: a graph's input is copied as one block."""
    generator, headers = np.random.default_rng(1), defaultdict(list)
    for num_images in (31, 31, 32, 32, 36, 40, 40, 47, 55, 55, 61, 61):
        widths = 1 + generator.multinomial(200 - num_images, np.full(num_images, 1 / num_images))
        batch = random_pack([(1, 30), *((1, int(width)) for width in widths)], layout)
        shape = PackShape.holding(batch, layout, max_patches=1024 * layout.merge_size**2)
        assert shape is not None
        num_taps = 0 if batch.metadata.interp_indices is None else batch.metadata.interp_indices.shape[1]
        headers[shape, num_taps].append((len(batch.rows), fill_batch(batch, shape, layout).header))
    assert any(min(group)[0] <= 32 < max(group)[0] for group in headers.values())
    for group in headers.values():
        assert len({header for _, header in group}) == 1, [num_images for num_images, _ in group]


def test_the_rows_of_the_filling_are_no_images(layout: TowerLayout) -> None:
    for batch, shape, filled in fillings(layout):
        num_images = len(batch.rows)
        assert len(filled.rows) == len(filled.grid_hw) == len(filled.size_hw) == shape.num_slots
        assert (filled.rows[num_images:] == -1).all()
        assert not filled.grid_hw[num_images:].any()
        assert not filled.size_hw[num_images:].any()


def test_a_packs_cost_grows_with_the_square_of_its_images() -> None:
    cost = PackCost(per_token=10, per_pair=2)
    assert cost.of(np.array([3, 4])) == 10 * 7 + 2 * (9 + 16)
    assert cost.of(np.array([7])) > cost.of(np.array([3, 4]))
