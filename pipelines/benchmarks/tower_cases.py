"""The towers of ``tower_limit.py``, each with a pack and transformers' forward over the same pictures and weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_cases import noise_images
from towers import CONFIGS, config_of, transformers_forward
from transformers import AutoModel
from transformers.initialization import no_init_weights

from vlmembed.batch import make_batch
from vlmembed.towers import open_tower
from vlmembed.towers.blueprint import modeling
from vlmembed.towers.builtin import model_folder
from vlmembed.towers.families import HALF, MODEL_TYPES
from vlmembed.towers.grid import open_grid
from vlmembed.towers.weights import ModelFiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from vlmembed.towers.base import Tower
    from vlmembed.types import PackedBatch

CPU = torch.device("cpu")
MIXED = [(16, 16), (20, 28), (24, 18), (32, 14), (12, 40), (22, 22), (10, 26), (22, 12)]
"""Grids of patches, 3,184 in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A tower, a pack, and transformers' forward over the same pictures, before its layers are cast to a dtype."""

    tower: Tower
    batch: PackedBatch
    model: Any
    theirs: Callable[[], torch.Tensor]


def qwen(num_layers: int, dtype: torch.dtype) -> Case:
    """Qwen3-VL-2B's tower and the mixed pack."""
    vision = {name: value for name, value in CONFIGS["qwen3_vl"].items() if name != "_source"}
    vision |= {"depth": num_layers, "deepstack_visual_indexes": []}
    files = ModelFiles(
        name="qwen3_vl",
        revision="",
        folder=Path(),
        repo=None,
        config={"vision_config": vision},
        processor={"image_mean": HALF, "image_std": HALF},
    )
    family = MODEL_TYPES["qwen3_vl"]
    blueprint = open_grid(files, family)
    skeleton = blueprint.make_skeleton()
    torch.manual_seed(0)
    weights = {
        name: torch.randn(tensor.shape).mul_(0.02) + (1.0 if "norm" in name else 0.0)
        for name, tensor in skeleton.state_dict().items()
    }
    with no_init_weights():
        model = getattr(modeling(family), family.classes[1])(config_of(skeleton)).eval()
    model.load_state_dict(weights, strict=False, assign=True)
    skeleton.load_state_dict(weights, assign=True)
    tower = blueprint.build(blueprint, skeleton, "").prepare(dtype=dtype, device=CPU)
    batch = make_batch(noise_images(MIXED, blueprint.layout), blueprint.layout)
    return Case(tower=tower, batch=batch, model=model, theirs=transformers_forward(blueprint, model, None, batch))


def built_in(dtype: torch.dtype) -> Case:
    """The built-in model and 8 pictures of one size."""
    folder = str(model_folder("dinov2-small"))
    blueprint = open_tower(folder)
    tower = blueprint.load(dtype=dtype, device=CPU)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    layout, patch = blueprint.layout, blueprint.layout.patch_size
    batch = make_batch(noise_images([(16, 16)] * 8, layout), layout)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (layout.image_mean, layout.image_std))
    pixels = torch.from_numpy(batch.patches).float().view(-1, 3, patch, patch).mul(1 / 255).sub(mean).div(std)
    whole = pixels.view(8, 16, 16, 3, patch, patch).permute(0, 3, 1, 4, 2, 5).reshape(8, 3, 16 * patch, 16 * patch)
    return Case(
        tower=tower,
        batch=batch,
        model=model,
        theirs=lambda: model(whole.to(model.dtype)).last_hidden_state[:, layout.num_prefix_tokens :],
    )
