"""What a source of images is."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Protocol

from vlmembed.errors import InputError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from vlmembed.types import EncodedImage


def rows_between(rows: Sequence[int], first: int, num_rows: int) -> Sequence[int]:
    """Those of `rows`, which ascend, that are among `num_rows` from `first` on."""
    return rows[bisect_left(rows, first) : bisect_left(rows, first + num_rows)]


def expected_rows(source: Source) -> int:
    """About how many rows a source has: exact where it knows, else an estimate of its own (`expected_rows`)."""
    return source.num_rows if source.num_rows is not None else getattr(source, "expected_rows", 0)


class Source(Protocol):
    """A finite, ordered, repeatable stream of rows.

    Attributes:
        num_rows: how many rows `read` yields from the start; None where that is not known before they have been read to
            the end once.
        skipped: files that are no rows, counted by kind.
        kept_schema: schema of the kept source columns; empty where there are none.
    """

    @property
    def num_rows(self) -> int | None:
        """See above."""
        ...

    @property
    def skipped(self) -> Counter[str]:
        """See above."""
        ...

    @property
    def kept_schema(self) -> pa.Schema:
        """See above."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over the ids, sizes and change times of what will be read."""
        ...

    @property
    def keys_digest(self) -> str:
        """SHA-256 (hex) over the ids alone, in order: the same for the same ids, whatever the contents are."""
        ...

    def read(self, start: int) -> Iterator[EncodedImage]:
        """Yield the rows from number `start` on, in order; an unreadable row carries its `ImageError`."""
        ...

    def read_rows(self, rows: Sequence[int]) -> Iterator[EncodedImage]:
        """Yield these rows alone, in order, without reading what the others hold. `rows` ascend, each once."""
        ...

    def close(self) -> None:
        """Release files."""
        ...


def read_after(source: Source, start: int, after: str) -> Iterator[EncodedImage]:
    """Yield the rows from `start` on, if the one before is what it was when it was committed: `after`, its id.

    Raises:
        InputError: it is another one, or not there.
    """
    rows = source.read(start - 1)
    before = next(rows, None)
    if before is None or before.key != after:
        now = "not there" if before is None else repr(before.key)
        msg = (
            f"row {start - 1} was {after!r} when it was committed, and is {now} now: an archive before it gives other "
            "rows than it did; make it readable as it was, or start anew with --overwrite"
        )
        raise InputError(msg)
    return rows
