"""Images in the rows of Parquet files."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vlmembed.errors import FailureCode, ImageError, InputError
from vlmembed.sources.base import rows_between
from vlmembed.sources.files import DAMAGE
from vlmembed.sources.locations import shown
from vlmembed.sources.pieces import SourcePiece, cut, holding
from vlmembed.sources.rowgroups import open_parquet
from vlmembed.sources.tables import RowNames, TableColumns, check_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from vlmembed.sources.files import FileStatus
    from vlmembed.sources.pieces import Piece
    from vlmembed.sources.readahead import ReadAhead, Row
    from vlmembed.sources.rowgroups import OpenParquet
    from vlmembed.types import EncodedImage


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetFile:
    """A Parquet input file, or the URL of one: `names.first_row` is where its rows begin in the run."""

    names: RowNames
    status: FileStatus
    num_rows: int

    @property
    def key(self) -> str:
        """Its id."""
        return self.names.key


class ParquetRows:
    """Rows of Parquet files that were listed."""

    def __init__(self, reader: ReadAhead, *, files: Sequence[ParquetFile], columns: TableColumns) -> None:
        self._reader = reader
        self._files = files
        self._columns = columns

    def read_rows(self, rows: Sequence[int]) -> Iterator[EncodedImage]:
        """Yield these rows; row groups that hold none of them are not touched."""
        return self._reader.read(self._rows(rows))

    def _rows(self, rows: Sequence[int]) -> Iterator[Row]:
        for file in self._files:
            wanted = rows_between(rows, file.names.first_row, file.num_rows)
            if wanted:
                yield from self._read_file(file, wanted)

    def _read_file(self, file: ParquetFile, rows: Sequence[int]) -> Iterator[Row]:
        with ExitStack() as stack:
            try:
                opened = stack.enter_context(open_parquet(file.names.location, file.key, self._reader.remotes))
                self._check_unchanged(file, opened)
            except FileNotFoundError:
                broken = ImageError(FailureCode.MISSING, f"{file.key} was there when the run began, and is gone")
            except DAMAGE as error:
                broken = ImageError(FailureCode.UNREADABLE, f"{file.key}: {error}")
            else:
                first = file.names.first_row
                for group, num_rows in enumerate(opened.group_rows):
                    wanted = rows_between(rows, first, num_rows)
                    if wanted:
                        yield from self._read_group(file, opened, group, first, wanted)
                    first += num_rows
                return
            yield from self._columns.lost(rows, file.names, broken)

    def _check_unchanged(self, file: ParquetFile, opened: OpenParquet) -> None:
        """Raises:
        ValueError: it is no longer the file that was listed.
        """
        difference = opened.status.difference(file.status) or self._columns.difference(opened.schema, file.key)
        if not difference and file.num_rows != sum(opened.group_rows):
            difference = f"{sum(opened.group_rows)} rows, and {file.num_rows}"
        if difference:
            msg = f"it has changed since it was listed: {difference} then"
            raise ValueError(msg)

    def _read_group(
        self, file: ParquetFile, opened: OpenParquet, group: int, first: int, rows: Sequence[int]
    ) -> Iterator[Row]:
        """Yield `rows` of a row group that begins with row `first`."""
        begin, num_read = first, 0
        try:
            for batch in opened.batches(group, list(self._columns.ways)):
                wanted = rows_between(rows, begin, batch.num_rows)
                yield from self._columns.rows(batch, begin, wanted, file.names)
                begin += batch.num_rows
                num_read += len(wanted)
                if num_read == len(rows):
                    return
        except ImageError as broken:
            ids = self._id_batches(opened, group, first)
            yield from self._columns.lost(rows[num_read:], file.names, broken, ids)

    def _id_batches(self, opened: OpenParquet, group: int, first: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        assert self._columns.identity
        for batch in opened.batches(group, [self._columns.identity]):
            yield first, batch
            first += batch.num_rows


class ParquetSource(ParquetRows):
    """Rows of Parquet files, streamed in small batches; memory does not grow with the number of rows.

    `files` are paths or URLs, each with its id; URLs are read through the reader's `remotes`. The first file says which
    columns are read; the others must have them with the same types.
    """

    def __init__(
        self,
        files: Sequence[tuple[str, str]],
        *,
        reader: ReadAhead,
        image_column: str | None,
        id_column: str | None,
        keep_columns: tuple[str, ...],
    ) -> None:
        self.skipped: Counter[str] = Counter()
        self.num_rows = 0
        listed: list[ParquetFile] = []
        columns: TableColumns | None = None
        digest, keys_digest = hashlib.sha256(), hashlib.sha256()
        for path, key in files:
            try:
                with open_parquet(path, key, reader.remotes) as opened:
                    columns = columns or TableColumns.choose(
                        opened.schema, key, image_column=image_column, id_column=id_column, keep_columns=keep_columns
                    )
                    columns.require_same(opened.schema, key)
                    file = _listed(path, key, opened, self.num_rows)
            except DAMAGE as error:
                msg = f"{shown(path)} cannot be read as Parquet ({error}): write it again, or leave it out"
                raise InputError(msg) from error
            listed.append(file)
            self.num_rows += file.num_rows
            status = file.status
            digest.update(json.dumps([key, status.num_bytes, status.version, file.num_rows]).encode() + b"\n")
            keys_digest.update(json.dumps([key, file.num_rows]).encode() + b"\n")
        assert columns is not None, "a run has files"
        super().__init__(reader, files=listed, columns=columns)
        self.kept_schema = columns.kept_schema
        self.digest: str = digest.hexdigest()
        self.keys_digest: str = keys_digest.hexdigest()
        if id_column:
            self.keys_digest = check_ids(id_column, ((file.key, self._ids(file)) for file in self._files))

    def _ids(self, file: ParquetFile) -> Iterator[list[object]]:
        identity = self._columns.identity
        assert identity
        with open_parquet(file.names.location, file.key, self._reader.remotes) as opened:
            for group in range(len(opened.group_rows)):
                for batch in opened.batches(group, [identity]):
                    yield self._columns.column(batch, identity).to_pylist()

    def read(self, start: int) -> Iterator[EncodedImage]:
        """Yield rows; what a damaged row group no longer gives fails row by row as ``unreadable``."""
        return self.read_rows(range(start, self.num_rows))

    def pieces(self, rows: range, size: int, first_row: int = 0) -> Iterator[Piece]:
        """See `Divisible`."""
        for run in cut(rows, size, first_row):
            files = holding(self._files, run, lambda file: file.names.first_row)
            make = partial(ParquetRows, files=files, columns=self._columns)
            yield SourcePiece(run=run, first_row=first_row, make=make)

    def close(self) -> None:
        """Nothing is kept open between reads."""


def _listed(path: str, key: str, opened: OpenParquet, first_row: int) -> ParquetFile:
    names = RowNames(key=key, first_row=first_row, location=path)
    return ParquetFile(names=names, status=opened.status, num_rows=sum(opened.group_rows))
