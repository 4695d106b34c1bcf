"""DINOv2 over a pack: transformers' layers once over all images, ``(1, T, C)``.

Shape legend: T tokens, N images, S patches, P values per patch, C width, D embedding width (here D = C).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from torch import nn
from transformers import AutoConfig, Dinov2Model
from transformers.utils.logging import disable_progress_bar

from vlmembed.attention import DeviceMetadata, PackedAttention
from vlmembed.errors import ModelError
from vlmembed.layout import TowerLayout
from vlmembed.towers.weights import normalisation, official_resize, weights_sha256

if TYPE_CHECKING:
    from typing import Self

    from vlmembed.towers.weights import ModelFiles


class DenseTower(nn.Module):
    """A DINOv2 tower that runs on packs.

    The position table and the patch normalisation stay in float32 whatever `dtype` the layers have.

    Attributes:
        layout: what preprocessing and packing must know.
        width: D, the embedding width.
        default_pool: what ``--pool auto`` means.
        weights_sha256, config_sha256, revision: identity of the checkpoint.
    """

    default_pool = "cls"
    prefix_embedding: torch.Tensor
    position_table: torch.Tensor
    patch_mean: torch.Tensor
    patch_inverse_std: torch.Tensor

    def __init__(self, model: Dinov2Model, layout: TowerLayout) -> None:
        super().__init__()
        self.layout = layout
        self.width: int = model.config.hidden_size
        self.weights_sha256 = ""
        self.config_sha256 = ""
        self.revision = ""
        self.dtype = model.dtype
        projection = model.embeddings.patch_embeddings.projection
        self.patch_weight = nn.Parameter(projection.weight.reshape(self.width, -1), requires_grad=False)
        self.patch_bias = nn.Parameter(projection.bias, requires_grad=False)
        self.layers = model.encoder.layer
        self.final_norm = model.layernorm
        for layer in self.layers:
            attention = layer.attention
            layer.attention = PackedAttention(
                attention.q_proj,
                attention.k_proj,
                attention.v_proj,
                attention.o_proj,
                num_heads=attention.num_attention_heads,
                scale=attention.scaling,
            )
        table = model.embeddings.position_embeddings.detach()[0].float()
        patch = layout.patch_size**2
        mean = torch.tensor(layout.image_mean).repeat_interleave(patch) / layout.rescale_factor
        inverse_std = layout.rescale_factor / torch.tensor(layout.image_std).repeat_interleave(patch)
        self.register_buffer("prefix_embedding", model.embeddings.cls_token.detach()[0].float() + table[:1])
        self.register_buffer("position_table", table[1:].clone())
        self.register_buffer("patch_mean", mean)
        self.register_buffer("patch_inverse_std", inverse_std)

    @classmethod
    def load(cls, files: ModelFiles, *, dtype: torch.dtype, device: torch.device) -> Self:
        """Read a checkpoint folder.

        Raises:
            ModelError: a tensor of the tower is missing or has the wrong shape.
        """
        sha256 = weights_sha256(files.folder)
        config = AutoConfig.from_pretrained(files.folder, local_files_only=True)
        disable_progress_bar()  # loading takes a moment; the bar of a run is the run's own
        model, info = Dinov2Model.from_pretrained(
            files.folder, config=config, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
        if absent := sorted(set(info["missing_keys"]) | {name for name, *_ in info["mismatched_keys"]}):
            msg = f"{files.folder} lacks {len(absent)} tensors of the tower, the first is {absent[0]!r}"
            raise ModelError(msg)
        tower = cls(model.eval(), layout_of(files))
        tower.weights_sha256, tower.config_sha256, tower.revision = sha256, files.config_sha256, files.revision
        return tower.prepare(dtype=dtype, device=device)

    def prepare(self, *, dtype: torch.dtype, device: torch.device) -> Self:
        """Cast the layers to `dtype`, keep the float32 buffers, and move all to `device`."""
        self.dtype = dtype
        for parameter in self.parameters():
            parameter.requires_grad = False
            parameter.data = parameter.data.to(dtype)
        return self.to(device)

    def embed_patches(self, patches_SP: torch.Tensor, metadata: DeviceMetadata) -> torch.Tensor:
        """uint8 (S, P) patches to (1, T, C) hidden states, CLS tokens and position embeddings included."""
        pixels = patches_SP.to(torch.float32).sub_(self.patch_mean).mul_(self.patch_inverse_std)
        hidden_SC = F.linear(pixels.to(self.dtype), self.patch_weight, self.patch_bias)
        positions_SC = F.embedding_bag(
            metadata.interp_indices, self.position_table, per_sample_weights=metadata.interp_weights, mode="sum"
        )
        num_images = metadata.cu_seqlens.shape[0] - 1
        num_tokens = patches_SP.shape[0] + metadata.prefix_positions.shape[0]
        hidden_TC = hidden_SC.new_empty(num_tokens, self.width)
        hidden_TC.index_copy_(0, metadata.patch_positions, hidden_SC + positions_SC.to(self.dtype))
        prefix = self.prefix_embedding.to(self.dtype).expand(num_images, -1, -1).reshape(-1, self.width)
        return hidden_TC.index_copy_(0, metadata.prefix_positions, prefix)[None]

    def hidden_states(self, patches_SP: torch.Tensor, metadata: DeviceMetadata) -> torch.Tensor:
        """(T, C) after the last layer, before the final norm."""
        hidden = self.embed_patches(patches_SP, metadata)
        for layer in self.layers:
            hidden = layer(hidden, metadata=metadata)
        return hidden.view(-1, self.width)

    def forward(self, patches_SP: torch.Tensor, metadata: DeviceMetadata, *, pool: str) -> torch.Tensor:
        """Pooled float32 (N, D): the CLS token, or the mean of the patch tokens, after the final norm."""
        hidden_TC = self.hidden_states(patches_SP, metadata)
        if pool == "cls":
            return cast("torch.Tensor", self.final_norm(hidden_TC.index_select(0, metadata.prefix_positions)).float())
        tokens_SC: torch.Tensor = self.final_norm(hidden_TC.index_select(0, metadata.patch_positions)).float()
        num_images = metadata.cu_seqlens.shape[0] - 1
        sums_ND = tokens_SC.new_zeros(num_images, self.width).index_add_(0, metadata.patch_images, tokens_SC)
        counts_N = metadata.cu_seqlens.diff() - self.layout.num_prefix_tokens
        return sums_ND / counts_N[:, None]


def layout_of(files: ModelFiles) -> TowerLayout:
    """Preprocessing and packing facts of a DINOv2 checkpoint, from its two config files.

    Raises:
        ModelError: the config lacks a setting, or the image processor normalises without saying how.
    """
    config, processor = files.config, files.processor
    try:
        patch_size, image_size = int(config["patch_size"]), int(config["image_size"])
    except (KeyError, TypeError, ValueError) as error:
        msg = f"{files.folder / 'config.json'} has no usable patch_size and image_size ({error!r})"
        raise ModelError(msg) from error
    official, problem = None, ""
    try:
        official = official_resize(processor)
    except ModelError as error:
        problem = str(error)
    height, width = (official and official.output_hw) or (224, 224)
    mean, std = normalisation(processor)
    return TowerLayout(
        patch_size=patch_size,
        num_prefix_tokens=1,
        position_grid_hw=(image_size // patch_size, image_size // patch_size),
        native_pixels=height * width,
        image_mean=mean,
        image_std=std,
        official=official,
        official_problem=problem,
        rescale_factor=float(processor.get("rescale_factor", 1 / 255)) if processor.get("do_rescale", True) else 1.0,
    )
