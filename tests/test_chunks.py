"""Rows go together within a part and a few bounds, and none waits for rows that come slowly, or for the next part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmembed.chunks import MAX_CHUNK_BYTES, MAX_CHUNK_ROWS, MAX_CHUNK_SECONDS, by_part, in_chunks
from vlmembed.types import EncodedImage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pytest


def images(rows: Iterable[int], num_bytes: int = 1) -> Iterator[EncodedImage]:
    return (EncodedImage(row=row, key=f"k{row}", content=bytes(num_bytes)) for row in rows)


def rows_of(chunks: Iterable[list[EncodedImage]]) -> list[list[int]]:
    return [[image.row for image in chunk] for chunk in chunks]


def test_chunks_hold_neighbours_of_one_part() -> None:
    chunks = rows_of(in_chunks(images(range(50, 250)), 100))
    assert [row for chunk in chunks for row in chunk] == list(range(50, 250))
    assert all(len(chunk) <= MAX_CHUNK_ROWS and len({row // 100 for row in chunk}) == 1 for chunk in chunks)
    assert len(chunks) == sum(-(-rows // MAX_CHUNK_ROWS) for rows in (50, 100, 50))
    assert rows_of(in_chunks(images([]), 100)) == []


def test_large_rows_go_alone() -> None:
    assert rows_of(in_chunks(images(range(3), MAX_CHUNK_BYTES), 100)) == [[0], [1], [2]]
    assert rows_of(in_chunks(images(range(4), MAX_CHUNK_BYTES // 2), 100)) == [[0, 1], [2, 3]]


def test_a_row_does_not_wait_for_many_that_come_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("vlmembed.chunks.time.monotonic", lambda: next(clock) * MAX_CHUNK_SECONDS / 3)
    assert rows_of(in_chunks(images(range(6)), 100)) == [[0, 1, 2], [3, 4, 5]]


def test_a_part_ends_without_a_row_of_the_next() -> None:
    read: list[int] = []

    def noted() -> Iterator[EncodedImage]:
        for image in images(range(10)):
            read.append(image.row)
            yield image

    parts = by_part(in_chunks(noted(), 4), 4)
    assert rows_of(next(parts)) == [[0, 1, 2, 3]]
    assert read == [0, 1, 2, 3]
    assert [rows_of(part) for part in parts] == [[[4, 5, 6, 7]], [[8, 9]]]
