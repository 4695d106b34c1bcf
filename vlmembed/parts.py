"""The committed parts of a run.

The partial folder holds ``manifest.json`` (whose run this is), a pair of Parquet files per part, and ``parts.jsonl``, a
line per committed part with its counts and the SHA-256 of its files. A part exists once its line does: its files are
written beside, synchronised and renamed first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlmembed.atomic import atomic
from vlmembed.errors import AccountingError, FailureCode, OutputError, StorageError
from vlmembed.schema import ERRORS_SCHEMA, HASH_BYTES
from vlmembed.types import Embedded, Failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from vlmembed.schema import VectorColumn
    from vlmembed.types import FloatArray, Int64Array

logger = logging.getLogger(__name__)

LINES = "parts.jsonl"

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
        return f"part-{self.number:06d}.errors.parquet"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Group:
    """A row group of a part, so that its rows can be picked one by one: ids, `_SIZES` and vectors by column."""

    keys: list[str]
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


class PartStore:
    """Owns the parts of one run, in its partial `folder`; `schema` has the columns `vectors`.

    `max_row_bytes` is what one row can hold at most: it bounds the row groups of the parts.
    """

    def __init__(
        self,
        folder: Path,
        schema: pa.Schema,
        *,
        vectors: tuple[VectorColumn, ...],
        rows_per_part: int,
        max_row_bytes: int = 0,
    ) -> None:
        self.folder = folder
        self.schema = schema
        self.vectors = vectors
        self._group_rows = max(1, min(PART_GROUP_ROWS, PART_GROUP_BYTES // max(1, max_row_bytes)))
        self._rows_per_part = rows_per_part
        self._rows = lru_cache(maxsize=64)(self._read_rows)
        self._failures = lru_cache(maxsize=16)(self._read_failures)
        cached = FOUND_BYTES // max(1, self._group_rows * max_row_bytes)
        self._group = lru_cache(maxsize=max(1, min(16, cached)))(self._read_group)
        _drop_cut_line(folder / LINES)
        self.records = read_records(folder)

    @property
    def next_row(self) -> int:
        """The first row that is not committed."""
        return sum(record.num_rows for record in self.records)

    def commit(self, record: PartRecord, columns: Mapping[str, Any], errors: Mapping[str, Any]) -> None:
        """Write a part whole or not at all, then its line. `columns` and `errors` are by name.

        Raises:
            StorageError: it could not be written.
        """
        path, errors_path = self.folder / record.file_name, self.folder / record.errors_name
        with storing(path):
            table = pa.table(dict(columns), schema=self.schema)
            options = writer_options(self.schema, self.vectors)
            sha256 = _write(table, path, row_group_size=self._group_rows, **options)
            failed = pa.table(dict(errors), schema=_PART_ERRORS_SCHEMA)
            errors_sha256 = _write(failed, errors_path, compression="zstd")
            record = replace(record, sha256=sha256, errors_sha256=errors_sha256)
            with (self.folder / LINES).open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(record)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        self.records.append(record)

    def check(self) -> int:
        """Compare every part with what was written. Those from the first damaged one on are no parts any more, and
        their rows are to be done again; returns how many parts that is."""
        for position, record in enumerate(self.records):
            expected = {record.file_name: record.sha256, record.errors_name: record.errors_sha256}
            damaged = [name for name, sha256 in expected.items() if not _is_as_written(self.folder / name, sha256)]
            if not damaged:
                continue
            num_lost = len(self.records) - position
            logger.error(
                "%s is not what was written there: rows from %d on are done again", damaged[0], record.first_row
            )
            del self.records[position:]
            with storing(self.folder / LINES), atomic(self.folder / LINES) as path:
                path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in self.records), encoding="utf-8")
            return num_lost
        return 0

    def hashes(self) -> Iterator[tuple[int, bytes]]:
        """(row, content hash) of every committed row that has one, part by part."""
        for record in self.records:
            failed = self._errors(record, "row", "content_hash").to_pydict()
            found = [pair for pair in zip(failed["row"], failed["content_hash"], strict=True) if pair[1] is not None]
            hashes = pq.read_table(self.folder / record.file_name, columns=["content_hash"])["content_hash"].to_pylist()
            found += zip(self._rows(record.number).tolist(), hashes, strict=True)
            yield from sorted(found)

    def codes(self) -> Counter[str]:
        """Committed failed rows by code."""
        codes: Counter[str] = Counter()
        for record in self.records:
            codes.update(self._errors(record, "code")["code"].to_pylist())
        return codes

    def find(self, row: int) -> tuple[str, Embedded | Failure]:
        """The id and the result that were committed for a row that is not a duplicate itself.

        Raises:
            AccountingError: the row's part holds it in neither of its files.
            StorageError: the part cannot be read any more.
        """
        number = row // self._rows_per_part
        try:
            return self._find(number, row)
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

    def last_key(self) -> str | None:
        """The id of the last committed row; None where there is none."""
        if not self.records:
            return None
        record = self.records[-1]
        rows, failed = self.rows_of(record.number)
        if len(failed) and (not len(rows) or failed[-1] > rows[-1]):
            table = self._errors(record, "id", "row").sort_by("row")
        else:
            table = pq.read_table(self.folder / record.file_name, columns=["id"], page_checksum_verification=True)
        return str(table["id"][-1].as_py())

    def rows_of(self, number: int) -> tuple[Int64Array, Int64Array]:
        """The rows of a part with vectors, and those that failed, ascending."""
        record = self.records[number]
        failed: Int64Array = self._errors(record, "row")["row"].to_numpy()
        rows = np.arange(record.first_row, record.first_row + record.num_rows, dtype=np.int64)
        return np.setdiff1d(rows, failed, assume_unique=True), failed

    def _errors(self, record: PartRecord, *columns: str) -> pa.Table:
        """These columns of a part's errors file, or all."""
        path = self.folder / record.errors_name
        return pq.read_table(path, columns=list(columns) or None, page_checksum_verification=True)

    def _read_rows(self, number: int) -> Int64Array:
        return self.rows_of(number)[0]

    def _read_group(self, number: int, group: int) -> _Group:
        with pq.ParquetFile(self.folder / part_name(number), page_checksum_verification=True) as file:
            table = file.read_row_group(group, columns=["id", *_SIZES, *(each.name for each in self.vectors)])
        return _Group(
            keys=table["id"].to_pylist(),
            sizes=list(zip(*(table[name].to_pylist() for name in _SIZES), strict=True)),
            vectors={column.name: _vectors_of(column, table[column.name]) for column in self.vectors},
        )

    def _read_failures(self, number: int) -> dict[int, tuple[str, Failure]]:
        found = {}
        for entry in self._errors(self.records[number]).to_pylist():
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


def _write(table: pa.Table, target: Path, **options: Any) -> str:  # noqa: ANN401  as pyarrow's
    with atomic(target) as path:
        pq.write_table(table, path, **options)
        return file_sha256(path)


def file_sha256(path: Path) -> str:
    """Hash (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_as_written(path: Path, sha256: str) -> bool:
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


def read_records(folder: Path) -> list[PartRecord]:
    """The committed parts of a partial folder; none where there is no such folder.

    Raises:
        OutputError: their list is not one that this version writes.
    """
    path = folder / LINES
    lines = _whole_lines(path.read_bytes()) if path.exists() else []
    try:
        return [PartRecord(**json.loads(line)) for line in lines]
    except TypeError as error:
        msg = f"{path} is of another version ({error}): start anew with --overwrite"
        raise OutputError(msg) from error


def _whole_lines(content: bytes) -> list[bytes]:
    """A crash can cut the last line, a power cut fill it with zeros: from there on no part counts."""
    lines = []
    for line in content.split(b"\n")[:-1]:
        try:
            json.loads(line)
        except ValueError:
            break
        lines.append(line)
    return lines


def _drop_cut_line(path: Path) -> None:
    """The next line must not join one that was cut."""
    content = path.read_bytes() if path.exists() else b""
    whole = sum(len(line) + 1 for line in _whole_lines(content))
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
            os.fsync(file.fileno())
