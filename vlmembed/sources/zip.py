"""Pictures in zips."""

from __future__ import annotations

import logging
import stat
import struct
import zipfile
from bisect import bisect_right
from collections import Counter
from contextlib import ExitStack
from dataclasses import astuple, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from vlmembed.errors import ImageError, InputError
from vlmembed.formats import SNIFF_BYTES
from vlmembed.sources.archive import (
    count_kind,
    has_picture_extension,
    is_hidden,
    is_picture,
    kind_of,
    list_archives,
    open_archive,
)
from vlmembed.sources.base import rows_between
from vlmembed.sources.ids import UniqueNames, escape_name
from vlmembed.sources.pieces import SourcePiece, holding
from vlmembed.sources.scratch import ListedRows
from vlmembed.sources.zipmembers import HEADER_BYTES, ZipMember
from vlmembed.types import EncodedImage

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator, Sequence
    from typing import Self

    from vlmembed.remote.remotes import Remotes
    from vlmembed.sources.archive import Archive
    from vlmembed.sources.pieces import Piece
    from vlmembed.sources.readahead import ReadAhead
    from vlmembed.sources.scratch import Numbered

logger = logging.getLogger(__name__)

_DIRECTORY_ERRORS = (
    zipfile.BadZipFile,
    OSError,
    ValueError,
    NotImplementedError,
    OverflowError,
    MemoryError,
    struct.error,
)
"""What `zipfile` raises of a damaged directory."""

_MEMBER_FIELDS = [field.name for field in fields(ZipMember)]

_MODE_SHIFT = 16
"""Where Unix keeps a file's mode in the attributes of an entry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedZip:
    """A zip, and where its rows are."""

    archive: Archive
    first_row: int
    num_rows: int


class ZipRows:
    """Rows of zips that were listed: the fields of a `ZipMember` behind an id."""

    def __init__(
        self, *, zips: Sequence[ListedZip], records: Numbered, remotes: Remotes | None, max_file_bytes: int
    ) -> None:
        self._zips = zips
        self._records = records
        self._remotes = remotes
        self._max_file_bytes = max_file_bytes

    @classmethod
    def of_reader(cls, reader: ReadAhead, *, zips: Sequence[ListedZip], records: Numbered) -> Self:
        """With what a reader has."""
        return cls(zips=zips, records=records, remotes=reader.remotes, max_file_bytes=reader.max_file_bytes)

    def read_rows(self, rows: Sequence[int]) -> Iterator[EncodedImage]:
        """Yield these rows; archives that hold none of them are not opened."""
        records = self._records.read(rows)
        for listed in self._zips:
            wanted = rows_between(rows, listed.first_row, listed.num_rows)
            if not wanted:
                continue
            with ExitStack() as stack:
                try:
                    file: io.BufferedReader | ImageError
                    file = stack.enter_context(open_archive(listed.archive, self._remotes))
                except ImageError as error:
                    logger.error("%s: %s", listed.archive.key, error)  # noqa: TRY400  no bug, so no traceback
                    file = error
                for _, (row, (key, *values)) in zip(wanted, records, strict=False):  # each takes what is its own
                    member = ZipMember(**dict(zip(_MEMBER_FIELDS, values, strict=True)))
                    content = file if isinstance(file, ImageError) else member.read(file, self._max_file_bytes)
                    yield EncodedImage(row=row, key=key, content=content)


class ZipSource(ListedRows):
    """The pictures in zips, in the order of each archive's directory, which is read when they are listed.

    `files` are paths (or URLs) and keys. A picture of more than `max_file_bytes` is not read.

    Raises:
        InputError: one of them cannot be looked up, or its directory not be read.
        StorageError: the list of members cannot be written.
    """

    def __init__(self, files: Sequence[tuple[str, str]], *, remotes: Remotes | None, max_file_bytes: int) -> None:
        super().__init__()
        self.skipped: Counter[str] = Counter()
        self.kept_schema = pa.schema([])
        self._remotes = remotes
        self._max_file_bytes = max_file_bytes
        self._zips: list[ListedZip] = []
        with ExitStack() as stack:
            stack.callback(self.close)
            for archive in list_archives(files, remotes):
                self._add(archive)
            self._records.seal()
            stack.pop_all()

    def _add(self, archive: Archive) -> None:
        first_row = self.num_rows
        self._note([archive.key, archive.num_bytes, archive.version])
        try:
            with open_archive(archive, self._remotes) as file, UniqueNames() as names:
                for name, kind, member in _read_directory(file):
                    if kind or not _is_picture(file, name, member):
                        count_kind(self.skipped, kind or kind_of(name))
                    else:
                        self._add_row(names.key(f"{archive.key}!/{escape_name(name)}"), member)
        except (ImageError, *_DIRECTORY_ERRORS) as error:
            msg = f"{archive.key!r} cannot be read as a zip ({error}): write it again, or leave it out"
            raise InputError(msg) from error
        self._zips.append(ListedZip(archive=archive, first_row=first_row, num_rows=self.num_rows - first_row))

    def _add_row(self, key: str, member: ZipMember) -> None:
        record = [key, *astuple(member)]
        self._list(record, key=key, noted=record)

    def read(self, start: int) -> Iterator[EncodedImage]:
        """Yield the rows from `start` on."""
        return self.read_rows(range(start, self.num_rows))

    def read_rows(self, rows: Sequence[int]) -> Iterator[EncodedImage]:
        """Yield these rows; archives that hold none of them are not opened."""
        zips = ZipRows(
            zips=self._zips, records=self._records, remotes=self._remotes, max_file_bytes=self._max_file_bytes
        )
        return zips.read_rows(rows)

    def pieces(self, rows: range, size: int, first_row: int = 0) -> Iterator[Piece]:
        """See `Divisible`."""
        for run, records in self._cut(rows, size, first_row):
            zips = holding(self._zips, run, lambda listed: listed.first_row)
            make = partial(ZipRows.of_reader, zips=zips, records=records)
            yield SourcePiece(run=run, first_row=first_row, make=make)


def _is_picture(file: io.BufferedReader, name: str, member: ZipMember) -> bool:
    head = b"" if has_picture_extension(name) else member.head(file, SNIFF_BYTES)
    return is_picture(name, head)


def _read_directory(file: io.BufferedReader) -> Iterator[tuple[str, str, ZipMember]]:
    """Yield name, kind ("" of a file) and member for each entry. Raises `_DIRECTORY_ERRORS`."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.filelist
        begins = sorted(entry.header_offset for entry in entries)
        begins.append(archive.start_dir)
        archive.NameToInfo.clear()  # so that an entry is let go of as soon as it was yielded
    entries.reverse()
    while entries:
        entry = entries.pop()
        end = entry.header_offset + HEADER_BYTES + entry.compress_size
        following = bisect_right(begins, entry.header_offset, hi=len(begins) - 1)
        is_repeated = following > 1 and begins[following - 2] == entry.header_offset
        member = ZipMember(
            begin=entry.header_offset,
            packed_bytes=entry.compress_size,
            num_bytes=entry.file_size,
            checksum=entry.CRC,
            method=entry.compress_type,
            flags=entry.flag_bits,
            overlaps=is_repeated or end > begins[following],
        )
        yield entry.filename, _kind_of_entry(entry), member


def _kind_of_entry(entry: zipfile.ZipInfo) -> str:
    if entry.filename.endswith("/"):  # `is_dir` fails of a name that is empty
        return "folder"
    mode = entry.external_attr >> _MODE_SHIFT
    if stat.S_ISLNK(mode):
        return "link"
    if stat.S_IFMT(mode) not in {0, stat.S_IFREG}:
        return "special member"
    return "hidden" if is_hidden(entry.filename) else ""
