"""The parts of a run become its output: one file, streamed together, or the files of a folder; and the errors file."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlmembed.errors import AccountingError, StorageError
from vlmembed.output import SUCCESS, atomic, publish
from vlmembed.parts import storing, writer_options
from vlmembed.schema import ERRORS_SCHEMA, with_provenance

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from vlmembed.output import OutputPaths
    from vlmembed.parts import PartRecord, PartStore
    from vlmembed.schema import VectorColumn

MAX_GROUP_ROWS = 10_000
MAX_GROUP_BYTES = 64 * 2**20
"""Bounds of the output's row groups, so that readers can seek."""

READY_PREFIX = "ready."
READY = READY_PREFIX + "parquet"
READY_ERRORS = READY_PREFIX + "errors.parquet"
READY_SUCCESS = READY_PREFIX + "success"
"""Files in the partial folder that only have to be moved into their places."""


def assemble(store: PartStore, paths: OutputPaths, provenance: Mapping[str, Any]) -> None:
    """Make the output of the committed parts, in place of what was there; the parts go.

    Raises:
        AccountingError: a file does not hold the rows that the parts' lines promise.
        StorageError: the disk is full, or a part is not what was written.
    """
    check_parts(store)
    records = store.records
    num_rows = sum(record.num_embedded + record.num_duplicates for record in records)
    with storing(paths.partial / READY_ERRORS):
        errors = read_groups([paths.partial / record.errors_name for record in records], ERRORS_SCHEMA)
        write_errors(paths, errors, provenance, sum(record.num_failed for record in records))
    if paths.is_folder:
        publish_folder(paths, records, provenance, {record.file_name: record.file_name for record in records})
        return
    moves, removes = {READY_ERRORS: paths.errors.name}, []
    if num_rows:
        with storing(paths.partial / READY):
            pieces = read_groups([paths.partial / record.file_name for record in records], store.schema)
            schema = with_provenance(store.schema, provenance)
            concatenate(paths.partial / READY, schema, pieces, num_rows, store.vectors)
        moves[READY] = paths.output.name
    else:
        removes = [paths.output.name]  # --overwrite: what stood there is no result of this run
    with storing(paths.output):
        publish(paths, moves, removes)


def check_parts(store: PartStore) -> None:
    """Look once more whether the parts are what was written.

    Raises:
        StorageError: some are not; they are no parts any more.
    """
    if store.check():
        msg = "parts were damaged on disk after they were written: the same command does their rows again"
        raise StorageError(msg)


def write_errors(paths: OutputPaths, tables: Iterable[pa.Table], provenance: Mapping[str, Any], num_rows: int) -> None:
    """Make the errors file ready to be published."""
    concatenate(paths.partial / READY_ERRORS, with_provenance(ERRORS_SCHEMA, provenance), tables, num_rows)


def publish_folder(
    paths: OutputPaths, records: Sequence[PartRecord], provenance: Mapping[str, Any], ready: Mapping[str, str]
) -> None:
    """Move parts that are `ready` in the partial folder, by their names there and in the output, and the errors file
    into the folder output. `records` are all parts that it has then; others that it had go."""
    own = {record.file_name for record in records}
    facts = {**provenance, "parts": [asdict(record) for record in records]}
    with storing(paths.success):
        with atomic(paths.partial / READY_SUCCESS) as path:
            path.write_text(json.dumps(facts, sort_keys=True), encoding="utf-8")
        stale = [path.name for path in paths.output.glob("part-*.parquet") if path.name not in own]
        moves = {**ready, READY_ERRORS: paths.errors.name, READY_SUCCESS: SUCCESS}
        publish(paths, moves, [SUCCESS, *stale])


def concatenate(
    target: Path,
    schema: pa.Schema,
    pieces: Iterable[pa.Table],
    num_rows: int,
    vectors: tuple[VectorColumn, ...] = (),
) -> None:
    """Stream tables into one file with row groups of a useful size.

    Raises:
        AccountingError: they do not have `num_rows` rows.
    """
    written = 0
    with atomic(target) as path:
        with pq.ParquetWriter(path, schema, **writer_options(schema, vectors)) as writer:
            waiting = schema.empty_table()
            for piece in pieces:
                waiting = pa.concat_tables([waiting, piece.cast(schema)])
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


def read_groups(files: Iterable[Path], schema: pa.Schema) -> Iterator[pa.Table]:
    """The files' rows in order, row group by row group: a part of tokens may be large."""
    for path in files:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for number in range(file.num_row_groups):
                yield file.read_row_group(number, columns=schema.names).select(schema.names)
