"""Image towers with one token per patch: CLIP, SigLIP, DINO. transformers runs them on batches of one size, or padded;
here their layers run on packs.

Shape legend: as in `vlmembed.towers.base`; H attention heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vlmembed.attention.varlen import varlen_pooling
from vlmembed.interpolation import PositionTable
from vlmembed.layout import TowerLayout
from vlmembed.towers.base import Parts, Tower, flat_patch_weight, replace_attention
from vlmembed.towers.blueprint import Blueprint, layout_settings, make_config, on_meta, vision_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from vlmembed.attention.metadata import DeviceMetadata, DeviceSegments
    from vlmembed.towers.families import Family
    from vlmembed.towers.weights import ModelFiles


class PackedPooling(nn.Module):
    """SigLIP's attention pooling over the segments of a pack: a learned query, then a residual MLP."""

    query: torch.Tensor

    def __init__(self, head: Any) -> None:  # noqa: ANN401  transformers' own
        super().__init__()
        attention = head.attention
        width = attention.embed_dim
        weight_q, weight_k, weight_v = attention.in_proj_weight.split(width)
        bias_q, bias_k, bias_v = attention.in_proj_bias.split(width)
        self.num_heads = attention.num_heads
        query = head.probe.detach().view(width).float() @ weight_q.detach().float().T + bias_q.detach().float()
        self.register_buffer("query", query.view(self.num_heads, -1))
        self.key_value = nn.Linear(width, 2 * width, device="meta")
        self.key_value.weight = nn.Parameter(torch.cat([weight_k, weight_v]), requires_grad=False)
        self.key_value.bias = nn.Parameter(torch.cat([bias_k, bias_v]), requires_grad=False)
        self.output, self.norm, self.mlp = attention.out_proj, head.layernorm, head.mlp

    def forward(self, hidden_TC: torch.Tensor, segments: DeviceSegments) -> torch.Tensor:
        """(T, C) to (N, C)."""
        query = self.query.to(hidden_TC.dtype)
        key_THd, value_THd = self.key_value(hidden_TC).view(-1, 2, *query.shape).unbind(1)
        pooled = varlen_pooling(query, key_THd, value_THd, segments, scale=query.shape[1] ** -0.5)
        hidden_NC = self.output(pooled.flatten(1))
        out_NC: torch.Tensor = hidden_NC + self.mlp(self.norm(hidden_NC))
        return out_NC


class CentreRope(nn.Module):
    """DINOv3's rotary angles: patch centres in -1..1 times 2 pi times the frequencies, rows then columns, twice.

    Formula: ``DINOv3ViTRopePositionEmbedding`` of transformers. Prefix tokens stand at (0, 0) and are not turned.
    """

    frequencies: torch.Tensor

    def __init__(self, theta: float, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", theta ** -torch.arange(0, 1, 4 / head_dim, dtype=torch.float32))

    def forward(self, positions_T2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, each (T, d)."""
        angles = (2 * math.pi * positions_T2[:, :, None] * self.frequencies).flatten(1).tile(2)
        return angles.cos(), angles.sin()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DenseParts:
    """`Parts`, and what pools: `cls_norm` of the first prefix token, `projection` behind it (CLIP), or `pooling`
    over the patches (SigLIP)."""

    parts: Parts
    cls_norm: nn.Module | None = None
    projection: nn.Linear | None = None
    pooling: PackedPooling | None = None


class DenseTower(Tower):
    """A tower whose output is one vector per patch."""

    def __init__(self, blueprint: Blueprint, dense_parts: DenseParts, *, weights_sha256: str) -> None:
        super().__init__(blueprint, dense_parts.parts, weights_sha256=weights_sha256)
        self.cls_norm = dense_parts.cls_norm or nn.Identity()
        self.projection = dense_parts.projection
        self.pooling = dense_parts.pooling

    def _is_first_token(self, pool: str | None) -> bool:
        """`pool` is made of the first token of an image alone."""
        return pool is not None and pool != "mean" and self.pooling is None

    def features(
        self, patches_SP: torch.Tensor, metadata: DeviceMetadata, *, pool: str | None = None, deepstack: bool = False
    ) -> list[torch.Tensor]:
        """(T, C) after the last layer, before the final norm; (N, C) where `pool` is made of the first tokens."""
        assert not deepstack
        hidden = self.pre_norm(self.embed_patches(patches_SP, metadata))
        if self._is_first_token(pool):
            return [self.first_of_layers(hidden, metadata, self.rotary(metadata))]
        return self.run_layers(hidden, metadata, self.rotary(metadata))

    def tokens_of(self, features: list[torch.Tensor], metadata: DeviceMetadata) -> list[torch.Tensor]:
        """The ``last_hidden_state`` of transformers without the prefix tokens, (S, C)."""
        return [self.final_norm(features[0].index_select(0, metadata.patch_positions))]

    def pooled_of(self, features: list[torch.Tensor], metadata: DeviceMetadata, pool: str) -> torch.Tensor:
        """``cls``: the first prefix token after its norm. ``head``: CLIP's projection of that, or SigLIP's attention
        pooling. ``mean``: over the patch tokens."""
        if pool == "mean":
            return self.mean(self.tokens_of(features, metadata)[0], metadata)
        if self.pooling is not None:
            pooled: torch.Tensor = self.pooling(self.final_norm(features[0]), metadata.segments)
            return pooled.float()
        num_images = len(metadata.segments.cu_seqlens) - 1
        cls_NC: torch.Tensor = self.cls_norm(features[0][:num_images])
        return (self.projection(cls_NC) if pool == "head" and self.projection is not None else cls_NC).float()


def clip(model: Any, _config: Any) -> DenseParts:  # noqa: ANN401  transformers' own
    """CLIP and MetaCLIP 2: the final norm is the CLS token's alone."""
    tower = model["vision_model"]
    replace_attention(tower.encoder.layers, returns_weights=True)
    embeddings = tower.embeddings
    table = embeddings.position_embedding.weight
    parts = Parts(
        patch_weight=flat_patch_weight(embeddings.patch_embedding),
        patch_bias=None,
        layers=tower.encoder.layers,
        prefix=(embeddings.class_embedding.float() + table[0].float())[None],
        table=table[1:],
        pre_norm=tower.pre_layrnorm,
    )
    projections = [module for name, module in model.items() if name == "visual_projection"]
    return DenseParts(parts=parts, cls_norm=tower.post_layernorm, projection=projections[0] if projections else None)


def siglip(model: Any, _config: Any) -> DenseParts:  # noqa: ANN401  transformers' own
    """SigLIP and SigLIP2: no prefix; NaFlex embeds patches whose values are (row, column, channel)."""
    replace_attention(model.encoder.layers, returns_weights=True)
    embeddings = model.embeddings
    embedding = embeddings.patch_embedding
    if isinstance(embedding, nn.Linear):
        side = math.isqrt(embedding.in_features // 3)
        weight = embedding.weight.view(-1, side, side, 3).permute(0, 3, 1, 2).reshape(embedding.out_features, -1)
    else:
        weight = flat_patch_weight(embedding)
    parts = Parts(
        patch_weight=weight,
        patch_bias=embedding.bias,
        layers=model.encoder.layers,
        table=embeddings.position_embedding.weight,
        final_norm=model.post_layernorm,
    )
    return DenseParts(parts=parts, pooling=PackedPooling(model.head) if model.use_head else None)


def dino(model: Any, config: Any) -> DenseParts:  # noqa: ANN401  transformers' own
    """DINOv2, DINOv2 with registers, DINOv3: CLS and register tokens; a learned table or rotary positions."""
    embeddings = model.embeddings
    prefix = embeddings.cls_token[0].float()
    table = getattr(embeddings, "position_embeddings", None)
    if table is not None:
        prefix, table = prefix + table[0, :1].float(), table[0, 1:]
    if (registers := getattr(embeddings, "register_tokens", None)) is not None:
        prefix = torch.cat([prefix, registers[0].float()])
    convolution = embeddings.patch_embeddings if table is None else embeddings.patch_embeddings.projection
    layers, norm = (model.model.layer, model.norm) if table is None else (model.encoder.layer, model.layernorm)
    rope = CentreRope(config.rope_theta, config.hidden_size // config.num_attention_heads) if table is None else None
    replace_attention(layers, returns_weights=True)
    parts = Parts(
        patch_weight=flat_patch_weight(convolution),
        patch_bias=convolution.bias,
        layers=layers,
        prefix=prefix,
        table=table,
        final_norm=norm,
        rope=rope,
    )
    return DenseParts(parts=parts, cls_norm=norm)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """What is particular to a kind of dense tower.

    Attributes:
        take_apart: from transformers' module and config to its parts.
        kernel: of the position table, or None where positions are rotary; `antialias` as in `PositionTable`.
        has_cls: there is a CLS token, and register tokens if the config says so.
        has_projection: whole models project the CLS token.
    """

    take_apart: Callable[[Any, Any], DenseParts]
    kernel: str | None = "bicubic"
    antialias: bool = False
    has_cls: bool = True
    has_projection: bool = False


ADAPTERS: dict[str, Adapter] = {
    "clip": Adapter(take_apart=clip, has_projection=True),
    "siglip": Adapter(take_apart=siglip, has_cls=False),
    "naflex": Adapter(take_apart=siglip, kernel="bilinear", antialias=True, has_cls=False),
    "dinov2": Adapter(take_apart=dino),
    "dinov2_with_registers": Adapter(take_apart=dino, antialias=True),
    "dinov3": Adapter(take_apart=dino, kernel=None),
}


def open_dense(files: ModelFiles, family: Family) -> Blueprint:
    """Read the settings of a dense tower.

    Raises:
        ModelError: they are incomplete, or contradict each other.
    """
    settings = vision_settings(files)
    config, adapter = make_config(family, settings, files), ADAPTERS[family.adapter]
    hidden_size = int(config.hidden_size)
    widths = dict.fromkeys(family.pools, hidden_size)
    if adapter.has_projection and _has_projection(files):
        widths["head"] = int(files.config.get("projection_dim") or config.projection_dim)
    elif adapter.has_projection or not getattr(config, "vision_use_head", True):
        del widths["head"]

    def make_skeleton() -> nn.Module:
        tower: nn.Module = on_meta(family, config)
        if not adapter.has_projection:
            return tower
        parts = nn.ModuleDict({"vision_model": tower})
        if "head" in widths:
            parts["visual_projection"] = nn.Linear(hidden_size, widths["head"], bias=False, device="meta")
        return parts

    return Blueprint(
        files=files,
        family=family,
        layout=_layout(files, family, config),
        make_skeleton=make_skeleton,
        num_heads=config.num_attention_heads,
        pool_widths=widths,
        token_width=hidden_size,
        build=lambda blueprint, skeleton, sha256: DenseTower(
            blueprint, adapter.take_apart(skeleton, config), weights_sha256=sha256
        ),
    )


def _has_projection(files: ModelFiles) -> bool:
    """A whole CLIP has one, a classifier has not, and a vision model saved alone has one if its class says so."""
    classes = " ".join(files.config.get("architectures") or ())
    if "vision_config" in files.config:
        return "ForImageClassification" not in classes
    return "WithProjection" in classes


def _layout(files: ModelFiles, family: Family, config: Any) -> TowerLayout:  # noqa: ANN401  a transformers config
    adapter, patch_size = ADAPTERS[family.adapter], int(config.patch_size)
    table = None
    if adapter.kernel is not None:
        num_patches = getattr(config, "num_patches", None)
        side = math.isqrt(num_patches) if num_patches else int(config.image_size) // patch_size
        table = PositionTable(size_hw=(side, side), kernel=adapter.kernel, antialias=adapter.antialias)
    return TowerLayout(
        patch_size=patch_size,
        num_prefix_tokens=1 + getattr(config, "num_register_tokens", 0) if adapter.has_cls else 0,
        table=table,
        rope="centre" if table is None else None,
        **layout_settings(files, family, patch_size=patch_size, merge_size=1),
    )
