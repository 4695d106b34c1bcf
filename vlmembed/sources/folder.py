"""Pictures in folders and single files."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from vlmembed.errors import FailureCode, ImageError
from vlmembed.formats import SNIFF_BYTES, picture_extensions, sniff_format
from vlmembed.parallel import ordered_map
from vlmembed.types import EncodedImage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path
    from typing import IO

READ_THREADS = 4
MAX_READ_AHEAD_BYTES = 128 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedFile:
    """A file that is a row: where it is, its id, its size in bytes."""

    path: str
    key: str
    num_bytes: int


def escape_name(name: str) -> str:
    r"""A path as valid Unicode, different for different paths.

    Bytes that do not decode become ``\xNN``. So that this cannot collide with a name that holds a backslash itself,
    backslashes are doubled; names without either stay as they are.
    """
    escaped = name.replace("\\", "\\\\")
    return "".join(f"\\x{ord(char) - 0xDC00:02x}" if "\udc80" <= char <= "\udcff" else char for char in escaped)


def key_of(path: str, root: str, prefix: str) -> str:
    """Id of a file: its path below `root`, behind `prefix` where the run has several inputs."""
    relative = os.path.relpath(path, root).replace(os.sep, "/")
    return escape_name(f"{prefix}/{relative}" if prefix else relative)


def read_content(path: str) -> bytes | ImageError:
    """The bytes of a regular file, or why there are none."""
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return ImageError(FailureCode.UNREADABLE, "not a regular file")
            return file.read()
    except FileNotFoundError:
        return ImageError(FailureCode.MISSING, "the file does not exist")
    except (OSError, ValueError) as error:
        return ImageError(FailureCode.UNREADABLE, f"{type(error).__name__}: {error}")
    except MemoryError:
        return ImageError(FailureCode.OUT_OF_MEMORY, "no memory for the file's bytes")


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a FIFO would wait for a writer for ever


@dataclass(slots=True)
class Walk:
    """Lists what a folder holds: pictures one by one, Parquet files aside, the rest counted by kind.

    A file is a picture if its bytes or its extension say so. Hidden entries are skipped. Symbolic links are followed
    unless they lead back to a folder that is being walked.
    """

    recursive: bool
    excluded: Collection[tuple[int, int]] = ()  # the run's own output, by `identity_of`
    skipped: Counter[str] = field(default_factory=Counter)
    parquet_files: list[str] = field(default_factory=list)
    _extensions: frozenset[str] = field(default_factory=picture_extensions)

    def pictures(self, folder: str, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[str]:
        """Yield the paths of the pictures below `folder`, by name; of an unreadable folder too, with a ``/``."""
        try:
            status = os.stat(folder)  # noqa: PTH116  str paths survive undecodable names without a Path each
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            yield f"{folder}/"
            return
        identity = (status.st_dev, status.st_ino)
        if identity in self.excluded:
            return
        if identity in above:
            self.skipped["symlink loop"] += 1
            return
        for entry in entries:
            if entry.name.startswith("."):
                self.skipped["hidden"] += 1
            elif not _is_folder(entry):
                if self.is_picture(entry.path):
                    yield entry.path
            elif self.recursive:
                yield from self.pictures(entry.path, above | {identity})
            else:
                self.skipped["subfolder"] += 1

    def is_picture(self, path: str) -> bool:
        """Whether a file that was found is a row; if not, it is counted, or kept among `parquet_files`."""
        extension = os.path.splitext(path)[1].lower()  # noqa: PTH122  see `pictures`
        try:
            status = os.stat(path)  # noqa: PTH116  see `pictures`
        except OSError:  # a broken link: a row that will fail as missing, if its name promises a picture
            mode = stat.S_IFREG
        else:
            mode = status.st_mode
            if (status.st_dev, status.st_ino) in self.excluded:
                return False
        if not stat.S_ISREG(mode):
            self.skipped["special file"] += 1
            return False
        if extension in self._extensions:
            return True
        try:
            with open(path, "rb") as file:  # noqa: PTH123  see `pictures`
                head = file.read(SNIFF_BYTES)
        except OSError:
            head = b""
        if sniff_format(head) is not None:
            return True
        if extension == ".parquet" and not os.path.basename(path).startswith("_"):  # noqa: PTH119  see `pictures`
            self.parquet_files.append(path)
        else:
            self.skipped[escape_name(extension) or "no extension"] += 1
        return False


def identity_of(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Device and inode of what lies at `path`, links followed; None where nothing does."""
    try:
        status = os.stat(path)  # noqa: PTH116  see `Walk.pictures`
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


class FolderSource:
    """Picture files, listed once at the start. The list lies in a scratch file, so memory does not grow with it."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.skipped: Counter[str] = Counter()
        self.kept_schema = pa.schema([])
        self._hash = hashlib.sha256()
        self._list: IO[str] = tempfile.TemporaryFile("w+", encoding="ascii")  # noqa: SIM115  closed in `close`

    @property
    def digest(self) -> str:
        """SHA-256 over the list."""
        return self._hash.hexdigest()

    def add(self, path: str, key: str) -> None:
        """Append a file to the list."""
        try:
            status = os.stat(path)  # noqa: PTH116  see `Walk.pictures`
            num_bytes, mtime_ns = status.st_size, status.st_mtime_ns
        except OSError:
            num_bytes, mtime_ns = 0, -1
        self._hash.update(json.dumps([key, num_bytes, mtime_ns]).encode() + b"\n")
        self._list.write(json.dumps([path, key, num_bytes]) + "\n")
        self.num_rows += 1

    def _listed(self, start: int) -> Iterator[tuple[int, ListedFile]]:
        self._list.seek(0)
        for row, line in enumerate(self._list):
            if row >= start:
                path, key, num_bytes = json.loads(line)
                yield row, ListedFile(path=path, key=key, num_bytes=num_bytes)

    def read(self, start: int) -> Iterator[EncodedImage]:
        """Read ahead with a few threads, yield in order."""

        def load(item: tuple[int, ListedFile]) -> EncodedImage:
            row, listed = item
            return EncodedImage(row=row, key=listed.key, content=read_content(listed.path))

        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="read") as pool:
            yield from ordered_map(
                lambda item: pool.submit(load, item),
                self._listed(start),
                max_items=4 * READ_THREADS,
                max_bytes=MAX_READ_AHEAD_BYTES,
                num_bytes=lambda item: item[1].num_bytes,
            )

    def close(self) -> None:
        """Drop the scratch list."""
        self._list.close()


def is_parquet(path: Path) -> bool:
    """Whether the bytes or the name of a file say Parquet."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False  # reading from a pipe would wait for its writer
        with path.open("rb") as file:
            return path.suffix == ".parquet" or file.read(4) == b"PAR1"
    except OSError:
        return False
