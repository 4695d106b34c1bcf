"""One member of a zip: what the directory says of it, and its content, never more than that.

`zipfile` reads the directory. Contents are decompressed here: `zipfile` decompresses bzip2 without a bound.
"""

from __future__ import annotations

import bz2
import io
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zipfile import ZIP_BZIP2, ZIP_DEFLATED, ZIP_STORED

from vlmembed.errors import FailureCode, ImageError
from vlmembed.sources.archive import describe, too_large

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_HEADER = struct.Struct("<4s22xHH")
"""A member's own header: signature, and the lengths of its name and extra field. The rest is as in the directory."""

HEADER_BYTES = _HEADER.size

_PIECE_BYTES = 2**16
_ENCRYPTED_FLAG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ZipMember:
    """A member of a zip, by the archive's directory.

    Attributes:
        begin: where its header lies in the file.
        packed_bytes, num_bytes: of its content.
        checksum: CRC-32 of its content.
        method, flags: how it is compressed; whether it is encrypted.
        overlaps: whether it reaches into another member.
    """

    begin: int
    packed_bytes: int
    num_bytes: int
    checksum: int
    method: int
    flags: int
    overlaps: bool

    def read(self, file: io.BufferedReader, max_bytes: int) -> bytes | ImageError:
        """Its content from the archive `file`, or why it has none."""
        try:
            return self._whole(file, max_bytes)
        except ImageError as error:
            return error
        except MemoryError:
            return ImageError(FailureCode.OUT_OF_MEMORY, "no memory for the file's bytes")
        except (OSError, ValueError) as error:
            return ImageError(FailureCode.UNREADABLE, describe(error))

    def _whole(self, file: io.BufferedReader, max_bytes: int) -> bytes:
        if self.num_bytes > max_bytes:
            raise too_large(self.num_bytes, max_bytes)
        content = self._unpack(file, self.num_bytes + 1)
        if len(content) != self.num_bytes:
            held = "more" if len(content) > self.num_bytes else f"{len(content)} bytes"
            msg = f"the archive's directory promises {self.num_bytes} bytes, and it holds {held}"
            raise ImageError(FailureCode.CORRUPT, msg)
        if zlib.crc32(content) != self.checksum:
            raise ImageError(FailureCode.CORRUPT, "its checksum is not the one that the archive's directory tells")
        return content

    def head(self, file: io.BufferedReader, num_bytes: int) -> bytes:
        """Its first bytes, or none where it cannot be read."""
        try:
            return self._unpack(file, min(num_bytes, self.num_bytes))
        except (ImageError, OSError, ValueError):
            return b""

    def _unpack(self, file: io.BufferedReader, max_bytes: int) -> bytes:
        """At most so many bytes of the content. Raises ImageError, OSError, ValueError."""
        if self.flags & _ENCRYPTED_FLAG:
            raise ImageError(FailureCode.UNREADABLE, "it is encrypted: unpack the archive, or leave it out")
        if self.overlaps:
            raise ImageError(FailureCode.UNREADABLE, "it overlaps with another member of the archive")
        if self.method not in _UNPACK:
            msg = f"compression method {self.method} is not read (stored, deflate and bzip2 are): pack it anew"
            raise ImageError(FailureCode.UNREADABLE, msg)
        file.seek(self.begin)
        header = file.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            raise _cut()
        signature, name_bytes, extra_bytes = _HEADER.unpack(header)
        if signature != b"PK\x03\x04":
            raise ImageError(FailureCode.UNREADABLE, "it is not where the archive's directory says")
        file.seek(self.begin + HEADER_BYTES + name_bytes + extra_bytes)
        content = io.BytesIO()
        for piece in _UNPACK[self.method](self._packed(file)):
            content.write(piece)
            if content.tell() >= max_bytes:
                break
        return content.getvalue()[:max_bytes]

    def _packed(self, file: io.BufferedReader) -> Iterator[bytes]:
        """The content as it lies in the archive, piece by piece."""
        left = self.packed_bytes
        while left:
            piece = file.read(min(_PIECE_BYTES, left))
            if not piece:
                raise _cut()
            left -= len(piece)
            yield piece


def _inflate(packed: Iterable[bytes]) -> Iterator[bytes]:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        for piece in packed:
            rest = piece
            while rest and not inflater.eof:
                yield inflater.decompress(rest, _PIECE_BYTES)
                rest = inflater.unconsumed_tail
            if inflater.eof:
                return
        yield inflater.flush()
    except zlib.error as error:
        raise ImageError(FailureCode.CORRUPT, describe(error)) from error


def _unpack_bzip2(packed: Iterable[bytes]) -> Iterator[bytes]:
    unpacker = bz2.BZ2Decompressor()
    for piece in packed:
        rest = piece
        while not unpacker.eof and (rest or not unpacker.needs_input):
            try:
                unpacked = unpacker.decompress(rest, _PIECE_BYTES)
            except OSError as error:
                raise ImageError(FailureCode.CORRUPT, describe(error)) from error
            yield unpacked
            rest = b""
        if unpacker.eof:
            return


_UNPACK: dict[int, Callable[[Iterable[bytes]], Iterable[bytes]]] = {
    ZIP_STORED: lambda packed: packed,
    ZIP_DEFLATED: _inflate,
    ZIP_BZIP2: _unpack_bzip2,
}


def _cut() -> ImageError:
    return ImageError(FailureCode.TRUNCATED, "the archive ends within it")
