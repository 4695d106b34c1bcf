"""Preprocessing in parity: grid, pixels and patch order are those of the models' own image processors."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from processors import CASES, DINOV3_CASE, KIMI_CASES, PIL_CASES, Case, grain, kimi_k25, smooth
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from vlmembed.errors import ConfigError, FailureCode, ImageError, ModelError
from vlmembed.official import CropResize, NaflexResize, NavitResize, SmartResize
from vlmembed.preprocess import preprocess
from vlmembed.resize import AreaResize, describe
from vlmembed.towers.families import MODEL_TYPES
from vlmembed.towers.processor import RULES, normalisation, rescale_factor, resize_rules, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from vlmembed.resize import Resize
    from vlmembed.types import PatchedImage

    Size = tuple[int, int]
    Picture = Callable[[Size], Image.Image]

# Tiny sides, primes, odd multiples of half a merged token (42 and 70 at 28, 48 and 80 at 32), and long strips.
SIZES = [(1, 1), (1, 7), (7, 1), (3, 5), (5, 3), (13, 13), (14, 14), (27, 29), (28, 28), (31, 33), (42, 42), (42, 70)]
SIZES += [(70, 42), (45, 60), (56, 56), (32, 48), (48, 80), (80, 48), (98, 126), (97, 101), (127, 131), (154, 210)]
SIZES += [(224, 224), (225, 223), (255, 257), (256, 256), (300, 451), (451, 300), (333, 77), (77, 333), (641, 479)]
SIZES += [(480, 640), (640, 480), (499, 503), (99, 1000), (1000, 99), (120, 640), (13, 200), (200, 13), (19, 360)]
SIZES += [(13, 2000), (2000, 13), (1, 200), (10, 2000), (2000, 10), (720, 1280), (1080, 1920)]

LARGE = (3000, 4000)

TOO_LONG = [(10, 2010), (2010, 10), (1, 201), (27, 5428)]

LENGTHS = [*range(1, 16), 17, 19, 23, 27, 28, 29, 31, 32, 33, 41, 42, 43, 47, 48, 49, 55, 56, 57, 63, 64, 65, 70, 71]
LENGTHS += [80, 97, 98, 126, 127, 144, 223, 224, 225, 336, 448, 449, 719, 720, 1080, 1920, 2801, 4000, 7168, 7169]
LENGTHS += [12_000, 30_011]
MANY_SIZES = list(itertools.product(LENGTHS, repeat=2))

BY_NAME = {case.name: case for case in CASES}
SMART_CASES = [case for case in PIL_CASES if case.family.processor.startswith("smart")]
OTHER_PIL_CASES = [case for case in PIL_CASES if case not in SMART_CASES]

# A strip's shortest edge at 224 can make its longest one 100 000 pixels: one such picture per model is enough.
CASES_AT_SIZES = [
    (case, size_hw)
    for case, size_hw in itertools.product(PIL_CASES, SIZES)
    if math.prod(case.rule().fit(size_hw).resized_hw) < 8_000_000
]
IDS_AT_SIZES = [f"{case.name}-{size_hw[0]}x{size_hw[1]}" for case, size_hw in CASES_AT_SIZES]


def each(cases: Sequence[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def at_sizes(sizes: Sequence[Size]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("size_hw", sizes, ids=lambda size: f"{size[0]}x{size[1]}")


def ours(case: Case, image: Image.Image) -> PatchedImage:
    return preprocess(image, 0, case.rule())


def check_exact(case: Case, image: Image.Image) -> None:
    patched = ours(case, image)
    grid, expected = case.own_patches(image, do_rescale=False, do_normalize=False)
    assert patched.grid_hw == grid
    assert patched.patches.dtype == np.uint8
    assert np.array_equal(case.in_own_layout(patched.patches), expected)
    _, expected = case.own_patches(image)
    found = case.in_own_layout(case.normalised(patched.patches))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def levels_apart(case: Case, image: Image.Image) -> NDArray[Any]:
    """How far each value is from the processor's, in levels of 0..255; the grids are equal."""
    patched = ours(case, image)
    in_float = case.rule().resize.in_float  # such a processor rescales before it resizes
    grid, expected = case.own_patches(image, do_normalize=False, do_rescale=in_float)
    assert patched.grid_hw == grid
    levels = expected / case.layout.rescale_factor if in_float else expected.astype(np.float64)
    return np.abs(case.in_own_layout(patched.patches) - levels)


def test_every_kind_and_class_of_processor_has_a_case() -> None:
    num_sizes = Counter(case.name for case, _ in CASES_AT_SIZES)
    assert min(num_sizes[case.name] for case in PIL_CASES) >= 40
    assert {case.family.processor for case in CASES} == set(RULES)
    kinds = {case.own.__name__: case.family.processor for case in CASES}
    for model_type, family in MODEL_TYPES.items():
        if classes := IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type):
            assert kinds[classes.get("pil", classes["torchvision"])] == family.processor, model_type


@pytest.mark.parametrize(("case", "size_hw"), CASES_AT_SIZES, ids=IDS_AT_SIZES)
def test_grid_pixels_and_patch_order_are_the_processors_own(case: Case, size_hw: Size) -> None:
    check_exact(case, smooth(size_hw))


@each([BY_NAME[name] for name in ("qwen2_5_vl-small", "siglip2-256", "dinov2")])
def test_a_large_picture_is_the_processors_own(case: Case) -> None:
    check_exact(case, smooth(LARGE))


@pytest.mark.parametrize(
    ("name", "size_hw", "expected"),
    [
        ("qwen2_vl", (13, 2000), (28, 700)),  # a side that rounds to nothing counts as 0, so the picture is enlarged
        ("qwen2_vl", (70, 126), (56, 112)),  # 2.5 and 4.5 tokens
        ("qwen3_vl", (720, 1280), (704, 1280)),  # 22.5 tokens
    ],
)
def test_halves_and_nothings_round_like_python(name: str, size_hw: Size, expected: Size) -> None:
    fit = BY_NAME[name].rule().fit(size_hw)
    assert (fit.resized_hw, fit.canvas_hw) == (expected, expected)


def own_fit(case: Case, own: Any, size_hw: Size) -> tuple[Size, Size] | None:  # noqa: ANN401  an image processor
    try:
        return case.fit(own, *size_hw)
    except ValueError:
        return None


def our_fit(resize: Resize, size_hw: Size) -> tuple[Size, Size] | None:
    try:
        fit = resize.fit(size_hw)
    except ImageError:
        return None
    return fit.resized_hw, fit.canvas_hw


@each(CASES)
def test_sizes_and_refusals_are_the_processors_own_everywhere(case: Case) -> None:
    own, resize = case.make_own(), case.rule().resize
    refused = 0
    for size_hw in MANY_SIZES:
        expected = own_fit(case, own, size_hw)
        assert our_fit(resize, size_hw) == expected, size_hw
        refused += expected is None
    assert (refused > 0) == (case in SMART_CASES)


@each(SMART_CASES)
@at_sizes(TOO_LONG)
def test_over_200_to_1_is_refused_as_the_processor_does(case: Case, size_hw: Size) -> None:
    image = smooth(size_hw)
    with pytest.raises(ValueError, match=r"absolute aspect ratio must be smaller than 200"):
        case.own_patches(image)
    message = rf"^{size_hw[1]}x{size_hw[0]} pixels: long side over short side is over 200, .*: crop the picture$"
    with pytest.raises(ImageError, match=message) as raised:
        ours(case, image)
    assert raised.value.code is FailureCode.ASPECT_RATIO


@each(OTHER_PIL_CASES)
def test_over_200_to_1_is_no_matter_to_the_others(case: Case) -> None:
    check_exact(case, smooth(TOO_LONG[0]))


def test_a_strip_is_refused_where_its_enlarged_picture_would_be_too_large() -> None:
    rule = replace(BY_NAME["clip"].rule(), max_source_pixels=10**6)
    message = (
        r"^200x1 pixels would become 44800x224 in the model's own processor, over the limit of 1000000 pixels: use"
    )
    with pytest.raises(ImageError, match=message) as raised:
        preprocess(smooth((1, 200)), 0, rule)
    assert raised.value.code is FailureCode.ASPECT_RATIO


# Bytes: Pillow and torch round the same passes differently. Since version 13 Pillow picks the order of its two passes,
# and torch always takes the horizontal one first; in white noise many values leave 0..255 and are cut off in between.
@each(KIMI_CASES)
@at_sizes(SIZES)
@pytest.mark.parametrize(("picture", "most", "mean"), [(smooth, 2, 0.02), (grain, 8, 0.25)], ids=["smooth", "grain"])
def test_kimis_grid_is_equal_and_its_pixels_nearly(
    case: Case, size_hw: Size, picture: Picture, most: float, mean: float
) -> None:
    apart = levels_apart(case, picture(size_hw))
    if case.rule().fit(size_hw).resized_hw == size_hw:
        assert not apart.any()
    assert apart.max() <= most
    assert apart.mean() <= mean
    assert np.mean(apart > 1) <= 0.005


@at_sizes(SIZES)
def test_kimi_pads_with_black_before_it_normalises(size_hw: Size) -> None:
    case = BY_NAME["kimi_k25"]
    patched, fit = ours(case, smooth(size_hw)), case.rule().fit(size_hw)
    assert fit.resized_hw == size_hw
    _, expected = case.own_patches(smooth(size_hw))
    np.testing.assert_allclose(case.normalised(patched.patches), expected, rtol=0, atol=1e-6)
    if fit.canvas_hw != size_hw:
        assert expected[-1, -1] == -1


@at_sizes(SIZES)
@pytest.mark.parametrize("picture", [smooth, grain], ids=["smooth", "grain"])
def test_dinov3_is_within_a_hundredth_of_a_level(size_hw: Size, picture: Picture) -> None:
    assert levels_apart(DINOV3_CASE, picture(size_hw)).max() <= 0.01


def test_dinov3s_pixels_stay_float_until_they_are_normalised() -> None:
    image = grain((300, 451))
    patched = ours(DINOV3_CASE, image)
    assert patched.patches.dtype == np.float32
    _, expected = DINOV3_CASE.own_patches(image)
    np.testing.assert_allclose(DINOV3_CASE.normalised(patched.patches), expected, rtol=0, atol=2e-4)


def test_kimis_released_spelling_is_transformers_own() -> None:
    released = {
        "media_proc_cfg": {
            "in_patch_limit": 16384,
            "patch_size": 14,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "merge_kernel_size": 2,
            "fixed_output_tokens": None,
            "patch_limit_on_one_side": 512,
        }
    }
    case = BY_NAME["kimi_k25"]
    known = settings(released, case.family.processor_defaults)
    native, official, problem = resize_rules("navit", known, patch_size=14, merge_size=2)
    assert native == official == case.layout.official
    assert problem == ""
    assert normalisation(known) == (case.layout.image_mean, case.layout.image_std)
    other = {"media_proc_cfg": released["media_proc_cfg"] | {"in_patch_limit": 256, "patch_limit_on_one_side": 32}}
    limited, _, _ = resize_rules("navit", settings(other, case.family.processor_defaults), patch_size=14, merge_size=2)
    for size_hw in SIZES:
        fit = limited.fit(size_hw)
        assert (fit.resized_hw, fit.canvas_hw) == kimi_k25.navit_resize(*size_hw, 14, 2, 256, 32)


@each(CASES)
@pytest.mark.parametrize("mode", ["native", "official"])
def test_a_picture_is_resized_once(case: Case, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = smooth((300, 451))
    resized: list[Size] = []
    real = Image.Image.resize

    def counted(self: Image.Image, size: Size, *args: Any, **kwargs: Any) -> Image.Image:  # noqa: ANN401  Pillow's own
        resized.append(size)
        return real(self, size, *args, **kwargs)

    monkeypatch.setattr(Image.Image, "resize", counted)
    rule = case.rule(mode)
    patched = preprocess(image, 0, rule)
    fit = rule.fit((300, 451))
    (height, width), canvas_w = fit.resized_hw, fit.canvas_hw[1]
    once = [(width, height)] if canvas_w >= width else [(width, 300), (canvas_w, height)]
    assert resized == once * (3 if rule.resize.in_float else 1)
    assert len(patched.patches) == patched.grid_hw[0] * patched.grid_hw[1]


def too_long(case: Case, resize: Resize) -> list[tuple[Size, Size]]:
    """Sizes that become more tokens than the rule says is possible, and their grids."""
    rule = replace(case.rule("native"), resize=resize)
    found = []
    for size_hw in SIZES + MANY_SIZES:
        if (fit := our_fit(resize, size_hw)) is not None:
            grid = fit[1][0] // case.patch_size, fit[1][1] // case.patch_size
            if rule.layout.num_tokens(grid) > rule.max_tokens_per_image:
                found.append((size_hw, grid))
    return found


@each(CASES)
def test_no_picture_has_more_tokens_than_the_native_rule_says(case: Case) -> None:
    assert not too_long(case, case.rule("native").resize)


@each(CASES)
@pytest.mark.parametrize("max_pixels", [5000, 50_000])
def test_no_picture_has_more_tokens_than_a_given_limit(case: Case, max_pixels: int) -> None:
    assert not too_long(case, case.layout.native.with_limits(None, max_pixels))


@each(SMART_CASES)
def test_limits_that_meet_are_not_exceeded_by_more_than_is_said(case: Case) -> None:
    lower, _ = case.layout.native.limits
    assert lower is not None
    for both in (lower - 1, lower + 10_000):
        assert not too_long(case, case.layout.native.with_limits(both, both))


AREA = AreaResize(patch_size=14, min_pixels=50_176, max_pixels=50_176)
SMART = SmartResize(factor=28, min_pixels=3136, max_pixels=1_000_000)
SMART_GLM = SmartResize(factor=28, min_pixels=12_544, max_pixels=1_000_000, small_sides="truncate", num_frames=2)
NAVIT = NavitResize(patch_size=14, merge_size=2, max_patches=16384, max_side_patches=512)
NAFLEX = NaflexResize(patch_size=16, max_patches=256)
CROP = CropResize(shortest_edge=None, size_hw=(224, 224), crop_hw=None, resample=3)


@pytest.mark.parametrize(
    ("resize", "given", "limits"),
    [
        (AREA, (None, None), (50_176, 50_176)),
        (AREA, (None, 100_000), (100_000, 100_000)),
        (AREA, (1000, None), (1000, 50_176)),
        (AREA, (100_000, None), (100_000, 100_000)),
        (AREA, (1000, 2000), (1000, 2000)),
        (SMART, (None, None), (3136, 1_000_000)),
        (SMART, (None, 50_000), (3136, 50_000)),
        (SMART, (None, 2000), (2000, 2000)),
        (SMART, (50_000, None), (50_000, 1_000_000)),
        (SMART, (2_000_000, None), (2_000_000, 2_000_000)),
        (SMART, (5000, 6000), (5000, 6000)),
        (SMART_GLM, (None, None), (6272, 500_000)),
        (SMART_GLM, (None, 100_000), (6272, 100_000)),
        (SMART_GLM, (7000, 8000), (7000, 8000)),
        (NAVIT, (None, None), (None, 16384 * 196)),
        (NAVIT, (None, 50_000), (None, 255 * 196)),
        (NAFLEX, (None, None), (None, 256 * 256)),
        (NAFLEX, (None, 50_000), (None, 195 * 256)),
        (CROP, (None, None), (None, None)),
    ],
)
def test_a_given_limit_takes_the_other_one_along(
    resize: Resize, given: tuple[int | None, int | None], limits: tuple[int | None, int | None]
) -> None:
    limited = resize.with_limits(*given)
    assert limited.limits == limits
    changed = dict.fromkeys(("min_pixels", "max_pixels", "max_patches"))
    assert describe(limited) | changed == describe(resize) | changed


@pytest.mark.parametrize(
    ("resize", "given", "message"),
    [
        (AREA, (2000, 1000), r"^min_pixels is 2000, more than max_pixels \(1000\): lower --min-pixels$"),
        (AREA, (None, 195), r"^max_pixels is 195, less than one patch .*14x14.*: give --max-pixels 196 or more$"),
        (SMART, (2000, 1000), r"^min_pixels is 2000, more than max_pixels \(1000\): lower --min-pixels$"),
        (SMART, (None, 783), r"^max_pixels is 783, less than one merged .*28x28.*: give --max-pixels 784 or more$"),
        (SMART_GLM, (None, 783), r"^max_pixels is 783, less than one merged .*: give --max-pixels 784 or more$"),
        (NAVIT, (1000, None), r"^--min-pixels is not possible with this model: .* never enlarges"),
        (NAVIT, (None, 195), r"^max_pixels is 195, less than one patch .*: give --max-pixels 196 or more$"),
        (NAFLEX, (1000, 2000), r"^--min-pixels is not possible with this model: .* upper limit$"),
        (NAFLEX, (None, 255), r"^max_pixels is 255, less than one patch .*: give --max-pixels 256 or more$"),
        (CROP, (1000, None), r"belong to --resize native"),
        (CROP, (None, 1000), r"belong to --resize native"),
    ],
)
def test_a_limit_that_the_rule_cannot_keep_is_refused(
    resize: Resize, given: tuple[int | None, int | None], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resize.with_limits(*given)


def rules_of(model_type: str, processor: dict[str, Any]) -> tuple[Resize, Resize | None, str]:
    family = MODEL_TYPES[model_type]
    known = settings(processor, family.processor_defaults)
    return resize_rules(family.processor, known, patch_size=14, merge_size=2 if family.is_grid else 1)


@pytest.mark.parametrize(
    ("model_type", "processor", "message"),
    [
        ("qwen2_vl", {"patch_size": 16}, r"has patch_size 16, and config\.json has 14: they must agree"),
        ("glm4v", {"merge_size": 4}, r"has merge_size 4, and config\.json has 2: they must agree"),
        ("paddleocr_vl", {"size": {"longest_edge": 10_000}}, r"lacks a usable setting .*shortest_edge"),
        ("qwen3_vl", {"size": {"shortest_edge": 10_000}}, r"lacks a usable setting .*longest_edge"),
        ("qwen3_vl", {"min_pixels": 5000, "max_pixels": 4000}, r"min_pixels is 5000, more than max_pixels \(4000\)"),
        ("kimi_k25", {"size": {"height": 512}}, r"lacks a usable setting .*max_height"),
        ("kimi_k25", {"fixed_output_tokens": 1024}, r"sets fixed_output_tokens, which is not supported"),
        ("kimi_k25", {"media_proc_cfg": {"fixed_output_tokens": 1}}, r"sets fixed_output_tokens"),
        ("siglip2", {"max_num_patches": "many"}, r"lacks a usable setting"),
        *(
            (name, {"do_resize": False}, r"says do_resize false")
            for name in ("qwen2_vl", "glm4v", "kimi_k25", "siglip2")
        ),
    ],
)
def test_a_processor_that_keeps_the_aspect_and_is_unusable_stops_the_run(
    model_type: str, processor: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        rules_of(model_type, processor)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"do_resize": False}, "says do_resize false"),
        ({"size": {"longest_edge": 5}}, "known are shortest_edge alone"),
        ({"size": None}, "known are shortest_edge alone"),
        ({"size": {"shortest_edge": 5}}, "leaves the size open"),
        ({"size": {"shortest_edge": 5}, "do_center_crop": True, "crop_size": {"height": 5}}, "lacks a usable setting"),
    ],
)
def test_without_a_usable_crop_there_is_still_the_native_rule(processor: dict[str, Any], message: str) -> None:
    native, official, problem = rules_of("dinov2", processor)
    assert official is None
    assert message in problem
    assert native == AreaResize(patch_size=14, min_pixels=224 * 224, max_pixels=224 * 224)


def test_the_native_rule_of_a_cropped_model_fills_the_official_area() -> None:
    for case in (BY_NAME["siglip-rest"], BY_NAME["dinov2-padded"], DINOV3_CASE):
        official = case.layout.official
        assert official is not None
        assert case.layout.native.limits == (official.max_canvas_pixels,) * 2


def test_pixels_are_left_as_they_are_where_the_processor_leaves_them() -> None:
    assert normalisation({"do_normalize": False}) == ((0.0,) * 3, (1.0,) * 3)
    assert rescale_factor({"do_rescale": False, "rescale_factor": 0.5}) == 1
    assert rescale_factor({"rescale_factor": 0.5}) == 0.5
    assert rescale_factor({}) == 1 / 255


@pytest.mark.parametrize("processor", [{}, {"image_mean": [0.5] * 3}, {"image_mean": 0.5, "image_std": 0.5}])
def test_normalising_by_nothing_is_refused(processor: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"without a usable image_mean and image_std"):
        normalisation(processor)
