"""Fuzz target: damaged pictures of every format.

What is decoded is an RGB picture within the limit that becomes patches; everything else is an `ImageError` that says
something.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import fuzzing
import hypothesis.strategies as st
from bombs import BOMBS, picture, saved
from decode_files import builtin_rule, peak_bytes, reset_peak
from PIL import Image

from vlmembed.decode import decode, own_pillow_settings
from vlmembed.errors import ImageError
from vlmembed.preprocess import preprocess

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_SOURCE_PIXELS = 10**6
MAX_MEMORY_BYTES = 300 * 10**6
MAX_SEED_BYTES = 100_000

INTERESTING = [0, 1, 2, 3, 4, 8, 16, 127, 128, 255, 256, 1000, 2**15 - 1, 2**15, 2**16 - 1, 2**16, 10**6, 2**24]
INTERESTING += [2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]

MODES = ("1", "L", "P", "LA", "RGB", "RGBA", "CMYK", "I;16", "I", "F", "LAB", "YCbCr", "PA")


@lru_cache(maxsize=1)
def seeds() -> list[bytes]:
    """The samples, a small picture in every mode and format that Pillow saves, and the bombs."""
    found = {path.read_bytes() for path in _samples()}
    saved(picture(), "PNG")  # registers the formats
    for kind in Image.SAVE:
        if kind not in ("PDF", "EPS", "WMF", "BUFR", "GRIB", "HDF5"):
            found.update(content for mode in MODES if (content := _saved(mode, kind)))
    for options in ({"compression": "tiff_lzw"}, {"compression": "jpeg"}, {"compression": "group4"}):
        found.add(saved(picture().convert("1" if "group4" in options.values() else "RGB"), "TIFF", **options))
    found.add(saved(picture(), "JPEG", progressive=True))
    found.add(saved(picture(), "PNG", save_all=True, append_images=[picture().rotate(9)]))
    found.update(content for make, _ in BOMBS.values() if len(content := make()) <= MAX_SEED_BYTES)
    return sorted(content for content in found if 0 < len(content) <= MAX_SEED_BYTES)


def _samples() -> list[Path]:
    folder = Path(__file__).parent.parent / "sample_data" / "images"  # conftest would import torch
    return [path for path in folder.rglob("*") if path.is_file()]


def _saved(mode: str, kind: str) -> bytes:
    try:
        return saved(picture().convert(mode), kind)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not in that mode
        return b""


@st.composite
def hostile_pictures(draw: st.DrawFn) -> bytes:
    """A seed, made worse in up to four ways."""
    data = draw(st.sampled_from(seeds()))
    for _ in range(draw(st.integers(0, 4))):
        data = _damage(draw, data)
    return data


def _damage(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes changed, dropped or added; more often in the first kilobyte, where the headers are."""
    if not data:
        return data
    last = len(data) - 1
    begin = draw(st.one_of(st.integers(0, min(last, 60)), st.integers(0, min(last, 1000)), st.integers(0, last)))
    end = min(len(data), begin + draw(st.sampled_from([1, 1, 2, 4, 8, 50, 1000])))

    def number() -> bytes:
        num_bytes = draw(st.sampled_from([1, 2, 4, 8]))
        order: Literal["little", "big"] = draw(st.sampled_from(["little", "big"]))
        value: int = draw(st.sampled_from(INTERESTING)) % (1 << 8 * num_bytes)
        return data[:begin] + value.to_bytes(num_bytes, order) + data[begin + num_bytes :]

    ways: list[Callable[[], bytes]] = [
        lambda: data[:begin] + bytes([data[begin] ^ 1 << draw(st.integers(0, 7))]) + data[begin + 1 :],
        lambda: data[:begin] + draw(st.binary(min_size=1, max_size=8)) + data[begin + 1 :],
        number,
        lambda: data[:begin] + data[end:],
        lambda: data[:begin] + draw(st.binary(min_size=1, max_size=20)) + data[begin:],
        lambda: data[:begin] + data[begin:end] * draw(st.sampled_from([2, 3, 100])) + data[end:],
        lambda: data[:begin],
        lambda: data[:begin] + (other := draw(st.sampled_from(seeds())))[draw(st.integers(0, len(other))) :],
    ]
    return draw(st.sampled_from(ways))()[: 4 * MAX_SEED_BYTES]


EXAMPLES = hostile_pictures()


def check(data: bytes) -> None:
    """Decode and preprocess; see the module."""
    warnings.simplefilter("ignore")
    rule = builtin_rule(MAX_SOURCE_PIXELS)
    reset_peak()
    before = peak_bytes()
    with own_pillow_settings(MAX_SOURCE_PIXELS):
        try:
            decoded = decode(data, max_source_pixels=MAX_SOURCE_PIXELS)
            patched = preprocess(decoded.rgb, 0, rule)
        except ImageError as error:
            assert str(error).strip(), error.code  # noqa: PT017  the error is what is looked at
        else:
            assert decoded.rgb.mode == "RGB"
            height, width = decoded.size_hw
            assert 0 < height * width <= MAX_SOURCE_PIXELS
            assert patched.size_hw == (height, width)
            assert patched.patches.shape == (patched.grid_hw[0] * patched.grid_hw[1], 3 * 14**2)
    grown = peak_bytes() - before
    assert grown <= MAX_MEMORY_BYTES, f"{grown} bytes for a file of {len(data)}"


def fuzz(seconds: float, seed: int) -> fuzzing.FuzzReport:
    """Fuzz for so long."""
    return fuzzing.fuzz("fuzz_decode", seconds, seed)
