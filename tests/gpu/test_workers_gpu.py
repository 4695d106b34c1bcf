"""Shared memory that a GPU copies from, and workers that share one GPU. Skipped where there is none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from conftest import make_rule, noise
from on_gpu import MARKS

from vlmembed.config import EncodeConfig
from vlmembed.encoder import Encoder, vector_columns
from vlmembed.exchange import GROWTH_BYTES, LoadOrder, SharedBlock
from vlmembed.towers import open_tower
from vlmembed.types import EmbeddingBatch
from vlmembed.worker import PinnedBlock
from vlmembed.workers import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vlmembed.types import PackedBatch

pytestmark = MARKS

GPU = torch.device("cuda", 0)


def test_a_shared_block_is_pinned_also_after_it_has_grown() -> None:
    ours = SharedBlock()
    theirs = PinnedBlock(os.dup(ours.descriptor), GPU)
    for num_bytes in (1000, 2 * GROWTH_BYTES, 5 * GROWTH_BYTES, 10):
        values = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)
        ours.reserve(num_bytes)[:] = values
        seen = torch.from_numpy(theirs.view(num_bytes))
        assert seen.is_pinned()
        on_device = seen.to(GPU, non_blocking=True)
        torch.cuda.synchronize()
        assert np.array_equal(on_device.cpu().numpy(), values)


def test_two_workers_on_one_gpu_give_what_the_cpu_gives(
    tiny_model: Path, pack_images: Callable[..., PackedBatch]
) -> None:
    blueprint = open_tower(str(tiny_model))
    config = EncodeConfig(inputs=("x",), output="y", model=str(tiny_model), device="cuda:0", dtype="fp32")
    rule, vectors = make_rule(blueprint.layout), vector_columns(config, blueprint)
    order = LoadOrder(config=config, vectors=vectors, rule=rule, num_rows=24, device="", num_workers=2, log_level=40)
    packs = [pack_images([noise(50 + n, 60, n), noise(90, 30 + n, n)], rule) for n in range(12)]
    for number, batch in enumerate(packs):
        batch.rows[:] = (2 * number, 2 * number + 1)
    pool, settled = WorkerPool.start(order, ["cuda:0", "cuda:0"])
    assert settled.config.attention == "sdpa"
    found = np.zeros((24, vectors[0].width), dtype=np.float32)
    for result in pool.stream(packs):
        if isinstance(result, EmbeddingBatch):
            found[result.rows] = result.vectors["embedding"]
    pool.close()
    tower = blueprint.load(dtype=torch.float32, device=torch.device("cpu"))
    cpu = Encoder(tower, vectors=vectors, pool="cls", normalize=True)
    expected = np.concatenate([cpu.encode(batch).vectors["embedding"] for batch in packs])
    assert F.cosine_similarity(torch.from_numpy(found), torch.from_numpy(expected)).min() >= 0.9999
