"""Grids, segments and interpolation against torch's and transformers' own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import make_rule
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from vlmembed.errors import ConfigError, FailureCode, ImageError
from vlmembed.layout import (
    OfficialResize,
    TowerLayout,
    attention_metadata,
    bicubic_taps,
    grid_of,
    interpolation,
    native_grid,
)

LAYOUT = TowerLayout(
    patch_size=14,
    num_prefix_tokens=1,
    position_grid_hw=(37, 37),
    native_pixels=224 * 224,
    image_mean=(0.485, 0.456, 0.406),
    image_std=(0.229, 0.224, 0.225),
    official=OfficialResize(shortest_edge=256, size_hw=None, crop_hw=(224, 224), resample=3),
)


@pytest.mark.parametrize("grid_hw", [(1, 1), (16, 16), (13, 19), (37, 37), (2, 101), (50, 3)])
def test_interpolation_is_torchs_bicubic(grid_hw: tuple[int, int]) -> None:
    table = torch.randn(1, 8, 37, 37, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.interpolate(table, size=grid_hw, mode="bicubic", align_corners=False)
    indices, weights = interpolation(grid_hw, (37, 37))
    flat = table[0].flatten(1).T.numpy()
    found = (flat[indices] * weights[:, :, None]).sum(axis=1)
    np.testing.assert_allclose(found, expected[0].flatten(1).T.numpy(), atol=2e-5)


def test_interpolation_is_transformers_own() -> None:
    grids = [(3, 7), (16, 16), (40, 2)]
    thw = torch.tensor([[1, h, w] for h, w in grids])
    indices, weights = get_vision_interpolation_indices_and_weights(thw, 37, mode="bicubic", align_corners=False)
    metadata = attention_metadata(grids, LAYOUT)
    np.testing.assert_array_equal(metadata.interp_indices, indices.numpy())
    np.testing.assert_allclose(metadata.interp_weights, weights.numpy(), atol=1e-5)


def test_identity_taps_are_exact() -> None:
    taps, weights = bicubic_taps(37, 37)
    np.testing.assert_array_equal(taps[:, 1], np.arange(37))
    np.testing.assert_array_equal(weights, np.tile(np.array([0, 1, 0, 0], np.float32), (37, 1)))


@pytest.mark.parametrize(
    ("size_hw", "expected"),
    [
        ((1, 1), (16, 16)),
        ((224, 224), (16, 16)),
        ((213, 320), (13, 19)),
        ((10, 400), (2, 101)),
        ((400, 10), (101, 2)),
        ((1, 100_000), (1, 256)),
        ((100_000, 1), (256, 1)),
        ((4000, 3000), (18, 14)),
    ],
)
def test_native_grid_fills_the_area(size_hw: tuple[int, int], expected: tuple[int, int]) -> None:
    grid = native_grid(size_hw, patch_size=14, min_pixels=224 * 224, max_pixels=224 * 224)
    assert grid == expected


def test_native_grid_stays_within_its_limits() -> None:
    generator = np.random.default_rng(1)
    for height, width in generator.integers(1, 3000, (2000, 2)).tolist():
        h, w = native_grid((height, width), patch_size=14, min_pixels=50_176, max_pixels=50_176)
        assert h >= 1
        assert w >= 1
        assert h * w <= 256
        if max(height, width) <= 4 * min(height, width):
            assert h * w >= 200
            assert abs(np.log((h / w) / (height / width))) < 0.2


def test_small_pictures_keep_their_size_between_the_limits() -> None:
    assert native_grid((140, 70), patch_size=14, min_pixels=196, max_pixels=50_176) == (10, 5)


def test_metadata_of_a_pack() -> None:
    metadata = attention_metadata([(2, 3), (2, 3), (1, 4)], LAYOUT)
    np.testing.assert_array_equal(metadata.cu_seqlens, [0, 7, 14, 19])
    assert metadata.cu_seqlens.dtype == np.int32
    assert metadata.max_seqlen == 7
    assert type(metadata.max_seqlen) is int
    assert metadata.segment_runs == ((7, 2), (5, 1))
    np.testing.assert_array_equal(metadata.prefix_positions, [0, 7, 14])
    np.testing.assert_array_equal(metadata.patch_positions, [*range(1, 7), *range(8, 14), *range(15, 19)])
    np.testing.assert_array_equal(metadata.patch_images, [0] * 6 + [1] * 6 + [2] * 4)


def test_limits_below_a_patch_or_crossed_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"max_pixels is 195, less than one patch .*196.*--max-pixels 196"):
        make_rule(LAYOUT, max_pixels=195)
    with pytest.raises(ConfigError, match=r"min_pixels is 400, more than max_pixels \(300\)"):
        make_rule(LAYOUT, max_pixels=300, min_pixels=400)


def test_official_refuses_an_absurd_intermediate() -> None:
    rule = make_rule(LAYOUT, mode="official")
    assert grid_of((1, 1000), rule) == (16, 16)
    with pytest.raises(ImageError, match="2560000x256") as caught:
        grid_of((1, 10_000), rule)
    assert caught.value.code is FailureCode.ASPECT_RATIO
