"""Directories of tags, as TIFF files and EXIF blocks have them, read without Pillow.

Pillow holds a TIFF's picture against the pixel limit, but libtiff unpacks a whole tile, whatever its size, and Pillow
makes Python objects of all values of a tag: a few kilobytes can ask for gigabytes. So they are looked at first.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from vlmembed.errors import FailureCode, ImageError

MAX_TAG_VALUES = 2**19
"""A value that is a strip or tile takes about 250 bytes and 12 microseconds in Pillow."""

_TILE_WIDTH, _TILE_LENGTH, _ICC_PROFILE = 322, 323, 34675
_BASELINE_TAGS = range(1000)
"""These and the colour profile are what Pillow's TIFF plugin looks into; private tags stay bytes."""

_WHOLE_NUMBERS = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 13: "I", 16: "Q", 17: "q", 18: "Q"}
_OTHER_NUMBERS = {5: "Q", 10: "Q", 11: "f", 12: "d"}
_VALUE_BYTES = {kind: struct.calcsize(f"={code}") for kind, code in (_WHOLE_NUMBERS | _OTHER_NUMBERS).items()}
_TIFF, _BIG_TIFF = 42, 43


class Entry(NamedTuple):
    """A tag: its number, the number of its type, how many values it has, and the value if that is one whole number."""

    tag: int
    kind: int
    num_values: int
    value: int


def read_directory(block: bytes) -> tuple[list[Entry], str]:
    """The first directory of a TIFF file or EXIF block, as far as it goes, and what is wrong with it, if anything."""
    order = {b"II": "<", b"MM": ">"}.get(block[:2])
    if order is None or len(block) < 4 or not {_TIFF, _BIG_TIFF} & {block[2], block[3]}:  # noqa: PLR2004  what is read
        return [], f"no TIFF header: it begins {block[:8]!r}"
    is_big = block[2] == _BIG_TIFF  # where Pillow looks, in either byte order
    offset_at, offset_code, number_code, entry_code = (8, "Q", "Q", "HHQ8s") if is_big else (4, "I", "H", "HHI4s")
    try:
        (start,) = struct.unpack_from(order + offset_code, block, offset_at)
        (num_entries,) = struct.unpack_from(order + number_code, block, start)
    except (struct.error, OverflowError):
        return [], "its directory lies outside"
    start += struct.calcsize(order + number_code)
    entry_bytes = struct.calcsize(order + entry_code)
    num_whole = min(num_entries, (len(block) - start) // entry_bytes)
    raw = struct.iter_unpack(order + entry_code, memoryview(block)[start : start + num_whole * entry_bytes])
    entries = [Entry(tag, kind, count, _whole_number(order, kind, value)) for tag, kind, count, value in raw]
    return entries, "" if num_whole == num_entries else f"its {num_entries} tags end after {num_whole}"


def _whole_number(order: str, kind: int, value: bytes) -> int:
    code = _WHOLE_NUMBERS.get(kind)
    if code is None or struct.calcsize(order + code) > len(value):
        return 0
    number: int = struct.unpack_from(order + code, value)[0]
    return number


def check_tiff(content: bytes, max_source_pixels: int) -> None:
    """Refuse a TIFF file whose tiles are larger than a picture may be, or whose tags have too many values.

    Raises:
        ImageError: ``too_large``.
    """
    entries, _ = read_directory(content)
    width = max((entry.value for entry in entries if entry.tag == _TILE_WIDTH), default=0)
    length = max((entry.value for entry in entries if entry.tag == _TILE_LENGTH), default=0)
    if width * length > max_source_pixels:
        msg = (
            f"its TIFF tiles are {width}x{length} = {width * length} pixels, over the limit of {max_source_pixels}: "
            "raise --max-source-pixels to accept it"
        )
        raise ImageError(FailureCode.TOO_LARGE, msg)
    for tag, kind, num_values, _ in entries:
        if tag not in _BASELINE_TAGS and tag != _ICC_PROFILE:
            continue
        value_bytes = _VALUE_BYTES.get(kind, 1)
        # Values of one byte stay bytes, and a number that the file cannot hold makes Pillow skip the tag.
        if value_bytes > 1 and MAX_TAG_VALUES < num_values <= len(content) // value_bytes:
            msg = (
                f"its TIFF tag {tag} has {num_values} values, more than {MAX_TAG_VALUES}: "
                "save it with fewer, larger strips or tiles"
            )
            raise ImageError(FailureCode.TOO_LARGE, msg)
