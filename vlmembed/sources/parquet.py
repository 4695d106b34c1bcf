"""Images in the rows of Parquet files."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlmembed.errors import FailureCode, ImageError, InputError
from vlmembed.sources.folder import read_content
from vlmembed.types import EncodedImage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

BATCH_BYTES = 16 * 2**20
"""Aim for a batch read from a row group; rows in it follow from the group's mean row size."""

MAX_BATCH_ROWS = 1024

READ_BUFFER_BYTES = 2**20
"""Column chunks are read through a buffer of this size, or one data page if that is larger; pyarrow's default takes a
whole row group into memory."""

_BINARY_NAMES = ("image", "img", "picture", "photo", "bytes", "image_bytes", "jpg", "jpeg", "png", "webp")
_PATH_NAMES = ("image", "image_path", "path", "file_path", "filepath", "file_name", "filename", "file")


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_binary(kind: pa.DataType) -> bool:
    kind = _plain(kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _is_string(kind: pa.DataType) -> bool:
    kind = _plain(kind)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_image_struct(kind: pa.DataType) -> bool:
    """``struct<bytes: binary, path: string>`` in any field order, one of the two enough."""
    if not pa.types.is_struct(kind):
        return False
    fields = {field.name: field.type for field in kind}
    contents, paths = fields.get("bytes"), fields.get("path")
    if contents is None:
        return paths is not None and set(fields) == {"path"} and _is_string(paths)
    return _is_binary(contents) and (paths is None or _is_string(paths) or pa.types.is_null(paths))


def find_image_column(schema: pa.Schema, name: str) -> str:
    """The column that holds the images of a file called `name`: a struct, else binary, else paths.

    Raises:
        InputError: none, or more than one that could be it.
    """
    structs = [field.name for field in schema if _is_image_struct(field.type)]
    binaries = [field.name for field in schema if _is_binary(field.type)]
    paths = [field.name for field in schema if _is_string(field.type) and field.name.lower() in _PATH_NAMES]
    for candidates in (structs, binaries, paths):
        if len(candidates) > 1:
            usual = [column for column in candidates if column.lower() in _BINARY_NAMES]
            candidates = usual if len(usual) == 1 else candidates  # noqa: PLW2901  narrowed, not replaced
        if len(candidates) == 1:
            return str(candidates[0])
        if candidates:
            msg = f"{name} has {len(candidates)} columns that could hold images ({', '.join(candidates)}): name one "
            raise InputError(msg + "with --image-column")
    msg = f"{name} has no image column among {', '.join(schema.names)}: name one with --image-column"
    raise InputError(msg)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetFile:
    """A Parquet input file: `key` is its id, `first_row` where its rows begin in the run."""

    path: Path
    key: str
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
        image_column: str | None,
        id_column: str | None,
        keep_columns: tuple[str, ...],
    ) -> None:
        self.skipped: Counter[str] = Counter()
        self._id_column = id_column
        self._files: list[ParquetFile] = []
        self.num_rows = 0
        digest = hashlib.sha256()
        schema: pa.Schema | None = None
        for path, key in files:
            with _open(path) as parquet:
                own, num_rows = parquet.schema_arrow, parquet.metadata.num_rows
            if schema is None:
                schema = own
                self._image_column = image_column or find_image_column(own, key)
                self._columns = list(
                    dict.fromkeys([self._image_column, *([id_column] if id_column else []), *keep_columns])
                )
                self._check_columns(own, key)
                self.kept_schema = pa.schema([own.field(name).with_nullable(nullable=True) for name in keep_columns])
            self._check_same(own, schema, key)
            self._files.append(ParquetFile(path=path, key=key, num_rows=num_rows, first_row=self.num_rows))
            self.num_rows += num_rows
            status = path.stat()
            digest.update(json.dumps([key, status.st_size, status.st_mtime_ns, num_rows]).encode() + b"\n")
        self.digest = digest.hexdigest()
        if id_column:
            self._check_ids(id_column)

    def _check_columns(self, schema: pa.Schema, key: str) -> None:
        for name in self._columns:
            if schema.names.count(name) != 1:
                number = "more than one" if name in schema.names else "no"
                msg = f"{key} has {number} column {name!r}; it has {', '.join(schema.names)}"
                raise InputError(msg)
        if self._id_column is not None:
            kind = schema.field(self._id_column).type
            if not (_is_string(kind) or pa.types.is_integer(kind)):
                msg = f"--id-column {self._id_column!r} of {key} has type {kind}; ids are strings or integers"
                raise InputError(msg)
        kind = schema.field(self._image_column).type
        if not (_is_image_struct(kind) or _is_binary(kind) or _is_string(kind)):
            msg = (
                f"column {self._image_column!r} of {key} has type {kind}; an image column is "
                "struct<bytes, path>, binary, large_binary, or string (paths)"
            )
            raise InputError(msg)

    def _check_same(self, own: pa.Schema, first: pa.Schema, key: str) -> None:
        for name in self._columns:
            if name not in own.names or own.field(name).type != first.field(name).type:
                found = own.field(name).type if name in own.names else "no such column"
                msg = f"{key}: column {name!r} is {found}, and {first.field(name).type} in {self._files[0].key}"
                raise InputError(msg)

    def _check_ids(self, column: str) -> None:
        """Ids must be present and unique, over all files: told before the run, not after it."""
        with closing(sqlite3.connect("")) as database:  # a scratch database, on disk once it grows
            database.execute("CREATE TABLE ids (id TEXT PRIMARY KEY) WITHOUT ROWID")
            for file in self._files:
                try:
                    with _open(file.path) as parquet:
                        for batch in parquet.iter_batches(batch_size=2**16, columns=[column]):
                            _insert_ids(database, batch.column(0).to_pylist(), column, file.key)
                except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: bytes that are no text
                    msg = f"--id-column {column!r} of {file.key} cannot be read ({error}): leave it out, or the file"
                    raise InputError(msg) from error

    def read(self, start: int) -> Iterator[EncodedImage]:
        """Yield rows; what a damaged row group no longer gives fails row by row as ``unreadable``."""
        for file in self._files:
            if file.first_row + file.num_rows <= start:
                continue
            with _open(file.path) as parquet:
                offset = 0
                for group in range(parquet.num_row_groups):
                    num_rows = parquet.metadata.row_group(group).num_rows
                    if file.first_row + offset + num_rows > start:
                        yield from self._read_group(parquet, file, group, offset, start)
                    offset += num_rows

    def _read_group(
        self, parquet: pq.ParquetFile, file: ParquetFile, group: int, offset: int, start: int
    ) -> Iterator[EncodedImage]:
        facts = parquet.metadata.row_group(group)
        mean_bytes = max(1, facts.total_byte_size // max(1, facts.num_rows))
        batch_rows = max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // mean_bytes))
        end = offset + facts.num_rows
        try:
            for batch in parquet.iter_batches(batch_size=batch_rows, row_groups=[group], columns=self._columns):
                for image in self._read_batch(batch, file, offset):
                    if image.row >= start:
                        yield image
                offset += batch.num_rows
        except (OSError, pa.ArrowException) as error:
            broken = ImageError(FailureCode.UNREADABLE, f"row group {group} of {file.key}: {error}")
            for row_in_file in range(offset, end):
                if (row := file.first_row + row_in_file) >= start:
                    yield EncodedImage(row=row, key=f"{file.key}#{row_in_file}", content=broken)

    def _read_batch(self, batch: pa.RecordBatch, file: ParquetFile, offset: int) -> Iterator[EncodedImage]:
        contents, paths = _split(batch.column(self._image_column))
        kept = batch.select(self.kept_schema.names) if len(self.kept_schema) else None
        ids = batch.column(self._id_column) if self._id_column else None
        for index in range(batch.num_rows):
            yield EncodedImage(
                row=file.first_row + offset + index,
                key=f"{file.key}#{offset + index}" if ids is None else str(ids[index].as_py()),
                content=_content(contents, paths, index, file.path.parent),
                columns=None if kept is None else kept.slice(index, 1),
            )

    def close(self) -> None:
        """Nothing is kept open between reads."""


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=READ_BUFFER_BYTES)
    except (OSError, UnicodeError, pa.ArrowException) as error:  # UnicodeError: a file name that does not decode
        msg = f"{str(path)!r} cannot be read as Parquet ({error}): write it again, or leave it out"
        raise InputError(msg) from error


def _insert_ids(database: sqlite3.Connection, values: list[Any], column: str, key: str) -> None:
    if None in values:
        msg = f"--id-column {column!r} of {key} holds nulls: every row needs an id of its own"
        raise InputError(msg)
    ids = [str(value) for value in values]
    try:
        with database:
            database.executemany("INSERT INTO ids VALUES (?)", ((value,) for value in ids))
    except sqlite3.IntegrityError as error:
        msg = f"--id-column {column!r} repeats an id, in {key}; {_first_repeat(database, ids)}"
        raise InputError(msg) from error


def _first_repeat(database: sqlite3.Connection, ids: list[str]) -> str:
    counts = Counter(ids)
    known = "SELECT 1 FROM ids WHERE id = ?"
    value = next(value for value in ids if counts[value] > 1 or database.execute(known, (value,)).fetchone())
    return f"the first is {value!r}: name another column, or leave --id-column out (ids are then FILE#ROW)"


def _split(column: pa.Array) -> tuple[pa.Array | None, pa.Array | None]:
    """The bytes and the paths of an image column, either of them None where the type has none."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_struct(column.type):
        names = {field.name for field in column.type}
        contents, paths = (pc.struct_field(column, name) if name in names else None for name in ("bytes", "path"))
        return contents, paths
    return (None, column) if _is_string(column.type) else (column, None)


def _content(contents: pa.Array | None, paths: pa.Array | None, index: int, folder: Path) -> bytes | ImageError:
    content: Any = None if contents is None else contents[index].as_py()
    if content is not None:
        return bytes(content)
    try:
        path = None if paths is None else paths[index].as_py()
    except UnicodeDecodeError as error:
        return ImageError(FailureCode.UNREADABLE, f"the row's path is not valid UTF-8: {error}")
    if path is not None:
        return read_content(str(folder / path))
    return ImageError(FailureCode.NULL, "the row's image is null")
