"""Images in the rows of Lance datasets."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vlmembed.errors import FailureCode, ImageError, InputError, MissingExtraError
from vlmembed.remote.store_options import s3_endpoint
from vlmembed.remote.urls import is_url, without_options
from vlmembed.sources.base import rows_between
from vlmembed.sources.files import DAMAGE
from vlmembed.sources.locations import shown
from vlmembed.sources.tables import RowNames, TableColumns, check_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    from vlmembed.sources.readahead import ReadAhead, Row
    from vlmembed.types import EncodedImage

BATCH_ROWS = 8
"""Lance bounds a batch by rows alone: its `batch_size_bytes` cuts batches that are in memory already."""

READ_BYTES = 32 * 2**20
"""What Lance may have read ahead; its default takes gigabytes."""

BLOB_EXTENSION = "lance.blob"
BLOB_METADATA = b"lance-encoding:blob"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """A part of a dataset, with what is left of it after rows were deleted: `first_row` in the run, and how many."""

    content: Any
    first_row: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LanceTable:
    """A version of a dataset, which stays what it is whatever is written meanwhile."""

    dataset: Any
    names: RowNames
    fragments: list[Fragment]


class LanceSource:
    """Rows of Lance datasets, streamed in small batches.

    `datasets` are folders, or ``s3://`` and ``gs://`` URLs, each with its id, read in the version that is the newest
    when the source is made. A row's id is ``ID#NUMBER``: its position in that version's order, so deleting rows moves
    those behind them. The first dataset says which columns are read; the others must have them with the same types.
    Columns that are encoded as blobs are read like any other.
    """

    def __init__(
        self,
        datasets: Sequence[tuple[str, str]],
        *,
        reader: ReadAhead,
        image_column: str | None,
        id_column: str | None,
        keep_columns: tuple[str, ...],
    ) -> None:
        self.skipped: Counter[str] = Counter()
        self.num_rows = 0
        self._reader = reader
        self._tables: list[LanceTable] = []
        self.kept_schema = pa.schema([])
        digest, keys_digest = hashlib.sha256(), hashlib.sha256()
        for location, key in datasets:
            dataset, fragments = _open(location, self.num_rows)
            schema = pa.schema([_as_bytes(field) for field in dataset.schema])
            if not self._tables:
                self._columns = TableColumns.choose(
                    schema, key, image_column=image_column, id_column=id_column, keep_columns=keep_columns
                )
                self.kept_schema = self._columns.kept_schema
            self._columns.require_same(schema, key)
            names = RowNames(key=key, first_row=self.num_rows, location=f"{location.rstrip('/')}/")
            self._tables.append(LanceTable(dataset=dataset, names=names, fragments=fragments))
            self.num_rows += sum(fragment.num_rows for fragment in fragments)
            parts = [fragment.content.metadata.to_json() for fragment in fragments]
            digest.update(json.dumps([key, dataset.version, parts], default=str).encode() + b"\n")
            keys_digest.update(json.dumps([key, self.num_rows - names.first_row]).encode() + b"\n")
        self.digest: str = digest.hexdigest()
        self.keys_digest: str = keys_digest.hexdigest()
        if id_column:
            self.keys_digest = check_ids(id_column, ((table.names.key, self._ids(table)) for table in self._tables))

    def _ids(self, table: LanceTable) -> Iterator[list[object]]:
        identity = self._columns.identity
        assert identity
        for fragment in table.fragments:
            for batch in _batches(table, fragment, [identity], 0, fragment.num_rows):
                yield self._columns.column(batch, identity).to_pylist()

    def read(self, start: int) -> Iterator[EncodedImage]:
        """Yield rows; those of a fragment from where it is damaged fail as ``unreadable``."""
        return self.read_rows(range(start, self.num_rows))

    def read_rows(self, rows: Sequence[int]) -> Iterator[EncodedImage]:
        """Yield these rows; what lies between them is not read."""
        return self._reader.read(self._rows(rows))

    def _rows(self, rows: Sequence[int]) -> Iterator[Row]:
        for table in self._tables:
            for fragment in table.fragments:
                wanted = rows_between(rows, fragment.first_row, fragment.num_rows)
                while wanted:
                    run = rows_between(wanted, wanted[0], _run_length(wanted))
                    yield from self._read_run(table, fragment, run)
                    wanted = wanted[len(run) :]

    def _read_run(self, table: LanceTable, fragment: Fragment, rows: Sequence[int]) -> Iterator[Row]:
        """Yield rows that follow each other."""
        num_read = 0
        names, columns = table.names, list(self._columns.ways)
        try:
            for batch in _batches(table, fragment, columns, rows[0] - fragment.first_row, len(rows)):
                wanted = rows_between(rows, rows[0] + num_read, batch.num_rows)
                yield from self._columns.rows(batch, rows[0] + num_read, wanted, names)
                num_read += len(wanted)
            broken = ImageError(FailureCode.UNREADABLE, f"{names.key} holds fewer rows than it promises")
        except DAMAGE as error:
            part = f"{names.key}, fragment {fragment.content.fragment_id}"
            broken = ImageError(FailureCode.UNREADABLE, f"{part}: {_first_line(error)}")
        yield from self._columns.lost(rows[num_read:], names, broken)

    def close(self) -> None:
        """Nothing is kept open between reads."""


def _import_lance(location: str) -> ModuleType:
    try:
        return importlib.import_module("lance")
    except ImportError as error:
        msg = f"{shown(location)} is a Lance dataset: pip install 'vlmembed[lance]' (it is the package pylance)"
        raise MissingExtraError(msg) from error


def _open(location: str, first_row: int) -> tuple[Any, list[Fragment]]:
    """A dataset and its parts, of which the first has its first row there."""
    lance = _import_lance(location)
    if is_url(location) and not location.lower().startswith(("s3://", "gs://")):
        msg = f"{shown(location)}: Lance datasets are read from disks, s3:// and gs://: copy it to one of them"
        raise InputError(msg)
    if is_url(location) and location != without_options(location):
        msg = f"{shown(location)}: Lance takes no options behind a URL: give them by the environment (AWS_ENDPOINT_URL)"
        raise InputError(msg)
    try:
        dataset = lance.dataset(location, storage_options=storage_options(location))
        fragments = []
        for content in dataset.get_fragments():
            fragments.append(Fragment(content=content, first_row=first_row, num_rows=content.count_rows()))
            first_row += fragments[-1].num_rows
    except DAMAGE as error:
        reason = _first_line(error)
        msg = f"{shown(location)} cannot be read as a Lance dataset ({reason}): write it again, or leave it out"
        raise InputError(msg) from error
    return dataset, fragments


def storage_options(location: str) -> dict[str, str] | None:
    """What Lance does not take from the environment by itself: another server for ``s3://``, without TLS too."""
    endpoint = s3_endpoint()
    if not (endpoint and location.lower().startswith("s3://")):
        return None
    return {"aws_endpoint": endpoint, "allow_http": str(endpoint.startswith("http://")).lower()}


def _as_bytes(field: pa.Field) -> pa.Field:
    """A field as a scan gives it: blobs, of the old kind and the new, as binary."""
    kind = field.type
    is_new = isinstance(kind, pa.BaseExtensionType) and kind.extension_name.startswith(BLOB_EXTENSION)
    is_old = BLOB_METADATA in (field.metadata or {})
    return pa.field(field.name, pa.large_binary(), field.nullable) if is_new or is_old else field.remove_metadata()


def _batches(
    table: LanceTable, fragment: Fragment, columns: Sequence[str], offset: int, num_rows: int
) -> Iterator[pa.RecordBatch]:
    """Yield so many rows of a fragment."""
    scanner = table.dataset.scanner(
        columns=list(columns),
        fragments=[fragment.content],
        offset=offset,
        limit=num_rows,
        batch_size=BATCH_ROWS,
        batch_readahead=1,
        fragment_readahead=1,
        io_buffer_size=READ_BYTES,
        scan_in_order=True,
        blob_handling="all_binary",
    )
    yield from scanner.to_batches()


def _run_length(rows: Sequence[int]) -> int:
    """How many rows follow each other from the first on."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return len(rows)
    return next(number for number, row in enumerate(rows) if row != rows[0] + number)


def _first_line(error: BaseException) -> str:
    """Lance's messages end in places of its own source code."""
    return str(error).split("\n", 1)[0].split(", /", 1)[0]
