"""An object store in memory, with whole objects as S3 has them, that can fail or fall silent at any write."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING

import pyarrow as pa
from pyarrow import fs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class DeadError(BaseException):
    """The process is gone, as far as the store can tell."""


class _Sink:
    def __init__(self) -> None:
        self.content = b""

    def write(self, buffer: pa.Buffer) -> None:
        self.content += buffer.to_pybytes()


@dataclass(eq=False)
class MemoryStore:
    """What `Objects` needs of a file system.

    Attributes:
        objects: content by ``bucket/key``. times: when each was written.
        on_write: called with the verb (``put``, ``delete``, ``delete_dir``) and the path of every write, before it.
        writes: of those that were done. reads: paths whose content was read.
        is_dead: every call raises `DeadError`.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    on_write: Callable[[str, str], None] = lambda *_: None
    writes: list[tuple[str, str]] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    is_dead: bool = False

    def names(self) -> list[str]:
        """All paths."""
        return sorted(self.objects)

    def _write(self, verb: str, path: str) -> None:
        if not self.is_dead:
            self.on_write(verb, path)
        self._check()
        self.writes.append((verb, path))

    def _check(self) -> None:
        if self.is_dead:
            raise DeadError

    def get_file_info(self, what: str | fs.FileSelector) -> fs.FileInfo | list[fs.FileInfo]:
        """Of one path, or of a folder's files."""
        self._check()
        if isinstance(what, fs.FileSelector):
            start = f"{what.base_dir}/"
            names = {path[len(start) :].partition("/")[0] for path in list(self.objects) if path.startswith(start)}
            return [self._info(start + name) for name in sorted(names)]
        return self._info(what)

    def _info(self, path: str) -> fs.FileInfo:
        if path in self.objects:
            mtime_ns = int(self.times[path] * 1e9)
            return fs.FileInfo(path, fs.FileType.File, size=len(self.objects[path]), mtime_ns=mtime_ns)
        is_folder = path == "bucket" or any(name.startswith(f"{path}/") for name in self.objects)
        return fs.FileInfo(path, fs.FileType.Directory if is_folder else fs.FileType.NotFound)

    def open_input_stream(self, path: str, *, compression: str | None) -> pa.NativeFile:
        """A small object."""
        assert compression is None
        return self.open_input_file(path)

    def open_input_file(self, path: str) -> pa.NativeFile:
        """An object."""
        self._check()
        self.reads.append(path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return pa.BufferReader(self.objects[path])

    def open(self, url: str) -> BytesIO:
        """What `Remotes.open` gives."""
        self._check()
        path = url.partition("://")[2]
        self.reads.append(path)
        if path not in self.objects:
            raise FileNotFoundError(url)
        return BytesIO(self.objects[path])

    @contextmanager
    def open_output_stream(self, path: str, *, compression: str | None) -> Iterator[_Sink]:
        """The object is there, whole, behind the block, whatever ends that."""
        assert compression is None
        self._check()
        sink = _Sink()
        try:
            yield sink
        finally:
            self._write("put", path)
            self.objects[path] = sink.content
            self.times[path] = time.time()

    def delete_file(self, path: str) -> None:
        """Delete an object."""
        self._write("delete", path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        del self.objects[path]

    def delete_dir(self, path: str) -> None:
        """Delete what is below a path."""
        self._write("delete_dir", path)
        for name in [name for name in self.objects if name.startswith(f"{path}/")]:
            del self.objects[name]
