"""One pass over the rows of a finished output: how many there are, and the vectors that are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from typing import Self

    from vlmembed.finished import FinishedOutput
    from vlmembed.types import Float32Array

MAX_COMPARED_ROWS = 4096
"""Rows compared pair by pair: the comparison grows with the square."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowScan:
    """What a pass has found.

    Attributes:
        num_rows, num_duplicates: duplicates are rows, too.
        num_patches: of all rows; 0 where they are not counted, which is where there is one vector per image.
        ids: of the first distinct rows, at most `MAX_COMPARED_ROWS`; none where tokens are stored. embeddings: theirs,
            in pieces (n, D).
    """

    num_rows: int
    num_duplicates: int
    num_patches: int
    ids: list[str]
    embeddings: list[Float32Array]

    @classmethod
    def of(cls, output: FinishedOutput) -> Self:
        """Read the columns that it takes.

        Raises:
            InputError: a file is damaged.
        """
        pooled = "embedding" in output.vectors
        num_rows = num_duplicates = num_patches = 0
        ids: list[str] = []
        embeddings: list[Float32Array] = []
        columns = ["id", "duplicate_of", *(["embedding"] if pooled else ["grid_h", "grid_w"])]
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
        return cls(
            num_rows=num_rows,
            num_duplicates=num_duplicates,
            num_patches=num_patches,
            ids=ids,
            embeddings=embeddings,
        )
