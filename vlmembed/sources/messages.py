"""The messages of an Arrow stream, found by their heads: how many rows there are, without touching what they hold.

A stream is a schema, then batches of rows, each behind a head that gives its size. pyarrow reads a stream from front to
back only; the heads let us count rows, pass over batches, and see where a file has been cut.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

_PREFIX = struct.Struct("<Ii")
_CONTINUATION = 0xFFFF_FFFF
MAX_HEAD_BYTES = 64 * 2**20
"""Heads have a few hundred bytes; a schema's can be longer."""

_HEADER_TYPE, _HEADER, _BODY_LENGTH = 1, 2, 3
_NUM_ROWS, _COMPRESSION = 0, 3


class Kind(IntEnum):
    """What a message is; the numbers are the format's."""

    SCHEMA = 1
    DICTIONARY = 2
    BATCH = 3


class Message(NamedTuple):
    """A message: where it begins in the file, its bytes with head and body, and for batches their rows, and whether
    they are compressed."""

    kind: Kind
    start: int
    num_bytes: int
    num_rows: int = 0
    is_compressed: bool = False

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.start + self.num_bytes


def read_messages(file: pa.NativeFile, num_bytes: int) -> Iterator[Message]:
    """Yield the messages of a file of so many bytes, up to the mark at its end; the last body may be cut.

    Raises:
        ValueError: something else follows, or the file ends before that mark.
        OSError: it cannot be read.
    """
    position = 0
    while position < num_bytes:
        prefix = file.read_at(_PREFIX.size, position)
        if len(prefix) < _PREFIX.size:
            break
        mark, head_bytes = _PREFIX.unpack(prefix)
        if mark != _CONTINUATION or not 0 <= head_bytes <= MAX_HEAD_BYTES:
            msg = f"no message at byte {position}"
            raise ValueError(msg)
        if head_bytes == 0:
            return
        head = file.read_at(head_bytes, position + _PREFIX.size)
        if len(head) < head_bytes:
            break
        message = _parse(head, position)
        yield message
        position = message.end
    msg = f"the file ends at byte {num_bytes}, without the mark that ends a stream: what came behind is lost"
    raise ValueError(msg)


def _parse(head: bytes, start: int) -> Message:
    """A message by its head, a flatbuffer. Raises ValueError where it is none."""
    try:
        message = _Table(head, struct.unpack_from("<I", head, 0)[0])
        kind = Kind(message.value(_HEADER_TYPE, "<B"))
        body_bytes = message.value(_BODY_LENGTH, "<q")
        content = message.table(_HEADER) if kind is Kind.BATCH else None
        num_rows = content.value(_NUM_ROWS, "<q") if content else 0
        is_compressed = bool(content and content.place(_COMPRESSION))
    except (struct.error, ValueError) as error:
        msg = f"the message at byte {start} cannot be read: {error}"
        raise ValueError(msg) from error
    if body_bytes < 0 or num_rows < 0:
        msg = f"the message at byte {start} has {num_rows} rows in {body_bytes} bytes"
        raise ValueError(msg)
    return Message(
        kind=kind,
        start=start,
        num_bytes=_PREFIX.size + len(head) + body_bytes,
        num_rows=num_rows,
        is_compressed=is_compressed,
    )


class _Table:
    """A table of a flatbuffer: fields by number, each of which may be left out."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position
        self._fields = position - struct.unpack_from("<i", data, position)[0]
        if self._fields < 0:
            msg = "its fields lie before it"
            raise ValueError(msg)
        self._fields_bytes = struct.unpack_from("<H", data, self._fields)[0]

    def place(self, field: int) -> int | None:
        """Where a field's value lies; None where it is left out."""
        entry = 4 + 2 * field
        if entry + 2 > self._fields_bytes:
            return None
        offset = struct.unpack_from("<H", self._data, self._fields + entry)[0]
        return self._position + offset if offset else None

    def value(self, field: int, kind: str) -> int:
        """A number; 0 where it is left out."""
        place = self.place(field)
        return 0 if place is None else int(struct.unpack_from(kind, self._data, place)[0])

    def table(self, field: int) -> _Table:
        """A table within this one."""
        place = self.place(field)
        if place is None:
            msg = f"field {field} is left out"
            raise ValueError(msg)
        return _Table(self._data, place + struct.unpack_from("<I", self._data, place)[0])
