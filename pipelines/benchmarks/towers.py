"""Question: how long does one mixed pack take in each family's full-size tower, beside transformers' own forward?

Random weights in the published shapes (``tests/vision_configs.json``), float32 unless asked otherwise, both sides in
one process on the same weights, interleaved. transformers' side is what its class offers for pictures of mixed sizes:
vision-language towers take them all at once (flat patches with their grids), NaFlex a padded batch, the others go
picture by picture, CLIP and SigLIP with ``interpolate_pos_encoding``. Pixels are prepared beforehand on both sides, and
transformers is given the pack's own.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from record import ROOT, write_result
from transformers.initialization import no_init_weights

from vlmembed.attention.metadata import DevicePack
from vlmembed.batch import make_batch
from vlmembed.layout import ResizeRule
from vlmembed.preprocess import preprocess
from vlmembed.towers.blueprint import modeling
from vlmembed.towers.dense import open_dense
from vlmembed.towers.families import HALF, MODEL_TYPES
from vlmembed.towers.grid import open_grid
from vlmembed.towers.weights import ModelFiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from vlmembed.towers.base import Tower
    from vlmembed.towers.blueprint import Blueprint
    from vlmembed.types import PackedBatch

CONFIGS = json.loads((ROOT / "tests" / "vision_configs.json").read_text())
SIZES = [(112, 168), (224, 112), (56, 280), (140, 140), (84, 84), (196, 126)]
TOWER_NAMES = ("vision_tower", "visual", "vision_model")
CPU = torch.device("cpu")


def make_files(model_type: str) -> ModelFiles:
    """Settings as a checkpoint's files would hold them."""
    vision = {name: value for name, value in CONFIGS[model_type].items() if name != "_source"}
    processor: dict[str, Any] = {"image_mean": HALF, "image_std": HALF}
    if model_type.startswith("dino"):
        processor["size"] = {"height": 224, "width": 224}
    config = {
        "vision_config": vision,
        "text_config": {"hidden_size": vision.get("text_hidden_size", 1024)},
        "projection_dim": vision.get("projection_dim"),
    }
    return ModelFiles(name=model_type, revision="", folder=Path(), repo=None, config=config, processor=processor)


def make_pack(blueprint: Blueprint) -> PackedBatch:
    """Six pictures of noise at their own aspect ratios."""
    layout = blueprint.layout
    own_rule = layout.native is not layout.official
    resize = layout.native.with_limits(196 if own_rule else None, 224 * 224)
    rule = ResizeRule(mode="native", resize=resize, layout=layout, max_source_pixels=10**9)
    generator = np.random.default_rng(0)
    images = [Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in SIZES]
    return make_batch([preprocess(image, row, rule) for row, image in enumerate(images)], layout)


def make_sides(model_type: str, dtype: torch.dtype) -> tuple[Blueprint, Tower, PackedBatch, Callable[[], torch.Tensor]]:
    """Our tower, a pack for it, and transformers' forward over the same pictures; the weights are shared."""
    family, files = MODEL_TYPES[model_type], make_files(model_type)
    opened = (open_grid if family.is_grid else open_dense)(files, family)
    skeleton, reference = opened.make_skeleton(), opened.make_skeleton()
    torch.manual_seed(0)
    weights = {
        name: torch.randn(tensor.shape, dtype=torch.float32).mul_(0.02) + (1.0 if "norm" in name else 0.0)
        for name, tensor in skeleton.state_dict().items()
    }
    skeleton.load_state_dict(weights, assign=True)
    tower = opened.build(opened, skeleton, "").prepare(dtype=dtype, device=CPU)
    module, class_name = modeling(family), family.classes[1]
    tower_name = next((name for name, _ in reference.named_children() if name in TOWER_NAMES), None)
    plain = {name.removeprefix(f"{tower_name}."): tensor for name, tensor in weights.items()} if tower_name else weights
    with no_init_weights():
        model = getattr(module, class_name)(config_of(reference)).eval()
    model.load_state_dict(plain, strict=False, assign=True)
    projector = None
    if family.adapter in ("kimi_k25", "paddleocr_vl"):
        name = "mm_projector" if family.adapter == "kimi_k25" else "projector"
        projector = reference[name]
        projector.load_state_dict(
            {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")},
            assign=True,
        )
        projector.to(dtype)
    batch = make_pack(opened)
    return opened, tower, batch, transformers_forward(opened, model.to(dtype), projector, batch)


def config_of(skeleton: torch.nn.Module) -> Any:  # noqa: ANN401  a transformers config
    """The config that the skeleton was made of."""
    for module in skeleton.modules():
        if (config := getattr(module, "config", None)) is not None:
            return config
    raise AssertionError


def transformers_forward(
    blueprint: Blueprint,
    model: Any,  # noqa: ANN401  transformers' own
    projector: Any,  # noqa: ANN401  the same
    batch: PackedBatch,
) -> Callable[[], torch.Tensor]:
    """A function that runs transformers' class on the pack's pictures."""
    layout, adapter = blueprint.layout, blueprint.family.adapter
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (layout.image_mean, layout.image_std))
    patch = layout.patch_size
    pixels = torch.from_numpy(batch.patches).float().view(-1, 3, patch, patch).mul(1 / 255).sub(mean).div(std)
    pixels = pixels.to(model.dtype)
    grid_thw = torch.tensor([[1, h, w] for h, w in batch.grid_hw.tolist()])
    if adapter == "kimi_k25":
        return lambda: projector(model(pixels, grid_thw).pooler_output)
    if adapter == "paddleocr_vl":
        return lambda: projector(model(pixel_values=pixels[None], grid_thw=grid_thw).last_hidden_state, grid_thw)
    if blueprint.family.is_grid:
        twice = pixels.view(len(pixels), 3, 1, patch, patch).expand(-1, -1, 2, -1, -1).reshape(len(pixels), -1)
        return lambda: model(twice, grid_thw).pooler_output
    sizes = [(h, w) for h, w in batch.grid_hw.tolist()]
    images = pixels.split([h * w for h, w in sizes])
    if adapter == "naflex":
        return padded(model, images, sizes)
    whole = [
        image.view(h, w, 3, patch, patch).permute(2, 0, 3, 1, 4).reshape(1, 3, h * patch, w * patch)
        for image, (h, w) in zip(images, sizes, strict=True)
    ]
    prefix, options = layout.num_prefix_tokens, {} if adapter.startswith("dino") else {"interpolate_pos_encoding": True}
    return lambda: torch.cat([model(image, **options).last_hidden_state[0, prefix:] for image in whole])


def padded(
    model: Any,  # noqa: ANN401  transformers' own
    images: tuple[torch.Tensor, ...],
    sizes: list[tuple[int, int]],
) -> Callable[[], torch.Tensor]:
    """NaFlex as transformers batches it."""
    longest = max(len(image) for image in images)
    values = torch.zeros(len(images), longest, images[0][0].numel(), dtype=images[0].dtype)
    mask = torch.zeros(len(images), longest, dtype=torch.long)
    for number, image in enumerate(images):
        values[number, : len(image)] = image.permute(0, 2, 3, 1).flatten(1)
        mask[number, : len(image)] = 1
    inputs = {"pixel_values": values, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor(sizes)}
    return lambda: model(**inputs).last_hidden_state[mask.bool()]


def timed(forward: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Seconds of one call, and its tokens (M, D)."""
    began = time.perf_counter()
    with torch.inference_mode():
        tokens = forward()
    return time.perf_counter() - began, tokens


def measure(model_type: str, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Interleaved timings of both sides, after one unmeasured round."""
    blueprint, tower, batch, theirs = make_sides(model_type, dtype)
    pack = DevicePack.of(batch, CPU)

    def ours() -> torch.Tensor:
        return tower.tokens(pack.patches, pack.metadata)[0]

    (_, tokens), (_, reference) = timed(ours), timed(theirs)  # not measured
    reference = reference.reshape(tokens.shape)
    agreement = float(torch.nn.functional.cosine_similarity(tokens.float(), reference.float(), dim=-1).min())
    rounds = [(timed(ours)[0], timed(theirs)[0]) for _ in range(repeats)]
    mine, others = zip(*rounds, strict=True)
    return {
        "tower": CONFIGS[model_type]["_source"],
        "parameters": sum(parameter.numel() for parameter in blueprint.make_skeleton().parameters()),
        "images": len(batch.rows),
        "patches": len(batch.patches),
        "worst_cosine_between_the_two": round(agreement, 7),
        "vlmembed_seconds": round(statistics.median(mine), 3),
        "transformers_seconds": round(statistics.median(others), 3),
        "ratio": round(statistics.median(b / a for a, b in rounds), 2),
        "ratio_range": [round(min(b / a for a, b in rounds), 2), round(max(b / a for a, b in rounds), 2)],
    }


def main() -> None:
    """Time the families that are asked for, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(CONFIGS), help="model types")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    figures = {}
    for model_type in arguments.families:
        figures[model_type] = measure(model_type, getattr(torch, arguments.dtype), arguments.repeats)
        print(model_type, figures[model_type], flush=True)
        gc.collect()
    claim = (
        "Seconds of one mixed pack in a full-size tower, projector included, and of transformers' own forward over the "
        "same pictures; ratio is transformers over vlmembed, above 1 where vlmembed is faster"
    )
    print(write_result("towers", claim, arguments.repeats, {"dtype": arguments.dtype, "families": figures}))


if __name__ == "__main__":
    main()
