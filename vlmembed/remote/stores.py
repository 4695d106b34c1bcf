"""Objects in the stores behind `pyarrow.fs`: what there is, read in ranges, and what their errors mean."""

from __future__ import annotations

import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from pyarrow import fs

from vlmembed.remote.retries import TransientError
from vlmembed.remote.store_options import build_filesystem
from vlmembed.remote.urls import parse_store_url, shown_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import pyarrow as pa

    from vlmembed.remote.retries import Deadline, Retries
    from vlmembed.remote.urls import StoreUrl

BLOCK_BYTES = 16 * 2**20
"""What is asked for at a time when a whole object is read: what a broken connection costs."""

_REFUSALS = {
    "ACCESS_DENIED": "access is denied: see to the credentials and the bucket's policy",
    "INVALID_ACCESS_KEY_ID": "the access key is not known to the server",
    "SIGNATURE_DOES_NOT_MATCH": "the secret key does not belong to the access key",
    "UNRECOGNIZED_CLIENT": "the credentials are not valid",
    "INVALID_CLIENT_TOKEN_ID": "the credentials are not valid",
    "EXPIRED_TOKEN": "the credentials have expired",
    "NO_SUCH_BUCKET": "there is no such bucket",
    "InvalidBucketName": "that is no name of a bucket",
    "HTTP status 301": "the bucket is in another region: give it by AWS_REGION or ?region=",
    "Empty path component": "a key with an empty part, as in a//b, cannot be read",
    "PERMISSION_DENIED": "access is denied: see to the credentials and the bucket's policy",
    "UNAUTHENTICATED": "there are no valid credentials",
}
"""What no further try changes, by what stands in the text of the error, which has no code of its own."""

_REFUSED_STATUS = re.compile(r"HTTP status 4(?!08|25|29)\d\d|Client [Ee]rror '4(?!08|25|29)\d\d")


class Store:
    """An object store, as the options of a URL choose it; thread-safe. Methods take URLs with these options.

    They raise FileNotFoundError where there is no such object, and another OSError where it cannot be read.

    Attributes:
        filesystem: pyarrow's, for what is not here.
    """

    def __init__(self, url: StoreUrl, retries: Retries, timeout_seconds: float) -> None:
        self.filesystem = build_filesystem(url, timeout_seconds)
        self._scheme = url.scheme
        self._retries = retries
        self._found_buckets: set[str] = set()

    def info(self, url: str) -> fs.FileInfo:
        """What there is: an object or a folder."""
        path = parse_store_url(url).path

        def look(_: Deadline) -> fs.FileInfo:
            with self._told(url):
                found = self.filesystem.get_file_info(path)
                if found.type == fs.FileType.NotFound:
                    raise FileNotFoundError(path)
                return found

        return self._retries.run(look)

    def walk(self, url: str, *, recursive: bool) -> list[fs.FileInfo]:
        """The objects below a folder."""
        selector = fs.FileSelector(parse_store_url(url).path, recursive=recursive)

        def look(_: Deadline) -> list[fs.FileInfo]:
            with self._told(url):
                return [info for info in self.filesystem.get_file_info(selector) if info.type == fs.FileType.File]

        return self._retries.run(look)

    def version(self, info: fs.FileInfo) -> str:
        """When an object was written, in whole seconds (listings and single objects differ below them); on the hub,
        what it holds; "" where that is not known."""
        if info.mtime_ns is not None:
            return str(info.mtime_ns // 10**9)
        if self._scheme == "hf" and info.type == fs.FileType.File:
            return str(self.filesystem.handler.fs.info(info.path).get("blob_id") or "")
        return ""

    def open(self, url: str) -> StoreObject:
        """An object, to be read in ranges."""
        return self._retries.run(lambda _: StoreObject(self, url, self._retries))

    def open_native(self, url: str) -> OpenObject:
        """An object and what is known of it, by one request where the store tells all at once."""
        path = parse_store_url(url).path
        with self._told(url):
            file = self.filesystem.open_input_file(path)
            metadata = file.metadata() or {}
            written = metadata.get("Last-Modified")
            if written is not None:
                version = str(int(datetime.fromisoformat(written.decode()).timestamp()))
            else:
                version = self.version(self.filesystem.get_file_info(path))
            return OpenObject(
                file=file, num_bytes=file.size(), version=version, etag=metadata.get("ETag", b"").decode()
            )

    def _told(self, url: str) -> AbstractContextManager[None]:
        return told(url, lambda: self._absence(url))

    def _absence(self, url: str) -> str:
        """What to say of an object that is not there; raises where it only seemed so."""
        path = parse_store_url(url).path
        if self._scheme == "hf":
            with told(url):
                self.filesystem.handler.fs.info(path)  # pyarrow takes a broken connection to the hub for an absence
            return "is not there"
        bucket = path.partition("/")[0]
        if bucket not in self._found_buckets:
            with suppress(OSError):
                if self.filesystem.get_file_info(bucket).type == fs.FileType.NotFound:
                    return "is not there: there is no such bucket"
            self._found_buckets.add(bucket)
        return "is not there"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OpenObject:
    """An object that pyarrow has opened: its size, when it was written (as `Store.version`), and its ETag or ""."""

    file: pa.NativeFile
    num_bytes: int
    version: str
    etag: str

    def check_same(self, other: OpenObject, url: str) -> None:
        """Raises:
        ChangedError: the two are not the same.
        """
        for name in ("num_bytes", "version", "etag"):
            then, now = getattr(self, name), getattr(other, name)
            if then != now:
                msg = f"{shown_url(url)} has changed while it was read: its {name} was {then}, and is {now}"
                raise ChangedError(msg)


class ChangedError(OSError):
    """An object is no longer what was opened."""


class StoreObject:
    """An object that is read in ranges; thread-safe.

    Attributes:
        num_bytes: its size. version: when it was written, as `Store.version`.
    """

    def __init__(self, store: Store, url: str, retries: Retries) -> None:
        self._store = store
        self._url = url
        self._retries = retries
        self._first = store.open_native(url)
        self._unused = [self._first.file]
        """For the first range, which often is the only one: without a further request for the object's size."""

        self.num_bytes = self._first.num_bytes
        self.version = self._first.version

    def read_range(self, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop`.

        Raises:
            OSError: the last try has failed, or the object is not what was opened.
        """

        def read(_: Deadline) -> bytes:
            with self._opened() as file, told(self._url):
                content: bytes = file.read_at(stop - start, start)
            if len(content) != stop - start:
                msg = f"{shown_url(self._url)}: {len(content)} bytes came of {stop - start}"
                raise TransientError(msg)
            return content

        return self._retries.run(read)

    @contextmanager
    def _opened(self) -> Iterator[pa.NativeFile]:
        try:
            file = self._unused.pop()
        except IndexError:
            found = self._store.open_native(self._url)
            file = found.file
            with file:
                self._first.check_same(found, self._url)
                yield file
        else:
            with file:
                yield file


@contextmanager
def told(url: str, absence: Callable[[], str] = lambda: "is not there") -> Iterator[None]:
    """Tell what goes wrong with an object as OSError. `absence` is asked what to say where it is not there.

    Raises:
        FileNotFoundError: it is not there.
        TransientError: it may pass. OSError: it will not.
    """
    shown = shown_url(url)
    try:
        yield
    except (TransientError, ChangedError):
        raise
    except FileNotFoundError as error:
        msg = f"{shown} {absence()}"
        raise FileNotFoundError(msg) from error
    except (ValueError, NotImplementedError) as error:
        msg = f"{shown} is no name of an object: {_first_line(error)}"
        raise OSError(msg) from error
    except PermissionError as error:
        msg = f"{shown}: access is denied: {_first_line(error)}"
        raise PermissionError(msg) from error
    except Exception as error:
        text = str(error)
        for word, meaning in _REFUSALS.items():
            if word in text:
                msg = f"{shown}: {meaning} ({_first_line(error)})"
                raise (FileNotFoundError if word == "NO_SUCH_BUCKET" else OSError)(msg) from error
        if _REFUSED_STATUS.search(text):
            msg = f"{shown}: {_first_line(error)}"
            raise OSError(msg) from error
        msg = f"{shown}: {_first_line(error)}"
        raise TransientError(msg) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:500]
