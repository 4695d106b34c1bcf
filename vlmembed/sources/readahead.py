"""Picture files and URLs, read ahead by a few threads: in order, within a bound of bytes, each within its time."""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from vlmembed.errors import FailureCode, ImageError, StoppedError
from vlmembed.parallel import DeadlinePool
from vlmembed.remote.urls import is_url, shown_url
from vlmembed.sources.glance import HEAD_BYTES, GlancedImage
from vlmembed.sources.inflight import Lane, through
from vlmembed.types import EncodedImage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

    import pyarrow as pa

    from vlmembed.remote.remotes import Remotes
    from vlmembed.remote.slots import Pause
    from vlmembed.sources.glance import Glance

READ_THREADS = 4
MAX_FILES = 4 * READ_THREADS
"""Files in flight."""

URLS_PER_DOWNLOAD = 2
"""URLs in flight for each thread that fetches: the next one of each is at hand."""

SMALL_FILE_BYTES = 2 * 2**20
"""A file up to this size is read at once; a larger one when there is room for it, which its size must first be known
for."""

MAX_LARGE_FILES_BYTES = 96 * 2**20
"""Limit of the larger files and URLs in flight, and of what waits behind them; with `MAX_FILES` small ones that makes
128 MiB. Small URLs come on top: 128 MiB for 32 downloads."""

MAX_READY_BYTES = MAX_FILES * SMALL_FILE_BYTES
"""Limit of the rows that wait with their content behind ones that are being read: they are as good as files."""

ROW_BYTES = 2**10
"""What a row takes at least."""

BYTES_PER_PIXEL = 8
"""What a pixel takes at most in a file that no compression has blown up: four samples of 16 bits."""

MAX_OTHER_BYTES = 256 * 2**20
"""Room for metadata, thumbnails and further frames."""

_NOT_REGULAR = "not a regular file"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnreadRow:
    """A row whose content is a file.

    Attributes:
        path: the file's path, or the URL of one.
        trusted: a URL that the user named, and not one that came with the data: its options may name a server.
        num_bytes: the file's size, once it was found to be a larger one.
    """

    row: int
    key: str
    path: str
    trusted: bool = False
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
                return ImageError(FailureCode.UNREADABLE, _NOT_REGULAR)
            size = min(status.st_size, max_bytes)
            content = file.read(size + 1) or b""  # None: a file of the kernel's that would make us wait
            if size < len(content) <= max_bytes:  # it grows, or is of a kind that does not tell its size
                content += file.read(max_bytes + 1 - len(content)) or b""
    except (OSError, ValueError, MemoryError) as error:
        return _reason(error)
    return content if len(content) <= max_bytes else _too_large(max(status.st_size, len(content)), max_bytes)


def read_head(path: str, num_bytes: int, max_bytes: int) -> tuple[bytes, int] | ImageError:
    """The first `num_bytes` of a regular file, or all of a shorter one, and its size; or why there are none."""
    try:
        with open(path, "rb", opener=open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return ImageError(FailureCode.UNREADABLE, _NOT_REGULAR)
            content = file.read(num_bytes) or b""  # None: see `read_content`
    except (OSError, ValueError, MemoryError) as error:
        return _reason(error)
    size = max(status.st_size, len(content))
    return (content, size) if size <= max_bytes else _too_large(size, max_bytes)


def _reason(error: Exception) -> ImageError:
    """Why a file cannot be read."""
    if isinstance(error, FileNotFoundError):
        return ImageError(FailureCode.MISSING, "the file does not exist")
    if isinstance(error, MemoryError):
        return ImageError(FailureCode.OUT_OF_MEMORY, "no memory for the file's bytes")
    return ImageError(FailureCode.UNREADABLE, f"{type(error).__name__}: {error}"[:1000])  # it holds the path


def _too_large(num_bytes: int, max_bytes: int) -> ImageError:
    return ImageError(
        FailureCode.TOO_LARGE,
        f"the file has {num_bytes} bytes, and a picture within --max-source-pixels {max_bytes} at most: raise that, or "
        "leave the file out",
    )


def open_without_waiting(path: str, flags: int) -> int:
    """An opener for `open`: a FIFO would wait for a writer for ever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


class ReadAhead:
    """Fills in the contents of rows that are files or URLs.

    A file that takes longer than `timeout_seconds` fails as ``timeout``, and the others go on; one that is too large
    for any picture of `max_source_pixels` is not read. URLs are fetched through `remotes`, `downloads` at a time;
    without `remotes` they fail. While `glance` is on, files and URLs are read no further than it asks for, and come as
    `GlancedImage`.

    Attributes:
        max_file_bytes: the size above which a file is not read.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float,
        max_source_pixels: int,
        remotes: Remotes | None = None,
        downloads: int = 32,
        glance: Glance | None = None,
    ) -> None:
        self.max_file_bytes = MAX_OTHER_BYTES + BYTES_PER_PIXEL * max_source_pixels
        self.remotes = remotes
        self._timeout_seconds = timeout_seconds
        self._downloads = downloads
        self._glance = glance

    def read(self, rows: Iterable[Row]) -> Iterator[EncodedImage]:
        """Yield the rows in order; those that have their content already pass through.

        Small files are read as they come, and the size of the larger ones is found; these are read when there is room.
        """
        with ExitStack() as stack:
            pools: dict[bool, DeadlinePool[UnreadRow, Row]] = {}

            def start(row: Row) -> Row | Future[Row]:
                if isinstance(row, EncodedImage):
                    return row
                remote = is_url(row.path)
                if remote not in pools:  # threads that many Parquet files have no use for
                    pools[remote] = stack.enter_context(self._download_pool() if remote else self._file_pool())
                return pools[remote].submit(row)

            for row in through(start, through(start, rows, self._lanes()), self._large_lane()):
                assert isinstance(row, EncodedImage)
                yield row

    def _lanes(self) -> Callable[[Row], tuple[Lane, int]]:
        """What is in flight at first: files and URLs whose sizes are not known, and rows that wait for them."""
        ready, files = Lane(limit=MAX_READY_BYTES), Lane(limit=MAX_FILES)
        urls = Lane(limit=URLS_PER_DOWNLOAD * self._downloads)

        def lane_of(row: Row) -> tuple[Lane, int]:
            if isinstance(row, EncodedImage):
                return ready, _num_bytes(row)
            return (urls if is_url(row.path) else files), 1

        return lane_of

    def _large_lane(self) -> Callable[[Row], tuple[Lane, int]]:
        """What is in flight then: larger files, and the small ones that wait for them."""
        large = Lane(limit=MAX_LARGE_FILES_BYTES)
        return lambda row: (large, min(_num_bytes(row), self.max_file_bytes))

    def _file_pool(self) -> DeadlinePool[UnreadRow, Row]:
        return DeadlinePool(
            self._advance,
            num_threads=READ_THREADS,
            seconds=self._timeout_seconds,
            late=self._late,
            name="read",
        )

    def _download_pool(self) -> DeadlinePool[UnreadRow, Row]:
        pool: DeadlinePool[UnreadRow, Row] = DeadlinePool(
            lambda row: self._advance_url(row, pool.paused),
            num_threads=self._downloads,
            seconds=self._timeout_seconds,
            late=self._late,
            name="download",
        )
        return pool

    def _advance(self, row: UnreadRow) -> Row:
        """Read a small file, or find out how large it is."""
        if self._is_glancing and row.num_bytes is None:
            return self._glanced(row, read_head(row.path, HEAD_BYTES, self.max_file_bytes))
        if row.num_bytes is None and (num_bytes := _size_of(row.path)) > SMALL_FILE_BYTES:
            return replace(row, num_bytes=num_bytes)
        return self._holding(row, read_content(row.path, self.max_file_bytes))

    def _advance_url(self, row: UnreadRow, pause: Pause) -> Row:
        """Fetch what a URL names if it is small, or find out how large it is; it waits for its turn in `pause`."""
        if self.remotes is None:
            return row.holding(ImageError(FailureCode.UNREADABLE, f"{shown_url(row.path)} is a URL: not read here"))
        max_bytes, stop_bytes = self.max_file_bytes, SMALL_FILE_BYTES if row.num_bytes is None else None
        try:
            if self._is_glancing and row.num_bytes is None:
                head = self.remotes.read_head(row.path, HEAD_BYTES, max_bytes, trusted=row.trusted, pause=pause)
                return self._glanced(row, head)
            found = self.remotes.read(row.path, max_bytes, stop_bytes, trusted=row.trusted, pause=pause)
        except MemoryError:
            return row.holding(ImageError(FailureCode.OUT_OF_MEMORY, "no memory for the picture's bytes"))
        except StoppedError:
            raise
        except Exception as error:  # noqa: BLE001  what people write as URLs, and servers answer, has no end
            msg = f"{shown_url(row.path)} cannot be read ({type(error).__name__}): leave it out, or download the file"
            return row.holding(ImageError(FailureCode.FETCH_FAILED, msg))
        return replace(row, num_bytes=found) if isinstance(found, int) else self._holding(row, found)

    @property
    def _is_glancing(self) -> bool:
        return self._glance is not None and self._glance.is_on

    def _glanced(self, row: UnreadRow, found: tuple[bytes, int] | ImageError) -> Row:
        """What the first bytes of a file are good for; if they do not suffice, the row is to be read whole."""
        assert self._glance is not None
        if isinstance(found, ImageError):
            return row.holding(found)
        head, num_bytes = found
        seen = self._glance.look(head, num_bytes)
        if seen is None:
            return replace(row, num_bytes=num_bytes)
        return GlancedImage(row=row.row, key=row.key, content=head, columns=row.columns, num_bytes=num_bytes, seen=seen)

    def _holding(self, row: UnreadRow, content: bytes | ImageError) -> EncodedImage:
        """The row with all that its file holds."""
        if not self._is_glancing or isinstance(content, ImageError):
            return row.holding(content)
        glanced = self._glanced(row, (content, len(content)))
        assert isinstance(glanced, GlancedImage)  # with all there is, whoever looks can say something
        return glanced

    def _late(self, row: UnreadRow) -> EncodedImage:
        where = "server or network" if is_url(row.path) else "disk or network"
        msg = (
            f"reading took longer than {self._timeout_seconds:g} seconds: look after the {where} that holds "
            "the file, or give --timeout more"
        )
        return row.holding(ImageError(FailureCode.TIMEOUT, msg))


def _num_bytes(row: Row) -> int:
    """What a row takes, or will take once it is read."""
    if isinstance(row, UnreadRow):
        num_bytes = row.num_bytes or 0
    else:
        num_bytes = len(row.content) if isinstance(row.content, bytes) else 0
    return max(num_bytes, ROW_BYTES)


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116  may not be text
    except (OSError, ValueError):
        return 0  # reading it will say why
