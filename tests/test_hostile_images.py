"""Pictures made to do harm: each ends by the rules, and none takes memory that its size does not explain."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from bombs import (
    BOMBS,
    DATA,
    EMBEDDED,
    ONE_STRIP,
    RGB_16X16,
    SIZE,
    Tags,
    picture,
    png,
    png_chunk,
    rgb_tags,
    saved,
    tiff,
)
from PIL import Image, ImageOps

from vlmembed.codestream import check_codestreams
from vlmembed.config import DEFAULT_MAX_SOURCE_PIXELS
from vlmembed.decode import decode, own_pillow_settings
from vlmembed.errors import FailureCode, ImageError

TESTS = Path(__file__).parent
LIMIT = DEFAULT_MAX_SOURCE_PIXELS


def decoded_elsewhere(folder: Path, contents: dict[str, bytes]) -> dict[str, tuple[str, str, int]]:
    """What `decode_files.py` says of files: an outcome, a message and a peak of memory each."""
    paths = {str(folder / f"{number:03}"): name for number, name in enumerate(contents)}
    for path, name in paths.items():
        Path(path).write_bytes(contents[name])
    command = [sys.executable, "-W", "ignore", str(TESTS / "decode_files.py"), str(LIMIT), *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return {paths[path]: tuple(found) for path, found in json.loads(done.stdout).items()}


def test_bombs_end_by_the_rules_and_take_at_most_300_mb(tmp_path: Path) -> None:
    found = decoded_elsewhere(tmp_path, {name: make() for name, (make, _) in BOMBS.items()})
    wrong = {name: found[name] for name, (_, right) in BOMBS.items() if found[name][0] not in right}
    assert not wrong
    assert all(message for code, message, _ in found.values() if code != EMBEDDED)
    assert "17825" in found["png: an EXIF block of 17 MiB"][1]
    dearest = sorted(found, key=lambda name: -found[name][2])
    print(*(f"{found[name][2] / 1e6:.0f} MB {name}: {found[name][0]}" for name in dearest[:9]), sep="\n")  # noqa: T201
    assert max(peak_bytes for code, _, peak_bytes in found.values() if code != EMBEDDED) <= 300e6
    assert max(peak_bytes for _, _, peak_bytes in found.values()) <= 450e6  # a side of eight million pixels


def compressed_png(side: int, depth: int, colour: int, sample_bytes: int, *chunks: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", side, side, depth, colour, 0, 0, 0)
    data = zlib.compress(bytes((side * sample_bytes + 1) * side), 1)
    body = png_chunk(b"IHDR", header) + b"".join(chunks) + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def compressed_tiff(side: int, sample_format: int) -> bytes:
    strip = zlib.compress(bytes(16 * side * 4), 1)
    num_strips = -(-side // 16)
    tags: Tags = rgb_tags((side, side), compression=8, photometric=1) | {258: (3, [32]), 277: (3, [1])}
    tags |= {273: (4, [DATA] * num_strips), 278: (4, [16]), 279: (4, [len(strip)] * num_strips)}
    return tiff(tags | {339: (3, [sample_format])}, strip)


def test_a_picture_costs_at_most_eleven_bytes_a_pixel(tmp_path: Path) -> None:
    """Four for RGB as Pillow holds it, as many before the conversion, and the decoder's own."""
    side = 4000
    contents = {
        "rgb": compressed_png(side, 8, 2, 3),
        "rgba": compressed_png(side, 8, 6, 4),
        "grey with alpha": compressed_png(side, 8, 4, 2),
        "16 bits": compressed_png(side, 16, 0, 2),
        "16 bits, one of them transparent": compressed_png(side, 16, 0, 2, png_chunk(b"tRNS", b"\0\1")),
        "palette": compressed_png(side, 8, 3, 1, png_chunk(b"PLTE", bytes(9)), png_chunk(b"tRNS", bytes([9, 8]))),
        "32-bit integers": compressed_tiff(side, 2),
        "float": compressed_tiff(side, 3),
    }
    found = decoded_elsewhere(tmp_path, contents)
    assert {code for code, _, _ in found.values()} == {EMBEDDED}
    bytes_per_pixel = {name: round(peak_bytes / side**2, 1) for name, (_, _, peak_bytes) in found.items()}
    print(bytes_per_pixel)  # noqa: T201
    assert max(bytes_per_pixel.values()) <= 11


def test_code_blocks_of_an_ordinary_size_pass() -> None:
    for side in (64, 32, 16):
        content = saved(Image.new("RGB", (2000, 1500)), "JPEG2000", codeblock_size=(side, side))
        check_codestreams(content, LIMIT)
    tiled = saved(Image.new("RGB", (2000, 1500)), "JPEG2000", tile_size=(64, 64))
    check_codestreams(tiled, LIMIT)
    check_codestreams(tiled[:300], LIMIT)


def test_a_codestream_without_end_is_given_up() -> None:
    content = saved(picture(), "JPEG2000", no_jp2=True)
    with pytest.raises(ImageError, match="more than 1048576 marker segments"):
        check_codestreams(content[: content.index(b"\xff\x52")] + bytes(2**21 + 2**10), LIMIT)


def directory(*entries: tuple[int, int, int, bytes], following: int = 0, num_entries: int | None = None) -> bytes:
    head = b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries) if num_entries is None else num_entries)
    return head + b"".join(struct.pack("<HHI4s", *entry) for entry in entries) + struct.pack("<I", following)


TURNED = (274, 3, 1, b"\6\0\0\0")
MALFORMED_EXIF = {
    "no header": b"no tiff header at all",
    "half a header": b"II*",
    "no directory": b"II*\0\x08\0\0\0",
    "directory outside": b"II*\0" + struct.pack("<I", 10**6),
    "directory far outside": b"II*\0" + struct.pack("<I", 2**32 - 1),
    "big directory outside": b"II+\0\x08\0\0\0" + struct.pack("<QQ", 2**63, 0),
    "big directory without end": b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, 2**60),
    "more tags than there are": directory((271, 2, 4, b"abc\0"), num_entries=65535),
    "orientation 0": directory((274, 3, 1, bytes(4))),
    "orientation 9": directory((274, 3, 1, b"\x09\0\0\0")),
    "orientation 65535": directory((274, 3, 1, b"\xff\xff\0\0")),
    "orientation 4294967295": directory((274, 4, 1, b"\xff\xff\xff\xff")),
    "orientation in words": directory((274, 2, 2, b"6\0\0\0")),
    "orientation as bytes": directory((274, 7, 4, b"\6\0\0\0")),
    "orientation 6.0": directory((274, 11, 1, struct.pack("<f", 6))),
    "orientation 6/1": directory((274, 5, 1, struct.pack("<I", 26))) + struct.pack("<II", 6, 1),
    "orientation 0/0": directory((274, 5, 1, struct.pack("<I", 26))) + bytes(8),
}
WITHOUT_ORIENTATION = {
    "orientations outside": directory((274, 3, 5, struct.pack("<I", 10**8))),
    "four billion orientations": directory((274, 3, 2**32 - 1, struct.pack("<I", 8))),
    "no orientation": directory((274, 3, 0, bytes(4))),
    "an unknown type": directory((274, 99, 1, b"\6\0\0\0")),
    "directories in a circle": directory((0x8769, 4, 1, b"\x08\0\0\0"), (0x8825, 4, 1, b"\x08\0\0\0"), following=8),
    "directories in words": directory((0x8769, 2, 4, b"abc\0"), (0x8825, 5, 1, b"abc\0")),
}
"""Pillow skips such a tag, as others do: there is nothing to say about the rest of the block."""


def with_exif(kind: str, block: bytes) -> bytes:
    options = {"lossless": True} if kind == "WEBP" else {}
    return saved(picture(), kind, exif=b"Exif\0\0" + block, **options)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("fault", MALFORMED_EXIF | WITHOUT_ORIENTATION)
def test_a_malformed_exif_block_is_ignored(kind: str, fault: str) -> None:
    decoded = decode(with_exif(kind, (MALFORMED_EXIF | WITHOUT_ORIENTATION)[fault]), max_source_pixels=LIMIT)
    assert decoded.size_hw == SIZE[::-1]
    assert bool(decoded.exif_problem) == (fault in MALFORMED_EXIF)
    if kind != "JPEG":
        np.testing.assert_array_equal(np.asarray(decoded.rgb), np.asarray(picture()))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "AVIF"])
@pytest.mark.parametrize(
    ("block", "problem"),
    [
        (directory(TURNED), ""),
        (directory(TURNED, following=8), ""),
        (directory((274, 3, 2, b"\6\0\3\0")), ""),
        (directory(TURNED, num_entries=9)[:-4], "its 9 tags end after 1"),
    ],
)
def test_an_orientation_that_can_be_read_is_applied(kind: str, block: bytes, problem: str) -> None:
    content = with_exif(kind, block)
    decoded = decode(content, max_source_pixels=LIMIT)
    assert decoded.size_hw == SIZE
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    np.testing.assert_array_equal(np.asarray(decoded.rgb), np.asarray(expected.convert("RGB")))
    if kind != "AVIF":  # its orientation lies elsewhere, and the block is written anew
        assert decoded.exif_problem == problem


@pytest.mark.parametrize("kind", [2, 7, 3, 4])
@pytest.mark.parametrize("value", [b"\0\0", b"\x09\0", b"\xff\xff", b"6\0"])
def test_a_malformed_orientation_of_a_tiff_is_ignored(kind: int, value: bytes) -> None:
    tag: Tags = {274: (kind, value) if kind in (2, 7) else (kind, list(struct.unpack("<H", value)))}
    decoded = decode(tiff(rgb_tags((16, 8)) | ONE_STRIP | tag, RGB_16X16), max_source_pixels=LIMIT)
    assert decoded.size_hw == (8, 16)


def test_messages_name_the_limit_and_the_remedy() -> None:
    for name, words in {
        "gigapixels: tiff": "4160000000 pixels. exceeds limit of 178956970 pixels: raise --max-source-pixels",
        "tiff: a tile beyond 32 bits": "its TIFF tiles are 4294967295x4294967295 = .* raise --max-source-pixels",
        "tiff: 600,000 strips": "tag 273 has 600000 values, more than 524288: save it with fewer, larger strips",
        "jpeg 2000: 65,535 tiles of one pixel": "would take 718 MiB beside the 255x257 pixels: save it with larger",
        "png: 400 MiB in zTXt": "save it without its texts and colour profile",
        "gigapixels: fits, in gzip": "over the limit of 4194304: save it without gzip",
        "size: 10000000x1": "a side is over the limit of 8388608 pixels; cut it",
    }.items():
        with own_pillow_settings(LIMIT), pytest.raises(ImageError, match=words):
            decode(BOMBS[name][0](), max_source_pixels=LIMIT)


def test_text_that_pillow_accepts_costs_no_picture() -> None:
    text = png_chunk(b"zTXt", b"key\0\0" + zlib.compress(bytes(2**20)))
    assert decode(png(SIZE, text), max_source_pixels=LIMIT).size_hw == SIZE[::-1]
    one_more = png_chunk(b"zTXt", b"key\0\0" + zlib.compress(bytes(2**20 + 1)))
    with pytest.raises(ImageError) as caught:
        decode(png(SIZE, one_more), max_source_pixels=LIMIT)
    assert caught.value.code is FailureCode.TOO_LARGE
