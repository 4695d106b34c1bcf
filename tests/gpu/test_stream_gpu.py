"""The streaming loop on a CUDA device: it waits for nothing, and what does not fit is split. Skipped without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from conftest import make_rule
from on_gpu import GPU, MARKS, noise_pack, pooling_encoder, tiny_tower

from vlmembed.calibration import MAX_PACK_TOKENS, CudaMeter, auto_budget
from vlmembed.graphs import CudaGraphs, GraphRunner
from vlmembed.types import EmbeddingBatch

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = MARKS


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # what switching it on says
@pytest.mark.parametrize("with_graphs", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl", "kimi_k25", "siglip2", "dinov2", "dinov3_vit"])
def test_the_streaming_loop_never_waits_for_the_device(model_type: str, with_graphs: bool, tmp_path: Path) -> None:  # noqa: FBT001  a parameter of the test
    tower = tiny_tower(model_type, tmp_path)
    packs = [noise_pack(grids, tower.layout) for grids in ([(4, 4), (6, 8)], [(10, 12)], [(2, 2)] * 9)]
    encoder = pooling_encoder(tower)
    if with_graphs:
        encoder.graphs = GraphRunner(tower, CudaGraphs(), max_patches=256)
    list(encoder.stream(packs * 3))
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = list(encoder.stream(packs * 2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(result.rows) for result in results if isinstance(result, EmbeddingBatch)] == [2, 1, 9] * 2
    assert encoder.graphs is None or encoder.graphs.num_captured


def test_a_pack_that_does_not_fit_is_split_and_all_rows_come(tmp_path: Path) -> None:
    tower = tiny_tower("qwen3_vl", tmp_path)
    batch = noise_pack([(48, 50)] * 64, tower.layout)
    encoder = pooling_encoder(tower)
    expected, _ = encoder.encode(batch), encoder.encode(batch)  # fills both of its buffers
    peak = CudaMeter(GPU).peak(lambda: encoder.encode(batch))
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved(GPU) + 0.4 * peak
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info(GPU)[1], GPU)
    try:
        results = list(encoder.stream([batch]))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    assert encoder.num_splits >= 1
    embedded = [result for result in results if isinstance(result, EmbeddingBatch)]
    assert len(embedded) == len(results) > 1
    assert np.concatenate([result.rows for result in embedded]).tolist() == batch.rows.tolist()
    found = np.concatenate([result.vectors["embedding"] for result in embedded])
    similarity = F.cosine_similarity(torch.from_numpy(found), torch.from_numpy(expected.vectors["embedding"]))
    assert similarity.min() >= 0.999


@pytest.mark.parametrize("model_type", ["qwen3_vl", "dinov2"])
def test_the_automatic_budget_is_a_power_of_two(model_type: str, tmp_path: Path) -> None:
    tower = tiny_tower(model_type, tmp_path)
    budget = auto_budget(pooling_encoder(tower), make_rule(tower.layout), CudaMeter(GPU))
    assert 0 < budget <= MAX_PACK_TOKENS
    assert budget & (budget - 1) == 0
