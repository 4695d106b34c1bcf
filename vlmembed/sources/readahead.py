"""Picture files, read ahead by a few threads: in order, within a bound of bytes, each within its time."""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

from vlmembed.errors import FailureCode, ImageError
from vlmembed.parallel import DeadlinePool, ordered_map
from vlmembed.types import EncodedImage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

    import pyarrow as pa

READ_THREADS = 4
MAX_ITEMS = 4 * READ_THREADS

SMALL_FILE_BYTES = 2 * 2**20
"""A file up to this size is read at once; a larger one when there is room for it, which its size must first be known
for."""

MAX_LARGE_FILES_BYTES = 96 * 2**20
"""Limit of the larger files in flight; with `MAX_ITEMS` small ones that makes 128 MiB."""

BYTES_PER_PIXEL = 8
"""What a pixel takes at most in a file that no compression has blown up: four samples of 16 bits."""

MAX_OTHER_BYTES = 256 * 2**20
"""Room for metadata, thumbnails and further frames."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnreadRow:
    """A row whose content is a file. `num_bytes` is that file's size, once it was found to be a larger one."""

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
            pools: list[DeadlinePool[UnreadRow, Row]] = []

            def submit(row: Row) -> Future[Row]:
                assert isinstance(row, UnreadRow)
                if not pools:  # threads that many Parquet files have no use for
                    pools.append(stack.enter_context(self._pool()))
                return pools[0].submit(row)

            for row in _through(submit, _through(submit, rows)):
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
        """Read a small file, or find out how large it is."""
        if row.num_bytes is None and (num_bytes := _size_of(row.path)) > SMALL_FILE_BYTES:
            return replace(row, num_bytes=num_bytes)
        return row.holding(read_content(row.path, self._max_file_bytes))

    def _late(self, row: UnreadRow) -> EncodedImage:
        msg = (
            f"reading took longer than {self._timeout_seconds:g} seconds: look after the disk or network that holds "
            "the file, or give --timeout more"
        )
        return row.holding(ImageError(FailureCode.TIMEOUT, msg))


def _through(submit: Callable[[Row], Future[Row]], rows: Iterable[Row]) -> Iterator[Row]:
    """Let the rows that are yet to be read pass through the pool, in order."""
    for is_read, group in groupby(rows, key=lambda row: isinstance(row, EncodedImage)):
        if is_read:
            yield from group
        else:
            yield from ordered_map(
                submit,
                group,
                max_items=MAX_ITEMS,
                max_bytes=MAX_LARGE_FILES_BYTES,
                num_bytes=lambda row: row.num_bytes or 0 if isinstance(row, UnreadRow) else 0,
            )


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116  may not be text
    except (OSError, ValueError):
        return 0  # reading it will say why
