"""Which column of a table holds the images, and what a row of it holds.

A column may be a field of a struct, at any depth: `meta.caption`. What has no dot is a column as before, and a column
whose own name has one comes before a field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from vlmembed.errors import FailureCode, ImageError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_BINARY_NAMES = ("image", "img", "picture", "photo", "bytes", "image_bytes", "jpg", "jpeg", "png", "webp")
_PATH_NAMES = ("image", "image_path", "path", "file_path", "filepath", "file_name", "filename", "file")

_IMAGE_TYPES = (
    "an image column is struct<bytes, path>, binary, large_binary, or string (paths); "
    "write lists and other structs as one image a row"
)


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_binary(kind: pa.DataType) -> bool:
    kind = _plain(kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def is_string(kind: pa.DataType) -> bool:
    """Whether values of a type are text, a dictionary's too."""
    kind = _plain(kind)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_image_struct(kind: pa.DataType) -> bool:
    """``struct<bytes: binary, path: string>`` in any field order, one of the two enough."""
    if not pa.types.is_struct(kind):
        return False
    fields = {field.name: field.type for field in kind}
    if len(fields) < kind.num_fields:  # a name twice: which of the two would it be?
        return False
    contents, paths = fields.get("bytes"), fields.get("path")
    if contents is None:
        return paths is not None and set(fields) == {"path"} and is_string(paths)
    return _is_binary(contents) and (paths is None or is_string(paths) or pa.types.is_null(paths))


def _inner_types(kind: pa.DataType) -> Iterator[pa.DataType]:
    """A type and all types in it, those that wrap others included."""
    yield kind
    if pa.types.is_dictionary(kind):
        yield from _inner_types(kind.value_type)
    elif isinstance(kind, pa.BaseExtensionType):
        yield from _inner_types(kind.storage_type)
    else:
        for number in range(kind.num_fields):
            yield from _inner_types(kind.field(number).type)


def holds_dictionary(kind: pa.DataType) -> bool:
    """Whether values of a type come as indices into a dictionary, at any depth."""
    return any(pa.types.is_dictionary(inner) for inner in _inner_types(kind))


def check_dictionaries(batch: pa.RecordBatch) -> None:
    """Raises:
    pa.ArrowInvalid: an index lies outside of its dictionary; pyarrow takes it from the file as it is.
    """
    for column in batch.columns:
        if holds_dictionary(column.type):
            column.validate(full=True)


def find_image_column(schema: pa.Schema, name: str) -> str:
    """The column that holds the images of a file called `name`: a struct, else binary, else paths.

    Raises:
        InputError: none, or more than one that could be it.
    """
    structs = [field.name for field in schema if _is_image_struct(field.type)]
    binaries = [field.name for field in schema if _is_binary(field.type)]
    paths = [field.name for field in schema if is_string(field.type) and field.name.lower() in _PATH_NAMES]
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
    if fields := [column for field in schema for column in _image_fields(field.type, field.name)]:
        msg = f"{msg} ({', '.join(fields)})"
    nested = [field for field in schema if any(map(_is_binary, _inner_types(field.type)))]
    if nested:
        msg = f"{msg}. {nested[0].name!r} has type {_short(nested[0].type)}; {_IMAGE_TYPES}"
    raise InputError(msg)


def check_image_column(kind: pa.DataType, column: str, name: str) -> None:
    """Raises:
    InputError: images cannot be read from a column of this type.
    """
    if not (_is_image_struct(kind) or _is_binary(kind) or is_string(kind)):
        fields = ", ".join(_image_fields(kind, column))
        remedy = f" (or name a field of it: {fields})" if fields else ""
        msg = f"column {column!r} of {name} has type {_short(kind)}; {_IMAGE_TYPES}{remedy}"
        raise InputError(msg)


def _image_fields(kind: pa.DataType, column: str) -> list[str]:
    """Dotted names of what could hold images in a struct called `column`."""
    if not pa.types.is_struct(kind) or _is_image_struct(kind):
        return []
    fields = [(f"{column}.{field.name}", field.type) for field in kind]
    found = [name for name, inner in fields if _is_image_struct(inner) or _is_binary(inner)]
    return found + [name for dotted, inner in fields for name in _image_fields(inner, dotted)]


def find_field(schema: pa.Schema, column: str, name: str) -> tuple[tuple[str, ...], pa.Field]:
    """The way to a column through structs, and its field, in a table called `name`.

    Raises:
        InputError: there is no such column, or more than one.
    """
    ways = list(_ways(schema, column))
    if column in schema.names:
        ways = [way for way in ways if len(way) == 1]
    if len(ways) == 1:
        field = schema.field(ways[0][0])
        for part in ways[0][1:]:
            field = field.type.field(part)
        return ways[0], field
    number = "more than one" if ways else "no"
    msg = f"{name} has {number} column {column!r}; it has {', '.join(schema.names)}"
    outer = column.partition(".")[0]
    if not ways and outer != column and schema.names.count(outer) == 1:
        kind = schema.field(outer).type
        fields = ", ".join(f"{outer}.{field.name}" for field in kind) if pa.types.is_struct(kind) else "no fields"
        msg = f"{msg}; {outer!r} has {fields}"
    raise InputError(msg)


def _ways(fields: Iterable[pa.Field], column: str) -> Iterator[tuple[str, ...]]:
    """All ways to a column of this name; a name within a struct may have a dot too."""
    for field in fields:
        if field.name == column:
            yield (field.name,)
        elif column.startswith(f"{field.name}.") and pa.types.is_struct(field.type):
            for way in _ways(field.type, column[len(field.name) + 1 :]):
                yield (field.name, *way)


def column_at(batch: pa.RecordBatch, way: Sequence[str]) -> pa.Array:
    """A column of a batch that may hold no more of its structs than was asked for; null where a struct around it is."""
    column = batch.column(way[0])
    for name in way[1:]:
        column = _part(column, name)
    return column


def _short(kind: pa.DataType) -> str:
    name = str(kind)
    return name if len(name) <= 200 else f"{name[:200]}..."  # noqa: PLR2004  a type can be a page long


def _part(column: pa.StructArray, name: str) -> pa.Array | None:
    """A field of a struct, null where the struct is."""
    number = column.type.get_field_index(name)
    if number < 0:
        return None
    return pc.struct_field(column, number) if column.null_count else column.field(number)


class ImageColumn:
    """An image column's part of a batch."""

    def __init__(self, column: pa.Array) -> None:
        self._contents: Sequence[Any] | None = None
        self._paths: Sequence[Any] | None = None
        if pa.types.is_struct(column.type):
            self._contents, self._paths = _part(column, "bytes"), _part(column, "path")
        elif is_string(column.type):
            self._paths = column
        else:
            self._contents = column

    def __getitem__(self, index: int) -> bytes | str | ImageError:
        """A row's encoded image; else its path; else why it has neither."""
        try:
            content = None if self._contents is None else self._contents[index].as_py()
            if content is not None:
                return bytes(content)
            path = None if self._paths is None else self._paths[index].as_py()
        except UnicodeDecodeError as error:
            return ImageError(FailureCode.UNREADABLE, f"the row's path is not valid UTF-8: {error}")
        if path is None:
            return ImageError(FailureCode.NULL, "the row's image is null")
        return str(path)
