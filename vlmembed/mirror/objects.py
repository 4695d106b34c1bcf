"""Whole objects below a folder of an object store: listed, read, written and deleted, each with several tries."""

from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from vlmembed.atomic import atomic
from vlmembed.remote.retries import TransientError
from vlmembed.remote.stores import told
from vlmembed.remote.urls import parse_store_url, shown_url

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vlmembed.remote.remotes import Remotes

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Waits before another try, on top of those that the store's own client makes: about a minute in all."""


BLOCK_BYTES = 2**20
"""What is written at a time where an object is downloaded; it is read ahead of that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """An object's size and when it was written, in seconds by the store's clock; or that objects lie below a name."""

    num_bytes: int
    mtime_seconds: int
    is_folder: bool = False

    @property
    def identity(self) -> list[int]:
        """Equal for one object at two times if it was not written in between, as far as a store tells."""
        return [self.num_bytes, self.mtime_seconds]


class Objects:
    """The objects below a folder, named by its URL. Thread-safe.

    Methods raise OSError when the last try has failed, or at once where another one is no use. A method that writes
    shows the whole object or nothing.
    """

    def __init__(self, remotes: Remotes, url: str) -> None:
        self._remotes = remotes
        self._filesystem, _ = remotes.filesystem(url)
        self._base = parse_store_url(url)
        self._stopped = threading.Event()
        self._has_answered = False

    def stop(self) -> None:
        """Try nothing again from now on."""
        self._stopped.set()

    def url(self, name: str) -> str:
        """What people call an object."""
        return shown_url(self._base.sibling(self._path(name)))

    def info(self, name: str) -> ObjectInfo | None:
        """Of one object or folder; None where there is none."""
        found = self._tried(name, lambda: self._filesystem.get_file_info(self._path(name)))
        return None if found.type == fs.FileType.NotFound else _info(found)

    def bucket_exists(self) -> bool:
        """Whether there is a place to write to."""
        bucket = self._base.path.partition("/")[0]
        found = self._tried("", lambda: self._filesystem.get_file_info(bucket))
        return bool(found.type != fs.FileType.NotFound)

    def list(self, folder: str) -> dict[str, ObjectInfo]:
        """What lies in a folder, by name in it; nothing where there is no such folder."""
        selector = fs.FileSelector(self._path(folder), allow_not_found=True)
        found = self._tried(folder, lambda: self._filesystem.get_file_info(selector))
        return {each.base_name: _info(each) for each in found}

    def read(self, name: str) -> bytes | None:
        """A small object's content; None where there is none."""

        def read() -> bytes:
            with self._filesystem.open_input_stream(self._path(name), compression=None) as stream:
                content: bytes = stream.read()
                return content

        try:
            return self._tried(name, read)
        except FileNotFoundError:
            return None

    def schema(self, name: str) -> pa.Schema:
        """That of a Parquet file, of which the end is read and nothing else.

        Raises:
            pa.ArrowInvalid: it is no Parquet file.
        """

        def read() -> pa.Schema | pa.ArrowInvalid:
            with self._filesystem.open_input_file(self._path(name)) as file:
                try:
                    return pq.read_schema(file)
                except pa.ArrowInvalid as error:
                    return error  # no further try changes it

        schema = self._tried(name, read)
        if isinstance(schema, pa.ArrowInvalid):
            raise schema
        return schema

    def put(self, name: str, content: bytes) -> None:
        """Write an object."""
        self._tried(name, lambda: self._write(name, pa.py_buffer(content)))

    def upload(self, name: str, path: Path) -> None:
        """Make a local file, which is not empty, an object."""
        with pa.memory_map(str(path)) as file:
            content = file.read_buffer()
        self._tried(name, lambda: self._write(name, content))

    def _write(self, name: str, content: pa.Buffer) -> None:
        """In one call: whatever ends a block that has written something, pyarrow makes that an object as it leaves
        (apache/arrow#40502), and a half of a file would show."""
        with self._filesystem.open_output_stream(self._path(name), compression=None) as stream:
            stream.write(content)
        found = self._filesystem.get_file_info(self._path(name))
        if found.size != content.size:
            msg = f"{self.url(name)} has {found.size} bytes after {content.size} were written"
            raise OSError(msg)

    def download(self, name: str, path: Path) -> str:
        """Make an object a local file, which appears whole or not at all; returns its SHA-256 (hex)."""
        digest = hashlib.sha256()
        with (
            self._remotes.open(self._base.sibling(self._path(name))) as source,
            atomic(path) as temporary,
            temporary.open("wb") as file,
        ):
            while block := source.read(BLOCK_BYTES):
                digest.update(block)
                file.write(block)
        return digest.hexdigest()

    def delete(self, name: str) -> None:
        """Delete an object, there or not."""

        def delete() -> None:
            try:
                self._filesystem.delete_file(self._path(name))
            except FileNotFoundError:
                logger.debug("%s is gone already", self.url(name))

        self._tried(name, delete)

    def delete_folder(self, name: str) -> None:
        """Delete all that lies in a folder, there or not."""

        def delete() -> None:
            try:
                self._filesystem.delete_dir(self._path(name))
            except FileNotFoundError:
                logger.debug("%s is gone already", self.url(name))

        self._tried(name, delete)

    def _path(self, name: str) -> str:
        return f"{self._base.path}/{name}"

    def _tried(self, name: str, action: Callable[[], Result]) -> Result:
        url = self._base.sibling(self._path(name))
        pauses = PAUSES_SECONDS if self._has_answered else PAUSES_SECONDS[:1]  # at first it is a name that is wrong
        for pause_seconds in (*pauses, None):
            try:
                with told(url):
                    result = action()
            except TransientError as error:
                if pause_seconds is None:
                    raise
                logger.warning("%s; another try in %g s", error, pause_seconds)
                if self._stopped.wait(pause_seconds):
                    raise
            else:
                self._has_answered = True
                return result
        raise AssertionError


def _info(found: fs.FileInfo) -> ObjectInfo:
    is_folder = found.type == fs.FileType.Directory
    return ObjectInfo(num_bytes=found.size or 0, mtime_seconds=(found.mtime_ns or 0) // 10**9, is_folder=is_folder)
