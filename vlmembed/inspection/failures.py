"""The rows that failed, as errors files have them: how many with which code, and the first of each."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from vlmembed.finished import reading

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MAX_SHOWN = 3
"""Rows of a code that are told one by one."""

_BATCH_ROWS = 2**14
_COLUMNS = ["id", "row", "stage", "code", "message"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedRow:
    """One of them; `row` is that of the input, from 0."""

    id: str
    row: int
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedGroup:
    """The `num_rows` that failed with `code` in `stage`, and the `first` few of them."""

    code: str
    stage: str
    num_rows: int
    first: tuple[FailedRow, ...]


def read_failures(files: Iterable[Path]) -> tuple[FailedGroup, ...]:
    """What is in errors files, or those of parts, the most frequent first.

    Raises:
        InputError: one is damaged, or gone.
    """
    counts: Counter[tuple[str, str]] = Counter()
    first: defaultdict[tuple[str, str], list[FailedRow]] = defaultdict(list)
    for path in files:
        with reading(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=_COLUMNS):
                _count(batch, counts, first)
    return tuple(
        FailedGroup(code=code, stage=stage, num_rows=number, first=tuple(first[code, stage]))
        for (code, stage), number in counts.most_common()
    )


def codes_of(groups: Iterable[FailedGroup]) -> dict[str, int]:
    """How many rows have which code, the most frequent first."""
    counts: Counter[str] = Counter()
    for group in groups:
        counts[group.code] += group.num_rows
    return dict(counts.most_common())


def _count(
    batch: pa.RecordBatch, counts: Counter[tuple[str, str]], first: defaultdict[tuple[str, str], list[FailedRow]]
) -> None:
    kinds = list(zip(batch["code"].to_pylist(), batch["stage"].to_pylist(), strict=True))
    counts.update(kinds)
    for position, kind in enumerate(kinds):
        if len(first[kind]) < MAX_SHOWN:
            key, row, message = (batch[name][position].as_py() for name in ("id", "row", "message"))
            first[kind].append(FailedRow(id=key, row=row, message=message))
