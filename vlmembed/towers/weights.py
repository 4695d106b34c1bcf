"""Finds a model's files, checks them and reads what preprocessing must know. Remote code never runs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open

from vlmembed.errors import ModelError
from vlmembed.layout import OfficialResize
from vlmembed.towers import builtin

if TYPE_CHECKING:
    from collections.abc import Mapping

_FILES = ("config.json", "preprocessor_config.json", "*.safetensors", "*.safetensors.index.json")
_VOLATILE_CONFIG_KEYS = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """A model folder on this disk. `name` and `revision` are what the user asked for and where it was found."""

    name: str
    revision: str
    folder: Path
    config: Mapping[str, Any]
    processor: Mapping[str, Any]

    @property
    def config_sha256(self) -> str:
        """Hash of the settings that change the result; which program wrote the file is left out."""
        settings = {key: value for key, value in self.config.items() if key not in _VOLATILE_CONFIG_KEYS}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def find_model(name: str, revision: str | None = None) -> ModelFiles:
    """Locate a built-in model, a local folder, or a hub id (downloaded into the hub's own cache).

    Raises:
        ModelError: the files are not there; the message holds the commands that bring them.
    """
    if revision is not None and (name in builtin.MODELS or Path(name).is_dir()):
        msg = f"--revision {revision} is for Hugging Face ids, and {name!r} is a local model: leave it out"
        raise ModelError(msg)
    if name in builtin.MODELS:
        folder, found = builtin.model_folder(name), f"built-in, {builtin.MODELS[name].origin}"
        if not (folder / "config.json").is_file():
            raise ModelError(builtin.how_to_get(name))
    elif Path(name).is_dir():
        folder, found = Path(name).resolve(), "local folder"
    else:
        folder = _from_hub(name, revision)
        found = folder.name  # the hub's cache names a snapshot by its commit
    return ModelFiles(
        name=name,
        revision=found,
        folder=folder,
        config=_read_json(folder / "config.json"),
        processor=_read_json(folder / "preprocessor_config.json"),
    )


def _from_hub(name: str, revision: str | None) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))
    except (HFValidationError, RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        msg = (
            f"--model {name!r} is neither a built-in model ({', '.join(builtin.MODELS)}) nor a folder here, and the "
            f"hub did not serve it: {str(error).splitlines()[0]}"
        )
        raise ModelError(msg) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read ({error}): a model folder holds config.json and preprocessor_config.json"
        raise ModelError(msg) from error
    if not isinstance(content, dict):
        msg = f"{path} holds {type(content).__name__}, not a JSON object"
        raise ModelError(msg)
    return content


def weights_sha256(folder: Path) -> str:
    """SHA-256 over every tensor's name, dtype, shape and bytes, in name order: independent of the sharding.

    Raises:
        ModelError: no safetensors file, or a broken one. Pickle checkpoints are not read.
    """
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        msg = f"{folder} holds no .safetensors file; pickle checkpoints are not read: convert it with safetensors"
        raise ModelError(msg)
    digest = hashlib.sha256()
    try:
        where = {}
        for shard in shards:
            with safe_open(shard, framework="pt") as reader:
                where.update(dict.fromkeys(reader.keys(), shard))
        readers = {shard: safe_open(shard, framework="pt") for shard in shards}
        for name in sorted(where):
            tensor: torch.Tensor = readers[where[name]].get_tensor(name).contiguous()  # type: ignore[no-untyped-call]
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    except (SafetensorError, OSError) as error:
        msg = f"{folder} has a broken .safetensors file ({error}): fetch the model again"
        raise ModelError(msg) from error
    return digest.hexdigest()


def official_resize(processor: Mapping[str, Any]) -> OfficialResize:
    """The resize rule of a ``preprocessor_config.json``, by transformers' own keys.

    Raises:
        ModelError: it asks for steps that are not known here.
    """
    if not processor.get("do_resize", True):
        msg = "preprocessor_config.json says do_resize false, which leaves the size open"
        raise ModelError(msg)
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
    return OfficialResize(
        shortest_edge=shortest_edge,
        size_hw=size_hw,
        crop_hw=(int(crop["height"]), int(crop["width"])) if crop else None,
        resample=int(processor.get("resample", 3)),
    )


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
