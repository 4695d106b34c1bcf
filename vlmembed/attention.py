"""Varlen attention over the segments of a pack, and the module that brings it into transformers' layers.

Shape legend: T tokens of a pack, R runs of equal segments, L tokens per segment, B segments in a run, H heads,
d head width, C = H * d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

if TYPE_CHECKING:
    from vlmembed.types import AttentionMetadata


MAX_SCORES = 2**26
"""Attention scores held at a time: 256 MiB in float32, beside a softmax of the same size."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceMetadata:
    """The tensors of an `AttentionMetadata` on the device, field by field; the host integers stay on the host."""

    max_seqlen: int
    segment_runs: tuple[tuple[int, int], ...]
    cu_seqlens: torch.Tensor
    prefix_positions: torch.Tensor
    patch_positions: torch.Tensor
    patch_images: torch.Tensor
    interp_indices: torch.Tensor
    interp_weights: torch.Tensor

    @classmethod
    def from_host(cls, metadata: AttentionMetadata, device: torch.device) -> DeviceMetadata:
        """Copy, and nothing else: no field is derived here."""

        def copy(name: str) -> torch.Tensor:
            return torch.from_numpy(getattr(metadata, name)).to(device, non_blocking=True)

        return cls(
            max_seqlen=metadata.max_seqlen,
            segment_runs=metadata.segment_runs,
            cu_seqlens=copy("cu_seqlens"),
            prefix_positions=copy("prefix_positions"),
            patch_positions=copy("patch_positions"),
            patch_images=copy("patch_images"),
            interp_indices=copy("interp_indices"),
            interp_weights=copy("interp_weights"),
        )


def varlen_attention(
    q_THd: torch.Tensor, k_THd: torch.Tensor, v_THd: torch.Tensor, metadata: DeviceMetadata, *, scale: float
) -> torch.Tensor:
    """Softmax attention inside each segment of a pack, (T, H, d) to (T, H, d).

    Formula: softmax(scale * q k^T) v per segment and head, as ``bmm -> softmax -> bmm``. The segments of a run have
    one length and are one batched call. The row counts come from the host, so nothing waits for the device.
    """
    num_heads, head_dim = q_THd.shape[1:]
    out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
    start = 0
    for length, count in metadata.segment_runs:
        stop = start + length * count

        def by_head(x_THd: torch.Tensor, start: int = start, stop: int = stop, length: int = length) -> torch.Tensor:
            x_BLHd = x_THd[start:stop].view(-1, length, num_heads, head_dim)
            return x_BLHd.transpose(1, 2).reshape(-1, length, head_dim)

        out = _attention(by_head(q_THd), by_head(k_THd), by_head(v_THd), scale)
        out_BHLd = out.view(-1, num_heads, length, head_dim)
        out_THd[start:stop].view(-1, length, num_heads, head_dim).copy_(out_BHLd.transpose(1, 2))
        start = stop
    return out_THd


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention over (B * H, L, d); the queries are taken in slices that keep the scores within `MAX_SCORES`."""
    batch, length, _ = q.shape
    parts = [
        torch.bmm(torch.softmax(torch.bmm(part, k.transpose(1, 2)).mul_(scale), dim=-1), v)
        for part in torch.split(q, max(1, MAX_SCORES // (batch * length)), dim=1)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class PackedAttention(nn.Module):
    """Stands in for a transformers attention module: its projections, our attention.

    The query, key and value projections become one Linear, so a layer reads its input once.
    """

    def __init__(
        self, query: nn.Linear, key: nn.Linear, value: nn.Linear, output: nn.Linear, *, num_heads: int, scale: float
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = scale
        has_bias = query.bias is not None
        self.qkv = nn.Linear(query.in_features, 3 * query.out_features, bias=has_bias, device="meta")
        self.qkv.weight = nn.Parameter(torch.cat([query.weight, key.weight, value.weight]), requires_grad=False)
        if has_bias:
            self.qkv.bias = nn.Parameter(torch.cat([query.bias, key.bias, value.bias]), requires_grad=False)
        self.output = output

    def forward(
        self, hidden_states: torch.Tensor, *, metadata: DeviceMetadata, **_: object
    ) -> tuple[torch.Tensor, None]:
        """(1, T, C) to (1, T, C); the second value is the attention map that transformers' layers expect and drop."""
        num_tokens = hidden_states.shape[1]
        qkv = self.qkv(hidden_states).view(num_tokens, 3, self.num_heads, -1)
        out_THd = varlen_attention(qkv[:, 0], qkv[:, 1], qkv[:, 2], metadata, scale=self.scale)
        return cast("torch.Tensor", self.output(out_THd.view(1, num_tokens, -1))), None
