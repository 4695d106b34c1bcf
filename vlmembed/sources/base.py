"""What a source of images is."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Protocol

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
