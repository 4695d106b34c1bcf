"""The committed parts of a run, and the single file they become.

``OUTPUT.partial/`` holds ``manifest.json`` (whose run this is), one pair of Parquet files per part, and
``parts.jsonl``, a line per committed part. A part exists once its line does: its files are written beside,
synchronised and renamed first.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlmembed.errors import AccountingError, FailureCode
from vlmembed.output import atomic, drop_parts
from vlmembed.schema import ERRORS_SCHEMA, HASH_BYTES, with_provenance
from vlmembed.types import Embedded, Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from vlmembed.output import OutputPaths
    from vlmembed.schema import VectorColumn
    from vlmembed.types import Int64Array

PART_GROUP_ROWS = 1024
PART_GROUP_BYTES = 16 * 2**20
"""Bounds of the row groups inside a part: what a late duplicate's look-up must read."""

FOUND_BYTES = 256 * 2**20
"""Row groups kept for the duplicates to come: 16, or fewer that hold so many bytes."""

MAX_GROUP_ROWS = 10_000
MAX_GROUP_BYTES = 64 * 2**20
"""Bounds of the output's row groups, so that readers can seek."""

_ROW = pa.field("row", pa.int64(), nullable=False)
_FOUND_COLUMNS = ("id", "height", "width", "grid_h", "grid_w")
_PART_ERRORS_SCHEMA = pa.schema([_ROW, pa.field("content_hash", pa.binary(HASH_BYTES)), *ERRORS_SCHEMA])


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRecord:
    """One line of ``parts.jsonl``: rows [`first_row`, `first_row` + `num_rows`) and what became of them."""

    number: int
    first_row: int
    num_rows: int
    num_embedded: int
    num_duplicates: int
    num_failed: int


class PartStore:
    """Owns the partial folder of one run, whose schema has the columns `vectors`.

    `max_row_bytes` is what one row can hold at most: it bounds the row groups of the parts.
    """

    def __init__(
        self,
        paths: OutputPaths,
        schema: pa.Schema,
        *,
        vectors: tuple[VectorColumn, ...],
        rows_per_part: int,
        max_row_bytes: int = 0,
    ) -> None:
        self._paths = paths
        self._folder = paths.partial
        self._schema = schema
        self.vectors = vectors
        self._group_rows = max(1, min(PART_GROUP_ROWS, PART_GROUP_BYTES // max(1, max_row_bytes)))
        self._part_schema = pa.schema([_ROW, *schema])
        self._rows_per_part = rows_per_part
        self._rows = lru_cache(maxsize=64)(self._read_rows)
        self._failures = lru_cache(maxsize=16)(self._read_failures)
        cached = FOUND_BYTES // max(1, self._group_rows * max_row_bytes)
        self._group = lru_cache(maxsize=max(1, min(16, cached)))(self._read_group)
        _drop_cut_line(self._folder / "parts.jsonl")
        self.records = read_records(self._folder)

    @property
    def next_row(self) -> int:
        """The first row that is not committed."""
        return sum(record.num_rows for record in self.records)

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number:06d}.parquet"

    def _part_errors(self, number: int) -> Path:
        return self._folder / f"part-{number:06d}.errors.parquet"

    def commit(self, record: PartRecord, columns: Mapping[str, Any], errors: Mapping[str, Any]) -> None:
        """Write a part whole or not at all, then its line. `columns` and `errors` are by name, with `row` first."""
        with atomic(self._part(record.number)) as path:
            table = pa.table(dict(columns), schema=self._part_schema)
            options = _writer_options(self._part_schema, self.vectors)
            pq.write_table(table, path, row_group_size=self._group_rows, **options)
        with atomic(self._part_errors(record.number)) as path:
            pq.write_table(pa.table(dict(errors), schema=_PART_ERRORS_SCHEMA), path, compression="zstd")
        with (self._folder / "parts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)

    def hashes(self) -> Iterator[tuple[int, bytes]]:
        """(row, content hash) of every committed row that has one, part by part."""
        for record in self.records:
            found: list[tuple[int, bytes]] = []
            for path in (self._part(record.number), self._part_errors(record.number)):
                table = pq.read_table(path, columns=["row", "content_hash"])
                rows, hashes = table["row"].to_pylist(), table["content_hash"].to_pylist()
                found += [pair for pair in zip(rows, hashes, strict=True) if pair[1] is not None]
            yield from sorted(found)

    def codes(self) -> Counter[str]:
        """Committed failed rows by code."""
        codes: Counter[str] = Counter()
        for path in self._each(self._part_errors):
            codes.update(pq.read_table(path, columns=["code"])["code"].to_pylist())
        return codes

    def find(self, row: int) -> tuple[str, Embedded | Failure]:
        """The id and the result that were committed for a row that is not a duplicate itself.

        Raises:
            AccountingError: the row's part holds it in neither of its files.
        """
        number = row // self._rows_per_part
        rows = self._rows(number)
        index = int(np.searchsorted(rows, row))
        if index == len(rows) or rows[index] != row:
            if (failed := self._failures(number).get(row)) is not None:
                return failed
            msg = f"row {row} is in neither file of part {number}, which is committed"
            raise AccountingError(msg)
        group, index = divmod(index, self._group_rows)
        table = self._group(number, group)
        assert table["row"][index].as_py() == row
        key, *sizes = (table[name][index].as_py() for name in _FOUND_COLUMNS)
        vectors = {column.name: column.from_arrow(table[column.name][index]) for column in self.vectors}
        return key, Embedded(row=row, vectors=vectors, size_hw=(sizes[0], sizes[1]), grid_hw=(sizes[2], sizes[3]))

    def _read_rows(self, number: int) -> Int64Array:
        rows: Int64Array = pq.read_table(self._part(number), columns=["row"])["row"].to_numpy()
        return rows

    def _read_group(self, number: int, group: int) -> pa.Table:
        with pq.ParquetFile(self._part(number)) as file:
            return file.read_row_group(group, columns=["row", *_FOUND_COLUMNS, *(each.name for each in self.vectors)])

    def _read_failures(self, number: int) -> dict[int, tuple[str, Failure]]:
        found = {}
        for entry in pq.read_table(self._part_errors(number)).to_pylist():
            row, code = entry["row"], FailureCode(entry["code"])
            failure = Failure(row=row, stage=entry["stage"], code=code, message=entry["message"])
            found[row] = entry["id"], failure
        return found

    def assemble(self, provenance: Mapping[str, Any]) -> None:
        """Stream the parts into the errors file and, unless nothing was embedded, the output; then drop the parts.

        Raises:
            AccountingError: a file does not hold the rows that the parts' lines promise.
        """
        num_rows = sum(record.num_embedded + record.num_duplicates for record in self.records)
        num_failed = sum(record.num_failed for record in self.records)
        errors_schema, schema = (with_provenance(each, provenance) for each in (ERRORS_SCHEMA, self._schema))
        _concatenate(self._paths.errors, errors_schema, self._each(self._part_errors), num_failed)
        if num_rows:
            _concatenate(self._paths.output, schema, self._each(self._part), num_rows, self.vectors)
        else:
            self._paths.output.unlink(missing_ok=True)  # --overwrite: what stood there is no result of this run
        self.drop(self._folder)

    def _each(self, part: Callable[[int], Path]) -> list[Path]:
        return [part(record.number) for record in self.records]

    @staticmethod
    def drop(folder: Path) -> None:
        """Remove a partial folder, its manifest last: until then it can be told whose it was."""
        drop_parts(folder)
        (folder / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(folder)


def _concatenate(
    target: Path,
    schema: pa.Schema,
    parts: Iterable[Path],
    num_rows: int,
    vectors: tuple[VectorColumn, ...] = (),
) -> None:
    written = 0
    with atomic(target) as path:
        with pq.ParquetWriter(path, schema, **_writer_options(schema, vectors)) as writer:
            waiting = schema.empty_table()
            for piece in _row_groups(parts, schema):
                waiting = pa.concat_tables([waiting, piece])
                bytes_per_row = max(1, waiting.nbytes // max(1, waiting.num_rows))
                group_rows = max(1, min(MAX_GROUP_ROWS, MAX_GROUP_BYTES // bytes_per_row))
                whole = waiting.num_rows // group_rows * group_rows
                if whole:
                    writer.write_table(waiting.slice(0, whole), row_group_size=group_rows)
                    written += whole
                waiting = waiting.slice(whole)
            if waiting.num_rows:
                writer.write_table(waiting, row_group_size=waiting.num_rows)
                written += waiting.num_rows
        if written != num_rows or pq.read_metadata(path).num_rows != num_rows:
            msg = f"{target} would hold {written} rows where its parts' lines promise {num_rows}; the parts are kept"
            raise AccountingError(msg)


def _row_groups(parts: Iterable[Path], schema: pa.Schema) -> Iterator[pa.Table]:
    """The parts' rows in order, row group by row group: a part of tokens may be large."""
    for part in parts:
        with pq.ParquetFile(part) as file:
            for number in range(file.num_row_groups):
                yield file.read_row_group(number, columns=schema.names).select(schema.names).cast(schema)


def _writer_options(schema: pa.Schema, vectors: tuple[VectorColumn, ...]) -> dict[str, Any]:
    """zstd; dictionaries only where values repeat; no BYTE_STREAM_SPLIT, which not every reader takes."""
    distinct = {"row", "id", "content_hash", *(column.name for column in vectors)}
    repeating = [name for name in schema.names if name not in distinct]
    return {"compression": "zstd", "use_dictionary": repeating, "write_statistics": True}


def read_records(folder: Path) -> list[PartRecord]:
    """The committed parts of a partial folder; none where there is no such folder."""
    path = folder / "parts.jsonl"
    if not path.exists():
        return []
    *lines, _cut_by_a_crash = path.read_text(encoding="utf-8").split("\n")
    return [PartRecord(**json.loads(line)) for line in lines]


def _drop_cut_line(path: Path) -> None:
    """A crash can cut the last line: its part does not count, and the next line must not join it."""
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
            os.fsync(file.fileno())
