"""Reads a model's ``preprocessor_config.json`` into resize rules and normalisation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vlmembed.errors import ConfigError, ModelError
from vlmembed.official import CropResize, NaflexResize, NavitResize, SmartResize
from vlmembed.resize import BICUBIC, AreaResize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vlmembed.resize import Resize

FALLBACK_PIXELS = 224 * 224
"""Area of a picture for towers without a resolution of their own."""


def normalisation(processor: Mapping[str, Any]) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Mean and standard deviation per RGB channel; 0 and 1 where the image processor does not normalise.

    Raises:
        ModelError: it normalises, and does not say by what.
    """
    if not processor.get("do_normalize", True):
        return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    try:
        mean, std = ([float(value) for value in processor[key]] for key in ("image_mean", "image_std"))
        return (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        msg = f"preprocessor_config.json normalises without a usable image_mean and image_std ({error!r})"
        raise ModelError(msg) from error


def rescale_factor(processor: Mapping[str, Any]) -> float:
    """What pixel values are multiplied by before they are normalised."""
    return float(processor.get("rescale_factor", 1 / 255)) if processor.get("do_rescale", True) else 1.0


def crop_resize(processor: Mapping[str, Any], *, in_float: bool = False) -> CropResize:
    """The rule of CLIP's, SigLIP's and DINO's image processors, by transformers' own keys.

    Raises:
        ModelError: it asks for steps that are not known here.
    """
    size = processor.get("size")
    size = {"shortest_edge": size} if isinstance(size, int) else dict(size or {})
    crop = processor.get("crop_size") if processor.get("do_center_crop", False) else None
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
    if set(size) == {"shortest_edge"}:
        shortest_edge, size_hw = int(size["shortest_edge"]), None
    elif set(size) == {"height", "width"}:
        shortest_edge, size_hw = None, (int(size["height"]), int(size["width"]))
    else:
        msg = f"preprocessor_config.json has size {size}; known are shortest_edge alone, and height with width"
        raise ModelError(msg)
    if shortest_edge is not None and crop is None:
        msg = "preprocessor_config.json resizes the shortest edge and does not crop, which leaves the size open"
        raise ModelError(msg)
    return CropResize(
        shortest_edge=shortest_edge,
        size_hw=size_hw,
        crop_hw=None if crop is None else (int(crop["height"]), int(crop["width"])),
        resample=_resample(processor),
        in_float=in_float,
    )


def _check_agreement(processor: Mapping[str, Any], patch_size: int, merge_size: int) -> None:
    for name, expected in (("patch_size", patch_size), ("merge_size", merge_size), ("merge_kernel_size", merge_size)):
        if (stated := processor.get(name, expected)) not in (expected, [expected, expected]):
            msg = f"preprocessor_config.json has {name} {stated}, and config.json has {expected}: they must agree"
            raise ModelError(msg)


def _smart(processor: Mapping[str, Any], patch_size: int, merge_size: int, small_sides: str = "keep") -> SmartResize:
    size = processor["size"]
    return SmartResize(
        factor=patch_size * merge_size,
        min_pixels=int(processor.get("min_pixels") or size["shortest_edge"]),
        max_pixels=int(processor.get("max_pixels") or size["longest_edge"]),
        small_sides=small_sides,
        resample=_resample(processor),
    )


def _smart_paddle(processor: Mapping[str, Any], patch_size: int, merge_size: int) -> SmartResize:
    return _smart(processor, patch_size, merge_size, small_sides="round")


def _smart_glm(processor: Mapping[str, Any], patch_size: int, merge_size: int) -> SmartResize:
    """GLM's processors count frames, and know no ``min_pixels`` and ``max_pixels``."""
    known = {name: value for name, value in processor.items() if name not in ("min_pixels", "max_pixels")}
    rule = _smart(known, patch_size, merge_size, small_sides="truncate")
    return replace(rule, num_frames=int(processor.get("temporal_patch_size", 2)))


def _navit(processor: Mapping[str, Any], patch_size: int, merge_size: int) -> NavitResize:
    """Kimi: in transformers' spelling, or in that of the released checkpoints, which is flattened by `settings`."""
    if processor.get("fixed_output_tokens") is not None:
        msg = "preprocessor_config.json sets fixed_output_tokens, which is not supported"
        raise ModelError(msg)
    return NavitResize(
        patch_size=patch_size,
        merge_size=merge_size,
        max_patches=int(processor.get("in_patch_limit", processor["max_patches"])),
        max_side_patches=int(processor.get("patch_limit_on_one_side", processor["size"]["max_height"])),
        resample=_resample(processor),
    )


def _naflex(processor: Mapping[str, Any], patch_size: int, _merge_size: int) -> NaflexResize:
    max_patches = int(processor["max_num_patches"])
    return NaflexResize(patch_size=patch_size, max_patches=max_patches, resample=_resample(processor))


def _crop_float(processor: Mapping[str, Any], _patch_size: int, _merge_size: int) -> CropResize:
    """DINOv3: a size in one number is a square."""
    size = processor.get("size")
    square = {"size": {"height": size, "width": size}} if isinstance(size, int) else {}
    return crop_resize({**processor, **square}, in_float=True)


def _resample(processor: Mapping[str, Any]) -> int:
    return int(processor.get("resample", BICUBIC))


RULES: dict[str, Callable[[Mapping[str, Any], int, int], Resize]] = {
    "smart": _smart,
    "smart_glm": _smart_glm,
    "smart_paddle": _smart_paddle,
    "navit": _navit,
    "naflex": _naflex,
    "crop": lambda processor, _patch, _merge: crop_resize(processor),
    "crop_float": _crop_float,
}
"""From an image processor's settings, the patch size and the merge size to its rule, by kind."""


def settings(processor: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The processor's settings over transformers' defaults; what released Kimi checkpoints nest is brought up, and
    ``null`` counts as silence."""
    known = {**processor, **(processor.get("media_proc_cfg") or {})}
    return {**defaults, **{name: value for name, value in known.items() if value is not None}}


def resize_rules(
    kind: str, processor: Mapping[str, Any], *, patch_size: int, merge_size: int
) -> tuple[Resize, Resize | None, str]:
    """The native rule, the official rule or None, and why there is none.

    Where the model's own processor keeps the aspect ratio it is both; else the native rule is our own, with the area of
    the official one.

    Raises:
        ModelError: there is no official rule, and no other is known for this kind.
    """
    official: Resize | None = None
    try:
        if not processor.get("do_resize", True):
            msg = "preprocessor_config.json says do_resize false, which leaves the size open"
            raise ModelError(msg)  # noqa: TRY301  handled like the rules' own
        _check_agreement(processor, patch_size, merge_size)
        official, problem = RULES[kind](processor, patch_size, merge_size), ""
    except (ModelError, ConfigError) as error:
        problem = str(error)
    except (KeyError, TypeError, ValueError) as error:
        problem = f"preprocessor_config.json lacks a usable setting ({error!r})"
    if kind.startswith("crop"):
        area = official.max_canvas_pixels if official else FALLBACK_PIXELS
        return AreaResize(patch_size=patch_size, min_pixels=area, max_pixels=area), official, problem
    if official is None:
        raise ModelError(problem)
    return official, official, problem
