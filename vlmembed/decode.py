"""Encoded bytes to RGB, by one declared pixel policy.

The policy (recorded in the provenance as `PIXEL_POLICY`): EXIF orientation applied; alpha and palette transparency
composited on white; 16-bit scaled to 8; CMYK and YCCK converted without a colour profile; the first frame of an
animation; truncated files fail.
"""

from __future__ import annotations

import hashlib
import io
import logging
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import PIL
from PIL import Image, UnidentifiedImageError

from vlmembed.errors import FailureCode, ImageError
from vlmembed.formats import SNIFF_BYTES, readable_formats, sniff_format

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

PIXEL_POLICY = "1: exif applied, alpha on white, 16-bit scaled, cmyk converted, first frame"

_ORIENTATION_TAG = 0x0112
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_16_BIT_MODES = {"I;16": "<u2", "I;16L": "<u2", "I;16B": ">u2", "I;16N": "=u2"}

_ENDS_EARLY = ("eoferror", "truncated", "unexpected end", "end of file", "not enough image data")
"""Words of Pillow's plugins for a file that stops before its picture does, in lower case."""

_NOT_SUPPORTED = ("unsupported", "not supported", "unknown compression", "cannot find loader")
"""Words for a file that is whole, of a kind that Pillow knows and cannot decode."""

_limit_lock = threading.Lock()
_limit_saved: list[int | None] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedImage:
    """`rgb` is a Pillow image of mode RGB, upright."""

    rgb: Image.Image

    @property
    def size_hw(self) -> tuple[int, int]:
        """Height and width in pixels, after orientation."""
        return self.rgb.height, self.rgb.width

    def pixel_hash(self) -> bytes:
        """SHA-256 over the size and the RGB bytes: 32 bytes, equal for equal pictures in different files."""
        digest = hashlib.sha256(f"RGB {self.rgb.width}x{self.rgb.height}\n".encode())
        digest.update(self.rgb.tobytes())
        return digest.digest()


@contextmanager
def own_pixel_limit() -> Iterator[None]:
    """Switch Pillow's own size limit off, so that ``max_source_pixels`` alone decides, and restore it at the end.

    The limit is global to the process: it is restored when the last of several concurrent runs ends.
    """
    with _limit_lock:
        _limit_saved.append(Image.MAX_IMAGE_PIXELS)
        Image.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        with _limit_lock:
            Image.MAX_IMAGE_PIXELS = _limit_saved.pop()  # only the first entry is not None


def decode(content: bytes, *, max_source_pixels: int) -> DecodedImage:
    """Decode the first frame of an encoded picture to upright RGB.

    Raises:
        ImageError: with the code that the row will carry.
    """
    if not content:
        raise ImageError(FailureCode.EMPTY, "the file has 0 bytes")
    image = _open(content)
    width, height = image.size
    if width * height > max_source_pixels:
        msg = (
            f"{width}x{height} = {width * height} pixels, over the limit of {max_source_pixels}: "
            "raise --max-source-pixels to accept it"
        )
        raise ImageError(FailureCode.TOO_LARGE, msg)
    try:
        image.load()
        orientation = _orientation(image)
        rgb = _to_rgb(image)
    except ImageError:
        raise
    except MemoryError as error:
        msg = f"no memory for {width}x{height} pixels"
        raise ImageError(FailureCode.OUT_OF_MEMORY, msg) from error
    except Exception as error:
        raise _broken(content, f"{type(error).__name__}: {error}") from error
    if (transpose := _TRANSPOSE.get(orientation)) is not None:  # FLIP_LEFT_RIGHT is 0
        rgb = rgb.transpose(transpose)
    return DecodedImage(rgb=rgb)


def _open(content: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(content), formats=readable_formats())
    except UnidentifiedImageError as error:
        name = sniff_format(content[:SNIFF_BYTES])
        if name == "HEIF" and name not in readable_formats():
            msg = "HEIC needs the heif extra: pip install pillow-heif"
            raise ImageError(FailureCode.UNSUPPORTED_FORMAT, msg) from error
        if name is None:
            msg = f"not a picture format that Pillow {PIL.__version__} opens; it begins {content[:8]!r}"
            raise ImageError(FailureCode.UNSUPPORTED_FORMAT, msg) from error
        raise _broken(content, f"it begins like {name}, but Pillow cannot read its header") from error
    except MemoryError as error:
        raise ImageError(FailureCode.OUT_OF_MEMORY, "no memory to read the header") from error
    except Exception as error:
        raise _broken(content, f"{type(error).__name__}: {error}") from error


def _broken(content: bytes, message: str) -> ImageError:
    """Tell a file that ends too early, or that Pillow cannot read, from one that is wrong inside."""
    if any(phrase in message.lower() for phrase in _NOT_SUPPORTED):
        return ImageError(FailureCode.UNSUPPORTED_FORMAT, message)
    ends_early = any(phrase in message.lower() for phrase in _ENDS_EARLY)
    if sniff_format(content[:SNIFF_BYTES]) == "WEBP":  # libwebp does not say; the RIFF header does
        ends_early = ends_early or int.from_bytes(content[4:8], "little") + 8 > len(content)
    return ImageError(FailureCode.TRUNCATED if ends_early else FailureCode.CORRUPT, message)


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8; a malformed EXIF block is a warning, not a failure."""
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception as error:  # noqa: BLE001  whatever the EXIF parser trips over
        logger.warning("malformed EXIF ignored: %s", error)
        return 1
    return orientation if isinstance(orientation, int) and orientation in _TRANSPOSE else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in _16_BIT_MODES:
        values = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        return Image.fromarray(_scale_to_8_bit(np.asarray(image))).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    if image.mode == "LAB":
        msg = "colour mode LAB has no conversion to RGB without a profile: convert the file to RGB"
        raise ImageError(FailureCode.UNSUPPORTED_FORMAT, msg)
    return image.convert("RGB")


def _scale_to_8_bit(values: np.ndarray) -> np.ndarray:
    """32-bit integers count as 16-bit unless one is larger; floats in 0..1 are scaled, others taken as 0..255."""
    if values.dtype.kind == "f":
        if not np.isfinite(values).all():
            raise ImageError(FailureCode.CORRUPT, "the picture holds NaN or infinite samples")
        scale = 255.0 if values.max() <= 1.0 else 1.0
    else:
        scale = 255 / 65535 if values.max() <= 65535 else 255 / (2**31 - 1)  # noqa: PLR2004  the types' ranges
    return np.clip(np.rint(values * scale), 0, 255).astype(np.uint8)
