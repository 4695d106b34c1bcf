"""Varlen attention over the segments of a pack, and the module that brings it into transformers' layers.

Shape legend: T tokens of a pack, L tokens per segment, N segments, H heads, d head width, C = H * d.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from vlmembed.types import Segments

if TYPE_CHECKING:
    from typing import Self

    from vlmembed.types import AttentionMetadata


MAX_SCORES = 2**26
"""Attention scores held at a time: 256 MiB in float32, beside a softmax of the same size."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceSegments:
    """`Segments` with `cu_seqlens` on the device; the host integers stay on the host."""

    cu_seqlens: torch.Tensor
    max_seqlen: int
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceMetadata:
    """An `AttentionMetadata` on the device, field by field."""

    segments: DeviceSegments
    windows: DeviceSegments | None
    prefix_positions: torch.Tensor
    patch_positions: torch.Tensor
    interp_indices: torch.Tensor | None
    interp_weights: torch.Tensor | None
    rope_positions: torch.Tensor | None
    window_index: torch.Tensor | None
    window_reverse: torch.Tensor | None
    merge_index: torch.Tensor | None

    @classmethod
    def from_host(cls, metadata: AttentionMetadata, device: torch.device) -> Self:
        """Copy, and nothing else: no field is derived here."""

        def copied(value: object) -> Any:  # noqa: ANN401  whatever the field holds
            if isinstance(value, np.ndarray):
                return torch.from_numpy(value).to(device, non_blocking=True)
            if isinstance(value, Segments):
                return DeviceSegments(cu_seqlens=copied(value.cu_seqlens), max_seqlen=value.max_seqlen, runs=value.runs)
            return value

        return cls(**{field.name: copied(getattr(metadata, field.name)) for field in dataclasses.fields(cls)})


def varlen_attention(
    q_THd: torch.Tensor, k_THd: torch.Tensor, v_THd: torch.Tensor, segments: DeviceSegments, *, scale: float
) -> torch.Tensor:
    """Softmax attention inside each segment of a pack, (T, H, d) to (T, H, d).

    Formula: softmax(scale * q k^T) v per segment and head, as ``bmm -> softmax -> bmm``. The segments of a run have
    one length and are one batched call. The row counts come from the host, so nothing waits for the device.
    """
    num_heads, head_dim = q_THd.shape[1:]
    out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
    start = 0
    for length, count in segments.runs:
        stop = start + length * count

        def by_head(x_THd: torch.Tensor, start: int = start, stop: int = stop, length: int = length) -> torch.Tensor:
            x_NLHd = x_THd[start:stop].view(-1, length, num_heads, head_dim)
            return x_NLHd.transpose(1, 2).reshape(-1, length, head_dim)

        out = _attention(by_head(q_THd), by_head(k_THd), by_head(v_THd), scale)
        out_NHLd = out.view(-1, num_heads, length, head_dim)
        out_THd[start:stop].view(-1, length, num_heads, head_dim).copy_(out_NHLd.transpose(1, 2))
        start = stop
    return out_THd


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention over (N * H, L, d); the queries are taken in slices that keep the scores within `MAX_SCORES`."""
    batch, length, _ = q.shape
    parts = [
        torch.bmm(torch.softmax(_scores(part, k, scale), dim=-1), v)
        for part in torch.split(q, max(1, MAX_SCORES // (batch * length)), dim=1)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Scale * q k^T; scaled inside the product, so that half precision does not overflow before it."""
    unused = q.new_empty(q.shape[0], q.shape[1], k.shape[1])
    return torch.baddbmm(unused, q, k.transpose(1, 2), beta=0, alpha=scale)


def varlen_pooling(
    q_Hd: torch.Tensor, k_THd: torch.Tensor, v_THd: torch.Tensor, segments: DeviceSegments, *, scale: float
) -> torch.Tensor:
    """One query that attends to each segment in turn: (N, H, d)."""
    num_heads, head_dim = q_Hd.shape
    pooled, start = [], 0
    for length, count in segments.runs:
        stop = start + length * count
        k_NLHd = k_THd[start:stop].view(count, length, num_heads, head_dim)
        v_NLHd = v_THd[start:stop].view(count, length, num_heads, head_dim)
        weights_NLH = torch.softmax((k_NLHd * q_Hd).sum(-1, dtype=torch.float32) * scale, dim=1).to(v_THd.dtype)
        pooled.append((weights_NLH[..., None] * v_NLHd).sum(1))
        start = stop
    return torch.cat(pooled)


def rotate(x_THd: torch.Tensor, cos_Td: torch.Tensor, sin_Td: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in float32: x * cos + rotate_half(x) * sin, where rotate_half swaps the halves of d and negates
    the first (J. Su et al., RoFormer, 2021, in the layout of transformers' vision towers)."""
    x = x_THd.float()
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos_Td[:, None] + turned * sin_Td[:, None]).to(x_THd.dtype)


def fused(*projections: nn.Linear) -> nn.Linear:
    """Several projections of one input as one, so that a layer reads its input once; an absent bias counts as 0."""
    first = projections[0]
    has_bias = any(projection.bias is not None for projection in projections)
    num_out = sum(projection.out_features for projection in projections)
    linear = nn.Linear(first.in_features, num_out, bias=has_bias, device="meta")
    linear.weight = nn.Parameter(torch.cat(tuple(projection.weight for projection in projections)), requires_grad=False)
    if has_bias:
        biases = tuple(
            projection.weight.new_zeros(projection.out_features) if projection.bias is None else projection.bias
            for projection in projections
        )
        linear.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return linear


class PackedAttention(nn.Module):
    """Stands in for a transformers attention module: its projections, our attention.

    Attributes:
        windowed: attend inside windows rather than inside images.
        returns_weights: the layer around it expects a pair, as transformers' attention returns, and drops the second.
    """

    def __init__(
        self,
        qkv: nn.Linear,
        output: nn.Module,
        *,
        num_heads: int,
        scale: float,
        windowed: bool = False,
        returns_weights: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = scale
        self.windowed = windowed
        self.returns_weights = returns_weights
        self.qkv = qkv
        self.output = output

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        metadata: DeviceMetadata,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **_: object,
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        """(T, C) or (1, T, C) to the same; `position_embeddings` are cosine and sine, each (T, d)."""
        num_tokens = hidden_states.shape[-2]
        q, k, v = self.qkv(hidden_states).view(num_tokens, 3, self.num_heads, -1).unbind(1)
        if position_embeddings is not None:
            q, k = rotate(q, *position_embeddings), rotate(k, *position_embeddings)
        segments = metadata.windows if self.windowed else metadata.segments
        assert segments is not None
        out_THd = varlen_attention(q, k, v, segments, scale=self.scale)
        out: torch.Tensor = self.output(out_THd.view(*hidden_states.shape[:-1], -1))
        return (out, None) if self.returns_weights else out
