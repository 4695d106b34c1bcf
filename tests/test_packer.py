"""The packer keeps every image, never splits one, and wastes little."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_layout import AREA, LAYOUT

from vlmembed.packer import PackingStats, pack
from vlmembed.types import PatchedImage

SIZES = json.loads((Path(__file__).parent / "stamp_sizes.json").read_text())


def patched(row: int, grid_hw: tuple[int, int]) -> PatchedImage:
    patches = np.full((grid_hw[0] * grid_hw[1], 2), row % 251, np.uint8)
    return PatchedImage(row=row, patches=patches, grid_hw=grid_hw, size_hw=(row, row + 1))


def stamp_grids(count: int) -> list[tuple[int, int]]:
    """Grids of `count` pictures drawn, with a seed, from the sizes of the Tux Paint stamps."""
    sizes = [(height, width) for height, width, number in SIZES for _ in range(number)]
    chosen = np.random.default_rng(0).integers(0, len(sizes), count)
    return [AREA.grid(sizes[at]) for at in chosen]


@pytest.mark.parametrize("budget", [1028, 2056, 4112, 8224, 16448, 32896])
def test_efficiency_on_a_thousand_stamps(budget: int) -> None:
    images = [patched(row, grid) for row, grid in enumerate(stamp_grids(1000))]
    stats = PackingStats(budget)
    packs = list(pack(images, LAYOUT, stats))
    assert sorted(row for batch in packs for row in batch.rows) == list(range(1000))
    assert max(batch.num_tokens for batch in packs) <= budget
    assert stats.num_tokens == sum(batch.num_tokens for batch in packs)
    assert stats.efficiency == stats.num_tokens / (len(packs) * budget)
    assert stats.efficiency >= 0.95


def test_a_pack_carries_its_images_whole() -> None:
    images = [patched(row, (1 + row % 5, 2 + row % 7)) for row in range(100)]
    for batch in pack(images, LAYOUT, PackingStats(64)):
        begin = 0
        for row, grid_hw, size_hw in zip(batch.rows, batch.grid_hw, batch.size_hw, strict=True):
            end = begin + grid_hw[0] * grid_hw[1]
            np.testing.assert_array_equal(batch.patches[begin:end], images[row].patches)
            assert tuple(size_hw) == images[row].size_hw
            begin = end
        assert begin == len(batch.patches)
        lengths = np.diff(batch.metadata.segments.cu_seqlens)
        assert (np.diff(lengths) >= 0).all()  # equal lengths stand together


def test_an_image_over_the_budget_travels_alone() -> None:
    stats = PackingStats(256)
    images = [patched(0, (2, 2)), patched(1, (16, 16)), patched(2, (3, 3))]
    packs = list(pack(images, LAYOUT, stats))
    assert [batch.rows.tolist() for batch in packs] == [[0, 2], [1]]
    assert stats.efficiency == (5 + 10 + 257) / (256 + 257)


def test_a_part_boundary_empties_the_lookahead() -> None:
    first = [patched(row, (4, 4)) for row in range(10)]
    second = [patched(row, (4, 4)) for row in range(10, 30)]
    packs = list(pack([*first, None, *second], LAYOUT, PackingStats(170)))
    alone = list(pack(second, LAYOUT, PackingStats(170)))
    assert [batch.rows.tolist() for batch in packs[1:]] == [batch.rows.tolist() for batch in alone]
    assert packs[0].rows.tolist() == list(range(10))


def test_no_image_waits_for_ever() -> None:
    small_then_large = [patched(0, (1, 1)), *(patched(row, (7, 9)) for row in range(1, 200))]
    packs = list(pack(small_then_large, LAYOUT, PackingStats(64)))
    assert 0 in packs[0].rows
