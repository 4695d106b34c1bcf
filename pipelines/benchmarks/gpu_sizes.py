"""How large the parts of the GPU benchmark are: in full, and for a dry run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlmembed.towers.builtin import MODELS

if TYPE_CHECKING:
    from collections.abc import Mapping

    Grid = tuple[int, int]

BUILT_IN = "dinov2-small"

MOONVIT: dict[str, Any] = {
    "vt_num_hidden_layers": 27,
    "vt_hidden_size": 1152,
    "vt_num_attention_heads": 16,
    "vt_intermediate_size": 4304,
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "init_pos_emb_time": 4,
    "merge_kernel_size": [2, 2],
    "mm_hidden_size": 1152,
    "projector_ln_eps": 1e-5,
    "text_hidden_size": 7168,
}
"""Vision part of Kimi K2.5's published config.json, in its own spelling."""

QWEN3_VL_8B: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "num_heads": 16,
    "intermediate_size": 4304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "out_hidden_size": 4096,
    "deepstack_visual_indexes": [8, 16, 24],
    "hidden_act": "gelu_pytorch_tanh",
}
"""Vision part of Qwen3-VL-8B's config, by its sizes in transformers and sglang."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dinov2:
    """Sizes of a DINOv2 with random weights."""

    width: int
    num_layers: int
    num_heads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How large everything is.

    Attributes:
        moonvit, qwen: vision settings.
        moonvit_grid: patches per side of the two images of part a.
        packs: images by grid, of every pack of part b; 360p, 720p and 1080p are brought to multiples of 32 pixels.
        check_pack: the same, of the pack whose tower is compared with a CPU's.
        lengths, num_heads: of the segments whose attention is compared.
        matmul_sides: of the square products whose best rate is the peak.
        num_small, max_small_side: images of part e, and their longest side, in patches.
        stand_in, vit_l: models of part d; `stand_in` where the built-in one has not been fetched.
        num_photos: of part d. photo_sides: sides of the squares whose area they are brought to, in pixels.
        warm_ups, repeats: rounds before a measurement, and measured.
        num_packs: packs of part c.
    """

    moonvit: Mapping[str, Any]
    qwen: Mapping[str, Any]
    moonvit_grid: Grid
    packs: Mapping[str, Mapping[Grid, int]]
    check_pack: Mapping[Grid, int]
    lengths: tuple[int, ...]
    num_heads: int
    matmul_sides: tuple[int, ...]
    num_small: int
    max_small_side: int
    stand_in: Dinov2
    vit_l: Dinov2
    num_photos: int
    photo_sides: tuple[int, ...]
    warm_ups: int
    repeats: int
    num_packs: int


FULL = Sizes(
    moonvit=MOONVIT,
    qwen=QWEN3_VL_8B,
    moonvit_grid=(64, 64),
    packs={
        "360p": {(22, 40): 32},
        "720p": {(44, 80): 8},
        "1080p": {(68, 120): 4},
        "mixed": {(22, 40): 8, (44, 80): 4, (68, 120): 2},
    },
    check_pack={(8, 10): 2, (12, 16): 1, (20, 24): 1},
    lengths=(1, 5, 64, 257, 880, 880, 2048),
    num_heads=16,
    matmul_sides=(4096, 8192, 16384),
    num_small=2000,
    max_small_side=20,
    stand_in=Dinov2(width=384, num_layers=MODELS[BUILT_IN].num_layers, num_heads=6),
    vit_l=Dinov2(width=1024, num_layers=24, num_heads=16),
    num_photos=4000,
    photo_sides=(224, 518),
    warm_ups=5,
    repeats=20,
    num_packs=20,
)
TINY = Sizes(
    moonvit=MOONVIT
    | {
        "vt_num_hidden_layers": 2,
        "vt_hidden_size": 64,
        "vt_num_attention_heads": 4,
        "vt_intermediate_size": 96,
        "mm_hidden_size": 64,
        "text_hidden_size": 48,
    },
    qwen=QWEN3_VL_8B
    | {
        "depth": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 96,
        "out_hidden_size": 48,
        "deepstack_visual_indexes": [0, 1],
    },
    moonvit_grid=(6, 8),
    packs={
        "360p": {(2, 4): 4},
        "720p": {(4, 6): 2},
        "1080p": {(6, 8): 1},
        "mixed": {(2, 4): 3, (4, 6): 2, (6, 8): 1},
    },
    check_pack={(2, 4): 2, (6, 8): 1},
    lengths=(1, 5, 64, 64),
    num_heads=2,
    matmul_sides=(256,),
    num_small=12,
    max_small_side=6,
    stand_in=Dinov2(width=48, num_layers=2, num_heads=3),
    vit_l=Dinov2(width=64, num_layers=2, num_heads=4),
    num_photos=8,
    photo_sides=(56,),
    warm_ups=3,
    repeats=1,
    num_packs=4,
)
