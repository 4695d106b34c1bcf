"""What tars and zips share: how they are listed and opened, and which of their members are pictures."""

from __future__ import annotations

import io
import os
import posixpath
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlmembed.errors import FailureCode, ImageError, InputError, StorageError
from vlmembed.formats import picture_extensions, sniff_format
from vlmembed.remote.urls import is_url
from vlmembed.sources.ids import escape_name
from vlmembed.sources.readahead import open_without_waiting

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from vlmembed.remote.remotes import RemoteFile, Remotes

BUFFER_BYTES = 64 * 2**10
"""Read at once: many headers of small members, and little beside the header where members are large."""

LISTING_THREADS = 16

MAX_KINDS = 1000
"""Kinds of members that are counted apart: a numbered extension each must not fill the memory."""

_MAX_EXTENSION_CHARS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Archive:
    """An archive as it was listed.

    Attributes:
        path: a path, or a URL.
        num_bytes: None where a server does not tell.
        version: what changes when the content does: the change time, or what the server calls it; "" if unknown.
    """

    path: str
    key: str
    num_bytes: int | None
    version: str


def list_archives(files: Sequence[tuple[str, str]], remotes: Remotes | None) -> list[Archive]:
    """Look up archives by path (or URL) and key.

    Raises:
        InputError: one cannot be looked up.
    """
    with ThreadPoolExecutor(LISTING_THREADS) as pool:
        return list(pool.map(lambda file: _look_up(file[0], file[1], remotes), files))


def _look_up(path: str, key: str, remotes: Remotes | None) -> Archive:
    try:
        if is_url(path):
            assert remotes is not None, "URLs need remotes"
            info = remotes.info(path)
            return Archive(path=path, key=key, num_bytes=info.num_bytes, version=info.version)
        status = os.stat(path)  # noqa: PTH116  may not be text
    except OSError as error:
        msg = f"{key!r} cannot be read ({error}): look after it, or leave it out"
        raise InputError(msg) from error
    return Archive(path=path, key=key, num_bytes=status.st_size, version=str(status.st_mtime_ns))


class _RemoteArchive(io.RawIOBase):
    """An archive on a server. Where that fails, the run stops: were the rest of the archive taken for lost, its rows
    would be others when the run goes on, with the server back."""

    def __init__(self, file: RemoteFile, key: str) -> None:
        self._file = file
        self._key = key

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any, /) -> int | None:  # noqa: ANN401  as io's own
        try:
            return self._file.readinto(buffer)
        except OSError as error:
            raise _unreachable(self._key, error) from error

    def close(self) -> None:
        self._file.close()
        super().close()


def _unreachable(key: str, error: Exception) -> StorageError:
    msg = f"{key} cannot be read ({error}): what was committed is kept, and the same command goes on from there"
    return StorageError(msg)


def open_archive(archive: Archive, remotes: Remotes | None, *, stops: bool = False) -> io.BufferedReader:
    """Open an archive that was listed; with `stops`, one that its server no longer gives is an end of the run.

    Raises:
        ImageError: it is gone, cannot be read, or is no longer what was listed.
        StorageError: see `stops`.
    """
    try:
        if is_url(archive.path):
            assert remotes is not None, "URLs need remotes"
            remote = remotes.open(archive.path)
            raw: io.RawIOBase = _RemoteArchive(remote, archive.key) if stops else remote
            num_bytes, version = (None if remote.num_bytes < 0 else remote.num_bytes), remote.version
        else:
            raw = open(archive.path, "rb", buffering=0, opener=open_without_waiting)  # noqa: SIM115  handed back
            status = os.stat(raw.fileno())  # noqa: PTH116  it is open
            num_bytes, version = status.st_size, str(status.st_mtime_ns)
            if not stat.S_ISREG(status.st_mode):
                version = "no regular file"
    except FileNotFoundError as error:
        raise ImageError(FailureCode.MISSING, "it was there when it was listed, and is gone") from error
    except (OSError, ValueError) as error:
        if stops and is_url(archive.path):
            raise _unreachable(archive.key, error) from error
        code = FailureCode.FETCH_FAILED if is_url(archive.path) else FailureCode.UNREADABLE
        raise ImageError(code, describe(error)) from error
    difference = _difference(archive.num_bytes, num_bytes) or _difference(archive.version, version)
    if difference:
        raw.close()
        msg = f"it has changed since it was listed: its {difference} then"
        raise ImageError(FailureCode.UNREADABLE, msg)
    return io.BufferedReader(raw, BUFFER_BYTES)


def _difference(then: int | str | None, now: int | str | None) -> str:
    if then in (None, "") or now in (None, "") or then == now:
        return ""
    return f"size is {now} bytes, and was {then}" if isinstance(then, int) else f"version is {now}, and was {then}"


def describe(error: BaseException) -> str:
    """An error for a row's message."""
    return f"{type(error).__name__}: {error}"[:1000]


def too_large(num_bytes: int, max_bytes: int) -> ImageError:
    """Why a member is not read that is larger than a picture can be."""
    return ImageError(
        FailureCode.TOO_LARGE,
        f"the file has {num_bytes} bytes, and a picture within --max-source-pixels {max_bytes} at most: raise that, or "
        "leave the file out",
    )


def extension_of(name: str) -> str:
    """The last extension of a member's name, lower case with the dot, or ""."""
    return posixpath.splitext(name)[1].lower()


def has_picture_extension(name: str) -> bool:
    """Whether a member's name promises a picture."""
    return extension_of(name) in picture_extensions()


def is_picture(name: str, head: bytes) -> bool:
    """Whether the name or the first `SNIFF_BYTES` of a member say picture."""
    return has_picture_extension(name) or sniff_format(head) is not None


def is_hidden(name: str) -> bool:
    """Whether a member is one that no one wants to see: ``.name`` or in such a folder, or macOS's copy of metadata."""
    folders = name.split("/")
    return "__MACOSX" in folders or any(part.startswith(".") and part not in {".", ".."} for part in folders)


def count_kind(skipped: Counter[str], kind: str) -> None:
    """Count a member that is no row."""
    skipped[kind if kind in skipped or len(skipped) < MAX_KINDS else "other"] += 1


def kind_of(name: str) -> str:
    """As what a member that is no picture is counted."""
    return escape_name(extension_of(name)[:_MAX_EXTENSION_CHARS]) or "no extension"
