"""Files that tables lie in, on a disk or behind a URL, opened for reading at any place."""

from __future__ import annotations

import io
import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from vlmembed.remote.urls import is_url, shown_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlmembed.remote.remotes import Remotes

SMALL_READ_BYTES = 64 * 2**10
"""What is asked of a server at least; headers lie close together, and each request takes as long as many bytes."""

DAMAGE = (OSError, ValueError, pa.ArrowException)
"""What is raised for bytes that are not what they should be; ValueError for text that is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileStatus:
    """Of a file that is open.

    Attributes:
        num_bytes: its size.
        version: its time of change, or what the server calls its version; "" where that is not known.
    """

    num_bytes: int
    version: str

    def difference(self, listed: FileStatus) -> str | None:
        """What is not as it was when the file was listed; None where nothing is."""
        if self.num_bytes != listed.num_bytes:
            return f"{self.num_bytes} bytes, and {listed.num_bytes}"
        if self.version != listed.version:
            return f"version {self.version}, and {listed.version}"
        return None


@contextmanager
def open_file(path: str, remotes: Remotes | None) -> Iterator[tuple[pa.NativeFile, FileStatus]]:
    """Open a path or a URL.

    Raises:
        FileNotFoundError: it is not there.
        OSError: it cannot be read.
    """
    if is_url(path):
        with _open_url(path, remotes) as opened:
            yield opened
        return
    if not stat.S_ISREG(Path(path).stat().st_mode):  # opening a pipe would wait for its writer
        msg = "not a regular file"
        raise OSError(msg)
    with pa.OSFile(os.fsencode(path), "r") as file:
        status = os.fstat(file.fileno())
        yield file, FileStatus(num_bytes=status.st_size, version=str(status.st_mtime_ns))


@contextmanager
def _open_url(url: str, remotes: Remotes | None) -> Iterator[tuple[pa.NativeFile, FileStatus]]:
    if remotes is None:
        msg = f"{shown_url(url)} is a URL: not read here"
        raise OSError(msg)
    with (
        remotes.open(url) as remote,
        io.BufferedReader(remote, SMALL_READ_BYTES) as buffered,  # a raw file may give less than it was asked for
        pa.PythonFile(buffered, mode="r") as file,
    ):
        if remote.num_bytes < 0:
            msg = f"{shown_url(url)}: the server does not tell the file's size: download the file"
            raise OSError(msg)
        yield file, FileStatus(num_bytes=remote.num_bytes, version=remote.version)
