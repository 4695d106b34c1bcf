"""A remote file as Python's files are, read block by block, with the next blocks on their way."""

from __future__ import annotations

import io
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vlmembed.remote.urls import shown_url

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from _typeshed import WriteableBuffer

FIRST_BYTES = 512 * 2**10
"""What is read at a place that no reading led to, unless more is asked for: often it is a footer or a header."""

BLOCK_BYTES = 4 * 2**20
BLOCKS_AHEAD = 3
MAX_BLOCKS = BLOCKS_AHEAD + 2
"""The blocks held: the one that is being read, the one before, and those ahead; 20 MiB for a file."""


class Blocks(Protocol):
    """The content of a file."""

    def read(self, position: int, num_bytes: int) -> memoryview:
        """Between one and `num_bytes` bytes at a position; none at the end of the file only.

        Raises:
            OSError: they cannot be read.
        """

    def close(self) -> None:
        """Let go of it."""


class RemoteFile(io.RawIOBase):
    """A file on a server. Like other files it is for one thread at a time; wrap it in `io.BufferedReader`.

    Reading raises OSError, which names the URL, when the last try has failed, and when the file is no longer what was
    opened.

    Attributes:
        num_bytes: its size; -1 where the server does not tell, and then it can be read forwards only.
        version: as that of `RemoteInfo`.
    """

    def __init__(self, url: str, *, num_bytes: int, version: str, blocks: Blocks) -> None:
        super().__init__()
        self.name = shown_url(url)
        self.num_bytes = num_bytes
        self.version = version
        self._blocks = blocks
        self._position = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes, if only forwards where the server takes no ranges."""
        return True

    def tell(self) -> int:
        """Where reading goes on."""
        self._check_open()
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go on reading elsewhere; costs nothing until something is read there."""
        self._check_open()
        if whence == io.SEEK_CUR:
            offset += self._position
        elif whence == io.SEEK_END:
            if self.num_bytes < 0:
                msg = f"{self.name}: the server does not tell the file's size, so its end cannot be found: download it"
                raise OSError(msg)
            offset += self.num_bytes
        if offset < 0:
            msg = f"position {offset} is before the beginning"
            raise ValueError(msg)
        self._position = offset
        return offset

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill the buffer, as far as the file goes: `pa.PythonFile` takes less for the end."""
        self._check_open()
        view = memoryview(buffer).cast("B")
        filled = 0
        while filled < view.nbytes and not 0 <= self.num_bytes <= self._position:
            content = self._blocks.read(self._position, view.nbytes - filled)
            if not content.nbytes:
                break
            view[filled : filled + content.nbytes] = content
            filled += content.nbytes
            self._position += content.nbytes
        return filled

    def close(self) -> None:
        """Let go of the blocks and connections."""
        if not self.closed:
            self._blocks.close()
        super().close()

    def _check_open(self) -> None:
        if self.closed:
            msg = f"{self.name} is closed"
            raise ValueError(msg)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Block:
    start: int
    stop: int
    content: Future[bytes]


class RangedBlocks:
    """Content read by `read_range(start, stop)`: where it is read in sequence, in threads of `pool` and ahead."""

    def __init__(self, num_bytes: int, read_range: Callable[[int, int], bytes], pool: Executor) -> None:
        self._num_bytes = num_bytes
        self._read_range = read_range
        self._pool = pool
        self._blocks: list[_Block] = []
        self._expected_position = -1
        """Where a sequence would go on with a block that is not here yet."""

        self._in_sequence = False

    def read(self, position: int, num_bytes: int) -> memoryview:
        """As `Blocks` says."""
        block = next((block for block in self._blocks if block.start <= position < block.stop), None)
        if block is None:
            self._in_sequence = position == self._expected_position
            block = self._fetched(position, num_bytes)
        if self._in_sequence:
            self._read_ahead(block.stop)
        try:
            content = block.content.result()
        except CancelledError as error:
            self.close()
            msg = "the remote files are closed"
            raise OSError(msg) from error
        except BaseException:
            self.close()  # those ahead may have failed with it, and must be asked for again
            raise
        self._expected_position = block.stop
        return memoryview(content)[position - block.start :][:num_bytes]

    def close(self) -> None:
        """Drop the blocks; those that are under way end by themselves."""
        for block in self._blocks:
            block.content.cancel()
        self._blocks = []

    def _fetched(self, position: int, num_bytes: int) -> _Block:
        """A block that begins here: read in this thread if it is a single one, for the pool may be busy."""
        if self._in_sequence:
            return self._started(position)
        size = min(BLOCK_BYTES, max(num_bytes, FIRST_BYTES))
        stop = min(self._num_bytes, position + size)
        content: Future[bytes] = Future()
        content.set_result(self._read_range(position, stop))
        return self._added(_Block(start=position, stop=stop, content=content))

    def _started(self, position: int) -> _Block:
        stop = min(self._num_bytes, position + BLOCK_BYTES)
        try:
            content = self._pool.submit(self._read_range, position, stop)
        except RuntimeError as error:
            msg = "the remote files are closed"
            raise OSError(msg) from error
        return self._added(_Block(start=position, stop=stop, content=content))

    def _read_ahead(self, position: int) -> None:
        for _ in range(BLOCKS_AHEAD):
            if position >= self._num_bytes:
                return
            block = next((block for block in self._blocks if block.start == position), None)
            position = (block or self._started(position)).stop

    def _added(self, block: _Block) -> _Block:
        self._blocks.append(block)
        for old in self._blocks[:-MAX_BLOCKS]:
            old.content.cancel()
        self._blocks = self._blocks[-MAX_BLOCKS:]
        return block
