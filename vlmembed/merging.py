"""Rows that failed and were done again go back among the others, in input order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vlmembed.types import Int64Array

Numbered = tuple["Int64Array", pa.Table]
"""Rows of a table and their input rows, ascending."""


def merge_rows(old: Iterable[Numbered], new: Iterable[Numbered]) -> Iterator[pa.Table]:
    """Two ascending streams of rows with one schema as one ascending stream. Nothing is copied."""
    coming = (pair for pair in new if len(pair[0]))
    new_rows, new_table = next(coming, (np.empty(0, np.int64), None))
    for rows, table in old:
        if not len(rows):
            continue
        position = 0
        while new_table is not None and new_rows[0] < rows[-1]:
            # `count` new rows go before old row number `until`
            until = int(np.searchsorted(rows, new_rows[0]))
            count = int(np.searchsorted(new_rows, rows[until]))
            if until > position:
                yield table.slice(position, until - position)
                position = until
            yield new_table.slice(0, count)
            new_rows, new_table = new_rows[count:], new_table.slice(count)
            if not len(new_rows):
                new_rows, new_table = next(coming, (new_rows, None))
        yield table.slice(position)
    while new_table is not None:
        yield new_table
        _, new_table = next(coming, (new_rows, None))
