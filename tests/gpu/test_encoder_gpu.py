"""On a CUDA device: a pack equals its images alone, and equals the CPU. Skipped where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from checkpoints import RECIPES, tiny_checkpoint
from conftest import make_rule, noise

from vlmembed.attention.metadata import DevicePack
from vlmembed.encoder import Encoder
from vlmembed.schema import VectorColumn
from vlmembed.towers import load_tower, open_tower

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from PIL.Image import Image

    from vlmembed.types import PackedBatch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]

SIZES = [(300, 200), (64, 64), (500, 480), (10, 400), (333, 77), (1, 1), (224, 224), (120, 640)]


@pytest.mark.parametrize(("dtype", "cosine"), [(torch.float32, 0.9999), (torch.bfloat16, 0.999)])
def test_a_pack_on_the_gpu(
    dtype: torch.dtype, cosine: float, builtin_folder: Path, pack_images: Callable[..., PackedBatch]
) -> None:
    images = [noise(height, width, seed) for seed, (height, width) in enumerate(SIZES)]
    on_gpu = load_tower(str(builtin_folder), dtype=dtype, device=torch.device("cuda"))
    on_cpu = load_tower(str(builtin_folder), dtype=torch.float32, device=torch.device("cpu"))
    rule = make_rule(on_gpu.layout)
    columns = (VectorColumn(name="embedding", width=384),)
    gpu, cpu = (Encoder(tower, vectors=columns, pool="cls", normalize=True) for tower in (on_gpu, on_cpu))

    def embed(encoder: Encoder, together: Sequence[Image]) -> torch.Tensor:
        return torch.from_numpy(encoder.encode(pack_images(together, rule)).vectors["embedding"])

    packed = embed(gpu, images)
    alone = torch.cat([embed(gpu, [image]) for image in images])
    assert F.cosine_similarity(packed, alone).min() >= cosine
    reference = embed(cpu, images)
    assert F.cosine_similarity(packed, reference).min() >= 0.99


@pytest.mark.parametrize("model_type", RECIPES)
def test_every_family_on_the_gpu(model_type: str, tmp_path: Path, pack_images: Callable[..., PackedBatch]) -> None:
    tiny_checkpoint(model_type, tmp_path)
    blueprint = open_tower(str(tmp_path))
    batch = pack_images([noise(height, width, 0) for height, width in SIZES], make_rule(blueprint.layout))
    results = []
    for name in ("cpu", "cuda"):
        device = torch.device(name)
        tower = blueprint.load(dtype=torch.float32, device=device).use_attention("sdpa")
        pack = DevicePack.of(batch, device)
        with torch.inference_mode():
            tokens = tower.tokens(pack.patches, pack.metadata, deepstack=tower.num_deepstack > 0)
            pooled = [tower(pack.patches, pack.metadata, pool=pool) for pool in tower.pool_widths]
        results.append([output.cpu() for output in (*tokens, *pooled)])
    for expected, found in zip(*results, strict=True):
        assert F.cosine_similarity(found, expected, dim=-1).min() >= 0.9999
