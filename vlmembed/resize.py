"""How a picture comes to a tower's patch grid: our own rule, and the rules of the models' image processors.

A rule only computes sizes; `vlmembed.preprocess` moves the pixels. Every size is (height, width), in pixels unless
said otherwise.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from vlmembed.errors import ConfigError, FailureCode, ImageError

if TYPE_CHECKING:
    from typing import Self

BICUBIC = 3
BILINEAR = 2
"""Pillow's filter numbers."""

MAX_ASPECT_RATIO = 200
"""Long side over short side that the Qwen, GLM and PaddleOCR processors accept at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """What becomes of one picture: resized to `resized_hw`, then put on a black canvas of `canvas_hw`, which crops it
    where it is smaller and pads it where it is larger; `centred`, or with both top left corners together."""

    resized_hw: tuple[int, int]
    canvas_hw: tuple[int, int]
    centred: bool = True


class Resize(Protocol):
    """A resize rule."""

    @property
    def resample(self) -> int:
        """Pillow's number of the filter."""

    @property
    def in_float(self) -> bool:
        """The pixels stay float32."""

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """Smallest and largest area, in pixels, that a picture is brought to; None where the rule has no such limit."""

    @property
    def max_canvas_pixels(self) -> int:
        """No canvas is larger."""

    def fit(self, size_hw: tuple[int, int]) -> Fit:
        """Sizes for a `size_hw` picture.

        Raises:
            ImageError: ``aspect_ratio`` where the rule refuses it.
        """

    def with_limits(self, min_pixels: int | None, max_pixels: int | None) -> Resize:
        """The rule with other limits; None keeps what it has, but a limit that is given moves the other one with it.

        Raises:
            ConfigError: the rule has no such limit, or the two contradict each other.
        """


def describe(rule: Resize) -> dict[str, Any]:
    """A rule as plain values, for the run's fingerprint."""
    assert isinstance(rule, (AreaResize, CropResize, SmartResize, NavitResize, NaflexResize))
    return {"rule": type(rule).__name__, **asdict(rule)}


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            msg = f"{name} is {value}; it must be 1 or more"
            raise ConfigError(msg)


def _check_limits(min_pixels: int, max_pixels: int, smallest: int, what: str) -> None:
    if max_pixels < smallest:
        msg = f"max_pixels is {max_pixels}, less than {what} ({smallest} pixels): give --max-pixels {smallest} or more"
        raise ConfigError(msg)
    if min_pixels < 0:
        msg = f"min_pixels is {min_pixels}; it must be 0 or more"
        raise ConfigError(msg)
    if min_pixels > max_pixels:
        msg = f"min_pixels is {min_pixels}, more than max_pixels ({max_pixels}): lower --min-pixels"
        raise ConfigError(msg)


@dataclass(frozen=True, kw_only=True, slots=True)
class AreaResize:
    """Our own rule: the picture's own aspect ratio, its area clamped to `min_pixels`..`max_pixels`.

    Of the grids around the exact one (both sides rounded down or up) the nearest in log space whose area stays within
    `max_pixels` is taken, the larger one where two are equally near. A side that would be less than one patch is one
    patch, and the other side is then cut to the limit.
    """

    patch_size: int
    min_pixels: int
    max_pixels: int
    resample: int = BICUBIC
    in_float: bool = False

    def __post_init__(self) -> None:
        patch = self.patch_size
        _check_limits(self.min_pixels, self.max_pixels, patch**2, f"one patch of the tower, {patch}x{patch}")

    @property
    def limits(self) -> tuple[int, int]:
        """As given."""
        return self.min_pixels, self.max_pixels

    @property
    def max_canvas_pixels(self) -> int:
        """`max_pixels`: no grid is larger."""
        return self.max_pixels

    def with_limits(self, min_pixels: int | None, max_pixels: int | None) -> Self:
        """Without either, every picture fills the area that the tower was made for."""
        max_pixels = max_pixels or max(self.max_pixels, min_pixels or 0)
        return replace(self, min_pixels=min_pixels or max_pixels, max_pixels=max_pixels)

    def grid(self, size_hw: tuple[int, int]) -> tuple[int, int]:
        """Patch grid (rows, columns)."""
        height, width = size_hw
        area = min(max(height * width, self.min_pixels), self.max_pixels)
        scale = math.sqrt(area / (height * width)) / self.patch_size
        exact_h, exact_w = height * scale, width * scale
        max_patches = self.max_pixels // self.patch_size**2
        candidates = [
            (h, w)
            for h in (max(1, math.floor(exact_h)), max(1, math.ceil(exact_h)))
            for w in (max(1, math.floor(exact_w)), max(1, math.ceil(exact_w)))
            if h * w <= max_patches
        ]
        if not candidates:
            return (1, max_patches) if height <= width else (max_patches, 1)

        def distance(grid: tuple[int, int]) -> tuple[float, int]:
            h, w = grid
            return math.log(h / exact_h) ** 2 + math.log(w / exact_w) ** 2, -h * w

        return min(candidates, key=distance)

    def fit(self, size_hw: tuple[int, int]) -> Fit:
        """The grid's pixels, without a crop."""
        rows, columns = self.grid(size_hw)
        size = rows * self.patch_size, columns * self.patch_size
        return Fit(resized_hw=size, canvas_hw=size)


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
        _check_positive(shortest_side=min(sides))

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
        _check_positive(factor=self.factor, num_frames=self.num_frames)
        what = f"one merged token of the tower, {self.factor}x{self.factor}"
        _check_limits(*self.limits, self.factor**2, what)

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
        _check_positive(max_patches=self.max_patches, max_side_patches=self.max_side_patches)

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
        if min_pixels:
            msg = "--min-pixels is not possible with this model: its processor never enlarges a picture"
            raise ConfigError(msg)
        if max_pixels is None:
            return self
        _check_limits(0, max_pixels, self.patch_size**2, "one patch of the tower")
        return replace(self, max_patches=max_pixels // self.patch_size**2)

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
        _check_positive(max_patches=self.max_patches)

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
        if min_pixels:
            msg = "--min-pixels is not possible with this model: its processor fills pictures up to the upper limit"
            raise ConfigError(msg)
        if max_pixels is None:
            return self
        _check_limits(0, max_pixels, self.patch_size**2, "one patch of the tower")
        return replace(self, max_patches=max_pixels // self.patch_size**2)

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
