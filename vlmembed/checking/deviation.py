"""How far vectors may be, and are, from those that another run has stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    from vlmembed.schema import VectorColumn
    from vlmembed.types import FloatArray

    Float64Array: TypeAlias = npt.NDArray[np.float64]

TOLERANCES = {"fp32": 2e-3, "bf16": 5e-2, "fp16": 5e-2}
"""Largest deviation, |now - stored| / |stored|, by dtype of the layers: what other packs, another processor or half
floats in the file can make, with room to spare. For vectors of length 1, 0.05 is a cosine of 0.99875."""


def deviation_of(now: FloatArray, stored: FloatArray) -> float:
    """|now - stored| / |stored|, over all values of a row; infinite where they do not even have one shape."""
    if now.shape != stored.shape:
        return float("inf")
    before = stored.astype(np.float64)
    length = max(float(np.linalg.norm(before)), float(np.finfo(np.float32).tiny))
    return float(np.linalg.norm(now.astype(np.float64) - before)) / length


def deviations_of(column: VectorColumn, here: pa.ChunkedArray, there: pa.ChunkedArray) -> Float64Array:
    """|here - there| / |there| of each row of two columns of vectors, (N,); infinite where they have different shapes,
    or NaN in them."""
    if here.equals(there):
        return np.zeros(len(here))
    with np.errstate(invalid="ignore"):  # of infinities
        if column.per_token or here.null_count or there.null_count:
            pairs = zip(here, there, strict=True)
            rows = [
                deviation_of(column.from_arrow(one), column.from_arrow(other))
                if one.is_valid and other.is_valid
                else np.inf
                for one, other in pairs
            ]
            deviations = np.array(rows)
        else:
            now, stored = (_matrix(each, column.width) for each in (here, there))
            lengths = np.maximum(np.linalg.norm(stored, axis=1), np.finfo(np.float32).tiny)
            deviations = np.linalg.norm(now - stored, axis=1) / lengths
    return np.where(np.isnan(deviations), np.inf, deviations)


def _matrix(column: pa.ChunkedArray, width: int) -> Float64Array:
    """Vectors, (N, D), in float64."""
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    return np.concatenate(values).astype(np.float64).reshape(-1, width)


def version_differences(then: dict[str, str], now: dict[str, str]) -> list[str]:
    """One line per package that has another version."""
    return [f"{name}: {then.get(name)} there, {now.get(name)} now" for name in now if then.get(name) != now.get(name)]
