"""Picture files, read ahead by a few threads: in order, within a bound of bytes, each within its time."""

from __future__ import annotations

import os
import stat
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

from vlmembed.errors import FailureCode, ImageError
from vlmembed.parallel import DeadlinePool, ordered_map
from vlmembed.types import EncodedImage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa

READ_THREADS = 4
MAX_READ_AHEAD_BYTES = 128 * 2**20

BYTES_PER_PIXEL = 8
"""What a pixel takes at most in a file that no compression has blown up: four samples of 16 bits."""

MAX_OTHER_BYTES = 256 * 2**20
"""Room for metadata, thumbnails and further frames."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnreadRow:
    """A row whose content is a file. `num_bytes` is that file's size, None where it has yet to be asked for."""

    row: int
    key: str
    path: str
    num_bytes: int | None = None
    columns: pa.RecordBatch | None = None

    def holding(self, content: bytes | ImageError) -> EncodedImage:
        """The row with what its file holds."""
        return EncodedImage(row=self.row, key=self.key, content=content, columns=self.columns)


Row: TypeAlias = EncodedImage | UnreadRow


def read_content(path: str, max_bytes: int) -> bytes | ImageError:
    """The bytes of a regular file, or why there are none."""
    try:
        with open(path, "rb", opener=open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return ImageError(FailureCode.UNREADABLE, "not a regular file")
            size = min(status.st_size, max_bytes)
            content = file.read(size + 1) or b""  # None: a file of the kernel's that would make us wait
            if size < len(content) <= max_bytes:  # it grows, or is of a kind that does not tell its size
                content += file.read(max_bytes + 1 - len(content)) or b""
    except FileNotFoundError:
        return ImageError(FailureCode.MISSING, "the file does not exist")
    except (OSError, ValueError) as error:
        return ImageError(FailureCode.UNREADABLE, f"{type(error).__name__}: {error}"[:1000])  # it holds the path
    except MemoryError:
        return ImageError(FailureCode.OUT_OF_MEMORY, "no memory for the file's bytes")
    if len(content) <= max_bytes:
        return content
    return ImageError(
        FailureCode.TOO_LARGE,
        f"the file has {max(status.st_size, len(content))} bytes, and a picture within --max-source-pixels "
        f"{max_bytes} at most: raise that, or leave the file out",
    )


def open_without_waiting(path: str, flags: int) -> int:
    """An opener for `open`: a FIFO would wait for a writer for ever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


class ReadAhead:
    """Fills in the contents of rows that are files.

    A file that takes longer than `timeout_seconds` fails as ``timeout``, and the others go on; one that is too large
    for any picture of `max_source_pixels` is not read.
    """

    def __init__(self, *, timeout_seconds: float, max_source_pixels: int) -> None:
        self._timeout_seconds = timeout_seconds
        self._max_file_bytes = MAX_OTHER_BYTES + BYTES_PER_PIXEL * max_source_pixels

    def read(self, rows: Iterable[Row]) -> Iterator[EncodedImage]:
        """Yield the rows in order; those that have their content already pass through."""
        with ExitStack() as stack:
            pool: DeadlinePool[UnreadRow, Row] | None = None
            for num_stages, group in groupby(rows, key=_num_stages):
                if num_stages and pool is None:
                    pool = stack.enter_context(self._pool())
                staged: Iterator[Row] = group
                for _ in range(num_stages):
                    assert pool is not None
                    staged = _through(pool, staged)
                for row in staged:
                    assert isinstance(row, EncodedImage)
                    yield row

    def _pool(self) -> DeadlinePool[UnreadRow, Row]:
        return DeadlinePool(
            self._advance,
            num_threads=READ_THREADS,
            seconds=self._timeout_seconds,
            late=self._late,
            name="read",
        )

    def _advance(self, row: UnreadRow) -> Row:
        """One stage further: a row's size, then its content."""
        if row.num_bytes is None:
            return replace(row, num_bytes=_size_of(row.path))
        return row.holding(read_content(row.path, self._max_file_bytes))

    def _late(self, row: UnreadRow) -> EncodedImage:
        msg = (
            f"reading took longer than {self._timeout_seconds:g} seconds: look after the disk or network that holds "
            "the file, or give --timeout more"
        )
        return row.holding(ImageError(FailureCode.TIMEOUT, msg))


def _num_stages(row: Row) -> int:
    if isinstance(row, EncodedImage):
        return 0
    return 2 if row.num_bytes is None else 1


def _through(pool: DeadlinePool[UnreadRow, Row], rows: Iterable[Row]) -> Iterator[Row]:
    return ordered_map(
        lambda row: _finished(row) if isinstance(row, EncodedImage) else pool.submit(row),
        rows,
        max_items=4 * READ_THREADS,
        max_bytes=MAX_READ_AHEAD_BYTES,
        num_bytes=lambda row: 0 if isinstance(row, EncodedImage) else row.num_bytes or 0,
    )


def _finished(row: Row) -> Future[Row]:
    future: Future[Row] = Future()
    future.set_result(row)
    return future


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116  may not be text
    except (OSError, ValueError):
        return 0  # reading it will say why
