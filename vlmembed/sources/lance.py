"""Images in the rows of Lance datasets."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vlmembed.errors import InputError
from vlmembed.remote.urls import is_url, without_options
from vlmembed.sources.files import DAMAGE
from vlmembed.sources.lancerows import (
    Fragment,
    LanceRows,
    LanceTable,
    first_line,
    import_lance,
    open_dataset,
    read_batches,
    storage_options,
)
from vlmembed.sources.locations import shown
from vlmembed.sources.pieces import SourcePiece, cut, holding
from vlmembed.sources.tables import RowNames, TableColumns, check_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vlmembed.sources.pieces import Piece
    from vlmembed.sources.readahead import ReadAhead
    from vlmembed.types import EncodedImage

__all__ = ["LanceSource", "storage_options"]

BLOB_EXTENSION = "lance.blob"
BLOB_METADATA = b"lance-encoding:blob"


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
        self._datasets: dict[str, Any] = {}
        self.kept_schema = pa.schema([])
        digest, keys_digest = hashlib.sha256(), hashlib.sha256()
        for location, key in datasets:
            dataset, fragments = _open_newest(location, self.num_rows)
            schema = pa.schema([_as_bytes(field) for field in dataset.schema])
            if not self._tables:
                self._columns = TableColumns.choose(
                    schema, key, image_column=image_column, id_column=id_column, keep_columns=keep_columns
                )
                self.kept_schema = self._columns.kept_schema
            self._columns.require_same(schema, key)
            names = RowNames(key=key, first_row=self.num_rows, location=f"{location.rstrip('/')}/")
            self._tables.append(LanceTable(version=dataset.version, names=names, fragments=fragments))
            self._datasets[names.location] = dataset
            self.num_rows += sum(fragment.num_rows for fragment in fragments)
            parts = [content.metadata.to_json() for content in dataset.get_fragments()]
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
            for batch in read_batches(self._datasets[table.names.location], fragment, [identity], 0, fragment.num_rows):
                yield self._columns.column(batch, identity).to_pylist()

    def read(self, start: int) -> Iterator[EncodedImage]:
        """Yield rows; those of a fragment from where it is damaged fail as ``unreadable``."""
        return self.read_rows(range(start, self.num_rows))

    def read_rows(self, rows: Sequence[int]) -> Iterator[EncodedImage]:
        """Yield these rows; what lies between them is not read."""
        listed = LanceRows(self._reader, tables=self._tables, columns=self._columns, datasets=self._datasets)
        return listed.read_rows(rows)

    def pieces(self, rows: range, size: int, first_row: int = 0) -> Iterator[Piece]:
        """See `Divisible`."""
        for run in cut(rows, size, first_row):
            tables = [
                replace(table, fragments=holding(table.fragments, run, lambda fragment: fragment.first_row))
                for table in holding(self._tables, run, lambda table: table.names.first_row)
            ]
            make = partial(LanceRows, tables=tables, columns=self._columns)
            yield SourcePiece(run=run, first_row=first_row, make=make)

    def close(self) -> None:
        """Nothing is kept open between reads."""


def _open_newest(location: str, first_row: int) -> tuple[Any, list[Fragment]]:
    """A dataset and its parts, of which the first has its first row there."""
    import_lance(location)
    if is_url(location) and not location.lower().startswith(("s3://", "gs://")):
        msg = f"{shown(location)}: Lance datasets are read from disks, s3:// and gs://: copy it to one of them"
        raise InputError(msg)
    if is_url(location) and location != without_options(location):
        msg = f"{shown(location)}: Lance takes no options behind a URL: give them by the environment (AWS_ENDPOINT_URL)"
        raise InputError(msg)
    try:
        dataset = open_dataset(location)
        fragments = []
        for content in dataset.get_fragments():
            number, num_rows = content.fragment_id, content.count_rows()
            fragments.append(Fragment(number=number, first_row=first_row, num_rows=num_rows))
            first_row += fragments[-1].num_rows
    except DAMAGE as error:
        reason = first_line(error)
        msg = f"{shown(location)} cannot be read as a Lance dataset ({reason}): write it again, or leave it out"
        raise InputError(msg) from error
    return dataset, fragments


def _as_bytes(field: pa.Field) -> pa.Field:
    """A field as a scan gives it: blobs, of the old kind and the new, as binary."""
    kind = field.type
    is_new = isinstance(kind, pa.BaseExtensionType) and kind.extension_name.startswith(BLOB_EXTENSION)
    is_old = BLOB_METADATA in (field.metadata or {})
    return pa.field(field.name, pa.large_binary(), field.nullable) if is_new or is_old else field.remove_metadata()
