"""Tells pictures from other files, by their first bytes and by their names.

Pillow's own per-plugin tests are made to choose among decoders: several accept plain text. So the signatures that
nothing else shares are listed here.
"""

from __future__ import annotations

from functools import lru_cache

from PIL import Image

try:
    import pillow_heif
except ImportError:  # the `heif` extra
    pillow_heif = None

SNIFF_BYTES = 32
"""How many leading bytes `sniff_format` needs."""

_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\xff\xd8\xff", "JPEG"),
    (0, b"\x89PNG\r\n\x1a\n", "PNG"),
    (0, b"GIF87a", "GIF"),
    (0, b"GIF89a", "GIF"),
    (8, b"WEBP", "WEBP"),
    (0, b"II*\x00", "TIFF"),
    (0, b"MM\x00*", "TIFF"),
    (0, b"II+\x00", "TIFF"),
    (0, b"MM\x00+", "TIFF"),
    (0, b"\x00\x00\x00\x0cjP  \r\n\x87\n", "JPEG2000"),
    (0, b"\xffO\xffQ", "JPEG2000"),
    (4, b"ftypavif", "AVIF"),
    (4, b"ftypavis", "AVIF"),
    (4, b"ftyphei", "HEIF"),
    (4, b"ftyphev", "HEIF"),
    (4, b"ftypmif1", "HEIF"),
    (4, b"ftypmsf1", "HEIF"),
    (0, b"8BPS\x00\x01", "PSD"),
    (0, b"DDS ", "DDS"),
    (0, b"qoif", "QOI"),
    (0, b"icns", "ICNS"),
    (0, b"SIMPLE  =", "FITS"),
    (0, b"\x59\xa6\x6a\x95", "SUN"),
    (0, b"P7 332", "XVTHUMB"),
)

_FORMATS_NOT_READ = frozenset({"BUFR", "EPS", "GRIB", "HDF5", "IPTC", "MPEG", "WMF"})
"""EPS is a program, run by Ghostscript; IPTC may wrap one, since Pillow opens what is inside whatever it is; the others
hold no picture, or none that Pillow alone can decode."""

_EXTENSIONS_BESIDE_PILLOWS = frozenset({".avif", ".heic", ".heif", ".jfif", ".jxl", ".webp"})


def sniff_format(head: bytes) -> str | None:
    """Name of the picture format that `head` (the first `SNIFF_BYTES` of a file) begins, or None.

    Only formats with a signature that text and other data do not share are told.
    """
    for offset, signature, name in _SIGNATURES:
        if head.startswith(signature, offset):
            return name
    if head.startswith(b"BM") and head[6:10] == b"\0\0\0\0":
        return "BMP"
    return None


@lru_cache(maxsize=1)
def readable_formats() -> tuple[str, ...]:
    """Pillow's names of the formats that are decoded, in the order in which it tries them.

    HEIF is among them where the `heif` extra is installed.
    """
    Image.preinit()
    Image.init()
    if pillow_heif is not None:
        pillow_heif.register_heif_opener()
    return tuple(name for name in Image.ID if name not in _FORMATS_NOT_READ)


@lru_cache(maxsize=1)
def picture_extensions() -> frozenset[str]:
    """File extensions, lower case with the dot, that promise a picture."""
    formats = frozenset(readable_formats())
    openable = {extension for extension, name in Image.EXTENSION.items() if name in formats}
    return frozenset(openable | _EXTENSIONS_BESIDE_PILLOWS)
