"""Pictures in folders and single files."""

from __future__ import annotations

import os
import stat
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from vlmembed.formats import SNIFF_BYTES, picture_extensions, sniff_format
from vlmembed.sources.ids import escape_name
from vlmembed.sources.kinds import kind_of_name
from vlmembed.sources.pieces import SourcePiece
from vlmembed.sources.readahead import UnreadRow, open_without_waiting
from vlmembed.sources.scratch import ListedRows

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from vlmembed.remote.remotes import RemoteInfo
    from vlmembed.sources.pieces import Piece
    from vlmembed.sources.readahead import ReadAhead
    from vlmembed.sources.scratch import Numbered
    from vlmembed.types import EncodedImage


def key_of(path: str, root: str, prefix: str) -> str:
    """Id of a file: its path below `root`, behind `prefix` where the run has several inputs."""
    relative = os.path.relpath(path, root).replace(os.sep, "/")
    return escape_name(f"{prefix}/{relative}" if prefix else relative)


@dataclass(slots=True)
class Walk:
    """Lists what a folder holds: pictures one by one, files that hold many aside, the rest counted by kind.

    A file is a picture if its bytes or its extension say so. Hidden entries are skipped. Symbolic links are followed
    unless they lead back to a folder that is being walked.
    """

    recursive: bool
    excluded: Collection[tuple[int, int]] = ()  # the run's own output, by `identity_of`
    skipped: Counter[str] = field(default_factory=Counter)
    containers: list[str] = field(default_factory=list)
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
        """Whether a file that was found is a row; if not, it is counted, or kept among `containers`."""
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
            with open(path, "rb", opener=open_without_waiting) as file:
                head = file.read(SNIFF_BYTES) or b""  # None: a file of the kernel's that would make us wait
        except OSError:
            head = b""
        if sniff_format(head) is not None:
            return True
        if kind_of_name(path) and not os.path.basename(path).startswith("_"):  # noqa: PTH119  see `pictures`
            self.containers.append(path)
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


class FolderRows:
    """Picture files that were listed: path and id of each."""

    def __init__(self, reader: ReadAhead, *, records: Numbered) -> None:
        self._reader = reader
        self._records = records

    def read_rows(self, rows: Sequence[int]) -> Iterator[EncodedImage]:
        """Read ahead with a few threads, yield in order."""
        listed = self._records.read(rows)
        return self._reader.read(UnreadRow(row=row, key=key, path=path) for row, (path, key) in listed)


class FolderSource(ListedRows):
    """Picture files, listed once at the start. The list lies in a scratch file, so memory does not grow with it."""

    def __init__(self, reader: ReadAhead) -> None:
        super().__init__()
        self.skipped: Counter[str] = Counter()
        self.kept_schema = pa.schema([])
        self._reader = reader

    def add(self, path: str, key: str, info: RemoteInfo | None = None) -> None:
        """Append a file to the list; `info` is what is known of a remote one."""
        stamp: list[int | str | None] = [0, -1]
        if info is not None:
            stamp = [info.num_bytes, info.version]
        else:
            with suppress(OSError):
                status = os.stat(path)  # noqa: PTH116  see `Walk.pictures`
                stamp = [status.st_size, status.st_mtime_ns]
        self._list([path, key], key=key, noted=[key, *stamp])

    def seal(self) -> None:
        """The list is whole: bring it to disk before the run goes by it."""
        self._records.seal()

    def read(self, start: int) -> Iterator[EncodedImage]:
        """Yield the rows from `start` on."""
        return self.read_rows(range(start, self.num_rows))

    def read_rows(self, rows: Sequence[int]) -> Iterator[EncodedImage]:
        """Read only these."""
        return FolderRows(self._reader, records=self._records).read_rows(rows)

    def pieces(self, rows: range, size: int, first_row: int = 0) -> Iterator[Piece]:
        """See `Divisible`."""
        for run, records in self._cut(rows, size, first_row):
            yield SourcePiece(run=run, first_row=first_row, make=partial(FolderRows, records=records))
