"""Thrift's compact protocol, both ways, so that tests can write Parquet metadata that lies.

A struct is a dict from field number to `[type, value]`; a list is `[element type, values]`; numbers are ints, strings
bytes, doubles their eight bytes.
"""

from __future__ import annotations

from typing import Any, TypeAlias

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)

Fields: TypeAlias = dict[int, list[Any]]


class Reader:
    """Reads values from `data`, from `position` on."""

    def __init__(self, data: bytes, position: int = 0) -> None:
        self._data = data
        self.position = position

    def _take(self, num_bytes: int) -> bytes:
        taken = self._data[self.position : self.position + num_bytes]
        assert len(taken) == num_bytes
        self.position += num_bytes
        return taken

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def _number(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def _value(self, kind: int) -> Any:  # noqa: ANN401  by its kind
        if kind in (TRUE, FALSE):
            return kind == TRUE
        if kind == BYTE:
            return self._take(1)[0]
        if kind in (I16, I32, I64):
            return self._number()
        if kind in (DOUBLE, BINARY):
            return self._take(8 if kind == DOUBLE else self._varint())
        if kind == STRUCT:
            return self.struct()
        assert kind in (LIST, SET)
        head = self._take(1)[0]
        element, length = head & 0x0F, head >> 4
        length = self._varint() if length == 15 else length
        take = (lambda: self._take(1)[0]) if element in (TRUE, FALSE) else lambda: self._value(element)
        return [element, [take() for _ in range(length)]]

    def struct(self) -> Fields:
        """Read a struct."""
        fields: Fields = {}
        number = 0
        while head := self._take(1)[0]:
            number = number + (head >> 4) if head >> 4 else self._number()
            fields[number] = [head & 0x0F, self._value(head & 0x0F)]
        return fields


def _varint(value: int) -> bytes:
    value &= 2**64 - 1
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])


def _number(value: int) -> bytes:
    return _varint(value << 1 ^ value >> 63)


def _dump(kind: int, value: Any) -> bytes:  # noqa: ANN401  by its kind
    if kind == BYTE:
        return bytes([value])
    if kind in (I16, I32, I64):
        return _number(value)
    if kind == DOUBLE:
        return bytes(value)
    if kind == BINARY:
        return _varint(len(value)) + bytes(value)
    if kind == STRUCT:
        return dump(value)
    element, values = value
    head = bytes([len(values) << 4 | element]) if len(values) < 15 else bytes([0xF0 | element]) + _varint(len(values))
    return head + (bytes(values) if element in (TRUE, FALSE) else b"".join(_dump(element, each) for each in values))


def dump(fields: Fields) -> bytes:
    """Write a struct, to the bytes it was read from where nothing was changed."""
    written = bytearray()
    before = 0
    for number, (kind, value) in sorted(fields.items()):
        kind = (TRUE if value else FALSE) if kind in (TRUE, FALSE) else kind  # noqa: PLW2901  the value is the type
        step = number - before
        written += bytes([step << 4 | kind]) if 0 < step < 16 else bytes([kind]) + _number(number)
        written += b"" if kind in (TRUE, FALSE) else _dump(kind, value)
        before = number
    return bytes(written) + b"\0"


def split(parquet: bytes) -> tuple[bytes, Fields]:
    """The pages of a Parquet file, and its footer (a FileMetaData)."""
    length = int.from_bytes(parquet[-8:-4], "little")
    return parquet[: -8 - length], Reader(parquet[-8 - length : -8]).struct()


def join(pages: bytes, footer: Fields) -> bytes:
    """A Parquet file of pages and a footer."""
    written = dump(footer)
    return pages + written + len(written).to_bytes(4, "little") + b"PAR1"


def row_group(footer: Fields, group: int) -> Fields:
    """A RowGroup: 2 is total_byte_size, 3 num_rows."""
    fields: Fields = footer[4][1][1][group]
    return fields


def chunk(footer: Fields, group: int, column: int) -> Fields:
    """A ColumnMetaData: 5 is num_values, 6 and 7 the total size before and after compression, 9 and 11 the offsets of
    the first data page and of the dictionary page."""
    fields: Fields = row_group(footer, group)[1][1][1][column][3][1]
    return fields


def page_headers(parquet: bytes, fields: Fields) -> list[tuple[int, int, Fields]]:
    """Where the header of each page of a chunk begins and ends, and the header (a PageHeader)."""
    position = min(fields[number][1] for number in (9, 11) if number in fields and fields[number][1])
    end = position + fields[7][1]
    headers = []
    while position < end:
        reader = Reader(parquet, position)
        header = reader.struct()
        headers.append((position, reader.position, header))
        position = reader.position + header[3][1]
    return headers
