"""What a source of images is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    import pyarrow as pa

    from vlmembed.types import EncodedImage


class Source(Protocol):
    """A finite, ordered, repeatable stream of rows.

    Attributes:
        num_rows: how many rows `read` yields from the start.
        skipped: files that are no rows, counted by kind.
        kept_schema: schema of the kept source columns; empty where there are none.
    """

    num_rows: int
    skipped: Counter[str]
    kept_schema: pa.Schema

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over the ids, sizes and change times of what will be read."""
        ...

    def read(self, start: int) -> Iterator[EncodedImage]:
        """Yield the rows from number `start` on, in order; an unreadable row carries its `ImageError`."""
        ...

    def close(self) -> None:
        """Release files."""
        ...
