"""Vision towers: transformers' own modules, run over packs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmembed.errors import ModelError
from vlmembed.towers.families import MODEL_TYPES

if TYPE_CHECKING:
    import torch

    from vlmembed.towers.dense import DenseTower

__all__ = ["load_tower"]


def load_tower(model: str, *, revision: str | None = None, dtype: torch.dtype, device: torch.device) -> DenseTower:
    """Load a vision tower: a built-in name, a local Hugging Face folder, or a hub id.

    Raises:
        ModelError: the files are not there, are broken, or hold a tower of another kind.
    """
    from vlmembed.towers.dense import DenseTower  # noqa: PLC0415  `vlmembed models` lists without loading torch
    from vlmembed.towers.weights import find_model  # noqa: PLC0415  the same

    files = find_model(model, revision)
    model_type = files.config.get("model_type")
    if model_type not in MODEL_TYPES:
        msg = f"{model} has model_type {model_type!r}; supported: {', '.join(MODEL_TYPES)} (see `vlmembed models`)"
        raise ModelError(msg)
    return DenseTower.load(files, dtype=dtype, device=device)
