"""Headers say what decoding then finds; of files and objects no more is read than that takes."""

from __future__ import annotations

import io
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from conftest import SAMPLES
from PIL import Image
from servers import put_s3, s3_server, use_s3

from vlmembed.config import DEFAULT_MAX_SOURCE_PIXELS
from vlmembed.decode import Header, decode, own_pillow_settings, read_header, read_header_of_head
from vlmembed.errors import FailureCode, ImageError
from vlmembed.forecast.histogram import Bin, Spread
from vlmembed.remote.remotes import Remotes
from vlmembed.sources.glance import HEAD_BYTES, Glance, GlancedImage
from vlmembed.sources.readahead import ReadAhead, UnreadRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vlmembed.types import EncodedImage

LIMIT = DEFAULT_MAX_SOURCE_PIXELS


def outcome(read: Callable[[], Header | None]) -> Header | FailureCode | None:
    try:
        return read()
    except ImageError as error:
        return error.code


def bytes_of(image: EncodedImage) -> bytes:
    assert isinstance(image.content, bytes)
    return image.content


def check_against_decoding(paths: Iterable[Path], *head_bytes: int) -> tuple[int, int]:
    """How many pictures there are, and how many of their heads have sufficed."""
    num_pictures = num_told = 0
    for path in paths:
        content = path.read_bytes()
        header = outcome(lambda content=content: read_header(content, max_source_pixels=LIMIT))  # type: ignore[misc]
        try:
            decoded = decode(content, max_source_pixels=LIMIT)
        except ImageError as error:
            failed = error.code
            assert isinstance(header, Header) or header == failed, path
        else:
            assert isinstance(header, Header), path
            assert header.size_hw == decoded.size_hw, path
            num_pictures += 1
        for size in head_bytes:
            if len(content) > size:
                head = content[:size]
                told = outcome(lambda head=head: read_header_of_head(head, max_source_pixels=LIMIT))  # type: ignore[misc]
                assert told in (header, None), path
                num_told += told is not None
    return num_pictures, num_told


def test_the_samples_headers_are_what_decoding_finds() -> None:
    paths = sorted(path for path in SAMPLES.rglob("*") if path.is_file())
    with own_pillow_settings(LIMIT):
        num_pictures, num_told = check_against_decoding(paths, 2048)
    assert num_pictures == 21
    assert num_told > 5


def test_the_headers_of_pillows_own_pictures_are_what_decoding_finds() -> None:
    named = os.environ.get("VLMEMBED_PILLOW_IMAGES", "")
    if not named or not Path(named).is_dir():
        pytest.skip("VLMEMBED_PILLOW_IMAGES names no folder: `make test` puts the sdist's pictures there if pip can")
    crashing = ("crash", "timeout", "oom")  # a decoder of this process may end with them
    paths = [path for path in sorted(Path(named).rglob("*")) if path.is_file()]
    with own_pillow_settings(LIMIT):
        num_pictures, num_told = check_against_decoding(
            [path for path in paths if not any(word in path.name for word in crashing)], 2048, 65536
        )
    assert num_pictures > 800
    assert num_told > 400


def test_a_head_that_shows_too_many_pixels_says_so_for_good() -> None:
    encoded = io.BytesIO()
    Image.new("RGB", (300, 200)).save(encoded, "PNG")
    head = encoded.getvalue()[:100]
    assert read_header_of_head(head, max_source_pixels=60_000) == Header(format="PNG", size_hw=(200, 300))
    assert outcome(lambda: read_header_of_head(head, max_source_pixels=59_999)) is FailureCode.TOO_LARGE
    assert outcome(lambda: read_header_of_head(b"\xff\xd8\xff\xe0" + b"\0" * 90, max_source_pixels=LIMIT)) is None
    assert outcome(lambda: read_header(b"", max_source_pixels=LIMIT)) is FailureCode.EMPTY


def test_rows_that_are_files_come_as_far_as_they_are_asked_for(tmp_path: Path) -> None:
    sizes = {"small": 100, "large": HEAD_BYTES + 1, "hard": 3 * 2**20, "huge": 5 * 2**20}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(name[:2].encode() * (size // 2) + b"." * (size % 2))
    asked: list[tuple[bytes, int, int]] = []

    def look(content: bytes, num_bytes: int) -> object:
        asked.append((content[:2], len(content), num_bytes))
        return None if content.startswith(b"ha") and len(content) < num_bytes else content[:1]

    glance = Glance(look=look, is_on=True)
    reader = ReadAhead(timeout_seconds=20, max_source_pixels=10**6, glance=glance)
    reader.max_file_bytes = 4 * 2**20
    names = [*sizes, "gone"]
    rows = [UnreadRow(row=row, key=name, path=str(tmp_path / name)) for row, name in enumerate(names)]
    images = list(reader.read(rows))
    assert [image.key for image in images] == names
    glanced = {image.key: image for image in images if isinstance(image, GlancedImage)}
    assert {key: (len(bytes_of(image)), image.num_bytes) for key, image in glanced.items()} == {
        "small": (100, 100),
        "large": (HEAD_BYTES, HEAD_BYTES + 1),
        "hard": (3 * 2**20, 3 * 2**20),
    }
    assert {image.seen for image in glanced.values()} == {b"s", b"l", b"h"}
    assert sorted(size for start, size, _ in asked if start == b"ha") == [HEAD_BYTES, 3 * 2**20]
    failed = {image.key: image.content.code for image in images if isinstance(image.content, ImageError)}
    assert failed == {"huge": "too_large", "gone": "missing"}
    glance.is_on, asked[:] = False, []
    whole = list(reader.read(rows[:3]))
    assert [len(bytes_of(image)) for image in whole] == [*sizes.values()][:3]
    assert not asked


def test_heads_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    content = np.random.default_rng(0).bytes(5000)
    with s3_server() as endpoint:
        put_s3(endpoint, {"bucket/a.jpg": content, "bucket/empty.jpg": b""})
        use_s3(endpoint, monkeypatch)
        with Remotes(timeout_seconds=20, allow_local=True) as remotes:
            assert remotes.read_head("s3://bucket/a.jpg", 100, 10**6) == (content[:100], 5000)
            assert remotes.read_head("s3://bucket/a.jpg", 6000, 10**6) == (content, 5000)
            assert remotes.read_head("s3://bucket/empty.jpg", 100, 10**6) == (b"", 0)
            found = [
                remotes.read_head(url, 100, 4999)
                for url in ("s3://bucket/a.jpg", "s3://bucket/gone", "s3://bucket/a?b=")
            ]
    codes = [each.code if isinstance(each, ImageError) else None for each in found]
    assert codes == ["too_large", "missing", "fetch_failed"]


def test_a_spread_counts_exactly_where_numbers_are_small() -> None:
    spread = Spread()
    assert spread.bins() == ()
    assert (spread.summary().min, spread.summary().median, spread.summary().mean) == (0, 0, 0.0)
    for number in (5, 1, 3, 3, 8):
        spread.add(number)
    found = spread.summary()
    assert (found.min, found.median, found.mean, found.max, found.total) == (1, 3, 4.0, 8, 20)
    assert spread.summary(2.5).total == 50
    bins = spread.bins()
    assert sum(each.count for each in bins) == 5
    assert bins[0] == Bin(first=1, last=1, count=1)


def test_a_spread_of_large_numbers_stays_small_and_near() -> None:
    spread = Spread()
    numbers = np.random.default_rng(0).integers(1, 2**27, 100_001)
    for number in numbers.tolist():
        spread.add(number)
    found = spread.summary()
    assert (found.min, found.max, found.total) == (numbers.min(), numbers.max(), numbers.sum())
    assert found.median == pytest.approx(np.median(numbers), rel=2**-11)
    assert len(spread._counts) < 16 * 2048 + 4096
    bins = spread.bins()
    assert len(bins) <= 13
    assert sum(each.count for each in bins) == 100_001
    assert all(before.last + 1 == after.first for before, after in itertools.pairwise(bins))


@pytest.mark.parametrize("numbers", [(0, 0), (0, 7), (1, 1), (7, 9), (257, 257), (203, 257), (4, 16_384), (999, 1001)])
def test_bars_cover_all_numbers(numbers: tuple[int, int]) -> None:
    spread = Spread()
    for number in numbers:
        spread.add(number)
    bins = spread.bins()
    assert 1 <= len(bins) <= 13
    assert sum(each.count for each in bins) == 2
    assert bins[0].first <= numbers[0] <= bins[0].last
    assert bins[-1].first <= numbers[1] <= bins[-1].last
