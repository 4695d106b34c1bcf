"""A file in the format of xz, decompressed from front to back within a limit of memory."""

from __future__ import annotations

import io
import lzma
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

XZ_MAGIC = b"\xfd7zXZ\x00"

MAX_DECODER_BYTES = 128 * 2**20
"""A stream names the size of its dictionary, up to 4 GiB, and the decoder allocates it; ``xz -9`` takes 64 MiB."""

_BLOCK_BYTES = 64 * 2**10


class XzReader(io.RawIOBase):
    """Reads what the streams in `file` hold, one behind the other; zeros may lie between them. What follows and is no
    stream is passed over, as the readers of gzip's and bzip2's files do. The file is not closed with this.

    Reading raises:
        lzma.LZMAError: a stream is damaged, or needs more memory than `MAX_DECODER_BYTES`.
        EOFError: the file ends within a stream.
    """

    def __init__(self, file: io.BufferedReader) -> None:
        super().__init__()
        self._file = file
        self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, MAX_DECODER_BYTES)
        self._compressed = b""
        self._is_over = False

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill the buffer, or a part of it; 0 at the end."""
        view = memoryview(buffer).cast("B")
        content = b""
        while not content and self._has_stream():
            content = self._decompress(view.nbytes)
        view[: len(content)] = content
        return len(content)

    def _has_stream(self) -> bool:
        """Whether a stream is under way, or another one begins."""
        if self._is_over or not self._decoder.eof:
            return not self._is_over
        rest = self._decoder.unused_data.lstrip(b"\0")
        while len(rest) < len(XZ_MAGIC) and (more := self._file.read(_BLOCK_BYTES)):
            rest = (rest + more).lstrip(b"\0")
        self._is_over = not rest or not XZ_MAGIC.startswith(rest[: len(XZ_MAGIC)])
        self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, MAX_DECODER_BYTES)
        self._compressed = rest
        return not self._is_over

    def _decompress(self, max_bytes: int) -> bytes:
        compressed, self._compressed = self._compressed, b""
        if self._decoder.needs_input and not compressed:
            compressed = self._file.read(_BLOCK_BYTES)
            if not compressed:
                msg = "Compressed file ended before the end-of-stream marker was reached"
                raise EOFError(msg)
        try:
            return self._decoder.decompress(compressed, max_bytes)
        except lzma.LZMAError as error:
            if "Memory usage limit" not in str(error):
                raise
            msg = (
                f"its head asks for a decoder of more than {MAX_DECODER_BYTES // 2**20} MiB: compress it again with "
                "xz -9 or less"
            )
            raise lzma.LZMAError(msg) from error
