"""JPEGs decoded at a half, a quarter or an eighth of their size, where a tower wants far less of them than they hold.

A JPEG's blocks can be turned into fewer pixels than they were made of, which saves most of the work behind the entropy
coding. The picture is then resized as the whole one would be, to the same size, from where it lies in the reduced one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from PIL import Image

from vlmembed.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vlmembed.resize import Fit

MARGIN = 2
"""A reduced picture has, on both sides, at least so many times the pixels that the resize leaves of them: its filter
then does most of the work on what is as good as the whole picture."""

DRAFT_POLICY = f"jpegs at 1/2, 1/4 or 1/8, not below {MARGIN} times the resized size"
"""Recorded in the provenance: other pixels."""

_LOSSLESS = re.compile(rb"\xff[\xc3\xc7\xcb\xcf]\0")
"""The frame header of a JPEG without blocks. libjpeg-turbo decodes some of those at full size whatever is asked for,
into Pillow's row of the reduced one."""

_TURNS = {
    Image.Transpose.FLIP_LEFT_RIGHT: (False, True, False),
    Image.Transpose.ROTATE_180: (False, True, True),
    Image.Transpose.FLIP_TOP_BOTTOM: (False, False, True),
    Image.Transpose.TRANSPOSE: (True, False, False),
    Image.Transpose.ROTATE_270: (True, True, False),
    Image.Transpose.TRANSVERSE: (True, True, True),
    Image.Transpose.ROTATE_90: (True, False, True),
}
"""Whether height and width are swapped, and whether the top left corner is then at the right, and at the bottom."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """What a reduced picture is of.

    Attributes:
        size_hw: height and width of the whole picture, in pixels.
        box: where the whole picture lies in the reduced one: left, top, right, bottom, in pixels of the latter. Sides
            that cannot be divided fill a part of their last pixel.
    """

    size_hw: tuple[int, int]
    box: tuple[float, float, float, float]

    def turned(self, transpose: Image.Transpose | None) -> Draft:
        """The same of the picture that was turned so. The box begins at the top left before."""
        if transpose is None:
            return self
        assert self.box[:2] == (0, 0)
        is_on_its_side, is_at_right, is_at_bottom = _TURNS[transpose]
        (height, width), (across, down) = self.size_hw, self.box[2:]
        if is_on_its_side:
            height, width, across, down = width, height, down, across
        left = ceil(across) - across if is_at_right else 0
        top = ceil(down) - down if is_at_bottom else 0
        return replace(self, size_hw=(height, width), box=(left, top, left + across, top + down))


def draft(
    image: Image.Image, content: bytes, fit: Callable[[tuple[int, int]], Fit], *, is_on_its_side: bool
) -> Draft | None:
    """Have a JPEG that was opened, and not loaded, decoded at the smallest scale that leaves enough of it for what it
    will be resized to; None where that is the whole picture.

    `fit` is of the upright picture; the draft, like the image, is as it lies in the file.
    """
    if _LOSSLESS.search(content):
        return None
    width, height = image.size
    try:
        resized_h, resized_w = fit((width, height) if is_on_its_side else (height, width)).resized_hw
    except ImageError:  # raised again by the resize
        return None
    if is_on_its_side:
        resized_h, resized_w = resized_w, resized_h
    drafted = image.draft(None, (MARGIN * resized_w, MARGIN * resized_h))
    if drafted is None or image.size == (width, height):
        return None
    return Draft(size_hw=(height, width), box=drafted[1])
