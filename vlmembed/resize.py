"""How a picture comes to a tower's patch grid: what a resize rule is, and our own. The models' are in `official`.

A rule only computes sizes; `vlmembed.preprocess` moves the pixels. Every size is (height, width), in pixels unless
said otherwise.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from vlmembed.errors import ConfigError

if TYPE_CHECKING:
    from typing import Self

BICUBIC = 3
BILINEAR = 2
"""Pillow's filter numbers."""


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


def describe(rule: Any) -> dict[str, Any]:  # noqa: ANN401  any of the rules, which are dataclasses
    """A rule as plain values, for the run's fingerprint."""
    return {"rule": type(rule).__name__, **asdict(rule)}


def check_positive(**values: int) -> None:
    """Raise a ConfigError for a value below 1."""
    for name, value in values.items():
        if value < 1:
            msg = f"{name} is {value}; it must be 1 or more"
            raise ConfigError(msg)


def check_limits(min_pixels: int, max_pixels: int, smallest: int, what: str) -> None:
    """Raise a ConfigError for limits that leave no room for `what`, of `smallest` pixels, or contradict each other."""
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
        check_limits(self.min_pixels, self.max_pixels, patch**2, f"one patch of the tower, {patch}x{patch}")

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
