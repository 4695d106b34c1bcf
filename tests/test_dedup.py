"""The hash is whole, the first row wins, and a duplicate is never encoded."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from vlmembed.dedup import HashIndex, dedup
from vlmembed.errors import FailureCode, ImageError
from vlmembed.types import EncodedImage, Failure, UniqueImage

if TYPE_CHECKING:
    from pathlib import Path


def images(*contents: bytes | ImageError) -> list[EncodedImage]:
    return [EncodedImage(row=row, key=f"k{row}", content=content) for row, content in enumerate(contents)]


def test_the_first_row_with_a_content_stands_for_all(tmp_path: Path) -> None:
    gone = ImageError(FailureCode.MISSING, "gone")
    with HashIndex(tmp_path / "index") as index:
        results = list(dedup(images(b"a", b"b", b"a", gone, gone, b"", b"b"), index))
    assert [ref.first_row for ref, _ in results] == [0, 1, 0, 3, 4, 5, 1]
    assert [type(work) for _, work in results] == [
        UniqueImage,
        UniqueImage,
        type(None),
        Failure,
        Failure,
        UniqueImage,
        type(None),
    ]
    assert results[2][0].content_hash == hashlib.sha256(b"a").digest()
    assert results[3][0].content_hash is None
    assert results[3][1] == Failure(row=3, stage="read", code=FailureCode.MISSING, message="gone")
    assert not (tmp_path / "index").exists()


def test_without_an_index_every_row_is_its_own() -> None:
    results = list(dedup(images(b"a", b"a"), None))
    assert [ref.first_row for ref, _ in results] == [0, 1]
    assert results[0][0].content_hash == results[1][0].content_hash


def test_hashes_that_share_a_prefix_are_different(tmp_path: Path) -> None:
    first, second = b"\0" * 31 + b"\1", b"\0" * 31 + b"\2"
    with HashIndex(tmp_path / "index") as index:
        assert index.first_row(first, 0) == 0
        assert index.first_row(second, 1) == 1
        assert index.first_row(first, 2) == 0
        for row in range(3, 5000):
            assert index.first_row(hashlib.sha256(str(row).encode()).digest(), row) == row
        assert index.first_row(second, 5000) == 1
