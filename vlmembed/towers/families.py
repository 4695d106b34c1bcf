"""The families of towers: what is known of each before any weight is read. Loads no torch.

`vlmembed models` and the table in docs/models.md are made from `FAMILIES`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)

_QWEN_PREFIXES = ("model.visual.", "visual.", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One kind of tower.

    Attributes:
        title: for people.
        model_types: values of ``model_type`` in config.json, of whole models and of towers alone.
        sizes: published checkpoints and the widths of their output.
        pools: what ``--pool`` can be; the first is ``auto``.
        aligned: the pooled vector can be compared with the model's text vectors.
        native: the aspect ratio is kept by default.
        adapter: the entry in `grid_adapters` or `dense` that takes transformers' module apart.
        classes: transformers' names of the package, the vision model and its config.
        prefixes: what stands in front of the tower's tensor names in a checkpoint, tried in this order.
        renames: (pattern, replacement), the first that matches a name without its prefix.
        fused: (name, names) of a tensor that checkpoints hold in one piece, row block by row block.
        permuted: the parts of it whose rows are stored pair by pair; see `weights.permute_for_rope`.
        processor: the kind of image processor, a key of `processor.RULES`.
        processor_defaults: what transformers' image processor takes where preprocessor_config.json is silent.
    """

    title: str
    model_types: tuple[str, ...]
    sizes: str
    pools: tuple[str, ...]
    aligned: bool = False
    native: bool = True
    adapter: str
    classes: tuple[str, str, str]
    prefixes: tuple[str, ...] = ("",)
    renames: tuple[tuple[str, str], ...] = ()
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    permuted: tuple[str, ...] = ()
    processor: str
    processor_defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_grid(self) -> bool:
        """A vision tower of a vision-language model: merged tokens, and a mean for want of a pooled vector."""
        return self.processor in ("smart", "smart_glm", "smart_paddle", "navit")


_QWEN_PROCESSOR = {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}
_CLIP_PROCESSOR = {
    "size": {"shortest_edge": 224},
    "crop_size": 224,
    "do_center_crop": True,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}
_CLIP_RENAMES = ((r"^(embeddings|pre_layrnorm|encoder|post_layernorm)\.", r"vision_model.\1."),)

_DINOV2_RENAMES = (
    (r"\.attention\.attention\.query\.", ".attention.q_proj."),
    (r"\.attention\.attention\.key\.", ".attention.k_proj."),
    (r"\.attention\.attention\.value\.", ".attention.v_proj."),
    (r"\.attention\.output\.dense\.", ".attention.o_proj."),
    (r"\.mlp\.weights_out\.", ".mlp.down_proj."),
)
_DINOV2_FUSED = (("mlp.weights_in", ("mlp.gate_proj", "mlp.up_proj")),)

_KIMI_RENAMES = (
    (r"^vision_tower\.encoder\.blocks\.(\d+)\.norm0\.", r"vision_tower.layers.\1.norm1."),
    (r"^vision_tower\.encoder\.blocks\.(\d+)\.norm1\.", r"vision_tower.layers.\1.norm2."),
    (r"^vision_tower\.encoder\.blocks\.(\d+)\.mlp\.fc0\.", r"vision_tower.layers.\1.mlp.fc1."),
    (r"^vision_tower\.encoder\.blocks\.(\d+)\.mlp\.fc1\.", r"vision_tower.layers.\1.mlp.fc2."),
    (r"^vision_tower\.encoder\.blocks\.(\d+)\.wo\.", r"vision_tower.layers.\1.attn.proj."),
    (r"^vision_tower\.encoder\.blocks\.(\d+)\.wqkv\.", r"vision_tower.layers.\1.attn.wqkv."),
    (r"^vision_tower\.encoder\.", r"vision_tower."),
    (r"^vision_tower\.patch_embed\.pos_emb\.weight$", r"vision_tower.patch_embed.pos_emb.position_embeddings"),
    (r"^mm_projector\.proj\.0\.", r"mm_projector.in_proj."),
    (r"^mm_projector\.proj\.2\.", r"mm_projector.out_proj."),
)

FAMILIES: tuple[Family, ...] = (
    Family(
        title="Qwen2-VL",
        model_types=("qwen2_vl", "qwen2_vl_vision"),
        sizes="2B 1536, 7B 3584, 72B 8192",
        pools=("mean",),
        adapter="qwen2_vl",
        classes=("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig"),
        prefixes=_QWEN_PREFIXES,
        processor="smart",
        processor_defaults=_QWEN_PROCESSOR,
    ),
    Family(
        title="Qwen2.5-VL",
        model_types=("qwen2_5_vl", "qwen2_5_vl_vision"),
        sizes="3B 2048, 7B 3584, 32B 5120, 72B 8192",
        pools=("mean",),
        adapter="qwen2_5_vl",
        classes=("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLVisionConfig"),
        prefixes=_QWEN_PREFIXES,
        processor="smart",
        processor_defaults=_QWEN_PROCESSOR,
    ),
    Family(
        title="Qwen3-VL",
        model_types=("qwen3_vl", "qwen3_vl_vision"),
        sizes="2B 2048, 4B 2560, 8B 4096, 32B 5120",
        pools=("mean",),
        adapter="qwen3_vl",
        classes=("qwen3_vl", "Qwen3VLVisionModel", "Qwen3VLVisionConfig"),
        prefixes=_QWEN_PREFIXES,
        processor="smart",
        processor_defaults=_QWEN_PROCESSOR,
    ),
    Family(
        title="Qwen3-VL MoE",
        model_types=("qwen3_vl_moe", "qwen3_vl_moe_vision"),
        sizes="30B-A3B 2048, 235B-A22B 4096",
        pools=("mean",),
        adapter="qwen3_vl",
        classes=("qwen3_vl_moe", "Qwen3VLMoeVisionModel", "Qwen3VLMoeVisionConfig"),
        prefixes=_QWEN_PREFIXES,
        processor="smart",
        processor_defaults=_QWEN_PROCESSOR,
    ),
    Family(
        title="Qwen3.5, 3.6",
        model_types=("qwen3_5", "qwen3_5_vision"),
        sizes="0.8B 1024, 9B 4096, 27B 5120",
        pools=("mean",),
        adapter="qwen3_vl",
        classes=("qwen3_5", "Qwen3_5VisionModel", "Qwen3_5VisionConfig"),
        prefixes=_QWEN_PREFIXES,
        processor="smart",
        processor_defaults=_QWEN_PROCESSOR,
    ),
    Family(
        title="Qwen3.5, 3.6 MoE",
        model_types=("qwen3_5_moe", "qwen3_5_moe_vision"),
        sizes="by config",
        pools=("mean",),
        adapter="qwen3_vl",
        classes=("qwen3_5_moe", "Qwen3_5MoeVisionModel", "Qwen3_5MoeVisionConfig"),
        prefixes=_QWEN_PREFIXES,
        processor="smart",
        processor_defaults=_QWEN_PROCESSOR,
    ),
    Family(
        title="Kimi K2.5, 2.6, 2.7 (MoonViT)",
        model_types=("kimi_k25",),
        sizes="7168",
        pools=("mean",),
        adapter="kimi_k25",
        classes=("kimi_k25", "Kimi_K25VisionModel", "Kimi_K25VisionConfig"),
        prefixes=("model.", ""),
        renames=_KIMI_RENAMES,
        fused=(("attn.wqkv", ("attn.q_proj", "attn.k_proj", "attn.v_proj")),),
        permuted=("attn.q_proj", "attn.k_proj"),
        processor="navit",
        processor_defaults={
            "max_patches": 16384,
            "size": {"max_height": 512, "max_width": 512},
            "image_mean": HALF,
            "image_std": HALF,
        },
    ),
    Family(
        title="GLM-4.1V, 4.5V, 4.6V",
        model_types=("glm4v", "glm46v", "glm4v_moe", "glm4v_vision", "glm4v_moe_vision"),
        sizes="9B 4096, 106B 4096",
        pools=("mean",),
        adapter="glm4v",
        classes=("glm4v", "Glm4vVisionModel", "Glm4vVisionConfig"),
        prefixes=_QWEN_PREFIXES,
        processor="smart_glm",
        processor_defaults=_QWEN_PROCESSOR | {"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}},
    ),
    Family(
        title="PaddleOCR-VL",
        model_types=("paddleocr_vl",),
        sizes="0.9B 1024",
        pools=("mean",),
        adapter="paddleocr_vl",
        classes=("paddleocr_vl", "PaddleOCRVisionModel", "PaddleOCRVisionConfig"),
        prefixes=("model.", ""),
        renames=((r"^mlp_AR\.", "projector."),),
        processor="smart_paddle",
        processor_defaults=_QWEN_PROCESSOR | {"size": {"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536}},
    ),
    Family(
        title="CLIP",
        model_types=("clip", "clip_vision_model"),
        sizes="B/32, B/16 512, L/14 768",
        pools=("head", "cls", "mean"),
        aligned=True,
        native=False,
        adapter="clip",
        classes=("clip", "CLIPVisionModel", "CLIPVisionConfig"),
        renames=_CLIP_RENAMES,
        processor="crop",
        processor_defaults=_CLIP_PROCESSOR,
    ),
    Family(
        title="MetaCLIP 2",
        model_types=("metaclip_2", "metaclip_2_vision_model"),
        sizes="H/14 1024",
        pools=("head", "cls", "mean"),
        aligned=True,
        native=False,
        adapter="clip",
        classes=("metaclip_2", "MetaClip2VisionModel", "MetaClip2VisionConfig"),
        renames=_CLIP_RENAMES,
        processor="crop",
        processor_defaults=_CLIP_PROCESSOR,
    ),
    Family(
        title="SigLIP, SigLIP2 of fixed size",
        model_types=("siglip", "siglip_vision_model"),
        sizes="base 768, large 1024, so400m 1152",
        pools=("head", "mean"),
        aligned=True,
        native=False,
        adapter="siglip",
        classes=("siglip", "SiglipVisionModel", "SiglipVisionConfig"),
        prefixes=("vision_model.", ""),
        processor="crop",
        processor_defaults={"size": {"height": 224, "width": 224}, "image_mean": HALF, "image_std": HALF},
    ),
    Family(
        title="SigLIP2-NaFlex",
        model_types=("siglip2", "siglip2_vision_model"),
        sizes="base 768, so400m 1152",
        pools=("head", "mean"),
        aligned=True,
        adapter="naflex",
        classes=("siglip2", "Siglip2VisionModel", "Siglip2VisionConfig"),
        prefixes=("vision_model.", ""),
        processor="naflex",
        processor_defaults={"max_num_patches": 256, "resample": 2, "image_mean": HALF, "image_std": HALF},
    ),
    Family(
        title="DINOv2",
        model_types=("dinov2",),
        sizes="S 384, B 768, L 1024, g 1536",
        pools=("cls", "mean"),
        adapter="dinov2",
        classes=("dinov2", "Dinov2Model", "Dinov2Config"),
        prefixes=("dinov2.", ""),
        renames=_DINOV2_RENAMES,
        fused=_DINOV2_FUSED,
        processor="crop",
    ),
    Family(
        title="DINOv2 with registers",
        model_types=("dinov2_with_registers",),
        sizes="S 384, B 768, L 1024, g 1536",
        pools=("cls", "mean"),
        adapter="dinov2_with_registers",
        classes=("dinov2_with_registers", "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig"),
        prefixes=("dinov2_with_registers.", ""),
        renames=_DINOV2_RENAMES,
        fused=_DINOV2_FUSED,
        processor="crop",
    ),
    Family(
        title="DINOv3 ViT",
        model_types=("dinov3_vit",),
        sizes="S 384, B 768, L 1024, 7B 4096",
        pools=("cls", "mean"),
        adapter="dinov3",
        classes=("dinov3_vit", "DINOv3ViTModel", "DINOv3ViTConfig"),
        renames=((r"^layer\.", "model.layer."),),
        processor="crop_float",
        processor_defaults={
            "size": {"height": 224, "width": 224},
            "resample": 2,
            "image_mean": IMAGENET_MEAN,
            "image_std": IMAGENET_STD,
        },
    ),
)

MODEL_TYPES: dict[str, Family] = {model_type: family for family in FAMILIES for model_type in family.model_types}
"""The family of each ``model_type``."""

NOTES = (
    "Width is that of --pool auto, and for vision-language towers (Qwen, Kimi, GLM, PaddleOCR) of each token of --emit "
    "tokens too. "
    "The first --pool is auto. head is the model's own: CLIP's projection, SigLIP's attention pooling; only these can "
    "be compared with the model's text vectors. A vision-language tower has no pooled vector of its own: the mean over "
    "its tokens is good for finding near copies, was never trained for similarity, and is not aligned with text. "
    "Executed on a CPU, against transformers' own classes with random weights (DINOv2 with real ones too); never on a "
    "GPU."
)
"""What the table means, and what it was run on."""


def table() -> list[tuple[str, ...]]:
    """Rows for people; the first is the head."""
    head = ("Family", "model_type", "Width", "--pool", "Aligned with text", "--resize")
    return [
        head,
        *(
            (
                family.title,
                ", ".join(family.model_types),
                family.sizes,
                ", ".join(family.pools),
                "yes (head)" if family.aligned else "no",
                "native" if family.native else "official",
            )
            for family in FAMILIES
        ),
    ]
