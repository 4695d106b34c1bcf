"""`--resize official` is the model's own image processor, bit for bit; patches are what a convolution sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from conftest import make_rule, noise
from PIL.Image import Resampling
from test_layout import LAYOUT
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

from vlmembed.errors import ModelError
from vlmembed.official import CropResize
from vlmembed.preprocess import patchify, preprocess, resize_pixels
from vlmembed.towers.processor import crop_resize

if TYPE_CHECKING:
    from typing import Any

    from PIL.Image import Image

    from vlmembed.types import PatchArray

SIZES = [(1, 1), (1, 7), (7, 1), (13, 200), (200, 13), (224, 224), (255, 257), (256, 256), (300, 451), (10, 400)]
SIZES += [(480, 640), (641, 479), (99, 1000)]


def processor(**settings: Any) -> BitImageProcessorPil:  # noqa: ANN401
    return BitImageProcessorPil(do_rescale=False, do_normalize=False, **settings)


def resized(image: Image, rule: CropResize) -> PatchArray:
    return resize_pixels(image, rule.fit((image.height, image.width)), rule)


@pytest.mark.parametrize("size_hw", SIZES)
def test_official_is_the_models_own(size_hw: tuple[int, int]) -> None:
    image = noise(*size_hw, seed=3)
    own = processor(size={"shortest_edge": 256}, crop_size={"height": 224, "width": 224}, resample=3)
    expected = own(images=image, return_tensors="np")["pixel_values"][0]
    rule = CropResize(shortest_edge=256, size_hw=None, crop_hw=(224, 224), resample=3)
    found = np.asarray(resized(image, rule)).transpose(2, 0, 1)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("resample", list(Resampling))
@pytest.mark.parametrize("in_float", [False, True])
def test_columns_that_are_cropped_off_early_leave_the_same_pixels(resample: Resampling, *, in_float: bool) -> None:
    for height, width in SIZES:
        image = noise(height, width, seed=9)
        rule = CropResize(shortest_edge=31, size_hw=None, crop_hw=(28, 28), resample=int(resample), in_float=in_float)
        size_h, size_w = rule.fit((height, width)).resized_hw
        channels = [channel.convert("F") for channel in image.split()] if in_float else [image]
        left, top = (size_w - 28) // 2, (size_h - 28) // 2
        box = (left, top, left + 28, top + 28)
        at_once = [np.asarray(each.resize((size_w, size_h), resample=resample).crop(box)) for each in channels]
        expected = np.stack(at_once, axis=-1) if in_float else at_once[0]
        np.testing.assert_array_equal(resized(image, rule), expected)


def test_official_pads_like_transformers_where_the_crop_is_larger() -> None:
    image = noise(50, 90, seed=4)
    rule = CropResize(shortest_edge=31, size_hw=None, crop_hw=(42, 70), resample=2)
    own = processor(size={"shortest_edge": 31}, crop_size={"height": 42, "width": 70}, resample=2)
    expected = own(images=image, return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(np.asarray(resized(image, rule)).transpose(2, 0, 1), expected)


def test_official_squeezes_to_a_fixed_size() -> None:
    image = noise(50, 90, seed=5)
    rule = CropResize(shortest_edge=None, size_hw=(60, 40), crop_hw=None, resample=2)
    own = processor(size={"height": 60, "width": 40}, do_center_crop=False, resample=2)
    expected = own(images=image, return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(np.asarray(resized(image, rule)).transpose(2, 0, 1), expected)


def test_patches_times_the_flattened_weight_is_the_convolution() -> None:
    image = np.asarray(noise(45, 60, seed=6))  # neither side a multiple of 14
    convolution = torch.nn.Conv2d(3, 5, kernel_size=14, stride=14)
    expected = convolution(torch.from_numpy(image.transpose(2, 0, 1).astype(np.float32))[None])[0].flatten(1).T
    patches = torch.from_numpy(patchify(image, 14)).float()
    found = torch.nn.functional.linear(patches, convolution.weight.flatten(1), convolution.bias)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)


def test_native_resizes_once_to_the_grid() -> None:
    image = noise(300, 200, seed=7)
    patched = preprocess(image, 9, make_rule(LAYOUT))
    assert (patched.row, patched.grid_hw, patched.size_hw) == (9, (19, 13), (300, 200))
    assert patched.patches.dtype == np.uint8
    resized = image.resize((13 * 14, 19 * 14), resample=3)
    np.testing.assert_array_equal(patched.patches, patchify(np.asarray(resized), 14))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": {"longest_edge": 5}}, "known are shortest_edge alone"),
        ({"size": {"shortest_edge": 5}}, "leaves the size open"),
    ],
)
def test_unknown_processors_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        crop_resize(settings)
