"""Files that promise or hide far more than they hold: made here, byte by byte, with what must become of each.

No test module: `test_hostile_images.py` decodes them, `fuzz_decode.py` starts from them.
"""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vlmembed.formats import readable_formats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

EMBEDDED = "embedded"
SIZE = (61, 47)
"""Width and height of the honest pictures: odd numbers that no header holds by chance."""

HUGE = (65000, 64000)
"""What the liars say in their place where 16 bits must do: 4 gigapixels."""

BOMBS: dict[str, tuple[Callable[[], bytes], frozenset[str]]] = {}
"""Name, how to make it, and the outcomes that are right: `EMBEDDED` or codes of failures."""


def bomb(name: str, *outcomes: str) -> Callable[[Callable[[], bytes]], Callable[[], bytes]]:
    def add(make: Callable[[], bytes]) -> Callable[[], bytes]:
        BOMBS[name] = (make, frozenset(outcomes))
        return make

    return add


@lru_cache(maxsize=1)
def picture() -> Image.Image:
    """Smooth and coloured, so that every format has something to compress."""
    generator = np.random.default_rng(6)
    coarse = Image.fromarray(generator.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    return coarse.resize(SIZE, Image.Resampling.BICUBIC)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:  # noqa: ANN401  of Pillow's plugins
    readable_formats()  # registers HEIF
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def replaced(content: bytes, old: bytes, new: bytes) -> bytes:
    assert old in content
    return content.replace(old, new, 1)


def overwritten(content: bytes, position: int, new: bytes) -> bytes:
    return content[:position] + new + content[position + len(new) :]


@lru_cache
def zeros(num_mib: int) -> bytes:
    """A zlib stream of so many MiB of zeros, made without inflating it."""
    compressor = zlib.compressobj(9)
    first = compressor.compress(bytes(2**20)) + compressor.flush(zlib.Z_FULL_FLUSH)
    again = compressor.compress(bytes(2**20)) + compressor.flush(zlib.Z_FULL_FLUSH)
    adler = (num_mib * 2**20 % 65521) << 16 | 1  # of zeros alone
    return first + again * (num_mib - 1) + b"\x03\0" + struct.pack(">I", adler)


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(size: tuple[int, int], *before: bytes, after: bytes = b"", compressed: bytes | None = None) -> bytes:
    """An RGB picture, black if it is not given, with chunks before and after its pixels."""
    header = struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes((3 * size[0] + 1) * size[1])) if compressed is None else compressed
    chunks = png_chunk(b"IHDR", header) + b"".join(before) + png_chunk(b"IDAT", data) + after
    return b"\x89PNG\r\n\x1a\n" + chunks + png_chunk(b"IEND", b"")


def gigapixel_png() -> bytes:
    """Header, a little data, end: 32768 x 32768 pixels claimed."""
    return png((2**15, 2**15), compressed=zlib.compress(bytes(2**20)))


TYPE_CODES = {1: "B", 3: "H", 4: "I", 16: "Q"}
DATA = -1
"""Stands in a TIFF's tag for the place of its pixels."""

Tags = dict[int, tuple[int, "Sequence[int] | bytes"]]


def tiff(tags: Tags, pixels: bytes, *, big: bool = False, following: int = 0) -> bytes:
    """A file with one directory, the pixels and then the values that do not fit into it.

    `tags` are numbers with a type and values or, for strings, bytes; `following` is the place of the next directory.
    """
    entry_code, number_code, word = ("<HHQ", "<Q", "<Q") if big else ("<HHI", "<H", "<I")
    inline_bytes = struct.calcsize(word)
    header = b"II+\0\x08\0\0\0" + struct.pack("<Q", 16) if big else b"II*\0" + struct.pack("<I", 8)
    entry_bytes = struct.calcsize(entry_code) + inline_bytes
    start = len(header) + struct.calcsize(number_code) + len(tags) * entry_bytes + inline_bytes
    directory, values = bytearray(), bytearray()
    for tag, (kind, numbers) in sorted(tags.items()):
        if isinstance(numbers, bytes):
            raw, count = numbers, len(numbers)
        else:
            numbers = [start if number == DATA else number for number in numbers]  # noqa: PLW2901
            raw, count = struct.pack(f"<{len(numbers)}{TYPE_CODES[kind]}", *numbers), len(numbers)
        directory += struct.pack(entry_code, tag, kind, count)
        if len(raw) <= inline_bytes:
            directory += raw.ljust(inline_bytes, b"\0")
        else:
            directory += struct.pack(word, start + len(pixels) + len(values))
            values += raw
    return header + struct.pack(number_code, len(tags)) + directory + struct.pack(word, following) + pixels + values


def rgb_tags(size: tuple[int, int] = (16, 16), *, compression: int = 1, photometric: int = 2) -> Tags:
    return {
        256: (4, [size[0]]),
        257: (4, [size[1]]),
        258: (3, [8, 8, 8]),
        259: (3, [compression]),
        262: (3, [photometric]),
        277: (3, [3]),
    }


ONE_STRIP: Tags = {273: (4, [DATA]), 278: (4, [16])}
RGB_16X16 = bytes(16 * 16 * 3)


def jpeg_2000(size: tuple[int, int], tile: tuple[int, int], **options: Any) -> bytes:  # noqa: ANN401  of Pillow's plugin
    """A bare codestream of a small picture that says it is of another size and in other tiles."""
    content = saved(picture(), "JPEG2000", no_jp2=True, **options)
    return overwritten(overwritten(content, 8, struct.pack(">II", *size)), 24, struct.pack(">II", *tile))


def fits_card(key: str, value: object) -> bytes:
    return f"{key:<8}= {value!s:>20}".ljust(80).encode()


def fits_block(*cards: bytes) -> bytes:
    content = b"".join(cards) + b"END".ljust(80)
    return content.ljust(-(-len(content) // 2880) * 2880)


def fits_gzip(size: tuple[int, int], pixels: bytes) -> bytes:
    """A table that holds a compressed picture, as Pillow finds it."""
    first = fits_block(fits_card("SIMPLE", "T"), fits_card("BITPIX", 8), fits_card("NAXIS", 0))
    numbers = {"BITPIX": 8, "NAXIS": 2, "NAXIS1": 1, "NAXIS2": 0, "ZIMAGE": "T", "ZBITPIX": 16, "ZNAXIS": 2}
    numbers |= {"ZNAXIS1": size[0], "ZNAXIS2": size[1]}
    table = (b"XTENSION= 'BINTABLE'".ljust(80), b"ZCMPTYPE= 'GZIP_1  '".ljust(80))
    head = first + fits_block(*table, *(fits_card(*item) for item in numbers.items()))
    return head + gzip.compress(pixels, mtime=0).ljust(2880, b"\0")


# --- Headers that promise gigapixels ----------------------------------------------------------------------------------


def lie(
    kind: str,
    code: str,
    said: tuple[int, int] = HUGE,
    *,
    mode: str = "RGB",
    height_first: bool = False,
    **options: Any,  # noqa: ANN401  of Pillow's plugins
) -> Callable[[], bytes]:
    """A file as Pillow saves it, in which the size, packed by `code`, is another one."""
    true_size, said_size = (SIZE[::-1], said[::-1]) if height_first else (SIZE, said)

    def make() -> bytes:
        honest = saved(picture().convert(mode), kind, **options)
        return replaced(honest, struct.pack(code, *true_size), struct.pack(code, *said_size))

    return make


def in_words(kind: str, template: str) -> Callable[[], bytes]:
    return lambda: replaced(saved(picture(), kind), template.format(*SIZE).encode(), template.format(*HUGE).encode())


def webp_canvas(size: tuple[int, int]) -> bytes:
    animation = saved(picture(), "WEBP", save_all=True, append_images=[picture().rotate(5)])
    return overwritten(animation, 24, struct.pack("<I", size[0] - 1)[:3] + struct.pack("<I", size[1] - 1)[:3])


def ico(content: bytes, size: tuple[int, int] = (16, 16), kind: int = 1) -> bytes:
    return struct.pack("<3H4B2H2I", 0, kind, 1, *size, 0, 0, 1, 32, len(content), 22) + content


def icns(content: bytes) -> bytes:
    return struct.pack(">4sI4sI", b"icns", 16 + len(content), b"ic07", 8 + len(content)) + content


def gif(screen: tuple[int, int], frame: tuple[int, int], num_frames: int = 1) -> bytes:
    one = b"," + struct.pack("<4HB", 0, 0, *frame, 0) + b"\x02\x02\x44\x01\x00"
    return b"GIF89a" + struct.pack("<HHBBB", *screen, 0x80, 0, 0) + bytes(range(6)) + one * num_frames + b";"


def pcx(size: tuple[int, int], pixels: bytes = bytes(99)) -> bytes:
    head = struct.pack("<4B6H", 10, 5, 1, 8, 0, 0, size[0] - 1, size[1] - 1, 72, 72).ljust(65, b"\0")
    return (head + struct.pack("<BHH", 1, size[0] + size[0] % 2, 1)).ljust(128, b"\0") + pixels


def psd(size: tuple[int, int], layers: bytes = b"", pixels: bytes = bytes(99)) -> bytes:
    head = struct.pack(">4sH6xHIIHH", b"8BPS", 1, 3, *size[::-1], 8, 3)
    return head + bytes(8) + struct.pack(">I", len(layers)) + layers + b"\0\0" + pixels


def msp(size: tuple[int, int]) -> bytes:
    words = [*struct.unpack("<2H", b"DanM"), *size, *([1] * 4), 0, 0, 0, 0, 0, 0, 0, 0]
    for word in words[:12]:
        words[12] ^= word  # the checksum
    return struct.pack("<16H", *words) + bytes(99)


def spider(size: tuple[int, int]) -> bytes:
    """Floats, of which Pillow asks that they are whole and fit together."""
    width, height = size
    record_bytes = width * 4
    num_records = -(-1024 // record_bytes)
    fields = {1: 1, 2: height, 5: 1, 12: width, 13: num_records, 22: num_records * record_bytes, 23: record_bytes}
    return struct.pack(">256f", *(fields.get(number, 0) for number in range(1, 257))) + bytes(999)


GIGAPIXELS: dict[str, Callable[[], bytes]] = {
    "png": gigapixel_png,
    "jpeg": lie("JPEG", ">HH", height_first=True),
    "progressive jpeg": lie("JPEG", ">HH", height_first=True, progressive=True),
    "webp, lossy": lie("WEBP", "<HH", (16383, 16383)),
    "webp, lossless": lambda: overwritten(
        saved(picture(), "WEBP", lossless=True), 21, struct.pack("<I", 16383 << 14 | 16383)
    ),
    "webp, by its canvas": lambda: webp_canvas((2**24, 250)),
    "avif": lie("AVIF", ">II", (16384, 16384)),
    "avif, beyond libavif's limit": lie("AVIF", ">II", (40000, 40000)),
    "heif": lambda: replaced(
        saved(Image.new("RGB", (64, 64)), "HEIF"), struct.pack(">II", 64, 64), struct.pack(">II", 40000, 40000)
    ),
    "gif": lambda: gif(HUGE, (1, 1)),
    "gif, by its frame": lambda: gif((1, 1), HUGE),
    "bmp": lie("BMP", "<ii"),
    "dib": lie("DIB", "<ii"),
    "jpeg 2000, by its box": lie("JPEG2000", ">II", height_first=True),
    "jpeg 2000, by its codestream": lie("JPEG2000", ">II8x", (40000, 40000)),
    "tga": lie("TGA", "<HH"),
    "ppm": in_words("PPM", "{} {}"),
    "dds": lie("DDS", "<II", height_first=True),
    "qoi": lie("QOI", ">II"),
    "sgi": lie("SGI", ">HH"),
    "im": in_words("IM", "{}*{}"),
    "msp": lambda: msp(HUGE),
    "blp 2": lie("BLP", "<II", mode="P"),
    "blp 1": lie("BLP", "<II", mode="P", blp_version="BLP1"),
    "ico": lambda: ico(gigapixel_png()),
    "ico, bitmap": lambda: ico(lie("DIB", "<ii")()),
    "cur": lambda: ico(lie("DIB", "<ii")(), kind=2),
    "icns": lambda: icns(gigapixel_png()),
    "xbm": lambda: b"#define im_width 65000\n#define im_height 64000\nstatic char im_bits[] = {\n0x00\n};\n",
    "xpm": lambda: b'/* XPM */\nstatic char *x[] = {\n"65000 64000 1 1",\n"a c #FFFFFF",\n"aaaa"};\n',
    "xv thumbnail": lambda: b"P7 332\n#END_OF_COMMENTS\n65000 64000 255\n" + bytes(99),
    "image tools": lambda: b"width 65000\nheight 64000\npixel n8\n\x0c" + bytes(999),
    "spider": lambda: spider(HUGE),
    "pcx": lambda: pcx(HUGE),
    "dcx": lambda: struct.pack("<III", 0x3ADE68B1, 12, 0) + pcx(HUGE),
    "psd": lambda: psd(HUGE),
    "sun": lambda: struct.pack(">8I", 0x59A66A95, *HUGE, 24, 0, 1, 0, 0) + bytes(99),
    "fli": lambda: struct.pack("<I6H2xI", 999, 0xAF12, 1, *HUGE, 8, 3, 70).ljust(999, b"\0"),
    "ftex": lambda: b"FTEX" + struct.pack("<8i", 1, *HUGE, 1, 1, 1, 36, 4) + bytes(9),
    "gimp brush": lambda: struct.pack(">5I", 21, 1, *HUGE, 1) + bytes(99),
    "pixar": lambda: overwritten(b"\x80\xe8".ljust(2048, b"\0"), 416, struct.pack("<6H", *HUGE[::-1], 0, 0, 14, 2)),
    "mcidas": lambda: (
        struct.pack(">8i", 0, 4, 0, 0, 0, 0, 0, 0) + struct.pack(">6i", *HUGE[::-1], 1, 1, 1, 1).ljust(999, b"\0")
    ),
    "fits": lambda: (
        fits_block(*map(fits_card, ("SIMPLE", "BITPIX", "NAXIS", "NAXIS1", "NAXIS2"), ("T", 8, 2, *HUGE))) + bytes(2880)
    ),
    "fits, in gzip": lambda: fits_gzip((2049, 2048), b""),
    "tiff": lambda: tiff(rgb_tags(HUGE) | ONE_STRIP, RGB_16X16),
    "bigtiff": lambda: tiff(rgb_tags(HUGE) | {273: (16, [DATA]), 278: (4, [16])}, RGB_16X16, big=True),
}
for _name, _make in GIGAPIXELS.items():
    bomb(f"gigapixels: {_name}", "too_large")(_make)


# --- Pictures of an ordinary size with something huge beside it -------------------------------------------------------


def text_chunk(name: bytes, num_mib: int, number: int = 0) -> bytes:
    head = {b"zTXt": b"\0\0", b"iTXt": b"\0\1\0\0\0", b"iCCP": b"\0\0"}[name]
    return png_chunk(name, b"key %d" % number + head + zeros(num_mib))


def _text_bomb(name: bytes, *, behind: bool = False) -> bytes:
    chunk = text_chunk(name, 400)
    return png(SIZE, after=chunk) if behind else png(SIZE, chunk)


for _chunk in (b"zTXt", b"iTXt", b"iCCP"):
    bomb(f"png: 400 MiB in {_chunk.decode()}", "too_large")(partial(_text_bomb, _chunk))
    bomb(f"png: 400 MiB in {_chunk.decode()} behind the pixels", "too_large")(partial(_text_bomb, _chunk, behind=True))


@bomb("png: 60 texts of 1 MiB each, as Pillow allows", EMBEDDED)
def _many_texts() -> bytes:
    return png(SIZE, *(text_chunk(b"zTXt", 1, number) for number in range(60)))


@bomb("png: 80 texts of 1 MiB each", "too_large")
def _too_many_texts() -> bytes:
    return png(SIZE, *(text_chunk(b"zTXt", 1, number) for number in range(80)))


@bomb("png: 80 texts of 1 MiB each that take 4 bytes a character", "too_large")
def _wide_texts() -> bytes:
    text = zlib.compress(("\U0001f600" + "a" * (2**20 - 4)).encode())
    return png(SIZE, *(png_chunk(b"iTXt", b"key %d\0\1\0\0\0" % number + text) for number in range(80)))


@bomb("png: an EXIF block of 17 MiB", EMBEDDED)
def _huge_exif() -> bytes:
    block = b"II*\0\x08\0\0\0" + struct.pack("<HHHIII", 1, 274, 3, 2**23, 26, 0) + bytes(17 * 2**20)
    return png(SIZE, png_chunk(b"eXIf", block))


@bomb("png: two billion frames", EMBEDDED)
def _apng() -> bytes:
    return png(SIZE, png_chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0)))


@bomb("gif: 100,000 frames", EMBEDDED)
def _gif_frames() -> bytes:
    return gif(SIZE, (1, 1), 100_000)


@bomb("webp: 300 frames", EMBEDDED)
def _webp_frames() -> bytes:
    frames = [Image.new("RGB", (8, 8), (number % 256, number // 256, 0)) for number in range(300)]
    return saved(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True, method=0)


@bomb("mpo: a second picture of gigapixels", EMBEDDED)
def _mpo() -> bytes:
    both = saved(picture(), "MPO", save_all=True, append_images=[picture().resize((59, 43))])
    return replaced(both, struct.pack(">HH", 43, 59), struct.pack(">HH", *HUGE))


@bomb("psd: a layer of gigapixels", EMBEDDED)
def _psd_layer() -> bytes:
    layer = struct.pack(">h4iH", 1, 0, 0, *HUGE, 3) + bytes(3 * 6 + 16)
    return psd(SIZE, struct.pack(">I", len(layer)) + layer, bytes(3 * SIZE[0] * SIZE[1]))


@bomb("dds: four billion mipmaps", EMBEDDED)
def _dds_mipmaps() -> bytes:
    return overwritten(saved(picture(), "DDS"), 28, b"\xff\xff\xff\xff")


@bomb("ico: a PNG larger than it says", EMBEDDED)
def _ico_inside() -> bytes:
    return ico(saved(picture(), "PNG"))


@bomb("icns: a PNG larger than it says", "corrupt")
def _icns_inside() -> bytes:
    return icns(saved(picture().resize((300, 200)), "PNG"))


@bomb("blp: a JPEG of gigapixels inside", "too_large")
def _blp_jpeg() -> bytes:
    inner = GIGAPIXELS["jpeg"]()
    head = b"BLP1" + struct.pack("<iI2Iii", 0, 0, *SIZE, 5, 0)
    start = len(head) + 128 + 4
    return head + struct.pack("<16I16I", start, *[0] * 15, len(inner), *[0] * 15) + bytes(4) + inner


@bomb("iptc: a program inside", "unsupported_format")
def _iptc() -> bytes:
    """Pillow would hand it to Ghostscript."""
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
    fields = {(3, 60): b"\1\0", (3, 20): b"\0\x09", (3, 30): b"\0\x09", (3, 120): b"\5", (8, 10): program}
    return b"".join(struct.pack(">3BH", 0x1C, *tag, len(value)) + value for tag, value in fields.items())


# --- TIFF -------------------------------------------------------------------------------------------------------------


def tiled(tile: tuple[int, int], pixels: bytes, photometric: int = 2) -> bytes:
    tiles: Tags = {322: (4, [tile[0]]), 323: (4, [tile[1]]), 324: (4, [DATA]), 325: (4, [len(pixels)])}
    return tiff(rgb_tags(compression=8, photometric=photometric) | tiles, pixels)


@bomb("tiff: a tile of 208 megapixels for 16x16", "too_large")
def _tile() -> bytes:
    return tiled((16000, 13000), zeros(600))


@bomb("tiff: a tile of 208 megapixels in YCbCr", "too_large")
def _tile_ycbcr() -> bytes:
    return tiled((16000, 13000), zeros(600), photometric=6)


@bomb("tiff: a tile beyond 32 bits", "too_large")
def _tile_beyond() -> bytes:
    return tiled((2**32 - 1, 2**32 - 1), zeros(1))


@bomb("tiff: a tile somewhat larger than the picture", EMBEDDED)
def _tile_larger() -> bytes:
    return tiled((160, 128), zeros(1))


@bomb("tiff: two billion rows a strip", EMBEDDED)
def _strip() -> bytes:
    return tiff(rgb_tags(compression=8) | {273: (4, [DATA]), 278: (4, [2**31 - 1]), 279: (4, [600000])}, zeros(600))


@bomb("tiff: 600,000 strips", "too_large")
def _strips() -> bytes:
    strips: Tags = {273: (4, [DATA] * 600_000), 278: (4, [1]), 279: (4, [48] * 600_000)}
    return tiff(rgb_tags() | strips, RGB_16X16)


def _many_values(tag: int) -> bytes:
    return tiff(rgb_tags() | ONE_STRIP | {tag: (3, [8] * 600_000)}, RGB_16X16)


for _tag, _what in {258: "bits per sample", 274: "orientations", 700: "XMP numbers", 34675: "profile numbers"}.items():
    bomb(f"tiff: 600,000 {_what}", "too_large")(partial(_many_values, _tag))


@bomb("tiff: 600,000 numbers of a private tag", EMBEDDED)
def _private() -> bytes:
    return _many_values(60000)


@bomb("tiff: a tag with more values than the file has bytes", EMBEDDED, "corrupt")
def _count() -> bytes:
    content = tiff(rgb_tags() | ONE_STRIP | {305: (2, b"software")}, RGB_16X16)
    return replaced(content, struct.pack("<HHI", 305, 2, 8), struct.pack("<HHI", 305, 3, 2**32 - 1))


@bomb("tiff: 65,000 tags", EMBEDDED)
def _tags() -> bytes:
    many: Tags = {number: (3, [1]) for number in range(400, 65000) if number not in (530, 700, 34675, 0xBC01)}
    return tiff(rgb_tags() | ONE_STRIP | many, RGB_16X16)


@bomb("bigtiff: a trillion tags", EMBEDDED, "corrupt")
def _big_count() -> bytes:
    content = tiff(rgb_tags() | {273: (16, [DATA]), 278: (4, [16])}, RGB_16X16, big=True)
    return overwritten(content, 16, struct.pack("<Q", 2**40))


@bomb("tiff: a directory that follows itself", EMBEDDED)
def _loop() -> bytes:
    return tiff(rgb_tags() | ONE_STRIP, RGB_16X16, following=8)


@bomb("tiff: 50,000 frames", EMBEDDED)
def _frames() -> bytes:
    one = tiff(rgb_tags() | ONE_STRIP, RGB_16X16, following=0)
    entries = one[8 : -4 - len(RGB_16X16)]
    start = len(one)
    parts = [overwritten(one, 8 + len(entries), struct.pack("<I", start))]
    for number in range(50_000):
        following = start + (number + 1) * (len(entries) + 4) if number < 49_999 else 0
        parts.append(entries + struct.pack("<I", following))
    return b"".join(parts)


# --- Decoders that take much for little -------------------------------------------------------------------------------


@bomb("jpeg 2000: code-blocks of 4x4 in 36 megapixels", "too_large")
def _code_blocks() -> bytes:
    return jpeg_2000((6000, 6000), (6000, 6000), codeblock_size=(4, 4))


@bomb("jpeg 2000: the same inside a box", "too_large")
def _code_blocks_in_a_box() -> bytes:
    content = saved(picture(), "JPEG2000", codeblock_size=(4, 4))
    start = content.index(b"jp2c") + 4
    content = replaced(content, struct.pack(">II", *SIZE[::-1]), struct.pack(">II", 6000, 6000))
    return content[:start] + overwritten(
        overwritten(content[start:], 8, struct.pack(">II", 6000, 6000)), 24, struct.pack(">II", 6000, 6000)
    )


@bomb("jpeg 2000: the same inside an icns", "too_large")
def _code_blocks_in_an_icns() -> bytes:
    return icns(jpeg_2000((6000, 6000), (6000, 6000), codeblock_size=(4, 4)))


@bomb("jpeg 2000: 65,535 tiles of one pixel", "too_large")
def _tiles() -> bytes:
    return jpeg_2000((255, 257), (1, 1))


@bomb("jpeg 2000: tiles of 16x16", EMBEDDED, "corrupt")
def _small_tiles() -> bytes:
    return jpeg_2000((256, 256), (16, 16))


@bomb("jpeg: components sampled 4x4, 1x2 and 2x1", EMBEDDED, "corrupt", "truncated")
def _sampling() -> bytes:
    content = saved(picture(), "JPEG")
    start = content.index(b"\xff\xc0") + 10
    return (
        content[: start + 1]
        + b"\x44"
        + content[start + 2 : start + 4]
        + b"\x12"
        + content[start + 5 : start + 7]
        + b"\x21"
        + content[start + 8 :]
    )


@bomb("jpeg: 300 scans", EMBEDDED)
def _scans() -> bytes:
    content = saved(Image.new("L", (800, 800)), "JPEG", progressive=True)
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last:-2] * 300 + content[-2:]


@bomb("pcx: runs that end long before 170 megapixels", "truncated")
def _pcx_runs() -> bytes:
    return pcx((60000, 2900), b"\xff\x05" * 5000)


@bomb("sgi: rows that lie outside", "corrupt", "truncated")
def _sgi_rows() -> bytes:
    head = struct.pack(">hBBHHHH", 474, 1, 1, 3, 13000, 13000, 3).ljust(512, b"\0")
    return head + b"\x7f\xff\xff\xff" * 3000


@bomb("avif: its EXIF block has no header", EMBEDDED)
def _avif_exif() -> bytes:
    exif = struct.pack("<4sIHHHI4sI", b"II*\0", 8, 1, 271, 2, 4, b"abc", 0)
    return replaced(saved(picture(), "AVIF", exif=exif), exif, b"none" + exif[4:])


# --- Sizes ------------------------------------------------------------------------------------------------------------

for _size, _outcome in {
    (1, 65535): EMBEDDED,
    (65535, 1): EMBEDDED,
    (2**23, 1): EMBEDDED,
    (1, 2**23): EMBEDDED,
    (10**7, 1): "aspect_ratio",
    (1, 10**7): "aspect_ratio",
    (178_000_000, 1): "aspect_ratio",
    (2**31 - 1, 1): "too_large",
}.items():
    bomb(f"size: {_size[0]}x{_size[1]}", _outcome)(
        partial(png, _size, compressed=None if _outcome == EMBEDDED else zlib.compress(bytes(2**20)))
    )
