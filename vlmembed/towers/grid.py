"""Towers of vision-language models: flat patches, rotary positions, 2x2 patches merged into a token of the language
model.

Shape legend: as in `vlmembed.towers.base`.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vlmembed.errors import ModelError
from vlmembed.interpolation import PositionTable
from vlmembed.layout import TowerLayout
from vlmembed.towers.base import Tower
from vlmembed.towers.blueprint import Blueprint, layout_settings, make_config, modeling, on_meta, vision_settings
from vlmembed.towers.grid_adapters import ADAPTERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vlmembed.attention.metadata import DeviceMetadata
    from vlmembed.batch import PackCost
    from vlmembed.towers.families import Family
    from vlmembed.towers.grid_adapters import GridParts
    from vlmembed.towers.weights import ModelFiles


class GridTower(Tower):
    """A tower whose output is merged tokens."""

    def __init__(self, blueprint: Blueprint, grid_parts: GridParts, *, weights_sha256: str) -> None:
        super().__init__(blueprint, grid_parts.parts, weights_sha256=weights_sha256)
        self.merger = grid_parts.merger
        self.deepstack_layers = tuple(grid_parts.deepstack)
        self.deepstack_mergers = nn.ModuleList(grid_parts.deepstack.values())

    @property
    def cost(self) -> PackCost:
        """With the merger's operations, which are per merged token."""
        layers = super().cost
        weights = sum(weight.numel() for weight in self.merger.parameters() if weight.dim() > 1)
        return replace(layers, per_token=layers.per_token + 2.0 * weights / self.layout.merge_size**2)

    def with_positions(self, hidden_SC: torch.Tensor, metadata: DeviceMetadata) -> torch.Tensor:
        """The first norm, where there is one, comes before the positions here."""
        return super().with_positions(self.pre_norm(hidden_SC), metadata)

    def _by_window(self, x: torch.Tensor, metadata: DeviceMetadata) -> torch.Tensor:
        """(S, …) with its merge blocks in window order."""
        assert metadata.window_index is not None
        block = self.layout.merge_size**2
        return x.view(-1, block * x.shape[-1]).index_select(0, metadata.window_index).view(x.shape)

    def features(
        self, patches_SP: torch.Tensor, metadata: DeviceMetadata, *, pool: str | None = None, deepstack: bool = False
    ) -> list[torch.Tensor]:
        """What the language model would be fed, (M, D), and the deepstack features on request."""
        del pool  # its mean takes them all
        hidden = self.embed_patches(patches_SP, metadata)
        rope = self.rotary(metadata)
        if metadata.window_index is not None:
            hidden = self._by_window(hidden, metadata)
            rope = rope and (self._by_window(rope[0], metadata), self._by_window(rope[1], metadata))
        hidden, *tapped = self.run_layers(hidden, metadata, rope, self.deepstack_layers if deepstack else ())
        inner = [self.deepstack_mergers[number](each_SC) for number, each_SC in enumerate(tapped)]
        hidden = self.final_norm(hidden)
        if metadata.merge_index is not None:
            hidden = hidden.index_select(0, metadata.merge_index)
        tokens = self.merger(hidden)
        if metadata.window_reverse is not None:
            tokens = tokens.index_select(0, metadata.window_reverse)
        return [tokens, *inner]

    def tokens_of(self, features: list[torch.Tensor], metadata: DeviceMetadata) -> list[torch.Tensor]:
        """The features of the images' own tokens."""
        num_merged = len(metadata.patch_positions) // self.layout.merge_size**2
        return [each_MD[:num_merged] for each_MD in features]

    def pooled_of(self, features: list[torch.Tensor], metadata: DeviceMetadata, pool: str) -> torch.Tensor:
        """Mean over the merged tokens: these towers have no pooled vector of their own."""
        assert pool == "mean"
        return self.mean(features[0], metadata)


KIMI_SPELLINGS = {
    "vt_hidden_size": "hidden_size",
    "vt_num_hidden_layers": "num_hidden_layers",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_intermediate_size": "intermediate_size",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
}
"""Released Kimi configs' names, and transformers' names for the same."""


def open_grid(files: ModelFiles, family: Family) -> Blueprint:
    """Read the settings of a grid tower.

    Raises:
        ModelError: they are incomplete, or contradict each other.
    """
    settings, adapter = vision_settings(files), ADAPTERS[family.adapter]
    settings |= {ours: settings[theirs] for theirs, ours in KIMI_SPELLINGS.items() if theirs in settings}
    config = make_config(family, settings, files)
    token_width = _text_width(settings, files) if adapter.projector else int(getattr(config, adapter.width))

    def make_skeleton() -> nn.Module:
        tower: nn.Module = on_meta(family, config)
        if adapter.projector is None:
            return tower
        return _with_projector(tower, config, settings, files=files, family=family, width=token_width)

    return Blueprint(
        files=files,
        family=family,
        layout=_layout(files, family, config),
        make_skeleton=make_skeleton,
        num_heads=config.num_attention_heads,
        pool_widths={"mean": token_width},
        token_width=token_width,
        num_deepstack=len(getattr(config, "deepstack_visual_indexes", ())),
        build=lambda blueprint, skeleton, sha256: GridTower(
            blueprint, adapter.take_apart(skeleton, config), weights_sha256=sha256
        ),
    )


def _text_width(settings: Mapping[str, Any], files: ModelFiles) -> int:
    """Width of the language model, which the projector projects to."""
    text = files.config.get("text_config") or {}
    width = text.get("hidden_size") or files.config.get("hidden_size") or settings.get("text_hidden_size")
    if files.config.get("vision_config") is None or width is None:
        msg = f"{files.folder / 'config.json'} does not say how wide the language model is (text_config.hidden_size)"
        raise ModelError(msg)
    return int(width)


def _with_projector(
    tower: nn.Module,
    config: Any,  # noqa: ANN401  a transformers config
    settings: Mapping[str, Any],
    *,
    files: ModelFiles,
    family: Family,
    width: int,
) -> nn.Module:
    """The tower together with the projector to `width` that is not part of it."""
    projector = ADAPTERS[family.adapter].projector
    assert projector is not None
    tower_name, projector_name, class_name = projector
    whole = files.config
    model_config = SimpleNamespace(
        vision_config=config,
        text_config=SimpleNamespace(hidden_size=width),
        projection_hidden_size=whole.get("projection_hidden_size")
        or settings.get("mm_hidden_size", config.hidden_size),
        projection_layer_norm_eps=whole.get("projection_layer_norm_eps") or settings.get("projector_ln_eps", 1e-5),
    )
    with torch.device("meta"):
        return nn.ModuleDict({tower_name: tower, projector_name: getattr(modeling(family), class_name)(model_config)})


def _layout(files: ModelFiles, family: Family, config: Any) -> TowerLayout:  # noqa: ANN401  a transformers config
    adapter = ADAPTERS[family.adapter]
    merge_size = int(getattr(config, "spatial_merge_size", 0) or config.merge_kernel_size[0])
    patch_size = int(config.patch_size)
    table, window_size = None, None
    if adapter.kernel is not None:
        table = PositionTable(size_hw=_table_size(config), kernel=adapter.kernel, align_corners=adapter.align_corners)
    if hasattr(config, "window_size"):
        window_size = config.window_size // merge_size // patch_size
    return TowerLayout(
        patch_size=patch_size,
        merge_size=merge_size,
        block_order=adapter.projector is None,
        table=table,
        rope="index",
        window_size=window_size,
        **layout_settings(files, family, patch_size=patch_size, merge_size=merge_size),
    )


def _table_size(config: Any) -> tuple[int, int]:  # noqa: ANN401  transformers' own
    if hasattr(config, "pos_emb_height"):
        return config.pos_emb_height, config.pos_emb_width
    if hasattr(config, "num_position_embeddings"):
        side = int(config.num_position_embeddings**0.5)
    else:
        side = config.image_size // config.patch_size
    return side, side
