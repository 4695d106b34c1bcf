"""Distinct pictures by the thousand, out of photos and stamps: crops, some of them mirrored, as JPEGs.

The same number of the same sources is the same picture on every machine with the same Pillow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LEAST_SHARE = 0.6
"""Of the source's width, and of its height, that a crop has."""

SHORT_EDGES = (224, 400)
LONGEST_EDGE = 500
"""Pixels."""

LEAST_SOURCE_EDGE = 100
QUALITY = 90


def crop(source: Image.Image, number: int) -> Image.Image:
    """A part of `source`, another one for another number."""
    generator = np.random.default_rng(number)
    width, height = (max(1, round(edge * generator.uniform(LEAST_SHARE, 1))) for edge in source.size)
    left, top = (
        int(generator.integers(0, whole - part + 1)) for whole, part in zip(source.size, (width, height), strict=True)
    )
    scale = min(generator.integers(*SHORT_EDGES) / min(width, height), LONGEST_EDGE / max(width, height))
    size = tuple(max(1, round(edge * scale)) for edge in (width, height))
    picture = source.resize(size, Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))
    return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if generator.random() < 0.5 else picture  # noqa: PLR2004  of two


def opened(path: Path) -> Image.Image:
    """A picture on white."""
    with Image.open(path) as image:
        picture = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")


def write_crops(sources: Sequence[Path], folder: Path, num: int) -> int:
    """Fill `folder` with so many pictures, all different by content; returns their bytes. Sources that are too small
    are passed over."""
    folder.mkdir()
    large = [path for path in sources if min(opened(path).size) >= LEAST_SOURCE_EDGE]
    contents = set()
    for number in range(num):
        path = folder / f"{number:06}.jpg"
        crop(opened(large[number % len(large)]), number).save(path, quality=QUALITY)
        contents.add(path.read_bytes())
    assert len(contents) == num, f"{num - len(contents)} of {num} crops are repeated"
    return sum(map(len, contents))
