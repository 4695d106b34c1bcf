"""The files of a part: written whole, and looked up row by row.

A part is a pair of Parquet files: the rows with vectors, and those that failed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlmembed.atomic import atomic
from vlmembed.errors import AccountingError, FailureCode, StorageError
from vlmembed.schema import ERRORS_SCHEMA, HASH_BYTES
from vlmembed.types import Embedded, Failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from vlmembed.schema import VectorColumn
    from vlmembed.types import FloatArray, Int64Array

logger = logging.getLogger(__name__)

PART_GROUP_ROWS = 1024
PART_GROUP_BYTES = 16 * 2**20
"""Bounds of the row groups inside a part: what a late duplicate's look-up must read."""

FOUND_BYTES = 256 * 2**20
"""Row groups kept for the duplicates to come: 16, or fewer that hold so many bytes."""

_SIZES = ("height", "width", "grid_h", "grid_w")
_PART_ERRORS_SCHEMA = pa.schema([*ERRORS_SCHEMA, pa.field("content_hash", pa.binary(HASH_BYTES))])


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRecord:
    """One line of ``parts.jsonl``: rows [`first_row`, `first_row` + `num_rows`) and what became of them.

    `sha256` and `errors_sha256` are of its two files.
    """

    number: int
    first_row: int
    num_rows: int
    num_embedded: int
    num_duplicates: int
    num_failed: int
    sha256: str = ""
    errors_sha256: str = ""

    @property
    def file_name(self) -> str:
        """Of the rows with vectors."""
        return part_name(self.number)

    @property
    def errors_name(self) -> str:
        """Of the rows that failed."""
        return errors_name(self.number)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Group:
    """A row group of a part, so that its rows can be picked one by one: ids, hashes, `_SIZES` and vectors by column."""

    keys: list[str]
    hashes: list[bytes | None]
    sizes: list[tuple[int, ...]]
    vectors: dict[str, Sequence[FloatArray]]


def _vectors_of(column: VectorColumn, values: pa.ChunkedArray) -> Sequence[FloatArray]:
    """The vectors of each image, views of the column."""
    if column.per_token:
        return [column.from_arrow(value) for value in values]
    rows: FloatArray = pa.concat_arrays(values.chunks).flatten().to_numpy().reshape(-1, column.width)
    return list(rows)


def part_name(number: int) -> str:
    """File name of a part."""
    return f"part-{number:06d}.parquet"


def errors_name(number: int) -> str:
    """File name of the rows of a part that failed."""
    return f"part-{number:06d}.errors.parquet"


def in_order(path: Path) -> tuple[int, str]:
    """A key that sorts the files of parts by their numbers, which may have more digits than six."""
    return len(path.name), path.name


def note_name(number: int) -> str:
    """File name of a part's record, where another process than the run's own has written the part."""
    return f"part-{number:06d}.json"


class PartFiles:
    """The files of the parts of one run in its partial `folder`; `schema` has the columns `vectors`, and every part but
    the last one has `rows_per_part` rows.

    `max_row_bytes` is what one row can hold at most: it bounds the row groups of the parts. `writer` tells processes
    apart that may write the same part.
    """

    def __init__(
        self,
        folder: Path,
        schema: pa.Schema,
        *,
        vectors: tuple[VectorColumn, ...],
        rows_per_part: int,
        max_row_bytes: int = 0,
        writer: str = "",
    ) -> None:
        self._writer = writer
        self.folder = folder
        self.schema = schema
        self.vectors = vectors
        self._group_rows = max(1, min(PART_GROUP_ROWS, PART_GROUP_BYTES // max(1, max_row_bytes)))
        self._rows_per_part = rows_per_part
        self._rows = lru_cache(maxsize=64)(self._read_rows)
        self._failures = lru_cache(maxsize=16)(self._read_failures)
        cached = FOUND_BYTES // max(1, self._group_rows * max_row_bytes)
        self._group = lru_cache(maxsize=max(1, min(16, cached)))(self._read_group)

    def write(self, record: PartRecord, columns: Mapping[str, Any], errors: Mapping[str, Any]) -> PartRecord:
        """Write both files of a part, each whole or not at all; returns the record with their hashes. `columns` and
        `errors` are by name.

        Raises:
            StorageError: they could not be written.
        """
        path, errors_path = self.folder / record.file_name, self.folder / record.errors_name
        with storing(path):
            table = pa.table(dict(columns), schema=self.schema)
            options = writer_options(self.schema, self.vectors)
            sha256 = self._write(table, path, row_group_size=self._group_rows, **options)
            failed = pa.table(dict(errors), schema=_PART_ERRORS_SCHEMA)
            errors_sha256 = self._write(failed, errors_path, compression="zstd")
        return replace(record, sha256=sha256, errors_sha256=errors_sha256)

    def _write(self, table: pa.Table, target: Path, **options: Any) -> str:  # noqa: ANN401  as pyarrow's
        with atomic(target, writer=self._writer) as path:
            pq.write_table(table, path, **options)
            return file_sha256(path)

    def run_id(self) -> str:
        """Which run the folder is of, as notes have it."""
        return file_sha256(self.folder / "manifest.json")

    def note(self, record: PartRecord, run_id: str) -> None:
        """Leave a record beside the files of its part, for the run when it goes on. Raises `StorageError`."""
        target = self.folder / note_name(record.number)
        with storing(target), atomic(target, writer=self._writer) as path:
            path.write_text(json.dumps({"run": run_id, "part": asdict(record)}), encoding="utf-8")

    def is_as_written(self, record: PartRecord) -> bool:
        """Whether both files are there, with the bytes that were written; else it is said which is not."""
        for name, sha256 in ((record.file_name, record.sha256), (record.errors_name, record.errors_sha256)):
            if not _is_as_written(self.folder / name, sha256):
                logger.error("%s is not what was written there: rows from %d on are done again", name, record.first_row)
                return False
        return True

    def find(self, row: int) -> tuple[str, Embedded | Failure]:
        """The id and the result that were committed for a row that is not a duplicate itself.

        Raises:
            AccountingError: the row's part holds it in neither of its files.
            StorageError: the part cannot be read any more.
        """
        number = row // self._rows_per_part
        with self._reading(number):
            return self._find(number, row)

    @contextmanager
    def _reading(self, number: int) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            msg = (
                f"{self.folder / part_name(number)} cannot be read any more ({error}): what was committed before it is "
                "kept, and the same command goes on from there"
            )
            raise StorageError(msg) from error

    def _find(self, number: int, row: int) -> tuple[str, Embedded | Failure]:
        rows = self._rows(number)
        index = int(np.searchsorted(rows, row))
        if index == len(rows) or rows[index] != row:
            if (failed := self._failures(number).get(row)) is not None:
                return failed
            msg = f"row {row} is in neither file of part {number}, which is committed"
            raise AccountingError(msg)
        group, index = divmod(index, self._group_rows)
        found = self._group(number, group)
        vectors = {name: values[index] for name, values in found.vectors.items()}
        height, width, grid_h, grid_w = found.sizes[index]
        image = Embedded(row=row, vectors=vectors, size_hw=(height, width), grid_hw=(grid_h, grid_w))
        return found.keys[index], image

    def content_hash(self, row: int) -> bytes | None:
        """The hash of a committed row that `find` finds; None where it could not be read. Raises as `find` does."""
        number = row // self._rows_per_part
        with self._reading(number):
            return self._content_hash(number, row)

    def _content_hash(self, number: int, row: int) -> bytes | None:
        rows = self._rows(number)
        index = int(np.searchsorted(rows, row))
        if index == len(rows) or rows[index] != row:
            failed = self._errors(number, "row", "content_hash").to_pydict()
            return dict(zip(failed["row"], failed["content_hash"], strict=True)).get(row)
        group, index = divmod(index, self._group_rows)
        return self._group(number, group).hashes[index]

    def rows_of(self, number: int) -> tuple[Int64Array, Int64Array]:
        """The rows of a part with vectors, and those that failed, ascending."""
        failed: Int64Array = self._errors(number, "row")["row"].to_numpy()
        num_rows = pq.read_metadata(self.folder / part_name(number)).num_rows + len(failed)
        first_row = number * self._rows_per_part
        rows = np.arange(first_row, first_row + num_rows, dtype=np.int64)
        return np.setdiff1d(rows, failed, assume_unique=True), failed

    def _errors(self, number: int, *columns: str) -> pa.Table:
        """These columns of a part's errors file, or all."""
        path = self.folder / errors_name(number)
        return pq.read_table(path, columns=list(columns) or None, page_checksum_verification=True)

    def _read_rows(self, number: int) -> Int64Array:
        return self.rows_of(number)[0]

    def _read_group(self, number: int, group: int) -> _Group:
        with pq.ParquetFile(self.folder / part_name(number), page_checksum_verification=True) as file:
            table = file.read_row_group(
                group, columns=["id", "content_hash", *_SIZES, *(each.name for each in self.vectors)]
            )
        return _Group(
            keys=table["id"].to_pylist(),
            hashes=table["content_hash"].to_pylist(),
            sizes=list(zip(*(table[name].to_pylist() for name in _SIZES), strict=True)),
            vectors={column.name: _vectors_of(column, table[column.name]) for column in self.vectors},
        )

    def _read_failures(self, number: int) -> dict[int, tuple[str, Failure]]:
        found = {}
        for entry in self._errors(number).to_pylist():
            row, code = entry["row"], FailureCode(entry["code"])
            failure = Failure(row=row, stage=entry["stage"], code=code, message=entry["message"])
            found[row] = entry["id"], failure
        return found


@contextmanager
def storing(what: Path) -> Iterator[None]:
    """Say as a person would what kept a file from being written.

    Raises:
        StorageError: the disk is full, the folder went away, ...
    """
    try:
        yield
    except (OSError, sqlite3.Error, pa.ArrowException) as error:
        msg = (
            f"cannot write {what} ({error}): what was committed is kept; make room, or make the folder writable again, "
            "and the same command goes on from there"
        )
        raise StorageError(msg) from error


def file_sha256(path: Path) -> str:
    """Hash (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_as_written(path: Path, sha256: str) -> bool:
    """Whether a file is there, with these bytes."""
    try:
        return file_sha256(path) == sha256
    except OSError:
        return False


def writer_options(schema: pa.Schema, vectors: tuple[VectorColumn, ...]) -> dict[str, Any]:
    """zstd; dictionaries only where values repeat; no BYTE_STREAM_SPLIT, which not every reader takes."""
    distinct = {"row", "id", "content_hash", *(column.name for column in vectors)}
    repeating = [name for name in schema.names if name not in distinct]
    return {
        "compression": "zstd",
        "use_dictionary": repeating,
        "write_statistics": True,
        "write_page_checksum": True,  # zstd alone lets many a flipped bit through
    }
