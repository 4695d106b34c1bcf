"""The hash is whole, the first row wins, and a duplicate is never encoded."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from vlmembed.dedup import HashIndex, dedup
from vlmembed.errors import FailureCode, ImageError, StorageError
from vlmembed.types import EncodedImage, Failure, UniqueImage


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


def hash_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def test_all_hashes_are_found_again_however_often_the_table_grew(tmp_path: Path) -> None:
    with HashIndex(tmp_path / "index") as index:
        assert [index.first_row(hash_of(row), row) for row in range(20_000)] == list(range(20_000))
        assert [index.first_row(hash_of(row), 10**12) for row in range(20_000)] == list(range(20_000))
        assert (tmp_path / "index").stat().st_size <= 20_000 * 40


def test_a_crowd_of_hashes_whose_tags_are_equal_is_told_apart(tmp_path: Path) -> None:
    alike = [bytes(4) + hash_of(number)[4:] for number in range(300)]
    last = [b"\xff" * 4 + hash_of(number)[4:] for number in range(300)]
    with HashIndex(tmp_path / "index") as index:
        for row, content_hash in enumerate(alike + last):
            assert index.first_row(content_hash, row) == row
        for row in range(1000, 6000):  # the table grows
            assert index.first_row(hash_of(row), row) == row
        for row, content_hash in enumerate(alike + last):
            assert index.first_row(content_hash, -1) == row


def test_an_index_that_cannot_write_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        HashIndex(tmp_path / "nowhere" / "index")
    with HashIndex(tmp_path / "index") as index:
        index._file.close()
        index._file = Path("/dev/full").open("w+b", buffering=0)  # type: ignore[assignment]  # noqa: SIM115  the index's
        with pytest.raises(StorageError, match="No space left"):
            list(dedup(images(*(str(row).encode() for row in range(2000))), index))
