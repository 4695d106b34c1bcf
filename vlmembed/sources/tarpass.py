"""One pass over one tar: its rows, in order."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

from vlmembed.errors import FailureCode, ImageError, StorageError
from vlmembed.formats import SNIFF_BYTES
from vlmembed.sources.archive import (
    count_kind,
    describe,
    has_picture_extension,
    is_hidden,
    is_picture,
    kind_of,
    open_archive,
    too_large,
)
from vlmembed.sources.forward import READ_ERRORS, ForwardFile
from vlmembed.sources.ids import UniqueNames, escape_name
from vlmembed.sources.samples import MAX_TEXT_BYTES, SampleBuffer, split_name
from vlmembed.sources.tarmembers import NO_END, read_members
from vlmembed.types import EncodedImage

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from vlmembed.remote.remotes import Remotes
    from vlmembed.sources.archive import Archive
    from vlmembed.sources.samples import KeptColumns
    from vlmembed.sources.tarmembers import Member

logger = logging.getLogger(__name__)


class TarPass:
    """Reads the rows of a tar that are among `rows`; its own begin with number `first_row`.

    Attributes:
        num_rows: rows so far, those that are not wanted too.
        skipped: members so far that are no rows.
        is_done: whether the tar was read to its end. It is left early behind the last of `rows`.
    """

    def __init__(
        self, archive: Archive, *, first_row: int, rows: Sequence[int], columns: KeptColumns, max_file_bytes: int
    ) -> None:
        self.num_rows = 0
        self.skipped: Counter[str] = Counter()
        self.is_done = False
        self._archive = archive
        self._first_row = first_row
        self._rows = rows
        self._next_wanted = bisect_left(rows, first_row)
        self._columns = columns
        self._max_file_bytes = max_file_bytes
        self._buffer = SampleBuffer(columns)

    def read(self, remotes: Remotes | None) -> Iterator[EncodedImage]:
        """Yield the rows. Where the tar cannot be opened, or is lost from some place on, the last row says so."""
        damage: ImageError | None = None
        num_members = 0
        try:
            with (
                open_archive(self._archive, remotes, stops=True) as opened,
                ForwardFile(opened, self._archive.num_bytes) as file,
                UniqueNames() as names,
            ):
                for num_members, member in enumerate(read_members(file), start=1):  # noqa: B007  told of below
                    if self._next_wanted == len(self._rows) and self._buffer.is_empty:
                        return
                    lost = yield from self._take(file, member, names)
                    if lost:
                        break
        except ImageError as error:
            damage = error
        except READ_ERRORS as error:
            damage = ImageError(_code_of(error), describe(error))
        yield from self._buffer.end()
        if damage is not None:
            message = f"{damage} (after {num_members:,} members; what follows is lost)" if num_members else str(damage)
            logger.error("%s: %s", self._archive.key, message)
            image = self._row(f"{self._archive.key}!", ImageError(damage.code, message))
            yield from self._buffer.add_picture(image, 0)
            yield from self._buffer.end()
        self.is_done = True

    def _take(self, file: ForwardFile, member: Member, names: UniqueNames) -> Generator[EncodedImage, None, bool]:
        """Yield what a member makes ready; returns whether nothing behind it can be read.

        Raises:
            ImageError: the same, and the member is no row that could tell.
        """
        if member.kind == NO_END:
            logger.warning("%s has no end mark: if it was cut there, what followed is missing", self._archive.key)
        if member.kind != "file" or is_hidden(member.name):
            count_kind(self.skipped, "hidden" if member.kind == "file" else member.kind)
            return False
        sample, extension = split_name(member.name)
        yield from self._buffer.begin(sample)
        head = b"" if has_picture_extension(member.name) else file.read(min(SNIFF_BYTES, member.num_bytes))
        if not is_picture(member.name, head):
            self._take_text(file, member, head, extension)
            return False
        key = names.key(f"{self._archive.key}!/{escape_name(member.name)}")
        content, lost = self._content(file, member, head) if self._is_wanted else self._pass_over(file, member)
        if lost:
            logger.error("%s: %s; what follows it is lost", key, content)
        num_bytes = min(member.num_bytes, self._max_file_bytes)
        yield from self._buffer.add_picture(self._row(key, content), num_bytes)
        return lost

    @property
    def _is_wanted(self) -> bool:
        """Whether the next row is one of `rows`."""
        wanted = self._next_wanted
        return wanted < len(self._rows) and self._rows[wanted] == self._first_row + self.num_rows

    def _row(self, key: str, content: bytes | ImageError) -> EncodedImage | None:
        """The next row, if it is wanted."""
        is_wanted = self._is_wanted
        row = self._first_row + self.num_rows
        self.num_rows += 1
        self._next_wanted += is_wanted
        return EncodedImage(row=row, key=key, content=content) if is_wanted else None

    def _content(self, file: ForwardFile, member: Member, head: bytes) -> tuple[bytes | ImageError, bool]:
        """What a picture or a text holds, and whether nothing behind it can be read."""
        if member.num_bytes > self._max_file_bytes:
            content, lost = self._pass_over(file, member)
            return (content if lost else too_large(member.num_bytes, self._max_file_bytes)), lost
        try:
            content = head + file.read(member.num_bytes - len(head))
        except MemoryError:
            return ImageError(FailureCode.OUT_OF_MEMORY, "no memory for the file's bytes"), not file.can_seek
        except READ_ERRORS as error:
            return ImageError(_code_of(error), describe(error)), not file.can_seek
        except StorageError as error:  # of a server; where it does not give the next header either, the run stops there
            if not file.can_seek:
                raise
            return ImageError(FailureCode.FETCH_FAILED, str(error.__cause__)), False
        if len(content) < member.num_bytes:
            return _cut(member, len(content)), True
        return content, False

    def _pass_over(self, file: ForwardFile, member: Member) -> tuple[bytes | ImageError, bool]:
        """The same of a picture that is not read."""
        try:
            if file.advance(member.end):
                return b"", False
        except READ_ERRORS as error:
            return ImageError(_code_of(error), describe(error)), True
        return _cut(member, file.position - member.begin), True

    def _take_text(self, file: ForwardFile, member: Member, head: bytes, extension: str) -> None:
        kind = kind_of(member.name)
        if extension not in self._columns.extensions:
            count_kind(self.skipped, kind)
        elif member.num_bytes > MAX_TEXT_BYTES:
            count_kind(self.skipped, f"{kind} above {MAX_TEXT_BYTES // 2**20} MiB")
        else:
            content, lost = self._content(file, member, head)
            if isinstance(content, bytes):
                self._buffer.add_text(extension, content)
            elif lost:
                raise content
            else:
                count_kind(self.skipped, f"unreadable {kind}")


def _code_of(error: BaseException) -> FailureCode:
    is_cut = isinstance(error, EOFError) or "Truncated compressed stream" in str(error)  # gzip's, bzip2's, xz's; zstd's
    return FailureCode.TRUNCATED if is_cut else FailureCode.UNREADABLE


def _cut(member: Member, num_bytes: int) -> ImageError:
    msg = f"the archive ends within it: {num_bytes:,} of {member.num_bytes:,} bytes are there"
    return ImageError(FailureCode.TRUNCATED, msg)
