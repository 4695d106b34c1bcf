"""Grids, segments and interpolation against torch's and transformers' own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_rule
from transformers.models.dinov3_vit.modeling_dinov3_vit import get_patches_center_coordinates
from transformers.models.kimi_k25.modeling_kimi_k25 import get_vision_frame_index, get_vision_temporal_merge_index
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings
from transformers.vision_utils import (
    get_vision_attention_seqlens,
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from vlmembed.errors import ConfigError, FailureCode, ImageError
from vlmembed.interpolation import PositionTable, axis_taps
from vlmembed.layout import TowerLayout, attention_metadata, image_layout
from vlmembed.official import CropResize
from vlmembed.resize import AreaResize

AREA = AreaResize(patch_size=14, min_pixels=224 * 224, max_pixels=224 * 224)
TABLE = PositionTable(size_hw=(37, 37), kernel="bicubic")
LAYOUT = TowerLayout(
    patch_size=14,
    native=AREA,
    official=CropResize(shortest_edge=256, size_hw=None, crop_hw=(224, 224), resample=3),
    image_mean=(0.485, 0.456, 0.406),
    image_std=(0.229, 0.224, 0.225),
    num_prefix_tokens=1,
    table=TABLE,
)


GRIDS = [(1, 1), (16, 16), (13, 19), (37, 37), (2, 101), (50, 3), (1, 256), (8, 6)]


def merged_layout(**changes: Any) -> TowerLayout:  # noqa: ANN401  fields of the layout
    """A layout of 2x2 merge blocks, like a vision-language tower's."""
    return replace(LAYOUT, **{"num_prefix_tokens": 0, "merge_size": 2, "block_order": True, "rope": "index", **changes})


@pytest.mark.parametrize("kernel", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("align_corners", "antialias"), [(False, False), (True, False), (False, True)])
def test_interpolation_is_torchs(kernel: str, align_corners: bool, antialias: bool) -> None:  # noqa: FBT001  parameters
    table = torch.randn(1, 8, 37, 37, generator=torch.Generator().manual_seed(0))
    layout = replace(
        LAYOUT, table=PositionTable(size_hw=(37, 37), kernel=kernel, align_corners=align_corners, antialias=antialias)
    )
    flat = table[0].flatten(1).T.numpy()
    for grid_hw in GRIDS:
        expected = torch.nn.functional.interpolate(
            table, size=grid_hw, mode=kernel, align_corners=align_corners, antialias=antialias
        )
        image = image_layout(grid_hw, layout)
        assert image.interp_indices is not None
        assert image.interp_weights is not None
        found = (flat[image.interp_indices] * image.interp_weights[:, :, None]).sum(axis=1)
        np.testing.assert_allclose(found, expected[0].flatten(1).T.numpy(), atol=3e-5, err_msg=str(grid_hw))


@pytest.mark.parametrize(
    ("kernel", "align_corners", "side", "merge"),
    [("bilinear", True, 48, 2), ("bicubic", False, 64, 1), ("bilinear", False, 27, 1), ("bicubic", False, 24, 2)],
    ids=["qwen3_vl", "kimi_k25", "paddleocr_vl", "glm4v"],
)
def test_interpolation_is_transformers_own(kernel: str, align_corners: bool, side: int, merge: int) -> None:  # noqa: FBT001  a parameter
    grids = [(2, 8), (16, 16), (40, 2), (64, 48), (48, 48), (6, 130)]
    layout = merged_layout(
        block_order=merge > 1,
        table=PositionTable(size_hw=(side, side), kernel=kernel, align_corners=align_corners),
    )
    indices, weights = get_vision_interpolation_indices_and_weights(
        grid_thw(grids), side, mode=kernel, align_corners=align_corners, spatial_merge_size=merge
    )
    metadata = attention_metadata(grids, layout)
    assert metadata.interp_weights is not None
    np.testing.assert_array_equal(metadata.interp_indices, indices.numpy())
    np.testing.assert_allclose(metadata.interp_weights, weights.numpy(), atol=1e-6)


def grid_thw(grids: list[tuple[int, int]]) -> torch.Tensor:
    return torch.tensor([[1, h, w] for h, w in grids])


def test_naflex_weights_are_transformers_own() -> None:
    grids = [(16, 16), (13, 19), (1, 256), (32, 8), (3, 2)]
    table = torch.randn(16, 16, 8, generator=torch.Generator().manual_seed(1))
    expected = Siglip2VisionEmbeddings.resize_positional_embeddings(table, torch.tensor(grids), max_length=256)
    layout = replace(
        LAYOUT, num_prefix_tokens=0, table=PositionTable(size_hw=(16, 16), kernel="bilinear", antialias=True)
    )
    metadata = attention_metadata(grids, layout)
    flat = table.flatten(0, 1).numpy()
    found = (flat[metadata.interp_indices] * metadata.interp_weights[:, :, None]).sum(axis=1)  # type: ignore[index]
    kept = torch.cat([expected[at, : h * w] for at, (h, w) in enumerate(grids)])
    np.testing.assert_allclose(found, kept.numpy(), atol=2e-6)


@pytest.mark.parametrize("merge", [1, 2])
def test_positions_and_segments_are_transformers_own(merge: int) -> None:
    grids = [(2, 8), (16, 16), (16, 16), (40, 2), (8, 8)]
    metadata = attention_metadata(grids, merged_layout(block_order=merge > 1))
    np.testing.assert_array_equal(metadata.rope_positions, get_vision_position_ids(grid_thw(grids), merge).numpy())
    for merge_temporal in (False, True):  # a still picture is one segment either way
        cu_seqlens = get_vision_cu_seqlens(grid_thw(grids), merge_temporal=merge_temporal)
        np.testing.assert_array_equal(metadata.segments.cu_seqlens, cu_seqlens.numpy())
    assert metadata.segments.cu_seqlens.dtype == np.int32
    config = SimpleNamespace(_attn_implementation="flash_attention_2")
    cu_seqlens, max_seqlen = get_vision_attention_seqlens(grid_thw(grids), config)
    assert metadata.segments.max_seqlen == int(max_seqlen)


def test_windows_are_transformers_own() -> None:
    grids = [(2, 8), (16, 16), (24, 18), (40, 2), (6, 130), (4, 4), (8, 8)]
    index, cu_seqlens = get_vision_window_index(grid_thw(grids), spatial_merge_size=2, window_size=112, patch_size=14)
    metadata = attention_metadata(grids, merged_layout(window_size=4))
    np.testing.assert_array_equal(metadata.window_index, index.numpy())
    np.testing.assert_array_equal(metadata.window_reverse, torch.argsort(index).numpy())
    assert metadata.windows is not None
    np.testing.assert_array_equal(metadata.windows.cu_seqlens, cu_seqlens.numpy())
    assert metadata.windows.max_seqlen == int(cu_seqlens.diff().max())
    assert sum(length * count for length, count in metadata.windows.runs) == sum(h * w for h, w in grids)


def test_merging_raster_patches_is_transformers_own() -> None:
    grids = [(2, 8), (16, 4), (6, 6)]
    destination, weight, num_merged = get_vision_temporal_merge_index(grid_thw(grids), 2, 2)
    assert get_vision_frame_index(grid_thw(grids)).abs().max() == 0  # stills have no place in time
    metadata = attention_metadata(grids, merged_layout(block_order=False))
    np.testing.assert_array_equal(metadata.merge_index, torch.argsort(destination).numpy())
    assert weight.unique().tolist() == [1]
    assert num_merged == sum(merged_layout(block_order=False).num_merged(grid) for grid in grids) == 4 + 16 + 9


def test_dinov3_angles_are_transformers_own() -> None:
    layout = replace(LAYOUT, num_prefix_tokens=5, table=None, rope="centre")
    metadata = attention_metadata([(4, 7), (16, 16)], layout)
    assert metadata.rope_positions is not None
    start = 0
    for h, w in ((4, 7), (16, 16)):
        centres = get_patches_center_coordinates(h, w, dtype=torch.float32, device=torch.device("cpu"))
        np.testing.assert_array_equal(metadata.rope_positions[start : start + 5], 0)
        np.testing.assert_allclose(metadata.rope_positions[start + 5 : start + 5 + h * w], centres.numpy(), atol=1e-7)
        start += 5 + h * w
    assert start == len(metadata.rope_positions)


def test_what_depends_on_the_grid_is_made_once() -> None:
    assert image_layout((6, 10), LAYOUT) is image_layout((6, 10), LAYOUT)
    with pytest.raises(ValueError, match="read-only"):
        image_layout((6, 10), LAYOUT).interp_weights[0, 0] = 1  # type: ignore[index]


def test_identity_taps_are_exact() -> None:
    taps, weights = axis_taps(37, 37, TABLE)
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
    assert AREA.grid(size_hw) == expected


def test_native_grid_stays_within_its_limits() -> None:
    generator = np.random.default_rng(1)
    for height, width in generator.integers(1, 3000, (2000, 2)).tolist():
        h, w = AREA.grid((height, width))
        assert h >= 1
        assert w >= 1
        assert h * w <= 256
        if max(height, width) <= 4 * min(height, width):
            assert h * w >= 200
            assert abs(np.log((h / w) / (height / width))) < 0.2


def test_small_pictures_keep_their_size_between_the_limits() -> None:
    assert AREA.with_limits(196, 50_176).grid((140, 70)) == (10, 5)


def test_metadata_of_a_pack() -> None:
    metadata = attention_metadata([(2, 3), (2, 3), (1, 4)], LAYOUT)
    np.testing.assert_array_equal(metadata.segments.cu_seqlens, [0, 7, 14, 19])
    assert metadata.segments.cu_seqlens.dtype == np.int32
    assert metadata.segments.max_seqlen == 7
    assert type(metadata.segments.max_seqlen) is int
    assert metadata.segments.runs == ((7, 2), (5, 1))
    np.testing.assert_array_equal(metadata.prefix_positions, [0, 7, 14])
    np.testing.assert_array_equal(metadata.patch_positions, [*range(1, 7), *range(8, 14), *range(15, 19)])


def test_limits_below_a_patch_or_crossed_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"max_pixels is 195, less than one patch .*196.*--max-pixels 196"):
        make_rule(LAYOUT, max_pixels=195)
    with pytest.raises(ConfigError, match=r"min_pixels is 400, more than max_pixels \(300\)"):
        make_rule(LAYOUT, max_pixels=300, min_pixels=400)


def test_official_refuses_an_absurd_intermediate() -> None:
    rule = make_rule(LAYOUT, mode="official")
    assert rule.fit((1, 1000)).canvas_hw == (224, 224)
    with pytest.raises(ImageError, match="2560000x256") as caught:
        rule.fit((1, 10_000))
    assert caught.value.code is FailureCode.ASPECT_RATIO
