"""Resampling a learned table of position embeddings to an image's patch grid: taps and weights, in numpy.

Shape legend: S patches, K taps of both axes together, k taps of one axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vlmembed.types import Float32Array, Int32Array, Int64Array

BICUBIC_A = -0.75
"""Keys' kernel parameter in ``torch.nn.functional.interpolate(mode="bicubic")``."""

ANTIALIAS_A = -0.5
"""The same with ``antialias=True``, as in Pillow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionTable:
    """A learned table of `size_hw` position embeddings, and how it is resampled to an image's grid.

    `kernel` is ``"bilinear"`` or ``"bicubic"``; the switches are those of ``torch.nn.functional.interpolate``.
    """

    size_hw: tuple[int, int]
    kernel: str
    align_corners: bool = False
    antialias: bool = False


def cubic(distance: Float32Array, a: float) -> Float32Array:
    """Cubic convolution kernel with parameter `a` (R. Keys, 1981); 0 from a distance of 2."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0)).astype(np.float32)  # noqa: PLR2004  the formula's own


def axis_taps(num_out: int, num_in: int, table: PositionTable) -> tuple[Int32Array, Float32Array]:
    """Taps and weights, each (num_out, k), that resample an axis of `num_in` samples to `num_out` as `table` says.

    Formula: ``torch.nn.functional.interpolate`` in float32: half-pixel centres (or the end points on each other with
    ``align_corners``), clamped borders; with ``antialias`` the kernel is widened by the scale where it shrinks, cut at
    the borders and normalised.
    """
    index = np.arange(num_out, dtype=np.float32)
    if table.antialias:
        return _antialiased_taps(index, num_out, num_in, table.kernel)
    if table.align_corners:
        source = index * np.float32(num_in - 1) / np.float32(max(num_out - 1, 1))
    else:
        source = (index + np.float32(0.5)) * np.float32(num_in) / np.float32(num_out) - np.float32(0.5)
    base = np.floor(source)
    offsets = np.arange(-1, 3) if table.kernel == "bicubic" else np.arange(2)
    distance = np.abs((source - base)[:, None] - offsets.astype(np.float32))
    weights = cubic(distance, BICUBIC_A) if table.kernel == "bicubic" else np.maximum(1 - distance, 0)
    taps = np.clip(base[:, None].astype(np.int32) + offsets, 0, num_in - 1)
    return taps.astype(np.int32), weights.astype(np.float32)


def _antialiased_taps(index: Float32Array, num_out: int, num_in: int, kernel: str) -> tuple[Int32Array, Float32Array]:
    scale = num_in / num_out
    widen = max(scale, 1.0)
    centre = (index + 0.5) * scale
    radius = (2.0 if kernel == "bicubic" else 1.0) * widen
    first = np.maximum((centre - radius + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + radius + 0.5).astype(np.int64), num_in)
    taps = first[:, None] + np.arange(int((last - first).max()))
    distance = np.abs((taps + 0.5 - centre[:, None]) / widen).astype(np.float32)
    weights = cubic(distance, ANTIALIAS_A) if kernel == "bicubic" else np.maximum(1 - distance, 0)
    weights = np.where(taps < last[:, None], weights, 0)
    weights /= weights.sum(axis=1, keepdims=True)
    return np.minimum(taps, num_in - 1).astype(np.int32), weights.astype(np.float32)


def interpolate(
    rows: Int64Array, columns: Int64Array, grid_hw: tuple[int, int], table: PositionTable
) -> tuple[Int32Array, Float32Array]:
    """Rows of the flattened table and weights, each (S, K): the outer product of the two axes' taps."""
    row_taps, row_weights = axis_taps(grid_hw[0], table.size_hw[0], table)
    column_taps, column_weights = axis_taps(grid_hw[1], table.size_hw[1], table)
    indices = row_taps[rows][:, :, None] * table.size_hw[1] + column_taps[columns][:, None, :]
    weights = row_weights[rows][:, :, None] * column_weights[columns][:, None, :]
    num_patches = len(rows)
    return indices.reshape(num_patches, -1), weights.reshape(num_patches, -1)
