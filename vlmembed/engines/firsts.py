"""The first row with each content, over the whole input: found by an aggregate over hashes, looked up part by part.

Only rows that are no first rows are kept. They lie in the partial folder, a file per stretch of rows, with an index
that appears once all of them are there: so a run that goes on has them.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlmembed.atomic import atomic
from vlmembed.dedup import HashIndex
from vlmembed.errors import StorageError
from vlmembed.partfiles import storing
from vlmembed.parts import FIRSTS
from vlmembed.schema import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

STRETCH_ROWS = 2**20
"""Rows whose first rows lie in one file: at most 56 MB, where nearly all are duplicates."""

BUCKET_ROWS = 2**21
"""About so many hashes are compared in one task: 90 MB, and twice that while they are sorted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstsIndex:
    """Where the first rows are: a file for each of `stretches`, which are of `stretch_rows`; in all of them
    `num_repeated` rows."""

    stretch_rows: int
    stretches: list[int]
    num_repeated: int


HASHED = pa.schema(
    [pa.field("bucket", pa.int32()), pa.field("content_hash", pa.binary(HASH_BYTES)), pa.field("row", pa.int64())]
)
REPEATED = pa.schema(
    [
        pa.field("stretch", pa.int64()),
        pa.field("row", pa.int64()),
        pa.field("first_row", pa.int64()),
        pa.field("content_hash", pa.binary(HASH_BYTES)),
    ]
)


def hashed_table(pairs: list[tuple[int, bytes]], buckets: int) -> pa.Table:
    """Rows and their hashes, each with the bucket that all rows with its hash have."""
    hashes = [content_hash for _, content_hash in pairs]
    numbers = [int.from_bytes(content_hash[:8]) % buckets for content_hash in hashes]
    return pa.table(
        {"bucket": numbers, "content_hash": hashes, "row": [row for row, _ in pairs]},
        schema=HASHED,
    )


def repeated_rows(bucket: pa.Table, stretch_rows: int) -> pa.Table:
    """Of the rows of one bucket those whose content an earlier row has, and the first of these."""
    bucket = bucket.sort_by("row")  # so that the first one that comes is the smallest
    found: list[tuple[int, int, bytes]] = []
    with tempfile.TemporaryDirectory() as folder, HashIndex(Path(folder) / "index") as index:
        for batch in bucket.to_batches(max_chunksize=2**16):
            for content_hash, row in zip(batch["content_hash"].to_pylist(), batch["row"].to_pylist(), strict=True):
                first_row = index.first_row(content_hash, row)
                if first_row != row:
                    found.append((row, first_row, content_hash))
    rows = np.array([row for row, _, _ in found], np.int64)
    return pa.table(
        {
            "stretch": rows // stretch_rows,
            "row": rows,
            "first_row": [first_row for _, first_row, _ in found],
            "content_hash": [content_hash for _, _, content_hash in found],
        },
        schema=REPEATED,
    )


def _file_of(folder: Path, stretch: int) -> Path:
    return folder / f"firsts-{stretch:06d}.parquet"


def write_stretch(folder: Path, rows: pa.Table) -> int:
    """Write what belongs to one stretch; returns which it is. Raises `StorageError`."""
    stretch = int(rows["stretch"][0].as_py())
    target = _file_of(folder, stretch)
    with storing(target), atomic(target) as path:
        pq.write_table(rows.sort_by("row").drop_columns(["stretch"]), path, write_page_checksum=True)
    return stretch


def write_index(folder: Path, found: FirstsIndex) -> None:
    """All files are there. Raises `StorageError`."""
    with storing(folder / FIRSTS), atomic(folder / FIRSTS) as path:
        path.write_text(json.dumps(asdict(found)), encoding="utf-8")


def read_index(folder: Path) -> FirstsIndex | None:
    """What was found; None where it was not looked for yet. Raises `StorageError`."""
    try:
        return FirstsIndex(**json.loads((folder / FIRSTS).read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        msg = f"{folder / FIRSTS} cannot be read ({error}): delete it, and the same command finds duplicates again"
        raise StorageError(msg) from error


class FirstRows:
    """The `vlmembed.dedup.Index` of one part: what was found for its rows, and for no others.

    A row whose content is another one now than when it was hashed stands for itself.

    Raises:
        StorageError: a file is not there, or cannot be read.
    """

    def __init__(self, folder: Path, index: FirstsIndex, rows: range) -> None:
        self._first: dict[int, tuple[int, bytes]] = {}
        for stretch in range(rows.start // index.stretch_rows, (rows.stop - 1) // index.stretch_rows + 1):
            if stretch in index.stretches:
                self._first.update(_read(_file_of(folder, stretch), rows))

    def first_row(self, content_hash: bytes, row: int) -> int:
        """As in `vlmembed.dedup.Index`."""
        first_row, then = self._first.get(row, (row, content_hash))
        return first_row if then == content_hash else row

    @property
    def firsts(self) -> frozenset[int]:
        """All rows that may be asked for."""
        return frozenset(first_row for first_row, _ in self._first.values())


def _read(path: Path, rows: range) -> Iterator[tuple[int, tuple[int, bytes]]]:
    limits = [("row", ">=", rows.start), ("row", "<", rows.stop)]
    try:
        table = pq.read_table(path, filters=limits, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        msg = f"{path} cannot be read ({error}): delete {path.with_name(FIRSTS)}, and the same command makes it again"
        raise StorageError(msg) from error
    columns = (table[name].to_pylist() for name in ("row", "first_row", "content_hash"))
    return ((row, (first_row, content_hash)) for row, first_row, content_hash in zip(*columns, strict=True))
