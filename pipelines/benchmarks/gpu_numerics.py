"""The numerics that the GPU benchmark checks before it measures."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from gpu_cases import graph_attention, noise_pack, one_by_one, problem_with, token_encoder
from gpu_table import Floor, Row

from vlmembed.attention.backends import BACKENDS
from vlmembed.attention.metadata import DeviceSegments
from vlmembed.attention.varlen import varlen_attention
from vlmembed.graphs import GraphRunner
from vlmembed.layout import make_segments

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpu_cases import Bench

    from vlmembed.encoder import Encoder
    from vlmembed.types import PackedBatch

ENOUGH = Floor(unit="cosine", limit=0.999)
"""Bf16 beside float32, and two packs of the same image beside each other."""

HEAD_DIMS = (64, 72, 80)
"""Of the published towers."""


def numerics(bench: Bench) -> Iterator[Row]:
    """Attention against float32 math on the CPU, and images of a pack against the same images alone."""
    usable = []
    for backend in BACKENDS:
        if problem := problem_with(backend, bench.device, HEAD_DIMS[0]):
            yield Row(part="numerics", case=backend, note=problem)
            continue
        usable.append(backend)
        for head_dim in HEAD_DIMS:
            yield attention_check(bench, backend, head_dim)
    yield from tower_checks(bench, usable)


def tower_checks(bench: Bench, backends: Sequence[str]) -> Iterator[Row]:
    """A whole tower by each of the backends."""
    small = noise_pack(bench.sizes.check_pack, bench.qwen.layout)
    batch = noise_pack(bench.sizes.packs["mixed"], bench.qwen.layout)
    reference = copy.deepcopy(bench.qwen).prepare(dtype=torch.float32, device=torch.device("cpu"))
    expected = tokens_of(token_encoder(reference.use_attention("cpu")), small)
    for backend in backends:
        case = f"{backend}: Qwen3-VL-8B tower"
        bench.qwen.use_attention(backend)
        encoder = token_encoder(bench.qwen)
        yield check(f"{case}, and float32 on the CPU", tokens_of(encoder, small), expected)
        alone = torch.cat([tokens_of(encoder, each) for each in one_by_one(batch, bench)])
        yield check(f"{case}, packed and alone", tokens_of(encoder, batch), alone)
        if backend == "cpu" or BACKENDS[backend].is_flash:
            yield graph_check(bench, encoder, batch, alone, f"{case}, by a graph and alone")


def graph_check(bench: Bench, encoder: Encoder, batch: PackedBatch, alone: torch.Tensor, case: str) -> Row:
    """The pack, filled up by four patches and through a graph."""
    encoder.graphs = GraphRunner(bench.qwen, bench.graph_api(), max_patches=len(batch.patches) + 4)
    with graph_attention(bench):
        tokens = [tokens_of(encoder, batch) for _ in range(3)][-1]  # plain, captured, replayed
    if not encoder.graphs.num_captured:
        return Row(part="numerics", case=case, note="the capture failed", floor=ENOUGH, is_check=True)
    return check(case, tokens, alone)


def attention_check(bench: Bench, backend: str, head_dim: int) -> Row:
    """One attention call of every length, of queries, keys and values that lie as in a tower."""
    generator = torch.Generator().manual_seed(head_dim)
    shape = (sum(bench.sizes.lengths), 3, bench.sizes.num_heads, head_dim)
    qkv = torch.randn(shape, generator=generator).to(torch.bfloat16)
    host = make_segments(bench.sizes.lengths)

    def attend(values: torch.Tensor, backend: str) -> torch.Tensor:
        segments = DeviceSegments(
            cu_seqlens=torch.from_numpy(host.cu_seqlens).to(values.device), max_seqlen=host.max_seqlen, runs=host.runs
        )
        q, k, v = values.unbind(1)
        return varlen_attention(q, k, v, segments, scale=head_dim**-0.5, backend=backend)

    found = attend(qkv.to(bench.device), backend).cpu().float()
    return check(f"{backend}: attention, heads of {head_dim}", found, attend(qkv.float(), "cpu"))


def check(case: str, found: torch.Tensor, expected: torch.Tensor) -> Row:
    """The worst cosine of two sets of vectors, and their largest difference."""
    figures = {
        "cosine": F.cosine_similarity(found, expected, dim=-1).min().item(),
        "largest difference": (found - expected).abs().max().item(),
    }
    return Row(part="numerics", case=case, figures=figures, floor=ENOUGH, is_check=True)


def tokens_of(encoder: Encoder, batch: PackedBatch) -> torch.Tensor:
    """All tokens of a pack, float32."""
    return torch.from_numpy(encoder.encode(batch).vectors["tokens"]).float()
