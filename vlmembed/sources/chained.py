"""Several sources, one after the other."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import pyarrow as pa

from vlmembed.sources.base import expected_rows, rows_between
from vlmembed.sources.pieces import Countable, Divisible, join

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import ExitStack

    from vlmembed.sources.base import Source
    from vlmembed.sources.pieces import Counted, CountPiece, Piece
    from vlmembed.types import EncodedImage

MAX_ROW = 2**63 - 1


class ChainedSource:
    """Several sources, one after the other, as one. `resources` are what they need, and are released with it."""

    def __init__(self, sources: Sequence[Source], resources: ExitStack) -> None:
        self.sources = sources
        self._resources = resources
        self.digest = _joint([source.digest for source in sources])
        self.keys_digest = _joint([source.keys_digest for source in sources])
        self.kept_schema = sources[0].kept_schema if len(sources) == 1 else pa.schema([])

    @property
    def num_rows(self) -> int | None:
        """Rows of all; None while one does not know its own."""
        counts = [source.num_rows for source in self.sources]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    @property
    def expected_rows(self) -> int:
        """About how many there are."""
        return sum(map(expected_rows, self.sources))

    @property
    def skipped(self) -> Counter[str]:
        """Of all."""
        return sum((source.skipped for source in self.sources), Counter())

    def read(self, start: int) -> Iterator[EncodedImage]:
        """Yield the rows of each source, numbered through."""
        first_row = 0
        for source in self.sources:
            if source.num_rows is None or start < first_row + source.num_rows:
                yield from _numbered(source.read(max(0, start - first_row)), first_row)
            assert source.num_rows is not None  # it was read to its end
            first_row += source.num_rows

    def read_rows(self, rows: Sequence[int]) -> Iterator[EncodedImage]:
        """Yield the rows of each source that are among these."""
        first_row = 0
        for source in self.sources:
            wanted = rows_between(rows, first_row, MAX_ROW if source.num_rows is None else source.num_rows)
            if wanted:
                yield from _numbered(source.read_rows([row - first_row for row in wanted]), first_row)
            if source.num_rows is None:  # all were found before its end
                return
            first_row += source.num_rows

    def pieces(self, rows: range, size: int, first_row: int = 0) -> Iterator[Piece]:
        """See `Divisible`: the pieces of each source, joined where one reaches into the next."""
        return join(self._parts(rows, size, first_row), size)

    def _parts(self, rows: range, size: int, first_row: int) -> Iterator[Piece]:
        for source in self.sources:
            assert source.num_rows is not None, "see `counted`"
            assert isinstance(source, Divisible)
            found = range(max(rows.start, first_row), min(rows.stop, first_row + source.num_rows))
            if found:
                yield from source.pieces(found, size, first_row)
            first_row += source.num_rows

    def uncounted(self) -> list[CountPiece]:
        """See `Countable`."""
        return [piece for source in self._countable for piece in source.uncounted()]

    def counted(self, counts: Sequence[Counted]) -> None:
        """See `Countable`."""
        left = iter(counts)
        for source in self._countable:
            source.counted(list(islice(left, len(source.uncounted()))))
        assert next(left, None) is None, "more than there were to count"

    @property
    def _countable(self) -> list[Countable]:
        return [source for source in self.sources if isinstance(source, Countable)]

    def close(self) -> None:
        """Close every source, and what they had in common."""
        self._resources.close()


def _numbered(images: Iterator[EncodedImage], first_row: int) -> Iterator[EncodedImage]:
    """The rows of a source whose row 0 is `first_row` of the whole."""
    return (replace(image, row=first_row + image.row) for image in images) if first_row else images


def _joint(digests: list[str]) -> str:
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()
