"""Where the column chunks of a Parquet file lie, by its footer.

pyarrow knows it too, but asking it for a chunk's metadata ends the process where they contradict themselves
(`RowGroupMetaData.column`, seen in version 26 with size statistics of the wrong length).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vlmembed.sources.compact import (
    BOOLEANS,
    I32,
    I64,
    LIST,
    STRUCT,
    Fields,
    number,
    read_field,
    read_list_head,
    read_value,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

_TAIL_BYTES = 8
_ROW_GROUPS, _COLUMNS, _METADATA = (4, LIST), (1, LIST), (3, STRUCT)
_CODEC, _NUM_VALUES, _COMPRESSED, _DATA_PAGE, _DICTIONARY_PAGE = 4, 5, 7, 9, 11


class ChunkPlace(NamedTuple):
    """A column chunk: where its pages begin, their bytes in the file, how many values they should hold, and the number
    of the codec that they are compressed by."""

    start: int
    num_bytes: int
    num_values: int
    codec: int


def read_places(file: pa.NativeFile, leaves: Sequence[int]) -> list[list[ChunkPlace] | None]:
    """The chunks of these columns of values, for each row group; None for one that does not say where they are.

    Raises:
        ValueError: it is no footer.
    """
    size = file.size()
    length = int.from_bytes(file.read_at(4, size - _TAIL_BYTES), "little")
    data = file.read_at(length, size - _TAIL_BYTES - length)
    places: list[list[ChunkPlace] | None] = []
    try:
        field, kind, position = read_field(data, 0, 0)
        while kind:
            if (field, kind) == _ROW_GROUPS:  # one at a time: all of them can take much memory
                places.clear()
                element, num_groups, position = read_list_head(data, position)
                for _ in range(num_groups):
                    group, position = read_value(data, position, element)
                    places.append(_places(group, leaves))
            elif kind not in BOOLEANS:
                _, position = read_value(data, position, kind)
            field, kind, position = read_field(data, position, field)
    except (IndexError, ValueError) as error:
        msg = f"its footer cannot be read: {error}"
        raise ValueError(msg) from error
    return places


def _places(group: Fields, leaves: Sequence[int]) -> list[ChunkPlace] | None:
    try:
        return [_place(group[_COLUMNS][index][_METADATA]) for index in leaves]
    except (LookupError, TypeError, ValueError):
        return None


def _place(chunk: Fields) -> ChunkPlace:
    start = number(chunk, _DATA_PAGE, I64)
    dictionary = chunk.get((_DICTIONARY_PAGE, I64), 0)
    if 0 < dictionary < start:
        start = dictionary
    return ChunkPlace(
        start=start,
        num_bytes=number(chunk, _COMPRESSED, I64),
        num_values=number(chunk, _NUM_VALUES, I64),
        codec=number(chunk, _CODEC, I32),
    )
