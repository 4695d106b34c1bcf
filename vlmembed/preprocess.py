"""Upright RGB to patches on the tower's grid. Normalising is left to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import PIL
from PIL import Image

from vlmembed.types import PatchedImage

if TYPE_CHECKING:
    from vlmembed.layout import ResizeRule
    from vlmembed.resize import Fit, Resize
    from vlmembed.types import PatchArray

RESIZER = f"pillow {PIL.__version__}"
"""Recorded in the provenance: another version may round another way."""


def patchify(pixels: PatchArray, patch_size: int, block_size: int = 1) -> PatchArray:
    """Cut (height, width, 3) pixels into (S, 3 * patch_size**2) patches, each channel-major.

    Patches go in raster order, or block by block of `block_size` a side. The order inside a patch is that of a
    flattened ``Conv2d`` weight, so patch embedding is one matrix product. What is left of an incomplete block at the
    right and the bottom is dropped, as a strided convolution drops it.
    """
    side = patch_size * block_size
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    whole = pixels[: rows * side, : columns * side]
    blocks = whole.reshape(rows, block_size, patch_size, columns, block_size, patch_size, 3)
    patches = np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 6, 2, 5))
    return cast("PatchArray", patches.reshape(rows * columns * block_size**2, 3 * patch_size**2))


def resize_pixels(rgb: Image.Image, fit: Fit, resize: Resize) -> PatchArray:
    """The picture's pixels (height, width, 3) after one resize and the crop or padding of `fit`."""
    (height, width), (canvas_h, canvas_w) = fit.resized_hw, fit.canvas_hw
    resample = Image.Resampling(resize.resample)
    top = (height - canvas_h) // 2 if fit.centred else 0
    left = (width - canvas_w) // 2 if fit.centred else 0
    box = (left, top, left + canvas_w, top + canvas_h)

    def fitted(image: Image.Image) -> PatchArray:
        resized = image.resize((width, height), resample=resample)
        return np.asarray(resized if fit.canvas_hw == fit.resized_hw else resized.crop(box))

    if not resize.in_float:
        return fitted(rgb)
    channels = [fitted(channel.convert("F")) for channel in rgb.split()]
    return np.stack(channels, axis=-1).astype(np.float32, copy=False)


def preprocess(rgb: Image.Image, row: int, rule: ResizeRule) -> PatchedImage:
    """Resize an upright RGB image by `rule` and cut it into patches.

    Raises:
        ImageError: ``aspect_ratio``, from the rule.
    """
    size_hw = (rgb.height, rgb.width)
    layout, fit = rule.layout, rule.fit(size_hw)
    patch = layout.patch_size
    pixels = resize_pixels(rgb, fit, rule.resize)
    return PatchedImage(
        row=row,
        patches=patchify(pixels, patch, layout.merge_size if layout.block_order else 1),
        grid_hw=(fit.canvas_hw[0] // patch, fit.canvas_hw[1] // patch),
        size_hw=size_hw,
    )
