"""On a CUDA device: a pack equals its images alone, and equals the CPU. Skipped where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from conftest import make_rule, noise

from vlmembed.encoder import Encoder
from vlmembed.towers import load_tower

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
    gpu, cpu = (Encoder(tower, pool="cls", normalize=True) for tower in (on_gpu, on_cpu))
    packed = torch.from_numpy(gpu.encode(pack_images(images, rule)).embeddings)
    alone = torch.cat([torch.from_numpy(gpu.encode(pack_images([image], rule)).embeddings) for image in images])
    assert F.cosine_similarity(packed, alone).min() >= cosine
    reference = torch.from_numpy(cpu.encode(pack_images(images, rule)).embeddings)
    assert F.cosine_similarity(packed, reference).min() >= 0.99
