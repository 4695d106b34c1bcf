"""Thrift's compact protocol, in which Parquet's footers and page headers are written."""

from __future__ import annotations

from typing import Any, TypeAlias

I32, I64, LIST, STRUCT = 5, 6, 9, 12
"""The types that are looked at; the others are passed over."""

BOOLEANS = (1, 2)
"""In a struct, these have no value of their own."""

_BYTE, _I16, _DOUBLE, _BINARY, _SET = 3, 4, 7, 8, 10
_BITS = {_I16: 0xFFFF, I32: 0xFFFF_FFFF, I64: 0xFFFF_FFFF_FFFF_FFFF}

_MORE = 0x80
"""The bit of a byte that says that a number goes on."""

_MAX_VARINT_BITS = 70
_MAX_DEPTH = 16

Fields: TypeAlias = dict[tuple[int, int], Any]
"""A struct, by number and type of its fields: Thrift passes over those that have the number but not the type."""


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """An unsigned number, and where it ends.

    Raises:
        ValueError: it has no end.
        IndexError: the data end first.
    """
    value = shift = 0
    while shift < _MAX_VARINT_BITS:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < _MORE:
            return value, position
        shift += 7
    msg = "a number without an end"
    raise ValueError(msg)


def read_field(data: bytes, position: int, before: int) -> tuple[int, int, int]:
    """Number and type of a struct's next field, and where its value begins; `before` is the number of the field before.
    Type 0 is the struct's end. Raises as `read_varint`."""
    head = data[position]
    position += 1
    if head >> 4:
        number = before + (head >> 4)
    elif head:
        value, position = read_varint(data, position)
        number = value >> 1 ^ -(value & 1)
    else:
        number = before
    return number & 0xFFFF, head & 0x0F, position


def read_struct(data: bytes, position: int, depth: int = 0) -> tuple[Fields, int]:
    """A struct without what is passed over, and where it ends. Raises as `read_varint`."""
    fields: Fields = {}
    number, kind, position = read_field(data, position, 0)
    while kind:
        if kind not in BOOLEANS:
            value, position = read_value(data, position, kind, depth + 1)
            if value is not None:
                fields[number, kind] = value
        number, kind, position = read_field(data, position, number)
    return fields, position


def read_list_head(data: bytes, position: int) -> tuple[int, int, int]:
    """Type and number of a list's elements, and where they begin. Raises as `read_varint`."""
    head = data[position]
    position += 1
    length = head >> 4
    if length == 0x0F:  # noqa: PLR2004  all four bits: a number follows
        length, position = read_varint(data, position)
    return head & 0x0F, length, position


def read_value(data: bytes, position: int, kind: int, depth: int = 0) -> tuple[Any, int]:
    """An integer, a struct or a list, or None for what is passed over, and where it ends. Raises as `read_varint`."""
    if kind in _BITS:
        value, position = read_varint(data, position)
        value &= _BITS[kind]
        return value >> 1 ^ -(value & 1), position
    if kind == _BINARY:
        num_bytes, position = read_varint(data, position)
        return None, position + num_bytes
    if kind == STRUCT and depth < _MAX_DEPTH:
        return read_struct(data, position, depth)
    if kind in (LIST, _SET) and depth < _MAX_DEPTH:
        kind, length, position = read_list_head(data, position)
        values = []
        for _ in range(length):
            element, position = read_value(data, position, kind, depth + 1)
            values.append(element)
        return values, position
    if kind in BOOLEANS or kind == _BYTE:
        return None, position + 1
    if kind == _DOUBLE:
        return None, position + 8
    msg = f"type {kind}, which there is none of"
    raise ValueError(msg)


def number(fields: Any, field: int, kind: int) -> int:  # noqa: ANN401  whatever stands where a struct should
    """A size or a count in a struct.

    Raises:
        ValueError: it is not there, or negative.
    """
    value = fields.get((field, kind)) if isinstance(fields, dict) else None
    if not isinstance(value, int) or value < 0:
        msg = f"field {field} is {value}"
        raise ValueError(msg)
    return value
