"""Pictures in tars, WebDataset's among them."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from vlmembed.sources.archive import list_archives
from vlmembed.sources.base import rows_between
from vlmembed.sources.pieces import Counted, SourcePiece, cut, holding
from vlmembed.sources.samples import KeptColumns
from vlmembed.sources.tarnames import TAR_HEAD_BYTES, is_tar
from vlmembed.sources.tarpass import TarPass

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vlmembed.remote.remotes import Remotes
    from vlmembed.sources.archive import Archive
    from vlmembed.sources.pieces import CountPiece, Piece
    from vlmembed.sources.readahead import ReadAhead
    from vlmembed.types import EncodedImage

__all__ = ["TAR_HEAD_BYTES", "TarSource", "is_tar"]

logger = logging.getLogger(__name__)

_BEYOND_ALL = (sys.maxsize,)
"""Rows that are wanted of a tar that is to be read to its end for no row of it."""

_GUESSED_ROW_BYTES = 100_000
"""Of a tar, for each row, as long as the rows are not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TarCount:
    """A tar whose rows are to be counted."""

    archive: Archive
    keep_columns: tuple[str, ...]

    def count(self, reader: ReadAhead) -> Counted:
        """See `CountPiece`."""
        current = TarPass(
            self.archive,
            first_row=0,
            rows=_BEYOND_ALL,
            columns=KeptColumns(self.keep_columns),
            max_file_bytes=reader.max_file_bytes,
        )
        for _ in current.read(reader.remotes):
            pass
        assert current.is_done
        return Counted(num_rows=current.num_rows, skipped=current.skipped)


class TarRows:
    """Rows of tars that were listed. `num_rows` has how many each holds, None where it was not counted yet: it is when
    it has been read to its end, and what it holds beside rows comes to `skipped` then."""

    def __init__(
        self,
        *,
        archives: Sequence[Archive],
        num_rows: list[int | None],
        keep_columns: tuple[str, ...],
        remotes: Remotes | None,
        max_file_bytes: int,
    ) -> None:
        self.skipped: Counter[str] = Counter()
        self._archives = archives
        self._num_rows = num_rows
        self._columns = KeptColumns(keep_columns)
        self._remotes = remotes
        self._max_file_bytes = max_file_bytes

    @classmethod
    def of_reader(
        cls,
        reader: ReadAhead,
        *,
        archives: Sequence[Archive],
        num_rows: list[int | None],
        keep_columns: tuple[str, ...],
    ) -> TarRows:
        """With what a reader has."""
        return TarRows(
            archives=archives,
            num_rows=num_rows,
            keep_columns=keep_columns,
            remotes=reader.remotes,
            max_file_bytes=reader.max_file_bytes,
        )

    def read_rows(self, rows: Sequence[int]) -> Iterator[EncodedImage]:
        """Yield these rows; tars that hold none of them are not opened again once their rows are counted."""
        first_row = 0
        for number, archive in enumerate(self._archives):
            if not rows or first_row > rows[-1]:
                return
            num_rows = self._num_rows[number]
            if num_rows is None or rows_between(rows, first_row, num_rows):
                current = TarPass(
                    archive,
                    first_row=first_row,
                    rows=rows,
                    columns=self._columns,
                    max_file_bytes=self._max_file_bytes,
                )
                yield from current.read(self._remotes)
                if not current.is_done:
                    return
                if num_rows is None:
                    self._num_rows[number] = num_rows = current.num_rows
                    self.skipped.update(current.skipped)
            first_row += num_rows


class TarSource(TarRows):
    """The pictures in tars, each of which is read once, from front to back.

    `files` are paths (or URLs) and keys. How many rows there are is known when all of them have been read: a tar has no
    list of what it holds. `keep_columns`: see `KeptColumns`. A picture of more than `max_file_bytes` is not read.

    Raises:
        InputError: one of them cannot be looked up.
    """

    def __init__(
        self,
        files: Sequence[tuple[str, str]],
        *,
        remotes: Remotes | None,
        keep_columns: tuple[str, ...],
        max_file_bytes: int,
    ) -> None:
        super().__init__(
            archives=list_archives(files, remotes),
            num_rows=[None] * len(files),
            keep_columns=keep_columns,
            remotes=remotes,
            max_file_bytes=max_file_bytes,
        )
        self.kept_schema = self._columns.schema
        digest, keys_digest = hashlib.sha256(), hashlib.sha256()
        for archive in self._archives:
            digest.update(json.dumps([archive.key, archive.num_bytes, archive.version]).encode() + b"\n")
            keys_digest.update(json.dumps([archive.key, archive.num_bytes]).encode() + b"\n")
        self.digest, self.keys_digest = digest.hexdigest(), keys_digest.hexdigest()

    @property
    def files_bytes(self) -> list[int]:
        """Size of each tar; 0 where a server does not tell."""
        return [archive.num_bytes or 0 for archive in self._archives]

    @property
    def num_rows(self) -> int | None:
        """Rows of all; None until each tar was read to its end."""
        known = [count for count in self._num_rows if count is not None]
        return sum(known) if len(known) == len(self._num_rows) else None

    @property
    def expected_rows(self) -> int:
        """A guess at `num_rows` by the size of what was not read yet, or `num_rows`."""
        sizes = zip(self._num_rows, self.files_bytes, strict=True)
        return sum(num_bytes // _GUESSED_ROW_BYTES + 1 if count is None else count for count, num_bytes in sizes)

    def read(self, start: int) -> Iterator[EncodedImage]:
        """Yield the rows from `start` on. Those before it cost their headers alone, in a tar that is not compressed."""
        yield from self.read_rows(range(start, sys.maxsize))
        if start == 0:
            for name in self._columns.missing:
                logger.error("--keep-columns %s is null in every row: no sample with a picture has it", name)

    def uncounted(self) -> list[CountPiece]:
        """See `Countable`."""
        tars = zip(self._archives, self._num_rows, strict=True)
        return [
            TarCount(archive=archive, keep_columns=tuple(self.kept_schema.names))
            for archive, num_rows in tars
            if num_rows is None
        ]

    def counted(self, counts: Sequence[Counted]) -> None:
        """See `Countable`."""
        numbers = [number for number, num_rows in enumerate(self._num_rows) if num_rows is None]
        for number, count in zip(numbers, counts, strict=True):
            self._num_rows[number] = count.num_rows
            self.skipped.update(count.skipped)

    def pieces(self, rows: range, size: int, first_row: int = 0) -> Iterator[Piece]:
        """See `Divisible`."""
        counts = [num_rows for num_rows in self._num_rows if num_rows is not None]
        assert len(counts) == len(self._num_rows), "see `counted`"
        first_rows = list(accumulate(counts[:-1], initial=0))
        keep_columns = tuple(self.kept_schema.names)
        for run in cut(rows, size, first_row):
            tars = holding(range(len(counts)), run, first_rows.__getitem__)
            before = first_rows[tars[0]]
            make = partial(
                TarRows.of_reader,
                archives=[self._archives[tar] for tar in tars],
                num_rows=[counts[tar] for tar in tars],
                keep_columns=keep_columns,
            )
            local = range(run.start - before, run.stop - before)
            yield SourcePiece(run=local, first_row=first_row + before, make=make)

    def close(self) -> None:
        """Nothing is kept open between reads."""
