"""Images in the rows of Parquet files."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from vlmembed.errors import FailureCode, ImageError, InputError
from vlmembed.sources.base import rows_between
from vlmembed.sources.columns import ImageColumn, check_image_column, find_image_column, is_string
from vlmembed.sources.ids import IdIndex
from vlmembed.sources.readahead import UnreadRow
from vlmembed.sources.rowgroups import DAMAGE, open_parquet
from vlmembed.types import EncodedImage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from vlmembed.sources.readahead import ReadAhead, Row
    from vlmembed.sources.rowgroups import OpenParquet


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetFile:
    """A Parquet input file: `key` is its id, `first_row` where its rows begin in the run."""

    path: Path
    key: str
    num_bytes: int
    num_rows: int
    first_row: int


class ParquetSource:
    """Rows of Parquet files, streamed in small batches; memory does not grow with the number of rows.

    The first file says which columns are read; the others must have them with the same types.
    """

    def __init__(
        self,
        files: Sequence[tuple[Path, str]],
        *,
        reader: ReadAhead,
        image_column: str | None,
        id_column: str | None,
        keep_columns: tuple[str, ...],
    ) -> None:
        self.skipped: Counter[str] = Counter()
        self.num_rows = 0
        self._reader = reader
        self._image_column = image_column
        self._id_column = id_column
        self._keep_columns = keep_columns
        self._schema = self.kept_schema = pa.schema([])
        self._files: list[ParquetFile] = []
        digest, keys_digest = hashlib.sha256(), hashlib.sha256()
        for path, key in files:
            try:
                with open_parquet(path, key) as opened:
                    file = self._add(path, key, opened)
                    mtime_ns = opened.status.st_mtime_ns
            except DAMAGE as error:
                msg = f"{str(path)!r} cannot be read as Parquet ({error}): write it again, or leave it out"
                raise InputError(msg) from error
            digest.update(json.dumps([key, file.num_bytes, mtime_ns, file.num_rows]).encode() + b"\n")
            keys_digest.update(json.dumps([key, file.num_rows]).encode() + b"\n")
        self.digest = digest.hexdigest()
        self.keys_digest = self._check_ids(id_column) if id_column else keys_digest.hexdigest()

    def _add(self, path: Path, key: str, opened: OpenParquet) -> ParquetFile:
        if not self._files:
            self._choose_columns(opened.schema, key)
        elif found := self._difference(opened.schema):
            msg = f"{key}: {found} in {self._files[0].key}"
            raise InputError(msg)
        file = ParquetFile(
            path=path,
            key=key,
            num_bytes=opened.status.st_size,
            num_rows=sum(opened.group_rows),
            first_row=self.num_rows,
        )
        self._files.append(file)
        self.num_rows += file.num_rows
        return file

    def _choose_columns(self, schema: pa.Schema, key: str) -> None:
        self._image_column = self._image_column or find_image_column(schema, key)
        ids = [self._id_column] if self._id_column else []
        names = list(dict.fromkeys([self._image_column, *ids, *self._keep_columns]))
        for name in names:
            if schema.names.count(name) != 1:
                number = "more than one" if name in schema.names else "no"
                msg = f"{key} has {number} column {name!r}; it has {', '.join(schema.names)}"
                raise InputError(msg)
        for name in ids:
            kind = schema.field(name).type
            if not (is_string(kind) or pa.types.is_integer(kind)):
                msg = f"--id-column {name!r} of {key} has type {kind}; ids are strings or integers"
                raise InputError(msg)
        check_image_column(schema.field(self._image_column).type, self._image_column, key)
        self._schema = pa.schema([schema.field(name) for name in names])
        self.kept_schema = pa.schema([schema.field(name).with_nullable(nullable=True) for name in self._keep_columns])

    def _difference(self, schema: pa.Schema) -> str | None:
        """In which column a schema differs from the first file's; None where it does not."""
        for field in self._schema:
            if field.name not in schema.names or schema.field(field.name).type != field.type:
                found = schema.field(field.name).type if field.name in schema.names else "no such column"
                return f"column {field.name!r} is {found}, and {field.type}"
        return None

    def _check_ids(self, column: str) -> str:
        """Look through all ids; returns their digest."""
        with IdIndex(column) as index:
            for file in self._files:
                try:
                    with open_parquet(file.path, file.key) as opened:
                        for group in range(len(opened.group_rows)):
                            for batch in opened.batches(group, [column]):
                                index.add(batch.column(0).to_pylist(), file.key)
                except (ImageError, *DAMAGE) as error:
                    msg = f"--id-column {column!r} of {file.key} cannot be read ({error}): leave it out, or the file"
                    raise InputError(msg) from error
            return index.digest

    def read(self, start: int) -> Iterator[EncodedImage]:
        """Yield rows; what a damaged row group no longer gives fails row by row as ``unreadable``."""
        return self.read_rows(range(start, self.num_rows))

    def read_rows(self, rows: Sequence[int]) -> Iterator[EncodedImage]:
        """Yield these rows; row groups that hold none of them are not touched."""
        return self._reader.read(self._rows(rows))

    def _rows(self, rows: Sequence[int]) -> Iterator[Row]:
        for file in self._files:
            wanted = rows_between(rows, file.first_row, file.num_rows)
            if wanted:
                yield from self._read_file(file, wanted)

    def _read_file(self, file: ParquetFile, rows: Sequence[int]) -> Iterator[Row]:
        with ExitStack() as stack:
            try:
                opened = stack.enter_context(open_parquet(file.path, file.key))
                self._check_unchanged(file, opened)
            except FileNotFoundError:
                broken = ImageError(FailureCode.MISSING, f"{file.key} was there when the run began, and is gone")
            except DAMAGE as error:
                broken = ImageError(FailureCode.UNREADABLE, f"{file.key}: {error}")
            else:
                first = file.first_row
                for group, num_rows in enumerate(opened.group_rows):
                    wanted = rows_between(rows, first, num_rows)
                    if wanted:
                        yield from self._read_group(file, opened, group, first, wanted)
                    first += num_rows
                return
            for row in rows:
                yield EncodedImage(row=row, key=_key(file, row, None), content=broken)

    def _check_unchanged(self, file: ParquetFile, opened: OpenParquet) -> None:
        """Raises:
        ValueError: it is no longer the file that was listed.
        """
        difference = self._difference(opened.schema)
        if file.num_bytes != opened.status.st_size:
            difference = f"{opened.status.st_size} bytes, and {file.num_bytes}"
        elif file.num_rows != sum(opened.group_rows):
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
            for batch in opened.batches(group, self._schema.names):
                wanted = rows_between(rows, begin, batch.num_rows)
                yield from self._read_batch(file, batch, begin, wanted)
                begin += batch.num_rows
                num_read += len(wanted)
                if num_read == len(rows):
                    return
        except ImageError as broken:
            lost = rows[num_read:]
            for row, key in zip(lost, self._keys(file, opened, group, first, lost), strict=True):
                yield EncodedImage(row=row, key=key, content=broken)

    def _keys(
        self, file: ParquetFile, opened: OpenParquet, group: int, first: int, rows: Sequence[int]
    ) -> Iterator[str]:
        """The ids of rows whose images are lost: the id column may be whole."""
        num_read = 0
        if self._id_column:
            try:
                for batch in opened.batches(group, [self._id_column]):
                    for row in rows_between(rows, first, batch.num_rows):
                        yield _key(file, row, batch.column(0)[row - first])
                        num_read += 1
                    first += batch.num_rows
            except ImageError:
                pass
        for row in rows[num_read:]:
            yield _key(file, row, None)

    def _read_batch(self, file: ParquetFile, batch: pa.RecordBatch, first: int, rows: Sequence[int]) -> Iterator[Row]:
        images = ImageColumn(batch.column(self._image_column))
        kept = batch.select(self.kept_schema.names) if len(self.kept_schema) else None
        ids = batch.column(self._id_column) if self._id_column else None
        for row in rows:
            index = row - first
            key = _key(file, row, None if ids is None else ids[index])
            columns = None if kept is None else kept.slice(index, 1)
            content = images[index]
            if isinstance(content, str):
                yield UnreadRow(row=row, key=key, path=str(file.path.parent / content), columns=columns)
            else:
                yield EncodedImage(row=row, key=key, content=content, columns=columns)

    def close(self) -> None:
        """Nothing is kept open between reads."""


def _key(file: ParquetFile, row: int, value: pa.Scalar | None) -> str:
    """A row's id: what the id column holds, or else the file and the row in it."""
    try:
        name = None if value is None else value.as_py()
    except UnicodeDecodeError:  # the file was changed after its ids were looked through
        name = None
    return f"{file.key}#{row - file.first_row}" if name is None else str(name)
