"""The pixel policy, on files made here with known pixels, and on files that are really broken."""

from __future__ import annotations

import io
import warnings

import numpy as np
import pytest
from bombs import DATA, Tags, fits_block, fits_card, fits_gzip, gigapixel_png, ico, rgb_tags, saved, tiff
from conftest import SAMPLES
from PIL import Image, ImageCms, ImageFile, ImageOps

import vlmembed.pixels
from vlmembed.decode import decode, own_pillow_settings
from vlmembed.errors import FailureCode, ImageError
from vlmembed.formats import picture_extensions, readable_formats, sniff_format

LIMIT = 10**8


def pixels(content: bytes) -> np.ndarray:
    return np.asarray(decode(content, max_source_pixels=LIMIT).rgb)


def code_of(content: bytes) -> FailureCode:
    with pytest.raises(ImageError) as caught:
        decode(content, max_source_pixels=LIMIT)
    return caught.value.code


def ramp() -> Image.Image:
    return Image.fromarray(np.arange(6 * 5 * 3, dtype=np.uint8).reshape(6, 5, 3))


@pytest.mark.parametrize("orientation", range(9))
def test_exif_orientation_as_pillow_applies_it(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = saved(ramp(), "PNG", exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))))
    np.testing.assert_array_equal(pixels(content), expected)


def test_exif_rotation_of_the_sample() -> None:
    decoded = decode((SAMPLES / "photos/exif-rotated.jpg").read_bytes(), max_source_pixels=LIMIT)
    upright = decode((SAMPLES / "photos/rocket.jpg").read_bytes(), max_source_pixels=LIMIT)
    assert decoded.size_hw == upright.size_hw == (214, 320)
    difference = np.abs(np.asarray(decoded.rgb).astype(int) - np.asarray(upright.rgb)).mean()
    assert difference < 2  # one more JPEG compression


def test_malformed_exif_is_a_warning() -> None:
    broken = saved(ramp(), "PNG", exif=b"Exif\x00\x00no tiff header at all")
    decoded = decode(broken, max_source_pixels=LIMIT)
    np.testing.assert_array_equal(np.asarray(decoded.rgb), np.asarray(ramp()))
    assert decoded.exif_problem
    assert not decode(saved(ramp(), "PNG"), max_source_pixels=LIMIT).exif_problem


def test_alpha_is_composited_on_white() -> None:
    colours = np.array([[[10, 20, 30, 255], [10, 20, 30, 0], [0, 0, 0, 51]]], np.uint8)
    found = pixels(saved(Image.fromarray(colours), "PNG"))
    assert found.tolist() == [[[10, 20, 30], [255, 255, 255], [204, 204, 204]]]


def test_palette_transparency_is_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([9, 9, 9, 200, 30, 30])
    image.putpixel((1, 0), 1)
    assert pixels(saved(image, "PNG", transparency=0)).tolist() == [[[255, 255, 255], [200, 30, 30]]]


def test_a_transparent_colour_of_rgb_is_white() -> None:
    image = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))
    assert pixels(saved(image, "PNG", transparency=(1, 2, 3))).tolist() == [[[255, 255, 255], [4, 5, 6]]]


def test_grey_with_alpha() -> None:
    image = Image.new("LA", (2, 1))
    image.putpixel((0, 0), (7, 255))
    image.putpixel((1, 0), (7, 0))
    assert pixels(saved(image, "PNG")).tolist() == [[[7, 7, 7], [255, 255, 255]]]


def test_16_bit_is_scaled_not_clipped() -> None:
    image = Image.fromarray(np.array([[0, 257, 32896, 65535]], np.uint16))
    for kind in ("PNG", "TIFF"):
        assert pixels(saved(image, kind))[0, :, 0].tolist() == [0, 1, 128, 255]
    sample = pixels((SAMPLES / "drawings/sixteen-bit.png").read_bytes())
    assert sample[0, 0, 0] == 0
    assert sample[-1, -1, 0] == 255
    assert len(np.unique(sample)) == 256


@pytest.mark.parametrize(
    ("samples", "dtype", "expected"),
    [
        ([0, 65535], np.int32, [0, 255]),
        ([0, 2**30, 2**31 - 1], np.int32, [0, 128, 255]),
        ([0, 0.5, 1], np.float32, [0, 128, 255]),
        ([0, 99.6, 300], np.float32, [0, 100, 255]),
    ],
)
def test_32_bit_and_float_samples(samples: list[float], dtype: type, expected: list[int]) -> None:
    content = saved(Image.fromarray(np.array([samples], dtype)), "TIFF")
    assert pixels(content)[0, :, 0].tolist() == expected


def test_samples_that_are_no_numbers() -> None:
    assert code_of(saved(Image.fromarray(np.array([[0, np.nan]], np.float32)), "TIFF")) is FailureCode.CORRUPT


def test_a_transparent_grey_of_16_bits_is_white() -> None:
    image = Image.fromarray(np.array([[0, 1000, 65535]], np.uint16))
    assert pixels(saved(image, "PNG", transparency=1000))[0, :, 0].tolist() == [0, 255, 255]


def test_cmyk_is_converted() -> None:
    assert pixels(saved(Image.new("CMYK", (2, 2), (0, 255, 255, 0)), "TIFF"))[0, 0].tolist() == [255, 0, 0]
    sample = pixels((SAMPLES / "photos/cmyk.jpg").read_bytes())
    plain = Image.open(SAMPLES / "photos/coffee.jpg").resize((160, 107))
    assert np.abs(sample.astype(int) - np.asarray(plain)).mean() < 12


def srgb_of_lab(lab: np.ndarray) -> np.ndarray:
    """CIE 15 and IEC 61966-2-1, with Bradford's adaptation from D50 to D65."""
    lightness, a, b = np.moveaxis(lab.astype(float), -1, 0)
    f = (lightness + 16) / 116 + np.stack([a / 500, 0 * a, -b / 200])
    xyz = np.where(f > 6 / 29, f**3, 3 * (6 / 29) ** 2 * (f - 4 / 29)) * np.array([0.9642, 1, 0.8249])[:, None, None]
    matrix = np.array([[3.1339, -1.6169, -0.4906], [-0.9788, 1.9161, 0.0335], [0.0719, -0.2290, 1.4052]])
    linear = np.clip(np.tensordot(matrix, xyz, 1), 0, 1)
    gamma = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.moveaxis(gamma * 255, 0, -1)


def test_lab_is_converted() -> None:
    lab = np.array([[[0, 0, 0], [50, 0, 0], [100, 0, 0], [53, 60, 40], [70, -40, 30], [40, 20, -50]]])
    stored = np.stack([np.rint(lab[..., 0] * 2.55), lab[..., 1], lab[..., 2]], axis=-1).astype(np.int8).view(np.uint8)
    tags: Tags = rgb_tags((6, 1), photometric=8) | {273: (4, [DATA]), 278: (4, [1])}
    found = pixels(tiff(tags, stored.tobytes()))
    assert np.abs(found - srgb_of_lab(lab)).max() < 1.1


def test_lab_without_littlecms_has_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        message = "no LittleCMS"
        raise ImportError(message)

    monkeypatch.setattr(ImageCms, "createProfile", missing)
    tags: Tags = rgb_tags((6, 1), photometric=8) | {273: (4, [DATA]), 278: (4, [1])}
    assert code_of(tiff(tags, bytes(18))) is FailureCode.UNSUPPORTED_FORMAT


def test_fits_is_read() -> None:
    samples = np.array([[0, 257], [32896, 65535]], ">u2")
    keys = ("SIMPLE", "BITPIX", "NAXIS", "NAXIS1", "NAXIS2")
    plain = fits_block(*map(fits_card, keys, ("T", 16, 2, 2, 2))) + samples.tobytes().ljust(2880, b"\0")
    expected = [[128, 255], [0, 1]]  # FITS counts rows from the bottom
    assert pixels(plain)[..., 0].tolist() == expected
    assert pixels(fits_gzip((2, 2), samples.astype(">u4").tobytes()))[..., 0].tolist() == expected
    cut = fits_block(*map(fits_card, keys, ("T", 16, 2, 99, 99))) + bytes(9000)
    assert code_of(cut) is FailureCode.TRUNCATED
    table = fits_block(*map(fits_card, keys[:3], ("T", 8, 0))) + bytes(2880)
    assert code_of(table) is FailureCode.UNSUPPORTED_FORMAT


def test_stripes_change_no_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    photo = Image.open(SAMPLES / "photos/cat.jpg").resize((61, 47))
    alpha = photo.convert("RGBA")
    alpha.putalpha(Image.linear_gradient("L").resize(photo.size))
    contents = [saved(photo.convert(mode), "TIFF") for mode in ("1", "L", "I", "F", "CMYK", "LAB", "I;16", "RGB")]
    contents += [saved(image, "PNG") for image in (alpha, alpha.convert("LA"), photo.quantize(), alpha.quantize())]
    contents.append(saved(photo.quantize(), "GIF", transparency=3))
    whole = [decode(content, max_source_pixels=LIMIT) for content in contents]
    monkeypatch.setattr(vlmembed.pixels, "STRIPE_PIXELS", 130)  # two rows
    for content, expected in zip(contents, whole, strict=True):
        found = decode(content, max_source_pixels=LIMIT)
        np.testing.assert_array_equal(np.asarray(found.rgb), np.asarray(expected.rgb))
        assert found.pixel_hash() == expected.pixel_hash()


def test_the_first_frame_counts() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "green", "blue")]
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        lossless = {"lossless": True} if kind == "WEBP" else {}
        content = saved(frames[0], kind, save_all=True, append_images=frames[1:], **lossless)
        assert pixels(content)[0, 0].tolist() == [255, 0, 0]


def test_avif_and_heif_are_read() -> None:
    assert pixels((SAMPLES / "photos/galaxies.avif").read_bytes()).shape == (209, 240, 3)
    image = Image.new("RGB", (64, 48), (200, 30, 60))
    assert "HEIF" in readable_formats()
    found = pixels(saved(image, "HEIF"))
    assert found.shape == (48, 64, 3)
    assert np.abs(found[24, 32].astype(int) - [200, 30, 60]).max() < 6


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("truncated.jpg", FailureCode.TRUNCATED),
        ("truncated.png", FailureCode.TRUNCATED),
        ("zero-bytes.jpg", FailureCode.EMPTY),
        ("text.jpg", FailureCode.UNSUPPORTED_FORMAT),
        ("flipped-byte.png", FailureCode.CORRUPT),
    ],
)
def test_broken_samples(name: str, code: FailureCode) -> None:
    assert code_of((SAMPLES / "broken" / name).read_bytes()) is code


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
def test_no_truncated_file_passes(kind: str, share: float) -> None:
    photo = Image.open(SAMPLES / "photos/cat.jpg")
    content = saved(photo, kind)
    assert code_of(content[: int(len(content) * share)]) in {
        FailureCode.TRUNCATED,
        FailureCode.CORRUPT,
        FailureCode.UNSUPPORTED_FORMAT,
    }


def test_a_bomb_is_refused_by_its_header() -> None:
    with (
        own_pillow_settings(LIMIT),
        pytest.raises(ImageError, match=r"1073741824 pixels.* limit of 100000000") as caught,
    ):
        decode(gigapixel_png(), max_source_pixels=LIMIT)
    assert caught.value.code is FailureCode.TOO_LARGE
    assert "--max-source-pixels" in str(caught.value)
    with pytest.raises(ImageError, match="320x214 = 68480 pixels, over the limit of 1000: raise --max-source-pixels"):
        decode((SAMPLES / "photos/rocket.jpg").read_bytes(), max_source_pixels=1000)


def test_pillows_settings_are_ours_and_then_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    before = Image.MAX_IMAGE_PIXELS
    with own_pillow_settings(200_000):
        assert code_of((SAMPLES / "broken/truncated.jpg").read_bytes()) is FailureCode.TRUNCATED
        with own_pillow_settings(500_001):
            assert Image.MAX_IMAGE_PIXELS == 250_001
        assert Image.MAX_IMAGE_PIXELS == 100_000
    assert before == Image.MAX_IMAGE_PIXELS
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


def test_the_callers_filters_of_warnings_are_left_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with own_pillow_settings(200_000):
            warnings.warn("silenced", Image.DecompressionBombWarning, stacklevel=1)
            warnings.filterwarnings("ignore", message="another thread's own")
            with own_pillow_settings(100_000):
                pass
            warnings.warn("still silenced", Image.DecompressionBombWarning, stacklevel=1)
        warnings.warn("another thread's own", UserWarning, stacklevel=1)  # an error in these tests, were it shown
        with pytest.raises(Image.DecompressionBombWarning):
            warnings.warn("shown again", Image.DecompressionBombWarning, stacklevel=1)


def test_a_bomb_inside_an_ico_is_refused_before_it_is_decoded() -> None:
    """Pillow decodes an ICO's PNG while it opens the file, and its own header may claim another size."""
    with own_pillow_settings(LIMIT):
        assert code_of(ico(gigapixel_png())) is FailureCode.TOO_LARGE


def test_programs_are_not_run() -> None:
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
    assert code_of(program) is FailureCode.UNSUPPORTED_FORMAT


def test_pixel_hash_sees_size_and_pixels_not_the_file() -> None:
    names = ("photos/same-pixels.png", "photos/same-pixels.bmp", "photos/cat.jpg")
    png, bmp, other = (decode((SAMPLES / name).read_bytes(), max_source_pixels=LIMIT).pixel_hash() for name in names)
    assert png == bmp != other
    flat, tall = (
        decode(saved(Image.new("RGB", size), "PNG"), max_source_pixels=LIMIT).pixel_hash() for size in ((4, 1), (1, 4))
    )
    assert flat != tall


def test_formats_are_told_from_bytes() -> None:
    photo = Image.open(SAMPLES / "photos/cat.jpg")
    for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "JPEG2000", "DDS", "QOI", "ICNS"):
        assert sniff_format(saved(photo.resize((64, 64)), kind)[:32]) == kind
    assert sniff_format(fits_block(fits_card("SIMPLE", "T"))[:32]) == "FITS"
    assert sniff_format(b"\x59\xa6\x6a\x95" + bytes(28)) == "SUN"
    assert sniff_format(b"P7 332\n#IMGINFO:512x440 RGB") == "XVTHUMB"
    for text in (
        b"SIMPLE words",
        b"Python is not a PPM",
        b"P5 sounds like one",
        b"#define x_width 1",
        b"BMW",
        b"",
        b"{}",
        b"PAR1",
    ):
        assert sniff_format(text) is None


def test_extensions() -> None:
    extensions = picture_extensions()
    assert {".jpg", ".jfif", ".png", ".tif", ".tiff", ".webp", ".avif", ".heic", ".gif", ".bmp", ".fits"} <= extensions
    assert not {".txt", ".json", ".pdf", ".parquet", ".mpg", ".eps", ".h5", ".iim"} & extensions
