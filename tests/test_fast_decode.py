"""`--fast-decode`: JPEGs decoded at a reduced scale give nearly the same pixels, and are never taken for the same."""

from __future__ import annotations

import io
import struct
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import make_rule
from PIL import Image
from test_decoders import make_decoders, through
from test_end_to_end import embeddings_of, run
from test_layout import LAYOUT

import vlmembed
from vlmembed.checking.verification import verify
from vlmembed.cli import main
from vlmembed.config import EncodeConfig
from vlmembed.decode import PIXEL_POLICY, decode, pixel_policy
from vlmembed.draft import MARGIN, Draft, draft
from vlmembed.errors import ConfigError, FailureCode, ImageError, InputError, OutputError
from vlmembed.layout import ResizeRule
from vlmembed.official import CropResize, NaflexResize, NavitResize, SmartResize
from vlmembed.patcher import Patcher
from vlmembed.recipes import load_recipe
from vlmembed.resize import BICUBIC, BILINEAR
from vlmembed.schema import read_provenance
from vlmembed.types import Failure, PatchedImage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vlmembed.decode import DecodedImage
    from vlmembed.resize import Fit, Resize

LIMIT = 10**8
SIZE_HW = (1203, 1601)
"""Neither side can be divided by 2."""

MEAN_LEVELS, MAX_LEVELS = 0.3, 3
"""How far the resized pixels of a `photo` may be from those of the whole one, of 255: in the mean, and at most. By
hand, for every rule and orientation here: 0.10 to 0.24, and 2; with the rest of the last pixels left on, 0.4 to 1.0."""

NATIVE = make_rule(LAYOUT, max_pixels=224 * 224)
RULES: dict[str, Resize] = {
    "native": NATIVE.resize,
    "shortest-edge": CropResize(shortest_edge=256, size_hw=None, crop_hw=(224, 224), resample=BICUBIC),
    "in-float": CropResize(shortest_edge=256, size_hw=None, crop_hw=(224, 224), resample=BICUBIC, in_float=True),
    "both-sides": CropResize(shortest_edge=None, size_hw=(224, 224), crop_hw=None, resample=BILINEAR),
    "smart": SmartResize(factor=28, min_pixels=3136, max_pixels=40_000),
    "navit": NavitResize(patch_size=14, merge_size=2, max_patches=256, max_side_patches=512),
    "naflex": NaflexResize(patch_size=14, max_patches=256),
}


def photo(size_hw: tuple[int, int], seed: int = 0) -> Image.Image:
    """Detail of every size, as photos have it: the finer, the fainter."""
    height, width = size_hw
    generator = np.random.default_rng(seed)
    total = np.full((height, width, 3), 128.0, np.float32)
    for octave in range(1, 9):
        side = 2**octave
        coarse = Image.fromarray(generator.integers(0, 256, (side, side, 3), dtype=np.uint8))
        fine = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32)
        total += (fine - 128) / np.float32(1.5**octave)
    return Image.fromarray(total.clip(0, 255).astype(np.uint8))


def jpeg(image: Image.Image, *, orientation: int = 1, **options: object) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=90, exif=exif, **options)
    return stream.getvalue()


@cache
def large() -> Image.Image:
    """A `photo` of `SIZE_HW`."""
    return photo(SIZE_HW)


@cache
def large_jpeg() -> bytes:
    return jpeg(large())


def lossless_jpeg(size_hw: tuple[int, int]) -> bytes:
    """A grey picture by prediction, without blocks: every sample is as predicted, which is one bit 0 each."""
    height, width = size_hw

    def segment(marker: int, content: bytes) -> bytes:
        return bytes((0xFF, marker)) + struct.pack(">H", len(content) + 2) + content

    frame = segment(0xC3, struct.pack(">BHHB", 8, height, width, 1) + bytes((1, 0x11, 0)))
    table = segment(0xC4, bytes((0, 1)) + bytes(15) + bytes(1))
    scan = segment(0xDA, bytes((1, 1, 0, 1, 0, 0)))
    return b"\xff\xd8" + frame + table + scan + bytes(-(-height * width // 8)) + b"\xff\xd9"


def rule_of(resize: Resize) -> ResizeRule:
    return ResizeRule(mode="official", resize=resize, layout=LAYOUT, max_source_pixels=LIMIT)


def patched(content: bytes, rule: ResizeRule, *, fast_decode: bool) -> PatchedImage | Failure:
    patcher = Patcher(rule=rule, max_source_pixels=LIMIT, hash_pixels=False, fast_decode=fast_decode)
    return patcher(0, content).result


def both(content: bytes, rule: ResizeRule) -> tuple[PatchedImage, PatchedImage]:
    """Of the whole picture, and of the reduced one."""
    whole, fast = (patched(content, rule, fast_decode=fast_decode) for fast_decode in (False, True))
    assert isinstance(whole, PatchedImage)
    assert isinstance(fast, PatchedImage)
    return whole, fast


def levels(content: bytes, rule: ResizeRule) -> tuple[float, float]:
    """How far the reduced picture's patches are from the whole one's; everything else is the same."""
    whole, fast = both(content, rule)
    assert (whole.grid_hw, whole.size_hw, whole.patches.dtype) == (fast.grid_hw, fast.size_hw, fast.patches.dtype)
    apart = np.abs(whole.patches.astype(np.float64) - fast.patches)
    return float(apart.mean()), float(apart.max())


def is_near(content: bytes, rule: ResizeRule) -> bool:
    mean, most = levels(content, rule)
    assert mean > 0, "it was not reduced"
    return mean <= MEAN_LEVELS and most <= MAX_LEVELS


def draft_of(content: bytes, fit: Callable[[tuple[int, int]], Fit] = NATIVE.fit) -> Draft | None:
    return decode(content, max_source_pixels=LIMIT, fit=fit).draft


def test_a_large_jpeg_is_reduced_and_the_resized_pixels_are_nearly_the_same() -> None:
    decoded = decode(large_jpeg(), max_source_pixels=LIMIT, fit=NATIVE.fit)
    assert decoded.rgb.size == (801, 602)
    assert decoded.draft == Draft(size_hw=SIZE_HW, box=(0, 0, 800.5, 601.5))
    assert decoded.size_hw == SIZE_HW
    assert is_near(large_jpeg(), NATIVE)


@pytest.mark.parametrize("name", RULES)
def test_the_resized_pixels_are_nearly_the_same_by_every_rule(name: str) -> None:
    assert is_near(large_jpeg(), rule_of(RULES[name]))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_resized_pixels_are_nearly_the_same_in_every_orientation(orientation: int) -> None:
    content = jpeg(large(), orientation=orientation)
    size_hw = SIZE_HW if orientation <= 4 else SIZE_HW[::-1]
    decoded = decode(content, max_source_pixels=LIMIT, fit=NATIVE.fit)
    assert (decoded.size_hw, decoded.rgb.size) == (size_hw, (801, 602) if orientation <= 4 else (602, 801))
    assert is_near(content, NATIVE)
    assert is_near(content, rule_of(RULES["shortest-edge"]))


def test_what_is_left_of_the_last_pixels_turns_with_the_picture() -> None:
    """As Pillow turns the pixels themselves: a picture whose last column and row are marked."""
    marked = Image.new("L", (5, 3))
    marked.paste(1, (4, 0, 5, 3))
    marked.paste(1, (0, 2, 5, 3))
    of_file = Draft(size_hw=(5, 9), box=(0, 0, 4.5, 2.5))
    for transpose in (None, *Image.Transpose):
        turned = of_file.turned(transpose)
        pixels = np.asarray(marked if transpose is None else marked.transpose(transpose))
        left, top, right, bottom = turned.box
        assert turned.size_hw == ((5, 9) if pixels.shape == (3, 5) else (9, 5))
        assert (right - left, bottom - top) == ((4.5, 2.5) if pixels.shape == (3, 5) else (2.5, 4.5))
        assert (left == 0.5, right == pixels.shape[1] - 0.5) == (bool(pixels[:, 0].all()), bool(pixels[:, -1].all()))
        assert (top == 0.5, bottom == pixels.shape[0] - 0.5) == (bool(pixels[0].all()), bool(pixels[-1].all()))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("is_on_its_side", [False, True])
def test_the_reduced_picture_is_the_smallest_that_is_large_enough(name: str, *, is_on_its_side: bool) -> None:
    rule, scales = rule_of(RULES[name]), set()

    def turned(size_hw: tuple[int, int]) -> tuple[int, int]:
        return size_hw[::-1] if is_on_its_side else size_hw

    for height, width in ((1, 1), (40, 900), (447, 448), (449, 1001), (1024, 1024), (2047, 3001), (3600, 4000)):
        with Image.open(io.BytesIO(jpeg(Image.new("L", (width, height))))) as image:
            drafted = draft(image, b"", rule.fit, is_on_its_side=is_on_its_side)
            reduced_wh = image.size
        resized_hw = turned(rule.fit(turned((height, width))).resized_hw)
        ratio = min(width / resized_hw[1], height / resized_hw[0])
        scale = next((scale for scale in (8, 4, 2) if ratio >= MARGIN * scale), 1)
        assert reduced_wh == (-(-width // scale), -(-height // scale))
        expected = Draft(size_hw=(height, width), box=(0, 0, width / scale, height / scale))
        assert drafted == (None if scale == 1 else expected)
        scales.add(scale)
    assert len(scales) > 2


@pytest.mark.parametrize("size_hw", [(5, 7), (300, 300), (700, 830)])
def test_a_jpeg_that_is_not_large_enough_keeps_its_pixels_to_the_bit(size_hw: tuple[int, int]) -> None:
    content = jpeg(large().crop((0, 0, *size_hw[::-1])))
    assert draft_of(content) is None
    assert levels(content, NATIVE) == (0, 0)


@pytest.mark.parametrize("mode", ["L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
def test_grey_cmyk_and_progressive_jpegs_are_reduced_alike(mode: str, *, progressive: bool) -> None:
    content = jpeg(large().convert(mode), progressive=progressive)
    assert is_near(content, NATIVE)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "MPO"])
def test_other_formats_keep_their_pixels_to_the_bit(kind: str) -> None:
    picture = large().crop((0, 0, 903, 901))
    options: dict[str, dict[str, Any]] = {
        "MPO": {"save_all": True, "append_images": [picture]},
        "TIFF": {"compression": "jpeg"},
        "PNG": {"compress_level": 1},
    }
    stream = io.BytesIO()
    picture.save(stream, kind, **options.get(kind, {}))
    assert draft_of(stream.getvalue()) is None
    assert levels(stream.getvalue(), NATIVE) == (0, 0)


def test_a_jpeg_without_blocks_is_decoded_whole() -> None:
    content = lossless_jpeg((900, 1200))
    assert draft_of(content) is None
    assert levels(content, NATIVE) == (0, 0)
    assert np.asarray(decode(content, max_source_pixels=LIMIT, fit=NATIVE.fit).rgb).mean() == 128


def test_broken_jpegs_fail_as_they_do_without() -> None:
    """Cut anywhere, or with bytes that are others."""
    rule = make_rule(LAYOUT, max_pixels=56 * 56)
    generator = np.random.default_rng(5)
    codes = set()
    for options in ({}, {"progressive": True}, {"orientation": 6}):
        content = jpeg(photo((240, 323)), **options)
        assert draft_of(content, rule.fit) is not None
        ends = [*range(len(content) - 8, len(content)), *generator.integers(2, len(content), 12).tolist()]
        broken = [content[:end] for end in ends]
        for places in generator.integers(2, 800, (20, 3)).tolist():
            altered = bytearray(content)
            for place in places:
                altered[place] ^= 0x55
            broken.append(bytes(altered))
        for each in broken:
            outcomes = [patched(each, rule, fast_decode=fast_decode) for fast_decode in (False, True)]
            failures = [each if isinstance(each, Failure) else None for each in outcomes]
            assert failures[0] == failures[1]
            codes |= {failure.code for failure in failures if failure is not None}
    assert {FailureCode.TRUNCATED, FailureCode.CORRUPT} <= codes


def test_what_a_rule_refuses_is_refused_as_without() -> None:
    rule = rule_of(RULES["smart"])
    content = jpeg(large().crop((0, 0, 1600, 7)))
    failure = patched(content, rule, fast_decode=True)
    assert isinstance(failure, Failure)
    assert (failure.stage, failure.code) == ("preprocess", FailureCode.ASPECT_RATIO)
    assert failure == patched(content, rule, fast_decode=False)
    with pytest.raises(ImageError, match="1601x1203 = 1926003 pixels, over the limit of 1000000"):
        decode(large_jpeg(), max_source_pixels=10**6, fit=NATIVE.fit)


def test_processes_decode_as_threads_do() -> None:
    patcher = Patcher(rule=NATIVE, max_source_pixels=LIMIT, hash_pixels=False, fast_decode=True)
    with make_decoders("processes", patcher) as decoders:
        (found,) = through(decoders, [large_jpeg()])
    expected = patched(large_jpeg(), NATIVE, fast_decode=True)
    assert isinstance(found.result, PatchedImage)
    assert isinstance(expected, PatchedImage)
    assert np.array_equal(found.result.patches, expected.patches)
    assert found.result.size_hw == SIZE_HW


def test_the_pixel_policy_is_another_with_it_and_what_it_was_without() -> None:
    assert pixel_policy(fast_decode=False) == PIXEL_POLICY
    assert (
        pixel_policy(fast_decode=True)
        == f"{PIXEL_POLICY}, jpegs at 1/2, 1/4 or 1/8, not below 2 times the resized size"
    )


def test_it_does_not_go_with_hashes_of_pixels() -> None:
    with pytest.raises(ConfigError, match="dedup pixels compares whole pictures, and fast_decode decodes less of them"):
        EncodeConfig(inputs=("in",), fast_decode=True, dedup="pixels")
    with pytest.raises(ConfigError, match="fast_decode is 1; it is true or false"):
        EncodeConfig(inputs=("in",), fast_decode=1)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder of JPEGs and one PNG, and its outputs with and without."""
    root = tmp_path_factory.mktemp("fast")
    (root / "in").mkdir()
    for number in range(3):
        picture = photo((601, 803), seed=number)
        (root / "in" / f"{number}.jpg").write_bytes(jpeg(picture, orientation=1 + 5 * (number == 2)))
    large().crop((0, 0, 803, 601)).save(root / "in" / "3.png")
    run(root / "in", root / "exact.parquet", model=str(tiny_model))
    run(root / "in", root / "fast.parquet", model=str(tiny_model), fast_decode=True)
    return root


def test_an_output_has_nearly_the_same_vectors_and_the_same_rows(world: Path) -> None:
    exact, fast = (pq.read_table(world / f"{name}.parquet") for name in ("exact", "fast"))
    assert fast.drop(["embedding"]).equals(exact.drop(["embedding"]))
    assert fast["height"].to_pylist() == [601, 601, 803, 601]
    exact_vectors, fast_vectors = (embeddings_of(world / f"{name}.parquet") for name in ("exact", "fast"))
    for name, vector in exact_vectors.items():
        cosine = float(vector @ fast_vectors[name])
        assert cosine == pytest.approx(1, abs=1e-6) if name == "3.png" else cosine > 0.999
        assert np.array_equal(vector, fast_vectors[name]) == (name == "3.png")


def test_the_provenance_says_it_and_the_recipe_makes_it_again(
    world: Path, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = read_provenance(pq.read_schema(world / "fast.parquet"), "fast")
    assert facts["fingerprint"]["pixel_policy"] == pixel_policy(fast_decode=True)
    without = read_provenance(pq.read_schema(world / "exact.parquet"), "exact")["fingerprint"]
    assert without["pixel_policy"] == PIXEL_POLICY
    assert facts["fingerprint"] == without | {"pixel_policy": pixel_policy(fast_decode=True)}

    def said(*arguments: object) -> str:
        monkeypatch.setattr("sys.argv", ["vlmembed", *map(str, arguments)])
        with suppress(SystemExit):
            main()
        return capsys.readouterr().out

    (tmp_path / "again.toml").write_text(said("inspect", "--recipe", world / "fast.parquet"))
    assert load_recipe(tmp_path / "again.toml").fast_decode is True
    said("run", tmp_path / "again.toml", "--set", f"output={tmp_path}/again.parquet")
    said("encode", world / "in", tmp_path / "flag.parquet", "--model", tiny_model, "--fast-decode")
    expected = pq.read_table(world / "fast.parquet")
    assert pq.read_table(tmp_path / "again.parquet").equals(expected)
    assert pq.read_table(tmp_path / "flag.parquet").equals(expected)
    shown = said("inspect", world / "fast.parquet")
    assert "fast-decode on" in shown
    assert "jpegs at 1/2, 1/4 or 1/8" in shown


def test_an_output_is_gone_on_with_and_taken_over_only_by_its_like(
    world: Path, tmp_path: Path, tiny_model: Path
) -> None:
    model, inputs = str(tiny_model), world / "in"
    said = 'pixel_policy: .* there, .*jpegs at 1/2, 1/4 or 1/8, not below 2 times the resized size" now'
    with pytest.raises(OutputError, match=said):
        run(inputs, world / "exact.parquet", model=model, fast_decode=True)
    with pytest.raises(OutputError, match="pixel_policy"):
        run(inputs, world / "fast.parquet", model=model)
    with pytest.raises(InputError, match=said):
        run(inputs, tmp_path / "x.parquet", model=model, fast_decode=True, reuse=(str(world / "exact.parquet"),))
    again = run(inputs, tmp_path / "y.parquet", model=model, fast_decode=True, reuse=(str(world / "fast.parquet"),))
    assert (again.num_found, again.num_encoded) == (4, 0)


def test_a_cache_keeps_the_two_apart(world: Path, tmp_path: Path, tiny_model: Path) -> None:
    cached = {"model": str(tiny_model), "cache": str(tmp_path / "cache")}
    for name, settings, found in (("a", {}, 0), ("b", {"fast_decode": True}, 0), ("c", {"fast_decode": True}, 4)):
        report = run(world / "in", tmp_path / f"{name}.parquet", **cached, **settings)
        assert (report.num_found, report.num_encoded) == (found, 4 - found)
    assert pq.read_table(tmp_path / "c.parquet").equals(pq.read_table(world / "fast.parquet"))


def test_verify_decodes_as_the_run_did(world: Path) -> None:
    found = verify(world / "fast.parquet", num_rows=None)
    assert (found.is_good, found.num_checked, found.differences) == (True, 4, [])
    assert found.worst < 1e-5
    assert verify(world / "exact.parquet", num_rows=None).worst < 1e-5


def test_a_plan_decodes_as_the_run_will(world: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []

    def noted(*arguments: object, **settings: object) -> DecodedImage:
        decoded.append(decode(*arguments, **settings))  # type: ignore[arg-type]
        return decoded[-1]

    monkeypatch.setattr("vlmembed.patcher.decode", noted)
    vlmembed.plan(str(world / "in"), model=str(tiny_model), fast_decode=True, calibration_seconds=0.01)
    assert sum(each.draft is not None for each in decoded) >= 2
