"""The parts of a run become its output: one file or Lance dataset, streamed together, or the files of a folder; and
the errors file."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlmembed.atomic import atomic, atomic_folder
from vlmembed.errors import AccountingError, StorageError
from vlmembed.lance_output import write_lance
from vlmembed.output import SUCCESS, publish
from vlmembed.partfiles import storing, writer_options
from vlmembed.schema import ERRORS_SCHEMA, with_provenance

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from vlmembed.output import OutputPaths
    from vlmembed.partfiles import PartRecord
    from vlmembed.parts import PartStore
    from vlmembed.schema import VectorColumn

MAX_GROUP_ROWS = 10_000
MAX_GROUP_BYTES = 64 * 2**20
"""Bounds of the output's row groups, so that readers can seek."""

MAX_TOKEN_GROUP_BYTES = 8 * 2**20
"""The same where tokens are stored, which `read_tokens` fetches image by image: it reads the footer, of which a row
group takes 0.8 kB, and one row group. For a file of 80 GB that is least with 8 MiB."""

READY_PREFIX = "ready."
READY = READY_PREFIX + "parquet"
READY_ERRORS = READY_PREFIX + "errors.parquet"
READY_LANCE = READY_PREFIX + "lance"
READY_SUCCESS = READY_PREFIX + "success"
"""What is in the partial folder and only has to be moved into its place."""


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
    if num_rows:
        pieces = read_groups([paths.partial / record.file_name for record in records], store.schema)
        publish_rows(paths, with_provenance(store.schema, provenance), pieces, num_rows, store.vectors)
        return
    with storing(paths.output):  # --overwrite: what stood there is no result of this run
        publish(paths, {READY_ERRORS: paths.errors.name}, [paths.output.name])


def publish_rows(
    paths: OutputPaths, schema: pa.Schema, pieces: Iterable[pa.Table], num_rows: int, vectors: tuple[VectorColumn, ...]
) -> None:
    """Make one file or Lance dataset of the rows, and move it and the errors file, which is ready, into their places.

    Raises:
        AccountingError: there are not `num_rows` of them. StorageError: the disk is full, or the like.
    """
    moves, removes = {READY_ERRORS: paths.errors.name}, []
    if paths.format == "lance":
        with storing(paths.partial / READY_LANCE), atomic_folder(paths.partial / READY_LANCE) as folder:
            _check_count(paths.output, write_lance(folder, schema, pieces), num_rows)
        moves[READY_LANCE] = paths.output.name  # the last move: see `publish`
        removes = [paths.output.name]
    else:
        with storing(paths.partial / READY):
            concatenate(paths.partial / READY, schema, pieces, num_rows, vectors)
        moves[READY] = paths.output.name
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
    max_group_bytes = MAX_TOKEN_GROUP_BYTES if any(column.per_token for column in vectors) else MAX_GROUP_BYTES
    with atomic(target) as path:
        options = writer_options(schema, vectors)
        with pq.ParquetWriter(path, schema, write_page_index=True, **options) as writer:
            waiting = schema.empty_table()
            for piece in pieces:
                waiting = pa.concat_tables([waiting, piece.cast(schema)])
                bytes_per_row = max(1, waiting.nbytes // max(1, waiting.num_rows))
                group_rows = max(1, min(MAX_GROUP_ROWS, max_group_bytes // bytes_per_row))
                whole = waiting.num_rows // group_rows * group_rows
                if whole:
                    writer.write_table(waiting.slice(0, whole), row_group_size=group_rows)
                    written += whole
                waiting = waiting.slice(whole)
            if waiting.num_rows:
                writer.write_table(waiting, row_group_size=waiting.num_rows)
                written += waiting.num_rows
        _check_count(target, written, num_rows)
        _check_count(target, pq.read_metadata(path).num_rows, num_rows)


def _check_count(target: Path, written: int, promised: int) -> None:
    if written != promised:
        msg = f"{target} would hold {written} rows where its parts' lines promise {promised}; the parts are kept"
        raise AccountingError(msg)


def read_groups(files: Iterable[Path], schema: pa.Schema) -> Iterator[pa.Table]:
    """The files' rows in order, row group by row group: a part of tokens may be large."""
    for path in files:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for number in range(file.num_row_groups):
                yield file.read_row_group(number, columns=schema.names).select(schema.names)
