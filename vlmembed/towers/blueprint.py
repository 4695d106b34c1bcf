"""A tower of which only the settings have been read: enough to refuse a run before any weight is loaded."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from vlmembed.errors import ModelError
from vlmembed.towers import processor
from vlmembed.towers.weights import read_tower

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from vlmembed.layout import TowerLayout
    from vlmembed.towers.base import Tower
    from vlmembed.towers.families import Family
    from vlmembed.towers.weights import ModelFiles


_IRRELEVANT = re.compile(r"model_type|auto_map|architectures|_?attn_implementation\w*|transformers_version")
"""Settings that do not describe a tower; an attention implementation would have to be installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blueprint:
    """What the settings of a model say of its tower.

    Attributes:
        files, family, layout: what and where it is.
        make_skeleton: transformers' module on the ``meta`` device, new each time; its tensor names are the tower's own.
        num_heads: attention heads.
        pool_widths: D by ``--pool`` choice; the first is the default.
        token_width: D of ``--emit tokens``.
        num_deepstack: inner layers whose features ``--deepstack`` stores.
        build: makes the tower of a filled skeleton, given this blueprint, the skeleton and the weights' hash.
    """

    files: ModelFiles
    family: Family
    layout: TowerLayout
    make_skeleton: Callable[[], nn.Module]
    num_heads: int
    pool_widths: Mapping[str, int]
    token_width: int
    num_deepstack: int = 0
    build: Callable[[Blueprint, nn.Module, str], Tower]

    def check_memory(self, skeleton: nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
        """Compare a skeleton's weights with the memory that is free.

        Raises:
            ModelError: they do not fit.
        """
        num_parameters = sum(parameter.numel() for parameter in skeleton.parameters())
        needed = num_parameters * dtype.itemsize
        available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
        if needed > available:
            msg = (
                f"the vision tower of {self.files.name} has {num_parameters:,} parameters: its weights alone need "
                f"{needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')}, and {device} has {available / 1e9:.1f} "
                "GB free: use a narrower --dtype, another --device, or a smaller model"
            )
            raise ModelError(msg)

    def load(self, *, dtype: torch.dtype, device: torch.device) -> Tower:
        """Read the weights.

        Raises:
            ModelError: they do not fit into memory, or a tensor of the tower is missing or has the wrong shape.
        """
        skeleton = self.make_skeleton()
        self.check_memory(skeleton, dtype=dtype, device=device)
        expected = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
        tensors, sha256 = read_tower(self.files, self.family, expected, num_heads=self.num_heads)
        skeleton.load_state_dict(tensors, assign=True)
        return self.build(self, skeleton, sha256).prepare(dtype=dtype, device=device)


def free_memory() -> int:
    """Bytes of main memory that this process may take: what the machine has free, or all that its control group may
    have, if that is less. What the group uses is not counted: most of it is a cache of files."""
    available = int(psutil.virtual_memory().available)
    try:
        return min(available, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such group, or none that limits memory
        return available


def vision_settings(files: ModelFiles) -> dict[str, Any]:
    """The part of config.json that is about the tower: all of it, where only a tower was saved."""
    settings = files.config.get("vision_config", files.config)
    if not isinstance(settings, dict):
        msg = f"{files.folder / 'config.json'} has a vision_config that is not an object: fetch the model again"
        raise ModelError(msg)
    return dict(settings)


def layout_settings(files: ModelFiles, family: Family, *, patch_size: int, merge_size: int) -> dict[str, Any]:
    """The fields of a `TowerLayout` that the image processor decides.

    Raises:
        ModelError: its settings are incomplete, or of a kind that is not known.
    """
    known = processor.settings(files.processor, family.processor_defaults)
    native, official, problem = processor.resize_rules(
        family.processor, known, patch_size=patch_size, merge_size=merge_size
    )
    mean, std = processor.normalisation(known)
    return {
        "native": native,
        "official": official,
        "official_problem": problem,
        "default_resize": "native" if family.native else "official",
        "image_mean": mean,
        "image_std": std,
        "rescale_factor": processor.rescale_factor(known),
    }


def make_config(family: Family, settings: Mapping[str, Any], files: ModelFiles) -> Any:  # noqa: ANN401  a transformers config
    """Build the tower's config by its class, never by a name in the file.

    Raises:
        ModelError: the settings do not suit it.
    """
    package, _, class_name = family.classes
    module = importlib.import_module(f"transformers.models.{package}.configuration_{package}")
    own = {name: value for name, value in settings.items() if not _IRRELEVANT.fullmatch(name)}
    try:
        return getattr(module, class_name)(**own)
    except Exception as error:
        msg = f"{files.folder / 'config.json'} does not describe a tower of {family.title} ({error})"
        raise ModelError(msg) from error


def modeling(family: Family) -> Any:  # noqa: ANN401  a module
    """The module of transformers with the family's classes; importing it loads no other family's."""
    package = family.classes[0]
    return importlib.import_module(f"transformers.models.{package}.modeling_{package}")


def on_meta(family: Family, config: Any) -> Any:  # noqa: ANN401  a transformers model
    """The family's model without memory for its weights.

    Raises:
        ModelError: the config's numbers do not go together.
    """
    try:
        with torch.device("meta"):
            return getattr(modeling(family), family.classes[1])(config)
    except Exception as error:
        msg = f"config.json does not describe a tower of {family.title}: {type(error).__name__}: {error}"
        raise ModelError(msg) from error
