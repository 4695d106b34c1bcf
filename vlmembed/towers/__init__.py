"""Vision towers: transformers' own modules, run over packs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmembed.errors import ConfigError, ModelError
from vlmembed.towers.families import MODEL_TYPES

if TYPE_CHECKING:
    import torch

    from vlmembed.towers.base import Tower
    from vlmembed.towers.blueprint import Blueprint

__all__ = ["load_tower", "open_tower"]


def open_tower(model: str, *, revision: str | None = None) -> Blueprint:
    """Find a model and read its settings, not its weights: a built-in name, a local Hugging Face folder, or a hub id.

    Raises:
        ModelError: the files are not there, are broken, or hold a tower of another kind.
    """
    from vlmembed.towers.dense import open_dense  # noqa: PLC0415  `vlmembed models` lists without loading torch
    from vlmembed.towers.grid import open_grid  # noqa: PLC0415  the same
    from vlmembed.towers.weights import find_model  # noqa: PLC0415  the same

    files = find_model(model, revision)
    model_type = files.config.get("model_type")
    family = MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        supported = ", ".join(MODEL_TYPES)
        msg = f"{model} has model_type {model_type!r}; supported: {supported} (see `vlmembed models`)"
        raise ModelError(msg)
    try:
        return (open_grid if family.is_grid else open_dense)(files, family)
    except ConfigError as error:  # a limit of the files', not of the command's
        msg = f"the settings in {files.folder} are out of range: {error}"
        raise ModelError(msg) from error
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        msg = f"the settings in {files.folder} cannot be used: {type(error).__name__}: {error}"
        raise ModelError(msg) from error


def load_tower(model: str, *, revision: str | None = None, dtype: torch.dtype, device: torch.device) -> Tower:
    """`open_tower`, then the weights.

    Raises:
        ModelError: as there; or a tensor of the tower is missing, or there is no memory for it.
    """
    tower = open_tower(model, revision=revision).load(dtype=dtype, device=device)
    return tower if device.type == "cpu" else tower.use_attention("sdpa")
