"""Encoded bytes to RGB, by one declared pixel policy.

The policy (recorded in the provenance as `PIXEL_POLICY`): EXIF orientation applied; alpha and palette transparency
composited on white; 16-bit scaled to 8; CMYK and YCCK converted without a colour profile; the first frame of an
animation; truncated files fail.
"""

from __future__ import annotations

import hashlib
import io
import threading
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import PIL
from PIL import Image, ImageFile, UnidentifiedImageError

from vlmembed.errors import FailureCode, ImageError
from vlmembed.formats import SNIFF_BYTES, readable_formats, sniff_format

if TYPE_CHECKING:
    from collections.abc import Iterator

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
_16_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")

_ENDS_EARLY = ("eoferror", "truncated", "unexpected end", "end of file", "not enough image data")
"""Words of Pillow's plugins for a file that stops before its picture does, in lower case."""

_NOT_SUPPORTED = ("unsupported", "not supported", "unknown compression", "cannot find loader")
"""Words for a file that is whole, of a kind that Pillow knows and cannot decode."""

_settings_lock = threading.Lock()
_limits: list[int] = []  # of the runs that are going on
_saved: dict[str, int | bool | None] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedImage:
    """`rgb` is a Pillow image of mode RGB, upright; `exif_problem` says why its EXIF block was ignored, if it was."""

    rgb: Image.Image
    exif_problem: str = ""

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
def own_pillow_settings(max_source_pixels: int) -> Iterator[None]:
    """Pillow's global settings for a run, restored at the end of the last of several concurrent ones.

    `decode` checks the header itself. Pillow's limit, twice ``MAX_IMAGE_PIXELS``, stands behind it for the formats that
    Pillow decodes while it opens them (ICO). Its warning at half of that is silenced. Truncated files fail, whatever
    the caller had set.
    """
    with _settings_lock:
        if not _limits:
            _saved.update(pixels=Image.MAX_IMAGE_PIXELS, truncated=ImageFile.LOAD_TRUNCATED_IMAGES)
        _limits.append(max_source_pixels)
        Image.MAX_IMAGE_PIXELS = -(-max(_limits) // 2)
        ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            yield
    finally:
        with _settings_lock:
            _limits.remove(max_source_pixels)
            Image.MAX_IMAGE_PIXELS = -(-max(_limits) // 2) if _limits else _saved["pixels"]
            ImageFile.LOAD_TRUNCATED_IMAGES = not _limits and bool(_saved["truncated"])


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
        transpose, exif_problem = _transpose_of(image)
        rgb = _to_rgb(image)
        if transpose is not None:
            rgb = rgb.transpose(transpose)
    except ImageError:
        raise
    except MemoryError as error:
        msg = f"no memory for {width}x{height} pixels"
        raise ImageError(FailureCode.OUT_OF_MEMORY, msg) from error
    except Exception as error:
        raise _broken(content, error) from error
    return DecodedImage(rgb=rgb, exif_problem=exif_problem)


def _open(content: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(content), formats=readable_formats())
    except UnidentifiedImageError as error:
        name = sniff_format(content[:SNIFF_BYTES])
        if name == "HEIF" and name not in readable_formats():
            msg = "HEIC needs the heif extra: pip install pillow-heif"
            raise ImageError(FailureCode.UNSUPPORTED_FORMAT, msg) from error
        if name is None:
            msg = f"not a picture format that is read with Pillow {PIL.__version__}; it begins {content[:8]!r}"
            raise ImageError(FailureCode.UNSUPPORTED_FORMAT, msg) from error
        unreadable = ValueError(f"it begins like {name}, but Pillow cannot read its header")
        raise _broken(content, unreadable) from error
    except MemoryError as error:
        raise ImageError(FailureCode.OUT_OF_MEMORY, "no memory to read the header") from error
    except Exception as error:
        raise _broken(content, error) from error


def _broken(content: bytes, error: Exception) -> ImageError:
    """Tell files that end too early, are too large or of an unreadable kind from those that are wrong inside."""
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, Image.DecompressionBombError):
        return ImageError(FailureCode.TOO_LARGE, f"{message} Raise --max-source-pixels to accept it")
    if any(phrase in message.lower() for phrase in _NOT_SUPPORTED):
        return ImageError(FailureCode.UNSUPPORTED_FORMAT, message)
    ends_early = any(phrase in message.lower() for phrase in _ENDS_EARLY)
    if sniff_format(content[:SNIFF_BYTES]) == "WEBP":  # libwebp does not say; the RIFF header does
        ends_early = ends_early or int.from_bytes(content[4:8], "little") + 8 > len(content)
    return ImageError(FailureCode.TRUNCATED if ends_early else FailureCode.CORRUPT, message)


def _transpose_of(image: Image.Image) -> tuple[Image.Transpose | None, str]:
    """What turns the image upright by its EXIF orientation, and why the EXIF block could not be read, if so."""
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception as error:  # noqa: BLE001  whatever the EXIF parser trips over is a warning, not a failure
        return None, f"{type(error).__name__}: {error}"
    return _TRANSPOSE.get(orientation) if isinstance(orientation, int) else None, ""


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in _16_BIT_MODES:
        values = np.asarray(image).astype(np.uint32)
        scaled = ((values * 255 + 32767) // 65535).astype(np.uint8)
        if isinstance(transparent := image.info.get("transparency"), int):
            scaled[values == transparent] = 255
        return Image.fromarray(scaled).convert("RGB")
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
