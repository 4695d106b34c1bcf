"""The resize rules of the models' own image processors: sizes alone, equal to transformers' (``tests/test_resize.py``).

Every size is (height, width), in pixels unless said otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vlmembed.errors import ConfigError, FailureCode, ImageError
from vlmembed.resize import BICUBIC, BILINEAR, Fit, check_limits, check_positive

if TYPE_CHECKING:
    from typing import Self

MAX_ASPECT_RATIO = 200
"""Long side over short side that the Qwen, GLM and PaddleOCR processors accept at most."""


def _upper_limit(patch_size: int, min_pixels: int | None, max_pixels: int | None, *, reason: str) -> int | None:
    """`max_pixels` in patches, for rules that know no lower limit; None where it is not given."""
    if min_pixels:
        msg = f"--min-pixels is not possible with this model: {reason}"
        raise ConfigError(msg)
    if max_pixels is None:
        return None
    check_limits(0, max_pixels, patch_size**2, "one patch of the tower")
    return max_pixels // patch_size**2


@dataclass(frozen=True, kw_only=True, slots=True)
class CropResize:
    """The shortest edge or both sides to a fixed length, then a centre crop: CLIP, SigLIP, DINO and their kin.

    Exactly one of `shortest_edge` and `size_hw` is set; `crop_hw` is None where nothing is cropped.
    """

    shortest_edge: int | None
    size_hw: tuple[int, int] | None
    crop_hw: tuple[int, int] | None
    resample: int
    in_float: bool = False

    def __post_init__(self) -> None:
        sides = [self.shortest_edge or 1, *(self.size_hw or ()), *(self.crop_hw or ())]
        check_positive(shortest_side=min(sides))

    @property
    def limits(self) -> tuple[None, None]:
        """None: the size is fixed."""
        return None, None

    @property
    def output_hw(self) -> tuple[int, int]:
        """Size of every processed picture."""
        output = self.crop_hw or self.size_hw
        assert output is not None
        return output

    @property
    def max_canvas_pixels(self) -> int:
        """Every canvas is the same."""
        return self.output_hw[0] * self.output_hw[1]

    def with_limits(self, min_pixels: int | None, max_pixels: int | None) -> Self:
        """Refused: there is nothing to limit."""
        if min_pixels or max_pixels:
            msg = "--min-pixels and --max-pixels belong to --resize native; --resize official has the model's own size"
            raise ConfigError(msg)
        return self

    def fit(self, size_hw: tuple[int, int]) -> Fit:
        """The long side is truncated, not rounded, as transformers' ``get_resize_output_image_size`` does."""
        if self.size_hw is not None:
            resized = self.size_hw
        else:
            assert self.shortest_edge is not None
            (height, width), edge = size_hw, self.shortest_edge
            resized = (int(edge * height / width), edge) if width <= height else (edge, int(edge * width / height))
        return Fit(resized_hw=resized, canvas_hw=self.crop_hw or resized)


@dataclass(frozen=True, kw_only=True, slots=True)
class SmartResize:
    """Both sides to a multiple of `factor`, the area between two limits: the Qwen, GLM and PaddleOCR processors.

    Formula: ``smart_resize`` of transformers' ``Qwen2VLImageProcessor``, ``Glm4vImageProcessor`` and
    ``PaddleOCRVLImageProcessor``.

    Attributes:
        factor: pixels per side of a merged token.
        min_pixels, max_pixels: limits of the area, summed over `num_frames`.
        small_sides: what comes first for a side below `factor`: ``"keep"`` it (Qwen), ``"truncate"`` after scaling up
            (GLM), or ``"round"`` (PaddleOCR).
        num_frames: a still picture counts as that many frames (GLM: 2).
    """

    factor: int
    min_pixels: int
    max_pixels: int
    small_sides: str = "keep"
    num_frames: int = 1
    resample: int = BICUBIC
    in_float: bool = False

    def __post_init__(self) -> None:
        check_positive(factor=self.factor, num_frames=self.num_frames)
        what = f"one merged token of the tower, {self.factor}x{self.factor}"
        check_limits(*self.limits, self.factor**2, what)

    @property
    def limits(self) -> tuple[int, int]:
        """Of one frame."""
        return self.min_pixels // self.num_frames, self.max_pixels // self.num_frames

    @property
    def max_canvas_pixels(self) -> int:
        """The upper limit, unless rounding can exceed it: a strip one merged token wide cannot be made narrower, and a
        picture that is enlarged to the lower limit is rounded up on both sides."""
        (least, most), factor, aspect = self.limits, self.factor, MAX_ASPECT_RATIO
        strip = factor * math.sqrt(aspect * most)
        enlarged = least + factor * math.sqrt(least) * (math.sqrt(aspect) + 1 / math.sqrt(aspect)) + factor**2
        return max(most, math.ceil(strip), math.ceil(enlarged))

    def with_limits(self, min_pixels: int | None, max_pixels: int | None) -> Self:
        """The processor's own limits where none is given."""
        least, most = ((given or 0) * self.num_frames for given in (min_pixels, max_pixels))
        most = most or max(self.max_pixels, least)
        return replace(self, min_pixels=least or min(self.min_pixels, most), max_pixels=most)

    def _enlarged(self, height: int, width: int) -> tuple[int, int]:
        factor = self.factor
        if self.small_sides == "truncate" and min(height, width) < factor:
            scale = max(factor / height, factor / width)
            return int(height * scale), int(width * scale)
        if self.small_sides == "round":
            if height < factor:
                height, width = factor, round(width * factor / height)
            if width < factor:
                height, width = round(height * factor / width), factor
        return height, width

    def fit(self, size_hw: tuple[int, int]) -> Fit:
        """Halves are rounded to even, and a side that rounds to nothing takes part in the comparison as 0, as there."""
        height, width = self._enlarged(*size_hw)
        if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
            msg = (
                f"{size_hw[1]}x{size_hw[0]} pixels: long side over short side is over {MAX_ASPECT_RATIO}, which the "
                "model's own processor refuses: crop the picture"
            )
            raise ImageError(FailureCode.ASPECT_RATIO, msg)
        factor, area = self.factor, self.num_frames * height * width
        rows, columns = round(height / factor), round(width / factor)
        rounded_area = self.num_frames * rows * columns * factor**2
        if rounded_area > self.max_pixels:
            shrink = math.sqrt(area / self.max_pixels)
            rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
        elif rounded_area < self.min_pixels:
            enlarge = math.sqrt(self.min_pixels / area)
            rows, columns = (math.ceil(side * enlarge / factor) for side in (height, width))
        size = rows * factor, columns * factor
        return Fit(resized_hw=size, canvas_hw=size)


@dataclass(frozen=True, kw_only=True, slots=True)
class NavitResize:
    """Never larger than the picture, at most `max_patches` in all and `max_side_patches` a side, then padded with
    black at the right and the bottom to whole merged tokens: Kimi.

    Formula: ``navit_resize`` of transformers' ``Kimi_K25ImageProcessor``.
    """

    patch_size: int
    merge_size: int
    max_patches: int
    max_side_patches: int
    resample: int = BICUBIC
    in_float: bool = False

    def __post_init__(self) -> None:
        check_positive(max_patches=self.max_patches, max_side_patches=self.max_side_patches)

    @property
    def limits(self) -> tuple[None, int]:
        """No smallest area: nothing is enlarged."""
        return None, self.max_patches * self.patch_size**2

    @property
    def max_canvas_pixels(self) -> int:
        """The limit, and what truncating a side to whole patches before the comparison and padding it to whole merged
        tokens afterwards can add to a strip. A strip of one merged token at full length may have more than twice the
        limit, as in the model's own processor."""
        rows = math.ceil(self.max_patches / self.max_side_patches)
        excess = (self.merge_size + 1) * (self.max_side_patches + rows)
        return (self.max_patches + excess) * self.patch_size**2

    def with_limits(self, min_pixels: int | None, max_pixels: int | None) -> Self:
        """Only the upper limit can be set."""
        max_patches = _upper_limit(
            self.patch_size, min_pixels, max_pixels, reason="its processor never enlarges a picture"
        )
        return self if max_patches is None else replace(self, max_patches=max_patches)

    def fit(self, size_hw: tuple[int, int]) -> Fit:
        """Sides are truncated, never below one pixel."""
        height, width = size_hw
        patch, longest = self.patch_size, self.max_side_patches * self.patch_size
        num_patches = max(1, height // patch) * max(1, width // patch)
        scale = min(1.0, math.sqrt(self.max_patches / num_patches), longest / height, longest / width)
        resized_h, resized_w = (min(max(1, int(side * scale)), longest) for side in size_hw)
        factor = patch * self.merge_size
        canvas = -(-resized_h // factor) * factor, -(-resized_w // factor) * factor
        return Fit(resized_hw=(resized_h, resized_w), canvas_hw=canvas, centred=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class NaflexResize:
    """As close to `max_patches` as the aspect ratio allows: SigLIP2-NaFlex.

    Formula: ``get_image_size_for_max_num_patches`` of transformers' ``Siglip2ImageProcessor``: a bisection over the
    scale, each side rounded up to whole patches.
    """

    patch_size: int
    max_patches: int
    resample: int = BILINEAR
    in_float: bool = False

    def __post_init__(self) -> None:
        check_positive(max_patches=self.max_patches)

    _TOLERANCE = 1e-5
    _MAX_SCALE = 100.0

    @property
    def limits(self) -> tuple[None, int]:
        """The largest area; smaller pictures are filled up to it."""
        return None, self.max_patches * self.patch_size**2

    @property
    def max_canvas_pixels(self) -> int:
        """The limit."""
        return self.max_patches * self.patch_size**2

    def with_limits(self, min_pixels: int | None, max_pixels: int | None) -> Self:
        """Only the upper limit can be set."""
        reason = "its processor fills pictures up to the upper limit"
        max_patches = _upper_limit(self.patch_size, min_pixels, max_pixels, reason=reason)
        return self if max_patches is None else replace(self, max_patches=max_patches)

    def fit(self, size_hw: tuple[int, int]) -> Fit:
        """Bisect until the scale is known to `_TOLERANCE`."""
        patch = self.patch_size

        def size_at(scale: float) -> tuple[int, int]:
            height, width = (int(max(patch, math.ceil(side * scale / patch) * patch)) for side in size_hw)
            return height, width

        low, high = self._TOLERANCE / 10, self._MAX_SCALE
        while high - low >= self._TOLERANCE:
            middle = (low + high) / 2
            height, width = size_at(middle)
            if (height / patch) * (width / patch) <= self.max_patches:
                low = middle
            else:
                high = middle
        size = size_at(low)
        return Fit(resized_hw=size, canvas_hw=size)
