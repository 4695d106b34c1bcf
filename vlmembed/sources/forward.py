"""A file that is read from front to back, decompressed where it is compressed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from vlmembed.sources.xz import XZ_MAGIC, XzReader

if TYPE_CHECKING:
    from typing import Self

COMPRESSIONS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    XZ_MAGIC: "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
"""By the first bytes."""

MAX_MAGIC_BYTES = max(map(len, COMPRESSIONS))

CHUNK_BYTES = 2**20
"""What is asked for at once, so that a size which is a lie takes no memory."""

XZ_BUFFER_BYTES = 64 * 2**10

READ_ERRORS = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, pa.ArrowException)
"""What damage, or the disk or network, raises here."""


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def compression_of(head: bytes) -> str | None:
    """How a file that begins with `head` is compressed; None where it is not."""
    return next((name for magic, name in COMPRESSIONS.items() if head.startswith(magic)), None)


class ForwardFile:
    """Reads `file` forward, from its start. It is closed with this.

    `num_bytes` is the file's size, None where unknown. A compressed file, or one of unknown size, is read where
    another is only sought in.

    Attributes:
        can_seek: whether what lies between is passed over without being read.
        position: bytes from the start, of the decompressed content.
    """

    def __init__(self, file: io.BufferedReader, num_bytes: int | None) -> None:
        self._num_bytes = num_bytes
        self._file = file
        self.position = 0
        with ExitStack() as stack:
            stack.enter_context(file)
            compression = compression_of(file.peek(MAX_MAGIC_BYTES))
            self.can_seek = compression is None and num_bytes is not None
            self._reader: _Readable = file
            if compression == "gzip":
                self._reader = stack.enter_context(gzip.GzipFile(fileobj=file))
            elif compression == "bzip2":
                self._reader = stack.enter_context(bz2.BZ2File(file))
            elif compression == "xz":
                self._reader = stack.enter_context(io.BufferedReader(XzReader(file), XZ_BUFFER_BYTES))
            elif compression == "zstd":
                python_file = stack.enter_context(pa.PythonFile(file, mode="r"))
                self._reader = stack.enter_context(pa.CompressedInputStream(python_file, "zstd"))
            self._exit = stack.pop_all()

    def read(self, num_bytes: int) -> bytes:
        """The next bytes; fewer only at the end. Raises `READ_ERRORS`."""
        is_there = self.can_seek and self._num_bytes is not None and self.position + num_bytes <= self._num_bytes
        if is_there or num_bytes <= CHUNK_BYTES:
            return self._read_chunk(num_bytes)
        content = io.BytesIO()
        while (left := num_bytes - content.tell()) and (chunk := self._read_chunk(min(CHUNK_BYTES, left))):
            content.write(chunk)
        return content.getvalue()

    def _read_chunk(self, num_bytes: int) -> bytes:
        chunk = self._reader.read(num_bytes)
        self.position += len(chunk)
        return chunk

    def advance(self, position: int) -> bool:
        """Go on to a position that lies ahead; False if the file ends before it. Raises `READ_ERRORS`."""
        if self.can_seek:
            assert self._num_bytes is not None
            self.position = self._file.seek(min(position, self._num_bytes))
        else:
            while (left := position - self.position) > 0 and self._read_chunk(min(CHUNK_BYTES, left)):
                pass
        return self.position >= position

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()
