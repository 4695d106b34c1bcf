"""Rows go from the source to the decoders in chunks, which share what a hand-over from stage to stage costs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlmembed.types import EncodedImage

    Chunk = list[EncodedImage]

MAX_CHUNK_ROWS = 32
MAX_CHUNK_BYTES = 2**20
"""Limit of the encoded bytes, but for the row that reaches it."""

MAX_CHUNK_SECONDS = 0.05
"""A chunk whose first row has waited for so long goes with the next one that comes; not before, so that a source that
pauses keeps up to `MAX_CHUNK_ROWS` - 1 rows with it."""


def in_chunks(rows: Iterator[EncodedImage], rows_per_part: int) -> Iterator[Chunk]:
    """Neighbours of one part, as many as come quickly and the limits allow."""
    chunk: Chunk = []
    num_bytes, began = 0, 0.0
    for image in rows:
        if not chunk:
            num_bytes, began = 0, time.monotonic()
        chunk.append(image)
        num_bytes += len(image.content) if isinstance(image.content, bytes) else 0
        is_full = len(chunk) >= MAX_CHUNK_ROWS or num_bytes >= MAX_CHUNK_BYTES or _ends_part(chunk, rows_per_part)
        if is_full or time.monotonic() - began >= MAX_CHUNK_SECONDS:
            del image
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def by_part(chunks: Iterator[Chunk], rows_per_part: int) -> Iterator[Iterator[Chunk]]:
    """The chunks of each part, which are to be taken before the next part's. What comes behind a part is not waited
    for: the source may take its time."""

    def of_part(chunk: Chunk | None) -> Iterator[Chunk]:
        while chunk is not None:
            yield chunk
            chunk = None if _ends_part(chunk, rows_per_part) else next(chunks, None)

    return (of_part(first) for first in chunks)


def _ends_part(chunk: Chunk, rows_per_part: int) -> bool:
    return (chunk[-1].row + 1) % rows_per_part == 0
