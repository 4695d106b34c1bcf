"""Reads an output back: what is in it, where it came from, and which rows are nearest to each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlmembed.finished import FinishedOutput

if TYPE_CHECKING:
    from pathlib import Path

    from vlmembed.types import Float32Array

MAX_COMPARED_ROWS = 4096
"""Rows compared pair by pair: the comparison grows with the square."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two different pictures and the cosine of their embeddings."""

    first: str
    second: str
    cosine: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Facts of an output file.

    Attributes:
        num_rows: with vectors, duplicates included. width: values per vector.
        vectors: columns of vectors. dtype: of their values. num_tokens: tokens of all rows, where they are stored.
        num_duplicates: rows whose `duplicate_of` is set.
        codes: failed rows by code, from the errors file beside it; None where that file is not there.
        provenance: as recorded.
        num_compared: distinct rows among which `nearest` was looked for; 0 where tokens are stored.
        nearest: the pairs with the highest cosine, best first.
    """

    path: Path | str
    num_rows: int
    width: int
    vectors: tuple[str, ...]
    dtype: str
    num_tokens: int | None
    num_duplicates: int
    codes: dict[str, int] | None
    provenance: dict[str, Any]
    num_compared: int
    nearest: list[Pair]


def inspect(path: Path, *, num_pairs: int = 3) -> Inspection:
    """Read the facts of an output file.

    Raises:
        InputError: it cannot be read as Parquet, or was not written by vlmembed.
    """
    output = FinishedOutput.open(path)
    schema, vectors, provenance = output.schema, output.vectors, output.provenance
    pooled = "embedding" in vectors
    columns = ["id", "duplicate_of", *(["embedding"] if pooled else ["grid_h", "grid_w"])]
    num_rows = num_duplicates = num_patches = 0
    ids: list[str] = []
    embeddings: list[Float32Array] = []
    for batch in output.batches(columns, MAX_COMPARED_ROWS):
        distinct = batch.filter(batch["duplicate_of"].is_null())
        num_rows += batch.num_rows
        num_duplicates += batch.num_rows - distinct.num_rows
        if not pooled:
            num_patches += int(np.dot(batch["grid_h"].to_numpy().astype(np.int64), batch["grid_w"].to_numpy()))
            continue
        distinct = distinct.slice(0, MAX_COMPARED_ROWS - len(ids))
        ids += distinct["id"].to_pylist()
        values = distinct["embedding"].flatten().to_numpy().astype(np.float32)
        embeddings.append(values.reshape(len(distinct), -1))
    vector = schema.field(vectors[0]).type
    vector = vector if pooled else vector.value_type
    width = vector.list_size
    compared = np.concatenate(embeddings) if embeddings else np.empty((0, width), np.float32)
    return Inspection(
        path=path,
        num_rows=num_rows,
        width=width,
        vectors=vectors,
        dtype="float16" if vector.value_type == pa.float16() else "float32",
        num_tokens=None if pooled else num_patches // provenance["model"].get("patches_per_token", 1),
        num_duplicates=num_duplicates,
        codes=_codes(output.errors),
        provenance=provenance,
        num_compared=len(ids),
        nearest=nearest_pairs(ids, compared, num_pairs),
    )


def _codes(errors: Path) -> dict[str, int] | None:
    if not errors.exists():
        return None
    return dict(Counter(pq.read_table(errors, columns=["code"])["code"].to_pylist()).most_common())


def nearest_pairs(ids: list[str], vectors: Float32Array, num_pairs: int) -> list[Pair]:
    """The `num_pairs` pairs of rows of `vectors` (N, D) with the highest cosine, best first."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    first, second = np.triu_indices(len(ids), k=1)
    cosines = (unit @ unit.T)[first, second]
    best = np.argsort(-cosines, kind="stable")[:num_pairs]
    return [Pair(first=ids[first[at]], second=ids[second[at]], cosine=float(cosines[at])) for at in best]
