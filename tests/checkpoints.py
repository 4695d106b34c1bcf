"""Whole models of every supported family, shrunk to a few narrow layers and saved as their publishers do.

Each is transformers' full class, language or text model included, so that a test can show what is read of it and what
is not. Widths differ wherever the architecture lets them, so that no two of them can be mistaken for each other.
"""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from transformers.core_model_loading import revert_weight_conversion

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
HALF = [0.5, 0.5, 0.5]

TEXT_WIDTH = 32
"""Width of every language model, so of every grid tower's tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How to make a tiny model.

    Attributes:
        classes: transformers' names of the model and of its config.
        layers: where the tower's layers are in the model.
        settings: of the config.
        processor: preprocessor_config.json.
        save: what `save_pretrained` needs besides a folder.
    """

    classes: tuple[str, str]
    layers: str
    settings: Mapping[str, Any]
    processor: Mapping[str, Any]
    save: Mapping[str, Any] = field(default_factory=dict)


# Ids inside the tiny vocabulary: transformers warns about those outside.
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_IMAGE_TOKENS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
_GLM_TOKENS = {
    "image_token_id": 3,
    "video_token_id": 4,
    "image_start_token_id": 5,
    "image_end_token_id": 6,
    "video_start_token_id": 7,
    "video_end_token_id": 8,
}
_TEXT = {
    "hidden_size": TEXT_WIDTH,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    **_SPECIAL,
}
_HEAD_TEXT = {**_TEXT, "head_dim": 16}
_EXPERTS = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 2,
    "num_experts_per_tok": 1,
}
_QWEN3_5_TEXT = {**_HEAD_TEXT, "layer_types": ["full_attention"]}
_KIMI_TEXT = {
    **_TEXT,
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_DENSE_TEXT = {
    "hidden_size": TEXT_WIDTH,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 16,
    **_SPECIAL,
}

# Three heads of 16: rotary positions want a multiple of 4, and an odd number of heads shows when the two are swapped.
_WIDTH = {"hidden_size": 48, "intermediate_size": 80}
_BLOCKS = {"num_hidden_layers": 2, "num_attention_heads": 3}
_QWEN3_VISION = {**_WIDTH, "num_heads": 3, "out_hidden_size": TEXT_WIDTH, "num_position_embeddings": 64}
_GLM_VISION = {**_WIDTH, "depth": 2, "num_heads": 3, "out_hidden_size": TEXT_WIDTH, "image_size": 112}

_STEPS = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "resample": 3,
    "rescale_factor": 1 / 255,
}
_QWEN2_PROCESSOR = {
    **_STEPS,
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "min_pixels": 56 * 56,
    "max_pixels": 400 * 400,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
_QWEN3_PROCESSOR = {
    **_STEPS,
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "image_mean": HALF,
    "image_std": HALF,
    "size": {"shortest_edge": 64 * 64, "longest_edge": 400 * 400},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
_GLM_PROCESSOR = {
    **_STEPS,
    "image_processor_type": "Glm4vImageProcessor",
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "size": {"shortest_edge": 112 * 112, "longest_edge": 2 * 400 * 400},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
_PADDLE_PROCESSOR = {
    **_STEPS,
    "image_processor_type": "PaddleOCRVLImageProcessor",
    "image_mean": HALF,
    "image_std": HALF,
    "size": {"shortest_edge": 112 * 112, "longest_edge": 400 * 400},
    "patch_size": 14,
    "temporal_patch_size": 1,
    "merge_size": 2,
}
_KIMI_PROCESSOR = {
    "media_proc_cfg": {
        "in_patch_limit": 1024,
        "patch_size": 14,
        "image_mean": HALF,
        "image_std": HALF,
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 64,
    }
}
_CLIP_PROCESSOR = {
    **_STEPS,
    "image_processor_type": "CLIPImageProcessor",
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "do_center_crop": True,
    "size": {"shortest_edge": 80},
    "crop_size": {"height": 80, "width": 80},
}
_DINOV2_PROCESSOR = {
    **_STEPS,
    "image_processor_type": "BitImageProcessor",
    "image_mean": IMAGENET_MEAN,
    "image_std": IMAGENET_STD,
    "do_center_crop": True,
    "size": {"shortest_edge": 80},
    "crop_size": {"height": 70, "width": 70},
}

GRID_RECIPES: dict[str, Recipe] = {
    "qwen2_vl": Recipe(
        classes=("Qwen2VLForConditionalGeneration", "Qwen2VLConfig"),
        layers="model.visual.blocks",
        settings={
            **_IMAGE_TOKENS,
            "text_config": _TEXT,
            "vision_config": {"depth": 2, "embed_dim": 48, "num_heads": 3, "hidden_size": TEXT_WIDTH, "mlp_ratio": 2},
        },
        processor=_QWEN2_PROCESSOR,
    ),
    "qwen2_5_vl": Recipe(
        classes=("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig"),
        layers="model.visual.blocks",
        settings={
            **_IMAGE_TOKENS,
            "text_config": _TEXT,
            "vision_config": {
                **_WIDTH,
                "depth": 3,
                "num_heads": 3,
                "out_hidden_size": TEXT_WIDTH,
                "fullatt_block_indexes": [1],
            },
        },
        processor=_QWEN2_PROCESSOR,
    ),
    "qwen3_vl": Recipe(
        classes=("Qwen3VLForConditionalGeneration", "Qwen3VLConfig"),
        layers="model.visual.blocks",
        settings={
            **_IMAGE_TOKENS,
            "text_config": _HEAD_TEXT,
            "vision_config": {**_QWEN3_VISION, "depth": 3, "deepstack_visual_indexes": [0, 1]},
        },
        processor=_QWEN3_PROCESSOR,
    ),
    "qwen3_vl_moe": Recipe(
        classes=("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig"),
        layers="model.visual.blocks",
        settings={
            **_IMAGE_TOKENS,
            "text_config": {**_HEAD_TEXT, **_EXPERTS},
            "vision_config": {**_QWEN3_VISION, "depth": 3, "deepstack_visual_indexes": [0, 2]},
        },
        processor=_QWEN3_PROCESSOR,
    ),
    "qwen3_5": Recipe(
        classes=("Qwen3_5ForConditionalGeneration", "Qwen3_5Config"),
        layers="model.visual.blocks",
        settings={
            **_IMAGE_TOKENS,
            "text_config": _QWEN3_5_TEXT,
            "vision_config": {**_QWEN3_VISION, "depth": 2},
        },
        processor=_QWEN3_PROCESSOR,
    ),
    "qwen3_5_moe": Recipe(
        classes=("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig"),
        layers="model.visual.blocks",
        settings={
            **_IMAGE_TOKENS,
            "text_config": {**_QWEN3_5_TEXT, **_EXPERTS},
            "vision_config": {**_QWEN3_VISION, "depth": 2},
        },
        processor=_QWEN3_PROCESSOR,
    ),
    "kimi_k25": Recipe(
        classes=("Kimi_K25ForConditionalGeneration", "Kimi_K25Config"),
        layers="model.vision_tower.layers",
        settings={
            **_IMAGE_TOKENS,
            "text_config": _KIMI_TEXT,
            "vision_config": {**_WIDTH, **_BLOCKS, "pos_emb_height": 8, "pos_emb_width": 8},
            "projection_hidden_size": 48,
            "tie_word_embeddings": False,
        },
        processor=_KIMI_PROCESSOR,
        save={"save_original_format": False},
    ),
    "glm4v": Recipe(
        classes=("Glm4vForConditionalGeneration", "Glm4vConfig"),
        layers="model.visual.blocks",
        settings={**_GLM_TOKENS, "text_config": _TEXT, "vision_config": _GLM_VISION},
        processor=_GLM_PROCESSOR,
    ),
    "glm46v": Recipe(
        classes=("Glm46VForConditionalGeneration", "Glm46VConfig"),
        layers="model.visual.blocks",
        settings={
            **_GLM_TOKENS,
            "text_config": {**_TEXT, "model_type": "glm4v_text"},
            "vision_config": {**_GLM_VISION, "model_type": "glm4v_vision"},
        },
        processor=_GLM_PROCESSOR,
    ),
    "glm4v_moe": Recipe(
        classes=("Glm4vMoeForConditionalGeneration", "Glm4vMoeConfig"),
        layers="model.visual.blocks",
        settings={
            **_GLM_TOKENS,
            "text_config": {**_HEAD_TEXT, "first_k_dense_replace": 1},
            "vision_config": _GLM_VISION,
        },
        processor=_GLM_PROCESSOR,
    ),
    "paddleocr_vl": Recipe(
        classes=("PaddleOCRVLForConditionalGeneration", "PaddleOCRVLConfig"),
        layers="model.visual.vision_model.encoder.layers",
        settings={
            **_IMAGE_TOKENS,
            "text_config": _HEAD_TEXT,
            "vision_config": {**_WIDTH, **_BLOCKS, "image_size": 112},
        },
        processor=_PADDLE_PROCESSOR,
    ),
}
"""Vision-language models by ``model_type``."""

_CLIP_SETTINGS = {
    "projection_dim": 24,
    "text_config": {**_DENSE_TEXT, "projection_dim": 24},
    "vision_config": {**_WIDTH, **_BLOCKS, "image_size": 80, "patch_size": 16, "projection_dim": 24},
}
_DINOV2_SETTINGS = {"hidden_size": 48, **_BLOCKS, "mlp_ratio": 2, "image_size": 70, "patch_size": 14}

DENSE_RECIPES: dict[str, Recipe] = {
    "clip": Recipe(
        classes=("CLIPModel", "CLIPConfig"),
        layers="vision_model.encoder.layers",
        settings=_CLIP_SETTINGS,
        processor=_CLIP_PROCESSOR,
    ),
    "metaclip_2": Recipe(
        classes=("MetaClip2Model", "MetaClip2Config"),
        layers="vision_model.encoder.layers",
        settings=_CLIP_SETTINGS,
        processor=_CLIP_PROCESSOR,
    ),
    "siglip": Recipe(
        classes=("SiglipModel", "SiglipConfig"),
        layers="vision_model.encoder.layers",
        settings={
            "text_config": {**_DENSE_TEXT, "projection_size": 48},
            "vision_config": {**_WIDTH, **_BLOCKS, "image_size": 64, "patch_size": 16},
        },
        processor={
            **_STEPS,
            "image_processor_type": "SiglipImageProcessor",
            "image_mean": HALF,
            "image_std": HALF,
            "size": {"height": 64, "width": 64},
        },
    ),
    "siglip2": Recipe(
        classes=("Siglip2Model", "Siglip2Config"),
        layers="vision_model.encoder.layers",
        settings={
            "text_config": {**_DENSE_TEXT, "projection_size": 48},
            "vision_config": {**_WIDTH, **_BLOCKS, "num_patches": 64, "patch_size": 16},
        },
        processor={
            **_STEPS,
            "image_processor_type": "Siglip2ImageProcessor",
            "image_mean": HALF,
            "image_std": HALF,
            "resample": 2,
            "max_num_patches": 64,
            "patch_size": 16,
        },
    ),
    "dinov2": Recipe(
        classes=("Dinov2Model", "Dinov2Config"),
        layers="encoder.layer",
        settings=_DINOV2_SETTINGS,
        processor=_DINOV2_PROCESSOR,
    ),
    "dinov2_with_registers": Recipe(
        classes=("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig"),
        layers="encoder.layer",
        settings=_DINOV2_SETTINGS,
        processor=_DINOV2_PROCESSOR,
    ),
    "dinov3_vit": Recipe(
        classes=("DINOv3ViTModel", "DINOv3ViTConfig"),
        layers="model.layer",
        settings={**_WIDTH, **_BLOCKS, "image_size": 64, "patch_size": 16, "num_register_tokens": 4},
        processor={
            **_STEPS,
            "image_processor_type": "DINOv3ViTImageProcessorFast",
            "image_mean": IMAGENET_MEAN,
            "image_std": IMAGENET_STD,
            "resample": 2,
            "size": {"height": 64, "width": 64},
        },
    ),
}
"""Image towers by ``model_type``, with the text model where there is one."""

RECIPES = GRID_RECIPES | DENSE_RECIPES
"""All, by ``model_type``."""


def make_model(recipe: Recipe) -> Any:  # noqa: ANN401  a transformers model
    """A recipe's full model in eval mode, the same at every call.

    No parameter keeps its initial value: norms and layer scales of one, biases, tokens and tables of zero would hide
    their loss.
    """
    model_class, config_class = (getattr(transformers, name) for name in recipe.classes)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        # A copy, for configs keep the dictionaries that they are given, and write into them.
        model = model_class(config_class(**copy.deepcopy(dict(recipe.settings)))).eval()
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() > 1:
                is_convolution = parameter.dim() > 3  # (out, in, [frames,] height, width)
                parameter.copy_(noise / math.sqrt(parameter[0].numel() if is_convolution else parameter.shape[-1]))
            else:
                parameter.add_(noise, alpha=0.2)
    return model


def save_model(model: Any, folder: Path, recipe: Recipe, **save_kwargs: Any) -> None:  # noqa: ANN401  a transformers model
    """Save a model, or a part of it, with the recipe's preprocessor_config.json."""
    model.save_pretrained(folder, **{**recipe.save, **save_kwargs})
    write_json(folder / "preprocessor_config.json", recipe.processor)


def tiny_checkpoint(model_type: str, folder: Path, **save_kwargs: Any) -> Any:  # noqa: ANN401  a transformers model
    """Make a recipe's model, save it into a folder as a checkpoint, and return it.

    Args:
        model_type: a key of `RECIPES`.
        folder: made if it is not there.
        save_kwargs: for `save_pretrained`, as ``max_shard_size="20KB"``.
    """
    model = make_model(RECIPES[model_type])
    save_model(model, folder, RECIPES[model_type], **save_kwargs)
    return model


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object to a file, in a folder that is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


_TOWER_NAME = re.compile(
    r"(model\.)?(visual|vision_tower|mm_projector|projector|mlp_AR|vision_model|visual_projection)\."
)


def is_of_tower(name: str) -> bool:
    """Whether a tensor of a model with a language or text model is its tower's or its projector's, by its name."""
    return _TOWER_NAME.match(name) is not None


_KIMI_MISNAMED = {
    "language_model.model.blocks.": "language_model.model.layers.",
    "model.mm_projector.": "mm_projector.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
}
"""What transformers' reversed renames make of three kinds of names, and the released names."""

_KIMI_CONFIG_NAMES = {
    "hidden_size": "vt_hidden_size",
    "num_hidden_layers": "vt_num_hidden_layers",
    "num_attention_heads": "vt_num_attention_heads",
    "intermediate_size": "vt_intermediate_size",
    "pos_emb_height": "init_pos_emb_height",
    "pos_emb_width": "init_pos_emb_width",
    "pos_emb_time": "init_pos_emb_time",
    "merge_kernel_size": "merge_kernel_size",
    "patch_size": "patch_size",
}
"""transformers' names of the vision settings, and those of released configs."""


def kimi_released_tensors(model: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401  a transformers model
    """A Kimi's tensors as its publisher names and fuses them; the values are transformers' own reverse conversion."""
    released = {}
    for name, tensor in revert_weight_conversion(model, model.state_dict()).items():
        wrong = next((prefix for prefix in _KIMI_MISNAMED if name.startswith(prefix)), "")
        released[_KIMI_MISNAMED.get(wrong, "") + name.removeprefix(wrong)] = tensor
    return released


def kimi_released_checkpoint(folder: Path, **save_kwargs: Any) -> Any:  # noqa: ANN401  a transformers model
    """Save the tiny Kimi under its released tensor names, and return it. config.json is in transformers' spelling.

    Args:
        folder: made if it is not there.
        save_kwargs: for `save_torch_state_dict`, as ``max_shard_size="20KB"``.
    """
    model = make_model(RECIPES["kimi_k25"])
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    write_json(folder / "preprocessor_config.json", RECIPES["kimi_k25"].processor)
    save_torch_state_dict(kimi_released_tensors(model), folder, **save_kwargs)
    return model


def kimi_released_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A Kimi's config.json, spelled as its publisher does."""
    vision = {
        _KIMI_CONFIG_NAMES[name]: value for name, value in config["vision_config"].items() if name in _KIMI_CONFIG_NAMES
    }
    vision |= {
        "mm_hidden_size": config["projection_hidden_size"],
        "mm_projector_type": "patchmerger",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": config["projection_layer_norm_eps"],
        "text_hidden_size": config["text_config"]["hidden_size"],
        "merge_type": "sd2_tpool",
        "pos_emb_type": "divided_fixed",
        "video_attn_type": "spatial_temporal",
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k25.KimiK25Config",
            "AutoModelForCausalLM": "modeling_kimi_k25.KimiK25ForConditionalGeneration",
        },
        "model_type": "kimi_k25",
        "text_config": {**config["text_config"], "model_type": "kimi_k2"},
        "vision_config": vision,
    }
