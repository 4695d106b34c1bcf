"""Files and objects behind URLs: s3://, gs://, hf://, http:// and https://."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyarrow import fs

from vlmembed.errors import FailureCode, ImageError, InputError
from vlmembed.remote.downloads import Oversized, read_head, read_range, read_whole
from vlmembed.remote.http import HttpClient
from vlmembed.remote.remote_file import RangedBlocks, RemoteFile
from vlmembed.remote.retries import Retries
from vlmembed.remote.stores import BLOCK_BYTES, Store
from vlmembed.remote.urls import WEB_SCHEMES, parse_store_url, scheme_of, shown_url
from vlmembed.remote.web_stream import WebStream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from vlmembed.remote.slots import Pause
    from vlmembed.remote.urls import StoreUrl

__all__ = ["RemoteFile", "RemoteInfo", "Remotes"]

AHEAD_THREADS = 8
"""Threads that read ahead, for all open files together."""


MAX_STORES = 32
"""Object stores, or buckets of S3, that are kept for their next object: data may name any number of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteInfo:
    """What is known of a file or folder without reading it.

    Attributes:
        url: of it, with the options of the URL that it was found by.
        num_bytes: its size; None for a folder, and where a server does not tell.
        version: differs where the content does: ETag or time of change; "" if unknown.
    """

    url: str
    num_bytes: int | None
    version: str
    is_folder: bool


class Remotes:
    """Reads what URLs name, with several tries; thread-safe.

    `trusted` is False for a URL that came out of data: its options, which can name another server, are refused unless a
    trusted URL had the same ones before. Unless `allow_local`, http and https lead to no loopback or link-local
    address, to no cloud's metadata service and to no other address of this machine, trusted or not; they do lead to
    other machines in private networks.
    """

    def __init__(self, *, timeout_seconds: float, per_host: int = 16, allow_local: bool = False) -> None:
        self._timeout_seconds = timeout_seconds
        self._per_host = per_host
        self._allow_local = allow_local
        self._retries = Retries(timeout_seconds)
        self._lock = threading.Lock()
        self._http: HttpClient | None = None
        self._stores: OrderedDict[tuple[str, str, str], Store] = OrderedDict()  # the last used at the end
        self._trusted_queries = {""}
        self._pool = ThreadPoolExecutor(AHEAD_THREADS, thread_name_prefix="read-ahead")

    def info(self, url: str, *, trusted: bool = True) -> RemoteInfo:
        """What is known of a file or folder.

        Raises:
            FileNotFoundError: it is not there. OSError: that cannot be found out. InputError: it is no URL.
        """
        if scheme_of(url) in WEB_SCHEMES:
            found = self._client().info(url)
            return RemoteInfo(url=url, num_bytes=found.num_bytes, version=found.version, is_folder=False)
        store, parsed = self._store(url, trusted=trusted)
        return _remote_info(store, store.info(url), parsed)

    def walk(self, url: str, recursive: bool = True) -> Iterator[RemoteInfo]:  # noqa: FBT001, FBT002  as agreed
        """The files below a folder, sorted by URL. The names of all are held.

        Raises:
            FileNotFoundError: it is not there. OSError: it cannot be listed. InputError: a web server has no folders.
        """
        if scheme_of(url) in WEB_SCHEMES:
            msg = f"{shown_url(url)}: a web server lists no folders: name its files, or a list of them"
            raise InputError(msg)
        store, parsed = self._store(url, trusted=True)
        found = [_remote_info(store, info, parsed) for info in store.walk(url, recursive=recursive)]
        yield from sorted(found, key=lambda info: info.url)

    def read(
        self,
        url: str,
        max_bytes: int,
        stop_bytes: int | None = None,
        *,
        trusted: bool = True,
        pause: Pause = nullcontext,
    ) -> bytes | ImageError | int:
        """A whole file, or why there is none (``missing``, ``too_large``, ``fetch_failed``).

        If it is larger than `stop_bytes`, its size is returned in place of reading it (`max_bytes` where unknown). If
        it has to wait until other files of its host are read, it does so in `pause`, and that time does not count.
        """
        limit = max_bytes if stop_bytes is None else min(max_bytes, stop_bytes)
        try:
            found = self._read(url, limit, trusted=trusted, pause=pause)
        except FileNotFoundError as error:
            return ImageError(FailureCode.MISSING, str(error))
        except (OSError, InputError) as error:
            return ImageError(FailureCode.FETCH_FAILED, str(error))
        if isinstance(found, bytes):
            return found
        size = found.num_bytes
        if limit < max_bytes and (size is None or size <= max_bytes):
            return max_bytes if size is None else size
        return _too_large(url, size, max_bytes)

    def read_head(
        self, url: str, num_bytes: int, max_bytes: int, *, trusted: bool = True, pause: Pause = nullcontext
    ) -> tuple[bytes, int] | ImageError:
        """The first `num_bytes` of a file, or all of a shorter one, and its size; or why it cannot be had, as `read`
        says. Where a server does not tell the size, the whole file comes."""
        found: tuple[bytes, int] | Oversized
        try:
            if scheme_of(url) in WEB_SCHEMES:
                found = read_head(self._client(), url, num_bytes, max_bytes, pause)
            else:
                opened = self._store(url, trusted=trusted)[0].open(url)
                found = opened.read_range(0, min(num_bytes, opened.num_bytes)), opened.num_bytes
        except FileNotFoundError as error:
            return ImageError(FailureCode.MISSING, str(error))
        except (OSError, InputError) as error:
            return ImageError(FailureCode.FETCH_FAILED, str(error))
        if isinstance(found, Oversized):
            return _too_large(url, found.num_bytes, max_bytes)
        return found if found[1] <= max_bytes else _too_large(url, found[1], max_bytes)

    def _read(self, url: str, max_bytes: int, *, trusted: bool, pause: Pause) -> bytes | Oversized:
        if scheme_of(url) in WEB_SCHEMES:
            return read_whole(self._client(), url, max_bytes, pause)
        found = self._store(url, trusted=trusted)[0].open(url)
        if found.num_bytes > max_bytes:
            return Oversized(num_bytes=found.num_bytes)
        content = io.BytesIO()
        for start in range(0, found.num_bytes, BLOCK_BYTES):
            content.write(found.read_range(start, min(start + BLOCK_BYTES, found.num_bytes)))
        return content.getvalue()

    def open(self, url: str, *, trusted: bool = True) -> RemoteFile:
        """A file, to be read in parts.

        Raises:
            FileNotFoundError: it is not there. OSError: it cannot be read. InputError: it is no URL.
        """
        if scheme_of(url) not in WEB_SCHEMES:
            found = self._store(url, trusted=trusted)[0].open(url)
            blocks = RangedBlocks(found.num_bytes, found.read_range, self._pool)
            return RemoteFile(url, num_bytes=found.num_bytes, version=found.version, blocks=blocks)
        client = self._client()
        info = client.probe(url)
        num_bytes = -1 if info.num_bytes is None else info.num_bytes
        if not info.takes_ranges:
            return RemoteFile(url, num_bytes=num_bytes, version=info.version, blocks=WebStream(client, url, info))
        ranges = RangedBlocks(num_bytes, lambda start, stop: read_range(client, url, start, stop, info), self._pool)
        return RemoteFile(url, num_bytes=num_bytes, version=info.version, blocks=ranges)

    def filesystem(self, url: str) -> tuple[fs.FileSystem, str]:
        """The file system of an object store, and the path in it, without a slash at its end.

        Raises:
            InputError: it is the URL of a web server, or of none.
        """
        if scheme_of(url) in WEB_SCHEMES:
            msg = f"{shown_url(url)}: nothing can be written to a web server: use s3://, gs:// or hf://"
            raise InputError(msg)
        store, parsed = self._store(url, trusted=True)
        return store.filesystem, parsed.path

    def close(self) -> None:
        """End what is under way, and the connections."""
        self._retries.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._http is not None:
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _client(self) -> HttpClient:
        with self._lock:
            if self._http is None:
                self._http = HttpClient(
                    timeout_seconds=self._timeout_seconds, per_host=self._per_host, allow_local=self._allow_local
                )
            return self._http

    def _store(self, url: str, *, trusted: bool) -> tuple[Store, StoreUrl]:
        parsed = parse_store_url(url)
        with self._lock:
            if trusted:
                self._trusted_queries.add(parsed.query)
            elif parsed.query not in self._trusted_queries:
                msg = (
                    f"{shown_url(url)} has options behind it ({parsed.query.partition('=')[0]}=...), which a URL in "
                    "data must not have: give them by the environment (as AWS_ENDPOINT_URL)"
                )
                raise OSError(msg)
            bucket = parsed.path.partition("/")[0] if parsed.scheme == "s3" else ""  # its region may be its own
            key = (parsed.scheme, parsed.query, bucket)
            if found := self._stores.get(key):
                self._stores.move_to_end(key)
        if found is None:
            made = Store(parsed, self._retries, self._timeout_seconds)  # may ask Amazon for the bucket's region
            with self._lock:
                found = self._stores.setdefault(key, made)
                while len(self._stores) > MAX_STORES:
                    self._stores.popitem(last=False)  # what is open holds on to its own
        return found, parsed


def _too_large(url: str, num_bytes: int | None, max_bytes: int) -> ImageError:
    told_size = f"{num_bytes} bytes" if num_bytes is not None else f"more than {max_bytes} bytes"
    return ImageError(
        FailureCode.TOO_LARGE,
        f"{shown_url(url)} has {told_size}, and a picture within --max-source-pixels {max_bytes} at most: raise that, "
        "or leave the file out",
    )


def _remote_info(store: Store, info: fs.FileInfo, parent: StoreUrl) -> RemoteInfo:
    is_folder = info.type == fs.FileType.Directory
    return RemoteInfo(
        url=parent.sibling(info.path),
        num_bytes=None if is_folder else info.size,
        version="" if is_folder else store.version(info),
        is_folder=is_folder,
    )
