"""Pillow images of any mode to RGB, a stripe at a time: nothing but the picture before and after is held whole."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageCms

from vlmembed.errors import FailureCode, ImageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STRIPE_PIXELS = 2**18

_16_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")


def stripes(image: Image.Image) -> Iterator[tuple[tuple[int, int, int, int], Image.Image]]:
    """Pieces of full width, from top to bottom, and where they stand."""
    num_rows = max(1, STRIPE_PIXELS // image.width)
    for top in range(0, image.height, num_rows):
        box = (0, top, image.width, min(top + num_rows, image.height))
        yield box, image.crop(box)


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB by the pixel policy; an image that is RGB already comes back itself.

    Raises:
        ImageError: the samples are no numbers, or of a mode that cannot be converted.
    """
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    convert = _conversion_of(image)
    rgb = Image.new("RGB", image.size)
    for box, stripe in stripes(image):
        rgb.paste(convert(stripe), box)
    return rgb


def _conversion_of(image: Image.Image) -> Callable[[Image.Image], Image.Image]:
    if image.mode in _16_BIT_MODES:
        return _grey_of_16_bits
    if image.mode in ("I", "F"):
        return partial(_grey_of_32_bits, scale=_scale_of(image))
    if image.has_transparency_data:
        return _on_white
    if image.mode == "LAB":
        return _lab_conversion()
    return partial(Image.Image.convert, mode="RGB")


def _grey_of_16_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.uint32)
    scaled = ((values * 255 + 32767) // 65535).astype(np.uint8)
    if isinstance(transparent := image.info.get("transparency"), int):
        scaled[values == transparent] = 255
    return Image.fromarray(scaled).convert("RGB")


def _scale_of(image: Image.Image) -> float:
    """32-bit integers count as 16-bit unless one is larger; floats in 0..1 are scaled, others taken as 0..255."""
    if image.mode == "I":
        largest = max(int(np.asarray(stripe).max()) for _, stripe in stripes(image))
        return 255 / 65535 if largest <= 65535 else 255 / (2**31 - 1)  # noqa: PLR2004  the types' ranges
    brightest = -np.inf
    for _, stripe in stripes(image):
        values = np.asarray(stripe)
        if not np.isfinite(values).all():
            raise ImageError(FailureCode.CORRUPT, "the picture holds NaN or infinite samples")
        brightest = max(brightest, float(values.max()))
    return 255.0 if brightest <= 1.0 else 1.0


def _grey_of_32_bits(image: Image.Image, scale: float) -> Image.Image:
    scaled = np.clip(np.rint(np.asarray(image) * scale), 0, 255).astype(np.uint8)
    return Image.fromarray(scaled).convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, rgba).convert("RGB")


def _lab_conversion() -> Callable[[Image.Image], Image.Image]:
    """CIE L*a*b* with the white point of the ICC's connection space, D50, to sRGB.

    Without LittleCMS's optimisation, a table that turns white into 254.
    """
    try:
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        transform = ImageCms.buildTransform(lab, srgb, "LAB", "RGB", flags=ImageCms.Flags.NOOPTIMIZE)
    except (ImportError, ImageCms.PyCMSError) as error:
        msg = f"colour mode LAB needs a Pillow with LittleCMS ({error}): convert the file to RGB"
        raise ImageError(FailureCode.UNSUPPORTED_FORMAT, msg) from error

    def convert(image: Image.Image) -> Image.Image:
        converted = ImageCms.applyTransform(image, transform)
        assert converted is not None, "it is not done in place"
        return converted

    return convert
