"""Upright RGB to patches on the tower's grid. Normalising is left to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import PIL
from PIL import Image

from vlmembed.types import PatchedImage

if TYPE_CHECKING:
    from vlmembed.draft import Draft
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
    channels = np.ascontiguousarray(pixels[: rows * side, : columns * side].transpose(2, 0, 1))
    lines = channels.view(f"V{patch_size * pixels.itemsize}")  # a line of a patch is copied as one value
    blocks = lines.reshape(3, rows, block_size, patch_size, columns, block_size)
    patches = np.ascontiguousarray(blocks.transpose(1, 4, 2, 5, 0, 3)).view(pixels.dtype)
    return cast("PatchArray", patches.reshape(rows * columns * block_size**2, 3 * patch_size**2))


def resize_pixels(rgb: Image.Image, fit: Fit, resize: Resize, draft: Draft | None = None) -> PatchArray:
    """The picture's pixels (height, width, 3) after one resize and the crop or padding of `fit`; of a reduced picture,
    from where its `draft` says that the whole one lies in it.

    Pillow resizes the columns first, rounds, and then the rows. So columns that are cropped off can go in between: the
    pixels are the same, and half of a wide picture is not resized for nothing.
    """
    (height, width), (canvas_h, canvas_w) = fit.resized_hw, fit.canvas_hw
    resample = Image.Resampling(resize.resample)
    top = (height - canvas_h) // 2 if fit.centred else 0
    left = (width - canvas_w) // 2 if fit.centred else 0
    box = (left, top, left + canvas_w, top + canvas_h)
    from_left, from_top, from_right, from_bottom = source = draft.box if draft else (0, 0, *rgb.size)

    def fitted(image: Image.Image) -> PatchArray:
        if fit.canvas_hw == fit.resized_hw:
            return np.asarray(image.resize((width, height), resample=resample, box=source))
        if canvas_w >= width or canvas_h > height:
            return np.asarray(image.resize((width, height), resample=resample, box=source).crop(box))
        wide = image.resize((width, image.height), resample=resample, box=(from_left, 0, from_right, image.height))
        columns = wide.crop((left, 0, left + canvas_w, image.height))
        whole = columns.resize((canvas_w, height), resample=resample, box=(0, from_top, canvas_w, from_bottom))
        return np.asarray(whole)[top : top + canvas_h]

    if not resize.in_float:
        return fitted(rgb)
    channels = [fitted(channel.convert("F")) for channel in rgb.split()]
    return np.stack(channels, axis=-1).astype(np.float32, copy=False)


def preprocess(rgb: Image.Image, row: int, rule: ResizeRule, draft: Draft | None = None) -> PatchedImage:
    """Resize an upright RGB image by `rule` and cut it into patches. With a `draft`, which says what it is of, it
    becomes what the whole picture would.

    Raises:
        ImageError: ``aspect_ratio``, from the rule.
    """
    size_hw = draft.size_hw if draft else (rgb.height, rgb.width)
    layout, fit = rule.layout, rule.fit(size_hw)
    patch = layout.patch_size
    pixels = resize_pixels(rgb, fit, rule.resize, draft)
    return PatchedImage(
        row=row,
        patches=patchify(pixels, patch, layout.merge_size if layout.block_order else 1),
        grid_hw=(fit.canvas_hw[0] // patch, fit.canvas_hw[1] // patch),
        size_hw=size_hw,
    )
