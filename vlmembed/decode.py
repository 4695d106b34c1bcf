"""Encoded bytes to RGB, by one declared pixel policy.

The policy (recorded in the provenance as `PIXEL_POLICY`): EXIF orientation applied; alpha and palette transparency
composited on white; 16-bit scaled to 8; CMYK and YCCK converted without a colour profile, LAB to sRGB; the first frame
of an animation; truncated files fail. With `--fast-decode`, JPEGs are decoded at a reduced scale (`vlmembed.draft`),
which `pixel_policy` adds.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
import threading
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import PIL
from PIL import Image, ImageFile, UnidentifiedImageError

from vlmembed.codestream import check_codestreams
from vlmembed.directory import MAX_TAG_VALUES, check_tiff, read_directory
from vlmembed.draft import DRAFT_POLICY, draft
from vlmembed.errors import FailureCode, ImageError
from vlmembed.formats import SNIFF_BYTES, readable_formats, sniff_format
from vlmembed.pixels import stripes, to_rgb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vlmembed.draft import Draft
    from vlmembed.resize import Fit

PIXEL_POLICY = "1: exif applied, alpha on white, 16-bit scaled, cmyk converted, first frame"

MAX_EXIF_BYTES = 2**24
"""A larger EXIF block is ignored: Pillow makes Python objects of what it holds."""

MAX_SIDE_PIXELS = 2**23
"""Pillow's resize takes up to 32 bytes for each pixel along a side, and gives up at 67 million of them."""

MAX_FITS_GZIP_PIXELS = 2**22
"""Pillow unpacks a FITS file of this kind in Python, in 45 bytes and half a microsecond a pixel."""

_ORIENTATION_TAG = 0x0112
_TRANSPOSE = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ON_ITS_SIDE = tuple(_TRANSPOSE[number] for number in (5, 6, 7, 8))
_EXIF_PREFIX = re.compile(rb"\A(?:Exif\0\0){1,2}")
_AVIF_EXIF_ITEM = re.compile(rb"(infe(?:\x02.{7}|\x03.{9}))Exif", re.DOTALL)
_AVIF_EXIF_PROBLEM = "Invalid Exif payload"
_DECLARED_SIZE = re.compile(rb"ispe\0{4}(.{8})", re.DOTALL)

_ENDS_EARLY = ("eoferror", "truncated", "unexpected end", "end of file", "not enough image data")
"""Words of Pillow's plugins for a file that stops before its picture does, in lower case."""

_NOT_SUPPORTED = (
    "unsupported",
    "not supported",
    "not yet supported",
    "unknown compression",
    "unimplemented",
    "unknown pixel format",
    "cannot find loader",
    "no image data",
)
"""Words for a file that is whole, of a kind that Pillow knows and cannot decode."""

_METADATA_TOO_LARGE = ("max_text_chunk", "max_text_memory")
"""Pillow's names for what a PNG's texts and its colour profile may inflate to: 1 MiB each, texts 64 MiB in all."""

_NEEDS_ALL = ("JPEG2000", "ICNS")
"""Formats of which `_check_header` looks at every part."""

_settings_lock = threading.Lock()
_limits: list[int] = []  # of the runs that are going on
_saved: dict[str, int | bool | None] = {}
_silenced: list[object] = []  # the filter of warnings that is ours


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a picture's header says: Pillow's name of its `format`, and height and width in pixels, upright."""

    format: str
    size_hw: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedImage:
    """A picture that can be resized.

    Attributes:
        rgb: a Pillow image of mode RGB, upright.
        draft: what it is of, where it was decoded at a reduced scale; upright too.
        exif_problem: why its EXIF block was ignored, if it was.
    """

    rgb: Image.Image
    draft: Draft | None = None
    exif_problem: str = ""

    @property
    def size_hw(self) -> tuple[int, int]:
        """Height and width of the whole picture in pixels, after orientation."""
        return (self.rgb.height, self.rgb.width) if self.draft is None else self.draft.size_hw

    def pixel_hash(self) -> bytes:
        """SHA-256 over the size and the RGB bytes: 32 bytes, equal for equal pictures in different files. Of whole
        pictures only: what a reduced one looks like hangs on the resize."""
        assert self.draft is None
        digest = hashlib.sha256(f"RGB {self.rgb.width}x{self.rgb.height}\n".encode())
        for _, stripe in stripes(self.rgb):
            digest.update(stripe.tobytes())
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
            before = list(warnings.filters)
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            _silenced.extend(each for each in warnings.filters if each not in before)
        _limits.append(max_source_pixels)
        Image.MAX_IMAGE_PIXELS = -(-max(_limits) // 2)
        ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        with _settings_lock:
            _limits.remove(max_source_pixels)
            if not _limits:
                _end_silence()
            Image.MAX_IMAGE_PIXELS = -(-max(_limits) // 2) if _limits else _saved["pixels"]
            ImageFile.LOAD_TRUNCATED_IMAGES = not _limits and bool(_saved["truncated"])


def _end_silence() -> None:
    """Take the one filter away that was put there: `warnings.catch_warnings` would take those that the caller's threads
    have put there meanwhile, too."""
    filters = warnings.filters
    assert isinstance(filters, list)
    while _silenced:
        with suppress(ValueError):  # the caller has reset them all
            filters.remove(_silenced.pop())


def pixel_policy(*, fast_decode: bool) -> str:
    """The policy of a run, for its fingerprint."""
    return f"{PIXEL_POLICY}, {DRAFT_POLICY}" if fast_decode else PIXEL_POLICY


def decode(
    content: bytes, *, max_source_pixels: int, fit: Callable[[tuple[int, int]], Fit] | None = None
) -> DecodedImage:
    """Decode the first frame of an encoded picture to upright RGB. With `fit`, which tells what a picture of a size
    will be resized to, a JPEG that is much larger is decoded at a reduced scale.

    Raises:
        ImageError: with the code that the row will carry.
    """
    if not content:
        raise ImageError(FailureCode.EMPTY, "the file has 0 bytes")
    _check_header(content, max_source_pixels)
    image, exif_problem = _open(content, max_source_pixels)
    _check_size(image, max_source_pixels)
    drafted = None
    try:
        if fit is not None and image.format == "JPEG":
            is_on_its_side = _transpose_of(image)[0] in _ON_ITS_SIDE
            drafted = draft(image, content, fit, is_on_its_side=is_on_its_side)
        image.load()
        _check_size(image, max_source_pixels)  # again: what an ICNS or HEIF holds may be larger than it says
        transpose, problem = _transpose_of(image)
        rgb = to_rgb(image)
        del image  # not held beside the upright copy
        if transpose is not None:
            rgb = rgb.transpose(transpose)
    except ImageError:
        raise
    except MemoryError as error:
        raise ImageError(FailureCode.OUT_OF_MEMORY, "no memory for the picture's pixels") from error
    except Exception as error:
        raise _broken(content, error) from error
    return DecodedImage(rgb=rgb, draft=drafted and drafted.turned(transpose), exif_problem=exif_problem or problem)


def read_header(content: bytes, *, max_source_pixels: int) -> Header:
    """The header of a whole file, which is not decoded: damage behind the header is not seen, nor an orientation that a
    PNG has behind its pixels.

    Raises:
        ImageError: as `decode` would.
    """
    if not content:
        raise ImageError(FailureCode.EMPTY, "the file has 0 bytes")
    _check_header(content, max_source_pixels)
    image, _ = _open(content, max_source_pixels)
    _check_size(image, max_source_pixels)
    width, height = image.size
    if image.format != "TIFF":  # Pillow turns a TIFF's size by itself
        transpose, _ = _transpose_of(image, Image.Image.getexif)  # a PNG's own would decode it
        if transpose in _ON_ITS_SIDE:
            width, height = height, width
    return Header(format=image.format or "unknown", size_hw=(height, width))


def read_header_of_head(head: bytes, *, max_source_pixels: int) -> Header | None:
    """The header by the first bytes of a longer file; None where they do not suffice to judge it.

    Raises:
        ImageError: the picture is larger than it may be, which the first bytes tell for good.
    """
    if sniff_format(head[:SNIFF_BYTES]) in _NEEDS_ALL:
        return None
    if head.startswith((b"II", b"MM")):
        entries, problem = read_directory(head)
        if problem or any(entry.num_values > MAX_TAG_VALUES for entry in entries):  # judged by the file's length
            return None
    try:
        return read_header(head, max_source_pixels=max_source_pixels)
    except ImageError as error:
        if error.code in (FailureCode.TOO_LARGE, FailureCode.ASPECT_RATIO):
            raise
        return None


def _check_header(content: bytes, max_source_pixels: int) -> None:
    """Refuse what would cost much memory to open, or much more to decode than its picture."""
    if content.startswith((b"II", b"MM")):
        check_tiff(content, max_source_pixels)
    elif sniff_format(content[:SNIFF_BYTES]) in _NEEDS_ALL:
        check_codestreams(content, max_source_pixels)


def _check_size(image: Image.Image, max_source_pixels: int) -> None:
    width, height = image.size
    is_slow_fits = image.format == "FITS" and any(tile[0] == "fits_gzip" for tile in getattr(image, "tile", ()))
    limit = min(max_source_pixels, MAX_FITS_GZIP_PIXELS) if is_slow_fits else max_source_pixels
    if width * height > limit:
        remedy = "save it without gzip" if is_slow_fits else "raise --max-source-pixels to accept it"
        msg = f"{width}x{height} = {width * height} pixels, over the limit of {limit}: {remedy}"
        raise ImageError(FailureCode.TOO_LARGE, msg)
    if max(width, height) > MAX_SIDE_PIXELS:
        msg = f"{width}x{height}: a side is over the limit of {MAX_SIDE_PIXELS} pixels; cut it to pieces"
        raise ImageError(FailureCode.ASPECT_RATIO, msg)


def _open(content: bytes, max_source_pixels: int) -> tuple[Image.Image, str]:
    """The image, not yet decoded, and why its EXIF block had to be hidden for that, if so."""
    try:
        return Image.open(io.BytesIO(content), formats=readable_formats()), ""
    except UnidentifiedImageError as error:
        raise _unidentified(content, max_source_pixels) from error
    except MemoryError as error:
        raise ImageError(FailureCode.OUT_OF_MEMORY, "no memory to read the header") from error
    except Exception as error:
        if _AVIF_EXIF_PROBLEM in str(error):
            without_exif = _AVIF_EXIF_ITEM.sub(rb"\1skip", content)
            if without_exif != content:
                return _open(without_exif, max_source_pixels)[0], str(error)
        raise _broken(content, error) from error


def _unidentified(content: bytes, max_source_pixels: int) -> ImageError:
    name = sniff_format(content[:SNIFF_BYTES])
    if name == "HEIF" and name not in readable_formats():
        msg = "HEIC needs the heif extra: pip install pillow-heif"
        return ImageError(FailureCode.UNSUPPORTED_FORMAT, msg)
    if name is None:
        msg = f"not a picture format that is read with Pillow {PIL.__version__}; it begins {content[:8]!r}"
        return ImageError(FailureCode.UNSUPPORTED_FORMAT, msg)
    if name in ("AVIF", "HEIF"):  # libavif has a limit of its own, and Pillow does not say that it was met
        for width, height in (struct.unpack(">II", match[1]) for match in _DECLARED_SIZE.finditer(content)):
            if width * height > max_source_pixels:
                msg = f"{width}x{height} = {width * height} pixels, over the limit of {max_source_pixels}"
                return ImageError(FailureCode.TOO_LARGE, msg)
    return _broken(content, ValueError(f"it begins like {name}, but Pillow cannot read its header"))


def _broken(content: bytes, error: Exception) -> ImageError:
    """Tell files that end too early, are too large or of an unreadable kind from those that are wrong inside."""
    message = f"{type(error).__name__}: {error}".strip()
    lower = message.lower()
    if isinstance(error, Image.DecompressionBombError):
        return ImageError(FailureCode.TOO_LARGE, f"{str(error).split(',')[0]}: raise --max-source-pixels to accept it")
    if any(phrase in lower for phrase in _METADATA_TOO_LARGE):
        return ImageError(FailureCode.TOO_LARGE, f"{message}: save it without its texts and colour profile")
    if "security limit exceeded" in lower:  # libheif's words
        return ImageError(FailureCode.TOO_LARGE, message)
    if any(phrase in lower for phrase in _NOT_SUPPORTED):
        return ImageError(FailureCode.UNSUPPORTED_FORMAT, message)
    ends_early = any(phrase in lower for phrase in _ENDS_EARLY)
    if sniff_format(content[:SNIFF_BYTES]) == "WEBP":  # libwebp does not say; the RIFF header does
        ends_early = ends_early or int.from_bytes(content[4:8], "little") + 8 > len(content)
    return ImageError(FailureCode.TRUNCATED if ends_early else FailureCode.CORRUPT, message)


def _transpose_of(
    image: Image.Image, getexif: Callable[[Image.Image], Image.Exif] = lambda image: image.getexif()
) -> tuple[Image.Transpose | None, str]:
    """What turns the image upright by its EXIF orientation, and what is wrong with the EXIF block, if anything."""
    exif = image.info.get("exif")
    try:
        if exif and len(exif) > MAX_EXIF_BYTES:
            return None, f"{len(exif)} bytes, more than {MAX_EXIF_BYTES}"
        _, problem = read_directory(_EXIF_PREFIX.sub(b"", exif)) if exif else ([], "")
        orientation = getexif(image).get(_ORIENTATION_TAG, 1)
    except Exception as error:  # noqa: BLE001  whatever the EXIF parser trips over is a warning, not a failure
        return None, f"{type(error).__name__}: {error}"
    if isinstance(orientation, int) and orientation in _TRANSPOSE:
        return _TRANSPOSE[orientation], problem
    return None, problem or f"its orientation is {str(orientation)[:40]!r}, not one of 1 to 8"
