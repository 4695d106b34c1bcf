"""transformers' own image processors as oracles: which class, which released settings, how to read what it returns.

Kimi's and DINOv3's processors exist for torchvision only, which is not installed: their own code runs over a stand-in
for the few torchvision functions that they call.
"""

from __future__ import annotations

import importlib.util
import sys
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from conftest import noise
from PIL import Image
from transformers.image_transforms import get_resize_output_image_size
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.glm4v import image_processing_pil_glm4v as glm4v
from transformers.models.glm46v import image_processing_pil_glm46v as glm46v
from transformers.models.paddleocr_vl import image_processing_pil_paddleocr_vl as paddleocr_vl
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen2_vl
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2 import image_processing_pil_siglip2 as siglip2

from vlmembed.layout import ResizeRule, TowerLayout
from vlmembed.towers.families import MODEL_TYPES
from vlmembed.towers.processor import normalisation, rescale_factor, resize_rules, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from vlmembed.towers.families import Family

    Size = tuple[int, int]
    OwnFit = Callable[[Any, int, int], tuple[Size, Size]]
    Read = Callable[[Mapping[str, Any], int], tuple[Size, NDArray[Any]]]


@lru_cache(maxsize=64)
def smooth(size_hw: Size) -> Image.Image:
    """One picture for all towers, different for each size."""
    return noise(*size_hw, seed=size_hw[0] * 10_007 + size_hw[1])


def grain(size_hw: Size) -> Image.Image:
    """White noise, in which every rounding of a resizer shows."""
    return Image.fromarray(np.random.default_rng(sum(size_hw)).integers(0, 256, (*size_hw, 3), dtype=np.uint8))


class _InterpolationMode(Enum):
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def _resize(image: torch.Tensor, size: Size, interpolation: _InterpolationMode, *, antialias: bool) -> torch.Tensor:
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    assert image.dtype == torch.float32 or interpolation is _InterpolationMode.BICUBIC, "bytes take another path there"
    resized: torch.Tensor = F.interpolate(
        image, size=size, mode=interpolation.value, align_corners=False, antialias=antialias
    )
    return resized


def _pad(image: torch.Tensor, padding: tuple[int, int, int, int], fill: int, padding_mode: str) -> torch.Tensor:
    left, top, right, bottom = padding
    padded: torch.Tensor = F.pad(image, (left, right, top, bottom), mode=padding_mode, value=fill)
    return padded


def _normalize(image: torch.Tensor, mean: Any, std: Any, *, inplace: bool) -> torch.Tensor:  # noqa: ANN401  list or tensor
    del inplace
    mean, std = (torch.as_tensor(values, dtype=image.dtype).view(-1, 1, 1) for values in (mean, std))
    normalised: torch.Tensor = (image - mean) / std
    return normalised


def _torchvision_only(*names: str) -> list[ModuleType]:
    """Modules of transformers that need torchvision.

    They are fresh copies with a backend of their own: nothing that other code imports is changed, and torchvision is
    absent again afterwards.
    """
    stand_ins = {name: ModuleType(name) for name in ("torchvision", "torchvision.transforms")}
    functional, v2 = ModuleType("torchvision.transforms.v2.functional"), ModuleType("torchvision.transforms.v2")
    vars(functional).update(resize=_resize, pad=_pad, normalize=_normalize, InterpolationMode=_InterpolationMode)
    vars(v2).update(functional=functional)
    stand_ins |= {module.__name__: module for module in (functional, v2)}
    filters = {Image.Resampling[mode.name]: mode for mode in _InterpolationMode}
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in stand_ins.items():
            patch.setitem(sys.modules, name, stand_in)

        def fresh(name: str) -> ModuleType:
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
            return module

        backend = fresh("transformers.image_processing_backends")
        vars(backend).update(tvF=functional, pil_torch_interpolation_mapping=filters)
        return [fresh(name) for name in names]


kimi_k25, dinov3_vit = _torchvision_only(
    "transformers.models.kimi_k25.image_processing_kimi_k25",
    "transformers.models.dinov3_vit.image_processing_dinov3_vit",
)


def _fit_smart(module: Any, **more: int) -> OwnFit:  # noqa: ANN401  a module of transformers
    def fit(own: Any, height: int, width: int) -> tuple[Size, Size]:  # noqa: ANN401  an image processor
        size = module.smart_resize(
            height=height,
            width=width,
            factor=own.patch_size * own.merge_size,
            min_pixels=own.size.shortest_edge,
            max_pixels=own.size.longest_edge,
            **more,
        )
        return size, size

    return fit


def _fit_navit(own: Any, height: int, width: int) -> tuple[Size, Size]:  # noqa: ANN401  an image processor
    fit: tuple[Size, Size] = kimi_k25.navit_resize(
        height, width, own.patch_size, own.merge_size, own.max_patches, own.size.max_height
    )
    return fit


def _fit_naflex(own: Any, height: int, width: int) -> tuple[Size, Size]:  # noqa: ANN401  an image processor
    size = siglip2.get_image_size_for_max_num_patches(height, width, own.patch_size, own.max_num_patches)
    return size, size


def _fit_crop(own: Any, height: int, width: int) -> tuple[Size, Size]:  # noqa: ANN401  an image processor
    size = own.size.height, own.size.width
    if own.size.shortest_edge:
        shape_only = np.broadcast_to(np.uint8(0), (3, height, width))
        size = get_resize_output_image_size(
            shape_only, own.size.shortest_edge, default_to_square=False, input_data_format="channels_first"
        )
    return size, (own.crop_size.height, own.crop_size.width) if own.do_center_crop else size


def _read_grid(output: Mapping[str, Any], _patch_size: int) -> tuple[Size, NDArray[Any]]:
    """Qwen, GLM, PaddleOCR and Kimi state their grid."""
    ((frames, rows, columns),) = output["image_grid_thw"].tolist()
    assert frames == 1
    return (rows, columns), output["pixel_values"].reshape(rows * columns, -1)


def _read_naflex(output: Mapping[str, Any], _patch_size: int) -> tuple[Size, NDArray[Any]]:
    """NaFlex pads to its limit, and says in a shape and in a mask how far the picture goes."""
    ((rows, columns),) = output["spatial_shapes"].tolist()
    (patches,), (mask,) = output["pixel_values"], output["pixel_attention_mask"]
    num_patches = rows * columns
    assert mask.tolist() == [1] * num_patches + [0] * (len(patches) - num_patches)
    assert not patches[num_patches:].any()
    return (rows, columns), patches[:num_patches]


def _read_whole(output: Mapping[str, Any], patch_size: int) -> tuple[Size, NDArray[Any]]:
    """A whole picture, cut as a convolution with a stride of one patch cuts it."""
    (pixels,) = torch.from_numpy(output["pixel_values"]).float()
    patches = F.unfold(pixels[None], patch_size, stride=patch_size)[0].T
    return (pixels.shape[1] // patch_size, pixels.shape[2] // patch_size), patches.numpy()


def _as_ours(patches: NDArray[Any]) -> NDArray[Any]:
    """(channel, row, column) within a patch."""
    return patches.reshape(len(patches), -1)


def _two_frames(patches: NDArray[Any]) -> NDArray[Any]:
    """(channel, frame, row, column): a still picture is two equal frames."""
    return _as_ours(np.repeat(patches[:, :, None], 2, axis=2))


def _channels_last(patches: NDArray[Any]) -> NDArray[Any]:
    """(row, column, channel)."""
    return _as_ours(patches.transpose(0, 2, 3, 1))


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A model's preprocessing, by our code and by its own.

    Attributes:
        name: for the test's id.
        model_type: of config.json; decides the family.
        own: transformers' class.
        processor: preprocessor_config.json.
        patch_size, merge_size, block_order: the tower's, from config.json.
        fit: resized and canvas (height, width), by the processor's own size function.
        read: grid and patches out of the processor's output.
        laid_out: from our patches, (S, channel, row, column), to the processor's layout.
    """

    name: str
    model_type: str
    own: Any
    processor: Mapping[str, Any]
    patch_size: int
    merge_size: int = 1
    block_order: bool = False
    fit: OwnFit
    read: Read
    laid_out: Callable[[NDArray[Any]], NDArray[Any]] = _as_ours

    @property
    def family(self) -> Family:
        """Ours."""
        return MODEL_TYPES[self.model_type]

    def make_own(self, **overrides: Any) -> Any:  # noqa: ANN401  an image processor and its settings
        """The processor as it is read from a folder; some constructors change the settings that they are given."""
        return self.own.from_dict(deepcopy(dict(self.processor)), **overrides)

    @cached_property
    def layout(self) -> TowerLayout:
        """Read as `vlmembed.towers` reads it."""
        known = settings(self.processor, self.family.processor_defaults)
        native, official, problem = resize_rules(
            self.family.processor, known, patch_size=self.patch_size, merge_size=self.merge_size
        )
        mean, std = normalisation(known)
        return TowerLayout(
            patch_size=self.patch_size,
            native=native,
            official=official,
            official_problem=problem,
            image_mean=mean,
            image_std=std,
            rescale_factor=rescale_factor(known),
            merge_size=self.merge_size,
            block_order=self.block_order,
        )

    def rule(self, mode: str = "official") -> ResizeRule:
        """Ours."""
        resize = self.layout.official if mode == "official" else self.layout.native
        assert resize is not None, self.layout.official_problem
        return ResizeRule(mode=mode, resize=resize, layout=self.layout, max_source_pixels=10**9)

    def own_patches(self, image: Image.Image, **overrides: Any) -> tuple[Size, NDArray[Any]]:  # noqa: ANN401  settings
        """Grid and patches by the model's own processor."""
        output = self.make_own(**overrides)(images=image, return_tensors="np")
        return self.read(output, self.patch_size)

    def in_own_layout(self, patches: NDArray[Any]) -> NDArray[Any]:
        """Our patches as the processor would have them."""
        return self.laid_out(patches.reshape(-1, 3, self.patch_size, self.patch_size))

    def normalised(self, patches: NDArray[Any]) -> NDArray[np.float32]:
        """In the tower's own order of operations, which is not the processor's."""
        layout = self.layout
        mean, std = (np.repeat(values, self.patch_size**2) for values in (layout.image_mean, layout.image_std))
        mean, std = (mean / layout.rescale_factor).astype(np.float32), (layout.rescale_factor / std).astype(np.float32)
        found: NDArray[np.float32] = (patches.astype(np.float32) - mean) * std
        return found


_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


def _grid_case(name: str, own: Any, fit: OwnFit, processor: Mapping[str, Any], **changed: Any) -> Case:  # noqa: ANN401
    model_type = name.partition("-")[0]
    fields: dict[str, Any] = {"patch_size": 14, "merge_size": 2, "block_order": True, "laid_out": _two_frames} | changed
    stated = {"patch_size": fields["patch_size"], "merge_size": fields["merge_size"]}
    return Case(
        name=name,
        model_type=model_type,
        own=own,
        processor={**stated, **processor},
        fit=fit,
        read=_read_grid,
        **fields,
    )


def _qwen(name: str, processor: Mapping[str, Any], **fields: Any) -> Case:  # noqa: ANN401  fields of the case
    return _grid_case(name, qwen2_vl.Qwen2VLImageProcessorPil, _fit_smart(qwen2_vl), processor, **fields)


def _glm(name: str, module: Any, own: Any, longest_edge: int) -> Case:  # noqa: ANN401  transformers' own
    size = {"shortest_edge": 112 * 112, "longest_edge": longest_edge}
    fit = _fit_smart(module, num_frames=2, temporal_factor=2)
    return _grid_case(name, own, fit, {"size": size, "temporal_patch_size": 2, **_CLIP})


def _paddle(name: str, min_pixels: int, max_pixels: int) -> Case:
    limits = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    return _grid_case(
        name,
        paddleocr_vl.PaddleOCRVLImageProcessorPil,
        _fit_smart(paddleocr_vl),
        {**limits, "size": limits, "temporal_patch_size": 1, **_HALF},
        block_order=False,
        laid_out=_as_ours,
    )


def _kimi(name: str, max_patches: int, side: int) -> Case:
    size = {"max_height": side, "max_width": side}
    return _grid_case(
        name,
        kimi_k25.Kimi_K25ImageProcessor,
        _fit_navit,
        {"max_patches": max_patches, "size": size, **_HALF},
        block_order=False,
        laid_out=_as_ours,
    )


def _naflex(max_num_patches: int) -> Case:
    return Case(
        name=f"siglip2-{max_num_patches}",
        model_type="siglip2",
        own=siglip2.Siglip2ImageProcessorPil,
        processor={"max_num_patches": max_num_patches, "patch_size": 16, "resample": 2, **_HALF},
        patch_size=16,
        fit=_fit_naflex,
        read=_read_naflex,
        laid_out=_channels_last,
    )


def _whole(name: str, own: Any, patch_size: int, processor: Mapping[str, Any]) -> Case:  # noqa: ANN401  transformers' own
    return Case(
        name=name,
        model_type=name.partition("-")[0],
        own=own,
        processor=processor,
        patch_size=patch_size,
        fit=_fit_crop,
        read=_read_whole,
    )


# "small": limits that pictures of a few thousand pixels already meet.
PIL_CASES = (
    _qwen("qwen2_vl", {"min_pixels": 3136, "max_pixels": 12845056, "temporal_patch_size": 2, **_CLIP}),
    _qwen("qwen2_5_vl-small", {"size": {"shortest_edge": 3136, "longest_edge": 40_000}, **_CLIP}),
    _qwen("qwen3_vl", {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, **_HALF}, patch_size=16),
    _qwen("qwen3_5-small", {"size": {"shortest_edge": 4096, "longest_edge": 30_000}, **_HALF}, patch_size=16),
    _glm("glm4v", glm4v, glm4v.Glm4vImageProcessorPil, 9633792),
    _glm("glm46v-small", glm46v, glm46v.Glm46VImageProcessorPil, 90_000),
    _paddle("paddleocr_vl", 147384, 2822400),
    _paddle("paddleocr_vl-small", 2_000, 60_000),
    _naflex(256),
    _naflex(100),
    _whole(
        "clip",
        CLIPImageProcessorPil,
        32,
        {"size": 224, "crop_size": 224, "do_center_crop": True, "do_resize": True, "resample": 3, **_CLIP},
    ),
    _whole("siglip", SiglipImageProcessorPil, 16, {"size": {"height": 224, "width": 224}, "resample": 3, **_HALF}),
    _whole("siglip-rest", SiglipImageProcessorPil, 14, {"size": {"height": 100, "width": 120}, "resample": 3, **_HALF}),
    _whole(
        "dinov2",
        BitImageProcessorPil,
        14,
        {
            "size": {"shortest_edge": 256},
            "crop_size": {"height": 224, "width": 224},
            "do_center_crop": True,
            "resample": 3,
            **_IMAGENET,
        },
    ),
    _whole(
        "dinov2-padded",
        BitImageProcessorPil,
        14,
        {
            "size": {"shortest_edge": 31},
            "crop_size": {"height": 42, "width": 70},
            "do_center_crop": True,
            "resample": 2,
            **_IMAGENET,
        },
    ),
)
KIMI_CASES = (_kimi("kimi_k25", 16384, 512), _kimi("kimi_k25-small", 64, 16))
DINOV3_CASE = _whole(
    "dinov3_vit",
    dinov3_vit.DINOv3ViTImageProcessor,
    16,
    {"size": {"height": 224, "width": 224}, "resample": 2, "do_center_crop": None, "crop_size": None, **_IMAGENET},
)
CASES = (*PIL_CASES, *KIMI_CASES, DINOV3_CASE)
