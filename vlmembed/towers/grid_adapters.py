"""How transformers' vision-language towers are taken apart: one adapter per interface, and a new family costs lines.

Shape legend: as in `vlmembed.towers.base`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from torch import nn

from vlmembed.towers.base import Parts, flat_patch_weight, replace_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GridParts:
    """`Parts`, and what makes tokens of patches: `merger` takes (S, C) in merge-block order to (M, D); `deepstack`
    does so after the layers it is keyed by."""

    parts: Parts
    merger: nn.Module
    deepstack: Mapping[int, nn.Module] = field(default_factory=dict)


class BlockProjector(nn.Module):
    """Norm per patch, then two Linears over the joined patches of a merge block: Kimi's and PaddleOCR's projectors."""

    def __init__(self, norm: nn.Module, first: nn.Linear, act: nn.Module, second: nn.Linear) -> None:
        super().__init__()
        self.norm, self.first, self.act, self.second = norm, first, act, second

    def forward(self, hidden_SC: torch.Tensor) -> torch.Tensor:
        """(S, C) in merge-block order to (M, D)."""
        joined = self.norm(hidden_SC).view(-1, self.first.in_features)
        tokens: torch.Tensor = self.second(self.act(self.first(joined)))
        return tokens


class ConvMerger(nn.Module):
    """GLM's strided convolution over each merge block, as a Linear, then its merger."""

    def __init__(self, convolution: nn.Conv2d, merger: nn.Module) -> None:
        super().__init__()
        weight = convolution.weight.permute(0, 2, 3, 1).reshape(convolution.out_channels, -1)
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        self.bias = convolution.bias
        self.merger = merger

    def forward(self, hidden_SC: torch.Tensor) -> torch.Tensor:
        """(S, C) in merge-block order to (M, D)."""
        joined = hidden_SC.view(-1, self.weight.shape[1])
        tokens: torch.Tensor = self.merger(F.linear(joined, self.weight, self.bias))
        return tokens


class IndexRope(nn.Module):
    """A family's own rotary embedding of row and column numbers, made anew: the skeleton's has no memory for its
    frequencies."""

    def __init__(self, rotary: nn.Module, config: Any) -> None:  # noqa: ANN401  a transformers config
        super().__init__()
        self.rotary = type(rotary)(config)

    def forward(self, positions_T2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, each (T, d), float32."""
        cos, sin = self.rotary(positions_T2, positions_T2)
        return cos, sin


def _blocks_parts(model: Any, config: Any, **others: Any) -> Parts:  # noqa: ANN401  transformers' own
    """What Qwen's and GLM's modules name alike, and the parts that only some of them have."""
    replace_attention(model.blocks, returns_weights=False)
    return Parts(
        patch_weight=flat_patch_weight(model.patch_embed.proj),
        patch_bias=model.patch_embed.proj.bias,
        layers=model.blocks,
        rope=IndexRope(model.rotary_pos_emb, config),
        **others,
    )


def qwen2_vl(model: Any, config: Any) -> GridParts:  # noqa: ANN401  transformers' own
    """Qwen2-VL: rotary positions only."""
    return GridParts(parts=_blocks_parts(model, config), merger=model.merger)


def qwen2_5_vl(model: Any, config: Any) -> GridParts:  # noqa: ANN401  transformers' own
    """Qwen2.5-VL: most layers attend inside windows."""
    grid_parts = qwen2_vl(model, config)
    for number, layer in enumerate(model.blocks):
        layer.attn.windowed = number not in config.fullatt_block_indexes
    return grid_parts


def qwen3_vl(model: Any, config: Any) -> GridParts:  # noqa: ANN401  transformers' own
    """Qwen3-VL and Qwen3.5: learned positions too, and (Qwen3-VL) mergers after some layers."""
    parts = _blocks_parts(model, config, table=model.pos_embed.weight)
    layers = getattr(config, "deepstack_visual_indexes", ())
    mergers = getattr(model, "deepstack_merger_list", ())
    return GridParts(parts=parts, merger=model.merger, deepstack=dict(zip(layers, mergers, strict=True)))


def kimi_k25(model: Any, config: Any) -> GridParts:  # noqa: ANN401  transformers' own
    """Kimi: raster order, one norm at the end, a projector outside the tower."""
    tower, projector = model["vision_tower"], model["mm_projector"]
    replace_attention(tower.layers, returns_weights=False)
    parts = Parts(
        patch_weight=flat_patch_weight(tower.patch_embed.proj),
        patch_bias=tower.patch_embed.proj.bias,
        layers=tower.layers,
        table=tower.patch_embed.pos_emb.position_embeddings.flatten(0, 1),
        final_norm=tower.final_layernorm,
        rope=IndexRope(tower.rotary_emb, config),
    )
    merger = BlockProjector(projector.pre_norm, projector.in_proj, projector.act, projector.out_proj)
    return GridParts(parts=parts, merger=merger)


def glm4v(model: Any, config: Any) -> GridParts:  # noqa: ANN401  transformers' own
    """GLM-4V: a norm before the positions, a convolution before the merger."""
    parts = _blocks_parts(
        model,
        config,
        table=model.embeddings.position_embedding.weight,
        pre_norm=model.post_conv_layernorm,
        final_norm=model.post_layernorm,
    )
    return GridParts(parts=parts, merger=ConvMerger(model.downsample, model.merger))


def paddleocr_vl(model: Any, config: Any) -> GridParts:  # noqa: ANN401  transformers' own
    """PaddleOCR-VL: SigLIP's layers with rotary positions, raster order, a projector outside the tower."""
    tower, projector = model["visual"].vision_model, model["projector"]
    replace_attention(tower.encoder.layers, returns_weights=True)
    parts = Parts(
        patch_weight=flat_patch_weight(tower.embeddings.patch_embedding),
        patch_bias=tower.embeddings.patch_embedding.bias,
        layers=tower.encoder.layers,
        table=tower.embeddings.position_embedding.weight,
        final_norm=tower.post_layernorm,
        rope=IndexRope(tower.encoder.rotary_pos_emb, config),
    )
    merger = BlockProjector(projector.pre_norm, projector.linear_1, projector.act, projector.linear_2)
    return GridParts(parts=parts, merger=merger)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """What is particular to an interface.

    Attributes:
        take_apart: from transformers' module and config to its parts.
        kernel: of the position table, or None where there is none; `align_corners` as in `PositionTable`.
        width: the config's name for the width of the tokens.
        projector: (name of the tower, name of the projector, the projector's class), where the patches are merged
            outside the tower; such towers take patches in raster order.
    """

    take_apart: Callable[[Any, Any], GridParts]
    kernel: str | None = None
    align_corners: bool = False
    width: str = "out_hidden_size"
    projector: tuple[str, str, str] | None = None


ADAPTERS: dict[str, Adapter] = {
    "qwen2_vl": Adapter(take_apart=qwen2_vl, width="hidden_size"),
    "qwen2_5_vl": Adapter(take_apart=qwen2_5_vl),
    "qwen3_vl": Adapter(take_apart=qwen3_vl, kernel="bilinear", align_corners=True),
    "kimi_k25": Adapter(
        take_apart=kimi_k25,
        kernel="bicubic",
        projector=("vision_tower", "mm_projector", "Kimi_K25MultimodalProjection"),
    ),
    "glm4v": Adapter(take_apart=glm4v, kernel="bicubic"),
    "paddleocr_vl": Adapter(
        take_apart=paddleocr_vl, kernel="bilinear", projector=("visual", "projector", "PaddleOCRProjector")
    ),
}
