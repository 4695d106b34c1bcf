"""The module that brings varlen attention into transformers' layers, and what it is made of.

Shape legend: T tokens of a pack, N images, H heads, d head width, C = H * d.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from torch import nn

from vlmembed.attention.varlen import varlen_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    from vlmembed.attention.metadata import DeviceMetadata, DeviceSegments


def rotate(x_THd: torch.Tensor, cos_Td: torch.Tensor, sin_Td: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in float32: x * cos + rotate_half(x) * sin, where rotate_half swaps the halves of d and negates
    the first (J. Su et al., RoFormer, 2021, in the layout of transformers' vision towers)."""
    first, second = x_THd.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_THd * cos_Td[:, None] + turned * sin_Td[:, None]).to(x_THd.dtype)  # the products are float32


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
        backend: name of the backend that computes it.
        attend: `varlen_attention`, or a stand-in that calls it.
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
        self.backend = "cpu"
        self.attend: Callable[..., torch.Tensor] = varlen_attention
        self.qkv = qkv
        self.output = output

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        metadata: DeviceMetadata,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        keys_values: tuple[torch.Tensor, torch.Tensor] | None = None,
        queries: DeviceSegments | None = None,
        **_: object,
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        """(T, C) or (1, T, C) to the same; `position_embeddings` are cosine and sine, each (T, d).

        With `keys_values`, from `keys_values_of`, `hidden_states` are those of some tokens, whose segments are
        `queries`.
        """
        num_tokens = hidden_states.shape[-2]
        segments = metadata.windows if self.windowed else metadata.segments
        assert segments is not None
        if keys_values is None:
            q, k, v = self.qkv(hidden_states).view(num_tokens, 3, self.num_heads, -1).unbind(1)
            if position_embeddings is not None:
                q, k = rotate(q, *position_embeddings), rotate(k, *position_embeddings)
        else:
            q, (k, v) = self._project(hidden_states, 0, 1)[0], keys_values
            if position_embeddings is not None:
                q = rotate(q, *position_embeddings)
        out_THd = self.attend(q, k, v, segments, queries=queries, scale=self.scale, backend=self.backend)
        out: torch.Tensor = self.output(out_THd.view(*hidden_states.shape[:-1], -1))
        return (out, None) if self.returns_weights else out

    def keys_values_of(
        self, hidden_TC: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens, each (T, H, d)."""
        k, v = self._project(hidden_TC, 1, 3)
        return k if position_embeddings is None else rotate(k, *position_embeddings), v

    def _project(self, hidden_TC: torch.Tensor, begin: int, end: int) -> tuple[torch.Tensor, ...]:
        """Those of queries (0), keys (1) and values (2), each (T, H, d)."""
        width = self.qkv.out_features // 3
        rows = slice(begin * width, end * width)
        bias = None if self.qkv.bias is None else self.qkv.bias[rows]
        projected = F.linear(hidden_TC, self.qkv.weight[rows], bias)
        return projected.view(-1, end - begin, self.num_heads, width // self.num_heads).unbind(1)
