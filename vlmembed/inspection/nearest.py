"""The pairs of rows that are nearest to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vlmembed.types import Float32Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two different pictures and the cosine of their embeddings."""

    first: str
    second: str
    cosine: float


def nearest_pairs(ids: list[str], vectors: Float32Array, num_pairs: int) -> list[Pair]:
    """The `num_pairs` pairs of rows of `vectors` (N, D) with the highest cosine, best first."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    first, second = np.triu_indices(len(ids), k=1)
    cosines = (unit @ unit.T)[first, second]
    best = np.argsort(-cosines, kind="stable")[:num_pairs]
    return [Pair(first=ids[first[at]], second=ids[second[at]], cosine=float(cosines[at])) for at in best]
