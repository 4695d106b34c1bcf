"""CUDA graphs and compiled layers give what the plain layers give. Skipped where there is no CUDA device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from conftest import make_rule
from on_gpu import GPU, MARKS, embed, noise_pack, pooling_encoder, tiny_tower

from vlmembed.attention.metadata import DevicePack
from vlmembed.calibration import CudaMeter
from vlmembed.config import EncodeConfig
from vlmembed.graphs import CudaGraphs, GraphRunner
from vlmembed.tuning import settle

if TYPE_CHECKING:
    from pathlib import Path

    from vlmembed.towers.base import Tower
    from vlmembed.types import PackedBatch

pytestmark = MARKS

MAX_PATCHES = 512
MODEL_TYPES = ["qwen3_vl", "qwen2_5_vl", "kimi_k25", "dinov2"]

SMALL = [(4, 6), (4, 4), (6, 6)]
LARGE = [(12, 16), (4, 4), (10, 12), (6, 8)]
OTHER_BOUNDARIES = [(6, 8), (10, 12), (4, 4), (12, 16)]


def by_graph(runner: GraphRunner, tower: Tower, batch: PackedBatch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Features of a pack by its graph, and by the plain layers of the same pack filled up."""
    key = runner.claim(batch) or runner.claim(batch)  # the second time captures
    assert key is not None
    filled = runner.fill(batch, key)
    block = torch.from_numpy(filled.block).to(GPU)
    with torch.inference_mode():
        captured = [feature.clone() for feature in runner.features(block, filled, key)]
        pack = DevicePack.view(block, filled.header)
        return captured, tower.features(pack.patches, pack.metadata)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_graph_gives_the_plain_layers_bits(model_type: str, tmp_path: Path) -> None:
    """Small, large, small again, then the large pack's sums with other boundaries."""
    tower = tiny_tower(model_type, tmp_path)
    runner = GraphRunner(tower, CudaGraphs(), max_patches=MAX_PATCHES)
    for grids in (SMALL, LARGE, SMALL, OTHER_BOUNDARIES, LARGE):
        captured, plain = by_graph(runner, tower, noise_pack(grids, tower.layout))
        for found, expected in zip(captured, plain, strict=True):
            assert torch.isfinite(found).all()
            assert torch.equal(found, expected)
    assert runner.num_captured == 2


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_an_encoder_with_graphs_gives_the_vectors_of_one_without(model_type: str, tmp_path: Path) -> None:
    """Packs of one shape with few images and with many go through one graph."""
    tower = tiny_tower(model_type, tmp_path)
    packs = [noise_pack(grids, tower.layout) for grids in ([(4, 4)] * 30, [(4, 4)] * 20 + [(2, 4)] * 20, LARGE, SMALL)]
    plain, graphed = pooling_encoder(tower), pooling_encoder(tower)
    graphed.graphs = GraphRunner(tower, CudaGraphs(), max_patches=MAX_PATCHES)
    expected = [torch.from_numpy(each.vectors["embedding"]) for each in plain.stream(packs)]  # type: ignore[union-attr]
    results = list(graphed.stream(packs * 3))
    assert graphed.graphs.num_captured
    assert len(results) == 3 * len(packs)
    for number, result in enumerate(results):
        found = torch.from_numpy(result.vectors["embedding"])  # type: ignore[union-attr]
        assert F.cosine_similarity(found, expected[number % len(packs)]).min() >= 0.999


@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize("model_type", ["qwen3_vl", "dinov2"])
def test_compiled_layers_and_a_graph_of_them(model_type: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    tower = tiny_tower(model_type, tmp_path)
    batch = noise_pack(LARGE, tower.layout)
    plain = embed(pooling_encoder(tower), batch)
    encoder = pooling_encoder(tower)
    config = EncodeConfig(
        inputs=("pictures",),
        output="vectors.parquet",
        dtype="bf16",
        compile="on",
        cuda_graphs="on",
        max_tokens_per_batch=max(MAX_PATCHES, make_rule(tower.layout).max_tokens_per_image),
    )
    settled, _ = settle(config, encoder, rule=make_rule(tower.layout), num_rows=1, meter=CudaMeter(GPU))
    assert (settled.compile, settled.cuda_graphs) == ("on", "on")
    for _ in range(3):  # plain, captured, replayed
        assert F.cosine_similarity(embed(encoder, batch), plain).min() >= 0.999
    assert encoder.graphs is not None
    assert encoder.graphs.num_captured
