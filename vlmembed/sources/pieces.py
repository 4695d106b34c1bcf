"""Pieces of a source, for other processes to read: what was listed of some rows, and how to read them.

A piece holds no open files and no threads, only what its rows need. What was listed is not listed again; files that
have changed since fail as they do in the process that has listed them. Relative paths stay relative, as messages show
them: the process that reads a piece must be in the same working folder.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from vlmembed.errors import InputError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from vlmembed.sources.readahead import ReadAhead
    from vlmembed.types import EncodedImage

_Span = TypeVar("_Span")


class Piece(Protocol):
    """Some rows of a source, for another process to read. Can be pickled, and holds no more than these rows need."""

    @property
    def rows(self) -> range:
        """Their numbers in the run."""
        ...

    def open(self, reader: ReadAhead) -> Generator[EncodedImage, None, None]:
        """Yield exactly these rows, numbered as in the run, as the source's `read_rows` does.

        Raises:
            InputError: some are not there: a tar has changed since its rows were counted.
            StorageError: the server of a tar fails.
        """
        ...


@runtime_checkable
class Divisible(Protocol):
    """A source that can be cut into pieces. Its rows must have been counted."""

    def pieces(self, rows: range, size: int, first_row: int = 0) -> Iterator[Piece]:
        """Yield the pieces that hold `rows`, in order: piece k has those of [k * size, (k + 1) * size).

        All are numbers in the run, in which the source begins with row `first_row`. What was listed is read once, piece
        by piece; no other read of the source may be under way meanwhile.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What a file held that is counted only by reading: rows, and members that are none, by kind."""

    num_rows: int
    skipped: Counter[str]


class CountPiece(Protocol):
    """A file whose rows are counted only by reading, for another process to count. Can be pickled."""

    def count(self, reader: ReadAhead) -> Counted:
        """Read it to its end, passing over its pictures.

        Raises:
            StorageError: its server fails.
        """
        ...


@runtime_checkable
class Countable(Protocol):
    """A source that may have files whose rows are counted only by reading."""

    def uncounted(self) -> list[CountPiece]:
        """Those that have not been counted yet, in order."""
        ...

    def counted(self, counts: Sequence[Counted]) -> None:
        """Take what was found in `uncounted`, in the same order."""
        ...


class Readable(Protocol):
    """What reads rows that were listed."""

    def read_rows(self, rows: Sequence[int]) -> Iterator[EncodedImage]:
        """See `Source`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePiece:
    """A piece of a single source.

    Attributes:
        run: its rows, by their numbers in what `make` makes.
        first_row: number in the run of what is row 0 there.
        make: makes what reads them, with a reader.
    """

    run: range
    first_row: int
    make: Callable[[ReadAhead], Readable]

    @property
    def rows(self) -> range:
        """See `Piece`."""
        return range(self.first_row + self.run.start, self.first_row + self.run.stop)

    def open(self, reader: ReadAhead) -> Generator[EncodedImage, None, None]:
        """See `Piece`."""
        num_read = 0
        for image in self.make(reader).read_rows(self.run):
            num_read += 1
            yield replace(image, row=self.first_row + image.row) if self.first_row else image
        if num_read < len(self.run):
            rows = self.rows
            msg = (
                f"of the rows {rows[0]} to {rows[-1]}, which were counted, {num_read} are there: an input has changed "
                "since; start anew with --overwrite"
            )
            raise InputError(msg)


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedPiece:
    """A piece that reaches from one source into the next ones."""

    parts: tuple[Piece, ...]

    @property
    def rows(self) -> range:
        """See `Piece`."""
        return range(self.parts[0].rows.start, self.parts[-1].rows.stop)

    def open(self, reader: ReadAhead) -> Generator[EncodedImage, None, None]:
        """See `Piece`."""
        for part in self.parts:
            yield from part.open(reader)


def join(pieces: Iterable[Piece], size: int) -> Iterator[Piece]:
    """Make one piece of those that are parts of it: their rows lie between the same multiples of `size`."""
    for _, found in groupby(pieces, key=lambda piece: piece.rows.start // size):
        parts = tuple(found)
        yield parts[0] if len(parts) == 1 else JoinedPiece(parts=parts)


def cut(rows: range, size: int, first_row: int) -> Iterator[range]:
    """The rows of each piece of `rows`, by their numbers in a source that begins with row `first_row` of the run."""
    assert rows.step == 1
    for begin in range(rows.start - rows.start % size, rows.stop, size):
        yield range(max(rows.start, begin) - first_row, min(rows.stop, begin + size) - first_row)


def holding(spans: Sequence[_Span], run: range, first_row: Callable[[_Span], int]) -> list[_Span]:
    """Those of `spans` that hold rows of `run`, which has some: each begins at its `first_row`, where the one before
    it ends."""
    first = max(0, bisect_right(spans, run.start, key=first_row) - 1)
    return list(spans[first : bisect_left(spans, run.stop, key=first_row)])
