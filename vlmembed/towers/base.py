"""What a tower is: transformers' layers once over all images of a pack, with our embedding, attention and pooling.

Shape legend: T tokens, N images, S patches, M merged tokens, P values per patch, C width, D output width, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from torch import nn

from vlmembed.attention.layers import PackedAttention, fused
from vlmembed.attention.metadata import DeviceSegments
from vlmembed.attention.varlen import varlen_attention
from vlmembed.batch import PackCost
from vlmembed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from vlmembed.attention.metadata import DeviceMetadata
    from vlmembed.towers.blueprint import Blueprint

Rope = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine, each (T, d), float32."""

FIRST_NORMS = ("norm1", "layer_norm1")
"""What transformers calls the norm before a layer's attention."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parts:
    """A transformers vision model taken apart; what a tower lacks is None.

    Attributes:
        patch_weight: (C, P), channel-major. patch_bias: (C,).
        prefix: (prefix tokens, C), their positions included.
        table: (rows, C), learned positions of the patches.
        pre_norm, final_norm: before and after the layers.
        layers: the blocks, attention replaced.
        rope: from positions (T, 2) to `Rope`.
    """

    patch_weight: torch.Tensor
    patch_bias: torch.Tensor | None
    layers: nn.ModuleList
    prefix: torch.Tensor | None = None
    table: torch.Tensor | None = None
    pre_norm: nn.Module | None = None
    final_norm: nn.Module | None = None
    rope: Callable[[torch.Tensor], Rope] | None = None


class LayerStack(Protocol):
    """Computes a tower's layers in torch's place; hidden states come and go as torch's do."""

    def run(
        self, hidden_TC: torch.Tensor, metadata: DeviceMetadata, rope: Rope | None, *, taps: Sequence[int]
    ) -> list[torch.Tensor]:
        """What `Tower.run_layers` returns."""

    def run_first(self, hidden_TC: torch.Tensor, metadata: DeviceMetadata, rope: Rope | None) -> torch.Tensor:
        """What `Tower.first_of_layers` returns."""


class Tower(nn.Module):
    """A vision tower that runs on packs.

    Positions, rotary angles and the patch normalisation stay in float32 whatever `dtype` the layers have.

    Attributes:
        layout: what preprocessing and packing must know.
        pool_widths: D by ``pool`` choice; the first is the default.
        token_width: D of `tokens`. num_deepstack: inner layers whose features it can add.
        dtype: of the layers.
        weights_sha256: over the tower's tensors.
    """

    prefix: torch.Tensor | None
    table: torch.Tensor | None
    patch_mean: torch.Tensor
    patch_inverse_std: torch.Tensor

    def __init__(self, blueprint: Blueprint, parts: Parts, *, weights_sha256: str) -> None:
        super().__init__()
        self.layout = layout = blueprint.layout
        self.pool_widths = blueprint.pool_widths
        self.token_width = blueprint.token_width
        self.num_deepstack = blueprint.num_deepstack
        self.weights_sha256 = weights_sha256
        self.dtype = parts.patch_weight.dtype
        self.patch_weight = nn.Parameter(parts.patch_weight, requires_grad=False)
        self.patch_bias = None if parts.patch_bias is None else nn.Parameter(parts.patch_bias, requires_grad=False)
        self.layers = parts.layers
        self.pre_norm = parts.pre_norm or nn.Identity()
        self.final_norm = parts.final_norm or nn.Identity()
        self.rope = parts.rope
        self._compiled: list[Callable[..., torch.Tensor]] | None = None
        self._calls: list[Callable[..., torch.Tensor]] | None = None
        self._stack: LayerStack | None = None
        patch = layout.patch_size**2
        self.register_buffer("prefix", None if parts.prefix is None else parts.prefix.detach().float())
        self.register_buffer("table", None if parts.table is None else parts.table.detach().float().clone())
        mean = torch.tensor(layout.image_mean).repeat_interleave(patch) / layout.rescale_factor
        inverse_std = layout.rescale_factor / torch.tensor(layout.image_std).repeat_interleave(patch)
        self.register_buffer("patch_mean", mean)
        self.register_buffer("patch_inverse_std", inverse_std)

    def prepare(self, *, dtype: torch.dtype, device: torch.device) -> Self:
        """Cast the layers to `dtype`, keep the float32 buffers, and move all to `device`."""
        self.dtype = dtype
        for parameter in self.parameters():
            parameter.requires_grad = False
            parameter.data = parameter.data.to(dtype)
        return self.eval().to(device)

    def embed_patches(self, patches_SP: torch.Tensor, metadata: DeviceMetadata) -> torch.Tensor:
        """uint8 or float32 (S, P) patches to (T, C) hidden states, prefix tokens and learned positions included."""
        pixels = (patches_SP.to(torch.float32) - self.patch_mean).mul_(self.patch_inverse_std)
        hidden_SC = F.linear(pixels.to(self.dtype), self.patch_weight, self.patch_bias)
        return self.with_positions(hidden_SC, metadata)

    def with_positions(self, hidden_SC: torch.Tensor, metadata: DeviceMetadata) -> torch.Tensor:
        """Add the resampled position table, then put the prefix tokens between the images' patches: (T, C)."""
        if self.table is not None:
            indices, weights = metadata.interp_indices, metadata.interp_weights
            assert indices is not None
            positions_SC = F.embedding_bag(indices, self.table, per_sample_weights=weights, mode="sum")
            hidden_SC = hidden_SC + positions_SC.to(self.dtype)
        if self.prefix is None:
            return hidden_SC
        num_images, width = metadata.segments.cu_seqlens.shape[0] - 1, hidden_SC.shape[1]
        hidden_TC = hidden_SC.new_empty(hidden_SC.shape[0] + metadata.prefix_positions.shape[0], width)
        hidden_TC.index_copy_(0, metadata.patch_positions, hidden_SC)
        prefix = self.prefix.to(self.dtype).expand(num_images, -1, -1).reshape(-1, width)
        return hidden_TC.index_copy_(0, metadata.prefix_positions, prefix)

    def run_layers(
        self, hidden_TC: torch.Tensor, metadata: DeviceMetadata, rope: Rope | None, taps: Sequence[int] = ()
    ) -> list[torch.Tensor]:
        """The hidden states after all layers, then those after each layer of `taps`, all (T, C). Each layer gets the
        one metadata object."""
        if self._stack is not None:
            return self._stack.run(hidden_TC, metadata, rope, taps=taps)
        tapped = {}
        for number, layer in enumerate(self._callables):
            hidden_TC = run_layer(layer, hidden_TC, metadata, rope)
            if number in taps:
                tapped[number] = hidden_TC
        return [hidden_TC, *(tapped[number] for number in taps)]

    def first_of_layers(self, hidden_TC: torch.Tensor, metadata: DeviceMetadata, rope: Rope | None) -> torch.Tensor:
        """The first token of each image after all layers, (N, C), by `run_last_layer`."""
        if self._stack is not None:
            return self._stack.run_first(hidden_TC, metadata, rope)
        *others, last = self._callables
        for layer in others:
            hidden_TC = run_layer(layer, hidden_TC, metadata, rope)
        return run_last_layer(self.layers[-1], hidden_TC, metadata.segments.cu_seqlens[:-1], metadata, rope, call=last)

    @property
    def _callables(self) -> Sequence[Callable[..., Any]]:
        """The layers, compiled or as they are."""
        return self._calls or list(self.layers)

    def rotary(self, metadata: DeviceMetadata) -> Rope | None:
        """Cosine and sine of every token's rotary angles, where the tower has them."""
        if self.rope is None:
            return None
        assert metadata.rope_positions is not None
        return self.rope(metadata.rope_positions)

    def mean(self, tokens_MD: torch.Tensor, metadata: DeviceMetadata) -> torch.Tensor:
        """Mean over each image's tokens in float32, (N, D); by runs of equal images, so in a fixed order."""
        means, start = [], 0
        for length, count in metadata.segments.runs:
            num_tokens = (length - self.layout.num_prefix_tokens) // self.layout.merge_size**2
            stop = start + num_tokens * count
            means.append(tokens_MD[start:stop].view(count, num_tokens, -1).mean(dim=1, dtype=torch.float32))
            start = stop
        return torch.cat(means)

    def features(
        self, patches_SP: torch.Tensor, metadata: DeviceMetadata, *, pool: str | None = None, deepstack: bool = False
    ) -> list[torch.Tensor]:
        """All layers: what `pooled_of` makes `pool` from, or without one `tokens_of` the tokens. Their shapes follow
        from those of the arguments, and lengths on the host are asked for by the attention alone."""
        raise NotImplementedError

    def tokens_of(self, features: list[torch.Tensor], metadata: DeviceMetadata) -> list[torch.Tensor]:
        """What `tokens` returns, of `features` that may belong to a pack with filling behind the images."""
        raise NotImplementedError

    def pooled_of(self, features: list[torch.Tensor], metadata: DeviceMetadata, pool: str) -> torch.Tensor:
        """What `forward` returns, of `features` for this `pool`; they may belong to a pack with filling behind the
        images."""
        raise NotImplementedError

    def tokens(
        self, patches_SP: torch.Tensor, metadata: DeviceMetadata, *, deepstack: bool = False
    ) -> list[torch.Tensor]:
        """One vector per merged token, (M, D), in raster order of each image; with `deepstack` the features of the
        inner layers behind them, each (M, D)."""
        return self.tokens_of(self.features(patches_SP, metadata, deepstack=deepstack), metadata)

    def forward(self, patches_SP: torch.Tensor, metadata: DeviceMetadata, *, pool: str) -> torch.Tensor:
        """One float32 vector per image, (N, D).

        Raises:
            ConfigError: the tower has no such pooled vector.
        """
        if pool not in self.pool_widths:
            msg = f"pool {pool!r} is not possible with this tower: use {' or '.join(self.pool_widths)}"
            raise ConfigError(msg)
        return self.pooled_of(self.features(patches_SP, metadata, pool=pool), metadata, pool)

    @property
    def attentions(self) -> list[PackedAttention]:
        """The layers' attention modules."""
        return attentions_of(self.layers)

    @property
    def head_dim(self) -> int:
        """Values per attention head."""
        attention = self.attentions[0]
        return attention.qkv.out_features // 3 // attention.num_heads

    @property
    def cost(self) -> PackCost:
        """Operations of a forward, two for a multiplication and an addition: those of each weight of the layers per
        token, and of scores and weighted sums per pair. A window's pairs count per token."""
        weights = sum(weight.numel() for weight in self.layers.parameters() if weight.dim() > 1)
        per_token, per_pair = 2.0 * (weights + self.patch_weight.numel()), 0.0
        for attention in self.attentions:
            per_key = 4.0 * attention.qkv.out_features / 3
            if attention.windowed:
                per_token += per_key * ((self.layout.window_size or 0) * self.layout.merge_size) ** 2
            else:
                per_pair += per_key
        return PackCost(per_token=per_token, per_pair=per_pair)

    def use_attention(self, backend: str) -> Self:
        """Let `backend` compute all attention."""
        for attention in self.attentions:
            attention.backend = backend
        return self

    def use_stack(self, stack: LayerStack | None) -> Self:
        """Let another engine compute all layers, or with None torch again."""
        self._stack = stack
        return self

    def use_compiled(self, compiled: bool) -> Self:  # noqa: FBT001  it is the whole question
        """Run the layers through ``torch.compile``, or plainly. Attention stays outside: what it reads of a pack on the
        host differs from pack to pack, and would be compiled in."""
        if compiled and self._compiled is None:
            self._compiled = [torch.compile(layer, dynamic=True) for layer in self.layers]
        attend: Any = varlen_attention
        if compiled:
            attend = torch.compiler.disable(varlen_attention)  # type: ignore[no-untyped-call]
        for attention in self.attentions:
            attention.attend = attend
        self._calls = self._compiled if compiled else None
        return self


def run_layer(
    layer: Callable[..., Any],
    hidden_TC: torch.Tensor,
    metadata: DeviceMetadata,
    rope: Rope | None,
    **settings: object,
) -> torch.Tensor:
    """One of transformers' layers with its attention replaced; `settings` are for the attention."""
    hidden: torch.Tensor = layer(
        hidden_TC,
        attention_mask=None,
        cu_seqlens=metadata.segments.cu_seqlens,
        position_embeddings=rope,
        metadata=metadata,
        **settings,
    )
    return hidden


def run_last_layer(
    layer: nn.Module,
    hidden_TC: torch.Tensor,
    rows_N: torch.Tensor,
    metadata: DeviceMetadata,
    rope: Rope | None,
    *,
    call: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """The last layer for the one token of each image that is wanted, at `rows_N`: (N, C).

    Of the other tokens only keys and values are computed: the same vector but for rounding, with about a sixth of the
    layer's work. `call` is the layer in compiled form.
    """
    norm = next(getattr(layer, name) for name in FIRST_NORMS if hasattr(layer, name))
    (attention,) = attentions_of(layer)
    keys_values = attention.keys_values_of(norm(hidden_TC), rope)
    if rope is not None:
        rope = rope[0].index_select(0, rows_N), rope[1].index_select(0, rows_N)
    return run_layer(
        layer if call is None else call,
        hidden_TC.index_select(0, rows_N),
        metadata,
        rope,
        keys_values=keys_values,
        queries=DeviceSegments.one_each(metadata.segments),
    )


def attentions_of(module: nn.Module) -> list[PackedAttention]:
    """The attention modules inside a layer, or inside all."""
    return [inner for inner in module.modules() if isinstance(inner, PackedAttention)]


def replace_attention(layers: nn.ModuleList, *, returns_weights: bool) -> None:
    """Put `PackedAttention` in the place of every layer's attention."""
    for layer in layers:
        name = next(name for name in ("attn", "self_attn", "attention") if hasattr(layer, name))
        attention = getattr(layer, name)
        if hasattr(attention, "qkv"):
            qkv = attention.qkv
        else:
            qkv = fused(attention.q_proj, attention.k_proj, attention.v_proj)
        output = next(getattr(attention, each) for each in ("proj", "out_proj", "o_proj") if hasattr(attention, each))
        num_heads = getattr(attention, "num_heads", None) or attention.num_attention_heads
        packed = PackedAttention(
            qkv,
            output,
            num_heads=num_heads,
            scale=(qkv.out_features // 3 // num_heads) ** -0.5,
            returns_weights=returns_weights,
        )
        setattr(layer, name, packed)


def flat_patch_weight(convolution: Any) -> torch.Tensor:  # noqa: ANN401  Conv2d or Conv3d, by shape
    """A patch embedding as (C, P). A still picture is the same in every frame of a Conv3d, so its weights are summed
    over the frames, in float32: half the products, the same result but for rounding."""
    weight: torch.Tensor = convolution.weight
    if weight.dim() == 5:  # noqa: PLR2004  (C, 3, frames, height, width)
        weight = weight.float().sum(2)
    return weight.reshape(weight.shape[0], -1)
