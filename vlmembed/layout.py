"""What a tower asks of the host, in numpy: patch grids, resize rules, segments, position interpolation.

Nothing here knows torch. Whatever depends on one image's grid alone is memoised per grid; a pack's metadata is
then a few concatenations.

Shape legend: T tokens, N images, S patches, K interpolation taps.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmembed.errors import ConfigError, FailureCode, ImageError
from vlmembed.types import AttentionMetadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlmembed.types import Float32Array, Int32Array

BICUBIC_A = -0.75
"""Keys' kernel parameter, as in ``torch.nn.functional.interpolate(mode="bicubic")``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfficialResize:
    """A model's own image processor, as its ``preprocessor_config.json`` states it.

    Exactly one of `shortest_edge` and `size_hw` is set. `crop_hw` is None where the processor does not crop.
    `resample` is a Pillow filter number.
    """

    shortest_edge: int | None
    size_hw: tuple[int, int] | None
    crop_hw: tuple[int, int] | None
    resample: int

    def resized_hw(self, size_hw: tuple[int, int]) -> tuple[int, int]:
        """Pixel size (height, width) after the resize and before the crop, of a `size_hw` image.

        The long side is truncated, not rounded, as transformers' ``get_resize_output_image_size`` does.
        """
        if self.size_hw is not None:
            return self.size_hw
        assert self.shortest_edge is not None
        height, width = size_hw
        if width <= height:
            return int(self.shortest_edge * height / width), self.shortest_edge
        return self.shortest_edge, int(self.shortest_edge * width / height)

    @property
    def output_hw(self) -> tuple[int, int] | None:
        """Pixel size of every processed image, or None where it depends on the image."""
        return self.crop_hw or self.size_hw


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerLayout:
    """What preprocessing and packing must know of a dense tower.

    Attributes:
        patch_size: pixels per patch side.
        num_prefix_tokens: CLS and register tokens in front of every image's patches.
        position_grid_hw: size of the learned position table, in patches.
        native_pixels: pixels per image that the tower was made for.
        image_mean, image_std: per RGB channel, for pixel values times `rescale_factor`.
        official: the model's own image processor, or None where it is of a kind that is not known here;
            `official_problem` then says why.
    """

    patch_size: int
    num_prefix_tokens: int
    position_grid_hw: tuple[int, int]
    native_pixels: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    official: OfficialResize | None
    official_problem: str = ""
    rescale_factor: float = 1 / 255

    def num_tokens(self, grid_hw: tuple[int, int]) -> int:
        """Tokens that attention sees for an image of `grid_hw` patches."""
        return self.num_prefix_tokens + grid_hw[0] * grid_hw[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResizeRule:
    """How the images of one run are brought to the tower's patch grid.

    Attributes:
        mode: ``"native"`` keeps the aspect ratio; ``"official"`` is the model's own processor.
        min_pixels, max_pixels: area that ``"native"`` resizes to, in pixels; an image inside stays near its own size.
        max_source_pixels: no image, given or intermediate, may be larger, in pixels.
    """

    mode: str
    layout: TowerLayout
    min_pixels: int
    max_pixels: int
    max_source_pixels: int

    def __post_init__(self) -> None:
        patch_pixels = self.layout.patch_size**2
        if self.max_pixels < patch_pixels:
            msg = (
                f"max_pixels is {self.max_pixels}, less than one patch of the tower "
                f"({self.layout.patch_size}x{self.layout.patch_size} = {patch_pixels} pixels): "
                f"give --max-pixels {patch_pixels} or more"
            )
            raise ConfigError(msg)
        if self.min_pixels > self.max_pixels:
            msg = f"min_pixels is {self.min_pixels}, more than max_pixels ({self.max_pixels}): lower --min-pixels"
            raise ConfigError(msg)

    @property
    def max_tokens_per_image(self) -> int:
        """The most tokens that one image can become, prefix tokens included."""
        layout, patch = self.layout, self.layout.patch_size
        if self.mode == "native":
            return layout.num_prefix_tokens + self.max_pixels // patch**2
        assert layout.official is not None
        assert layout.official.output_hw is not None
        height, width = layout.official.output_hw
        return layout.num_tokens((height // patch, width // patch))

    def describe(self) -> dict[str, Any]:
        """The rule as plain values, for the run's fingerprint."""
        described: dict[str, Any] = {
            "resize": self.mode,
            "patch_size": self.layout.patch_size,
            "image_mean": list(self.layout.image_mean),
            "image_std": list(self.layout.image_std),
            "rescale_factor": self.layout.rescale_factor,
            "max_source_pixels": self.max_source_pixels,
        }
        if self.mode == "native":
            return described | {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels, "resample": 3}
        assert self.layout.official is not None
        return described | asdict(self.layout.official)


def native_grid(size_hw: tuple[int, int], *, patch_size: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Patch grid (rows, columns) for an image of `size_hw` pixels at its own aspect ratio.

    The image's area is clamped to `min_pixels`..`max_pixels`; of the grids around the exact one (both sides rounded
    down or up) the nearest in log space whose area stays within `max_pixels` is taken, the larger one where two are
    equally near. A side that would be less than one patch is one patch, and the other side is then cut to the limit.
    """
    height, width = size_hw
    scale = math.sqrt(min(max(height * width, min_pixels), max_pixels) / (height * width)) / patch_size
    exact_h, exact_w = height * scale, width * scale
    max_patches = max_pixels // patch_size**2
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


def grid_of(size_hw: tuple[int, int], rule: ResizeRule) -> tuple[int, int]:
    """Patch grid of a `size_hw` image under `rule`.

    Raises:
        ImageError: ``aspect_ratio`` where the model's own processor would make an intermediate image larger than
            ``rule.max_source_pixels``.
    """
    patch = rule.layout.patch_size
    if rule.mode == "native":
        return native_grid(size_hw, patch_size=patch, min_pixels=rule.min_pixels, max_pixels=rule.max_pixels)
    official = rule.layout.official
    assert official is not None
    height, width = official.resized_hw(size_hw)
    if height * width > rule.max_source_pixels:
        msg = (
            f"{size_hw[1]}x{size_hw[0]} pixels would become {width}x{height} in the model's own processor, over the "
            f"limit of {rule.max_source_pixels} pixels: use --resize native, or raise --max-source-pixels"
        )
        raise ImageError(FailureCode.ASPECT_RATIO, msg)
    height, width = official.crop_hw or (height, width)
    return height // patch, width // patch


def bicubic_taps(num_out: int, num_in: int) -> tuple[Int32Array, Float32Array]:
    """Taps and weights, each (num_out, 4), that resample an axis of `num_in` samples to `num_out`.

    Formula: cubic convolution, R. Keys 1981, with a = -0.75, half-pixel centres and clamped borders, which is
    ``torch.nn.functional.interpolate(mode="bicubic", align_corners=False)``.
    """
    centre = (np.arange(num_out, dtype=np.float64) + 0.5) * (num_in / num_out) - 0.5
    base = np.floor(centre)
    offsets = np.arange(-1, 3)
    distance = np.abs((centre - base)[:, None] - offsets)
    a = BICUBIC_A
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    weights = np.where(distance <= 1, near, far).astype(np.float32)
    taps = np.clip(base[:, None].astype(np.int32) + offsets, 0, num_in - 1).astype(np.int32)
    return taps, weights


@lru_cache(maxsize=128)
def interpolation(grid_hw: tuple[int, int], table_hw: tuple[int, int]) -> tuple[Int32Array, Float32Array]:
    """Rows of a position table (raster order) and weights, each (h * w, 16), for an image of `grid_hw` patches.

    128 bytes per patch stay cached for each of the last 128 grids: a fixed area makes fewer grids than that, and where
    every image has another grid a larger cache would not be hit.
    """
    row_taps, row_weights = bicubic_taps(grid_hw[0], table_hw[0])
    column_taps, column_weights = bicubic_taps(grid_hw[1], table_hw[1])
    indices = row_taps[:, None, :, None] * table_hw[1] + column_taps[None, :, None, :]
    weights = row_weights[:, None, :, None] * column_weights[None, :, None, :]
    num_patches = grid_hw[0] * grid_hw[1]
    indices, weights = indices.reshape(num_patches, 16), weights.reshape(num_patches, 16)
    indices.flags.writeable = weights.flags.writeable = False  # shared by every pack
    return indices, weights


def attention_metadata(grids: Sequence[tuple[int, int]], layout: TowerLayout) -> AttentionMetadata:
    """Metadata of a pack whose images have these patch grids, in this order."""
    num_prefix = layout.num_prefix_tokens
    num_patches = np.array([h * w for h, w in grids], dtype=np.int64)
    lengths = num_patches + num_prefix
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    patch_images = np.repeat(np.arange(len(grids)), num_patches)
    per_image = [interpolation(grid, layout.position_grid_hw) for grid in grids]
    return AttentionMetadata(
        cu_seqlens=cu_seqlens.astype(np.int32),
        max_seqlen=int(lengths.max()),
        segment_runs=tuple((length, len(list(run))) for length, run in itertools.groupby(lengths.tolist())),
        prefix_positions=(cu_seqlens[:-1, None] + np.arange(num_prefix)).reshape(-1),
        patch_positions=np.arange(len(patch_images)) + (patch_images + 1) * num_prefix,
        patch_images=patch_images,
        interp_indices=np.concatenate([indices for indices, _ in per_image]),
        interp_weights=np.concatenate([weights for _, weights in per_image]),
    )
