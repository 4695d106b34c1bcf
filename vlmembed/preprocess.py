"""Upright RGB to uint8 patches on the tower's grid. Normalising is left to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import PIL
from PIL import Image

from vlmembed.layout import grid_of
from vlmembed.types import PatchedImage

if TYPE_CHECKING:
    from vlmembed.layout import OfficialResize, ResizeRule
    from vlmembed.types import UInt8Array

RESIZER = f"pillow {PIL.__version__}"
"""Recorded in the provenance: another version may round another way."""


def patchify(pixels: UInt8Array, patch_size: int) -> UInt8Array:
    """Cut (height, width, 3) pixels into (S, 3 * patch_size**2) patches, raster order, each channel-major.

    The order inside a patch is that of a flattened ``Conv2d`` weight, so patch embedding is one matrix product. What
    is left of an incomplete patch at the right and the bottom is dropped, as a strided convolution drops it.
    """
    grid_h, grid_w = pixels.shape[0] // patch_size, pixels.shape[1] // patch_size
    pixels = pixels[: grid_h * patch_size, : grid_w * patch_size]
    patches = pixels.reshape(grid_h, patch_size, grid_w, patch_size, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(patches).reshape(grid_h * grid_w, 3 * patch_size**2)


def resize_official(rgb: Image.Image, official: OfficialResize) -> Image.Image:
    """Resize, then crop the centre, as the model's own image processor does."""
    height, width = official.resized_hw((rgb.height, rgb.width))
    resized = rgb.resize((width, height), resample=Image.Resampling(official.resample))
    if official.crop_hw is None:
        return resized
    crop_h, crop_w = official.crop_hw
    top, left = (height - crop_h) // 2, (width - crop_w) // 2
    return resized.crop((left, top, left + crop_w, top + crop_h))


def preprocess(rgb: Image.Image, row: int, rule: ResizeRule) -> PatchedImage:
    """Resize an upright RGB image by `rule` and cut it into patches.

    Raises:
        ImageError: ``aspect_ratio``, from `grid_of`.
    """
    size_hw = (rgb.height, rgb.width)
    grid_hw = grid_of(size_hw, rule)
    patch = rule.layout.patch_size
    if rule.mode == "native":
        resized = rgb.resize((grid_hw[1] * patch, grid_hw[0] * patch), resample=Image.Resampling.BICUBIC)
    else:
        assert rule.layout.official is not None
        resized = resize_official(rgb, rule.layout.official)
    return PatchedImage(row=row, patches=patchify(np.asarray(resized), patch), grid_hw=grid_hw, size_hw=size_hw)
