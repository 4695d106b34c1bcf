"""Finds a model's files and reads its tower's tensors, and no others. Remote code never runs."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from vlmembed.errors import ModelError
from vlmembed.towers import builtin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vlmembed.towers.families import Family

_SETTINGS = ("config.json", "preprocessor_config.json", "processor_config.json", "*.index.json")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Weights in one file, the preferred first; sharded ones have ``.index.json`` behind the name."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_BROKEN = (SafetensorError, OSError, EOFError, RuntimeError, LookupError, AttributeError, TypeError, struct.error)
"""What the readers raise on files that are not what their names say."""

_VOLATILE_CONFIG_KEYS = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """A model's settings on this disk, and where its weights are.

    Attributes:
        name: what the user asked for. revision: where it was found.
        folder: holds the settings, and the weights as far as they are here.
        repo: the hub id whose weights are still to be fetched, at commit `revision`; None for a local model.
        config, processor: the parsed files.
    """

    name: str
    revision: str
    folder: Path
    repo: str | None
    config: Mapping[str, Any]
    processor: Mapping[str, Any]

    @property
    def config_sha256(self) -> str:
        """Hash of the settings that change the result; which program wrote the file is left out."""
        kept = {key: value for key, value in self.config.items() if key not in _VOLATILE_CONFIG_KEYS}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

    def fetch(self, names: Iterable[str]) -> None:
        """Bring these files into the folder, where it is a hub's; one that the hub lacks stays absent."""
        if self.repo is not None and (wanted := [name for name in names if not (self.folder / name).exists()]):
            _download(self.name, self.repo, self.revision, wanted)

    def tensor_files(self) -> dict[str, str]:
        """The file of every tensor, by tensor name.

        Raises:
            ModelError: there are no weights, or they cannot be read.
        """
        for name in _WEIGHTS:
            index = self.folder / f"{name}.index.json"
            if index.is_file():
                return _read_index(index)
            self.fetch([name])
            if (self.folder / name).is_file():
                return dict.fromkeys(_Reader(self.folder / name).names, name)
        msg = f"{self.folder} holds neither {' nor '.join(_WEIGHTS)}, nor an index of shards: fetch the model again"
        raise ModelError(msg)


def find_model(name: str, revision: str | None = None) -> ModelFiles:
    """Locate a built-in model, a local folder, or a hub id (its settings are downloaded into the hub's own cache).

    Raises:
        ModelError: the files are not there; the message holds the commands that bring them.
    """
    if revision is not None and (name in builtin.MODELS or Path(name).is_dir()):
        msg = f"--revision {revision} is for Hugging Face ids, and {name!r} is a local model: leave it out"
        raise ModelError(msg)
    repo = None
    if name in builtin.MODELS:
        folder, found = builtin.model_folder(name), f"built-in, {builtin.MODELS[name].origin}"
        if not (folder / "config.json").is_file():
            raise ModelError(builtin.how_to_get(name))
    elif Path(name).is_dir():
        folder, found = Path(name).resolve(), "local folder"
    else:
        folder, repo = _download(name, name, revision, _SETTINGS), name
        found = folder.name  # the hub's cache names a snapshot by its commit
    return ModelFiles(
        name=name,
        revision=found,
        folder=folder,
        repo=repo,
        config=_read_json(folder / "config.json"),
        processor=_read_processor(folder),
    )


def _download(name: str, repo: str, revision: str | None, patterns: Iterable[str]) -> Path:
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # the client lets its transport's own errors through, which have no common base
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        msg = (
            f"--model {name!r} is neither a built-in model ({', '.join(builtin.MODELS)}) nor a folder here, and the "
            f"hub did not serve it: {reason}"
        )
        raise ModelError(msg) from error


def _read_processor(folder: Path) -> Mapping[str, Any]:
    """The image processor's settings: a file of their own, or a part of the processor's, as newer versions save it."""
    whole = folder / "processor_config.json"
    if not (folder / "preprocessor_config.json").is_file() and whole.is_file():
        settings = _read_json(whole).get("image_processor")
        if isinstance(settings, dict):
            return settings
    return _read_json(folder / "preprocessor_config.json")


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


def _read_index(path: Path) -> dict[str, str]:
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        msg = f"{path} has no weight_map from tensors to files: fetch the model again"
        raise ModelError(msg)
    return weight_map


class _Reader:
    """Tensors of one file by name, read when asked for. A pickle is loaded with ``weights_only=True`` or not at all."""

    names: list[str]
    get: Callable[[str], torch.Tensor]

    def __init__(self, path: Path) -> None:
        try:
            if path.suffix == ".safetensors":
                file = safe_open(path, framework="pt")
                self.names, self.get = list(file.keys()), file.get_tensor  # type: ignore[no-untyped-call]
            else:
                tensors = _unpickle(path)
                self.names, self.get = list(tensors), tensors.__getitem__
        except FileNotFoundError:
            raise
        except pickle.UnpicklingError as error:
            msg = f"{path} holds more than tensors, and unpickling it could run code: convert it with safetensors"
            raise ModelError(msg) from error
        except _BROKEN as error:
            msg = f"{path} is broken ({error}): fetch the model again"
            raise ModelError(msg) from error


def _unpickle(path: Path) -> dict[str, torch.Tensor]:
    tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors.items()
    ):
        msg = f"{path} holds something else than tensors by name: fetch the model again"
        raise ModelError(msg)
    return tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class _Origin:
    """Where a tensor of the tower comes from: a tensor of the checkpoint, or the `part`-th of `num_parts` row blocks of
    it, whose rows are `permuted` or not."""

    name: str
    part: int = 0
    num_parts: int = 1
    permuted: bool = False


def _tower_name(name: str, prefix: str, family: Family) -> str | None:
    """A checkpoint's tensor name as the tower's own module has it."""
    if not name.startswith(prefix):
        return None
    name = name[len(prefix) :]
    for pattern, replacement in family.renames:
        renamed, count = re.subn(pattern, replacement, name)
        if count:
            return renamed
    return name


def _origins(names: Iterable[str], expected: Iterable[str], family: Family) -> dict[str, _Origin]:
    """The origin of each tensor of the tower that the checkpoint has; an earlier prefix goes before a later one."""
    known, all_names = set(expected), list(names)
    found: dict[str, _Origin] = {}
    for prefix in reversed(family.prefixes):
        for name in all_names:
            if (own := _tower_name(name, prefix, family)) is None:
                continue
            if own in known:
                found[own] = _Origin(name=name)
            for whole, parts in family.fused:
                for number, part in enumerate(parts if f".{whole}." in own else ()):
                    if (split := own.replace(whole, part)) in known:
                        permuted = part in family.permuted
                        found[split] = _Origin(name=name, part=number, num_parts=len(parts), permuted=permuted)
    return found


def permute_for_rope(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the output rows of a query or key projection, (C, ...), head by head: pairs (0, 1), (2, 3), … that the
    released weights rotate together become (0, d/2), (1, d/2 + 1), … as transformers' rotary embedding has them."""
    by_pair = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return by_pair.transpose(1, 2).reshape(rows.shape)


def read_tower(
    files: ModelFiles, family: Family, expected: Mapping[str, torch.Size], *, num_heads: int
) -> tuple[dict[str, torch.Tensor], str]:
    """The tower's tensors by their own names, and a SHA-256 over names, dtypes, shapes and bytes.

    Only files that hold one of `expected` are downloaded and opened. The hash does not depend on the sharding, the
    prefix or the fusion of the checkpoint.

    Raises:
        ModelError: a tensor or its file is missing or has another shape; the message names it.
    """
    where = files.tensor_files()
    origins = _origins(where, expected, family)
    if absent := sorted(set(expected) - set(origins)):
        msg = (
            f"{files.name} lacks {len(absent)} of {len(expected)} tensors of its vision tower ({family.title}), the "
            f"first is {absent[0]!r}: the checkpoint is incomplete, or config.json describes another tower"
        )
        raise ModelError(msg)
    files.fetch(sorted({where[origin.name] for origin in origins.values()}))
    readers: dict[Path, _Reader] = {}
    tensors: dict[str, torch.Tensor] = {}
    digest = hashlib.sha256()
    for name in sorted(origins):
        origin = origins[name]
        shard = where[origin.name]
        tensor = _read_tensor(files.folder / shard, origin, readers)
        rows, *rest = expected[name] or (1,)
        whole = (rows * origin.num_parts, *rest) if expected[name] else ()
        if tuple(tensor.shape) != whole:
            msg = (
                f"{origin.name!r} of {files.name} has shape {tuple(tensor.shape)}, and config.json asks for "
                f"{whole}: config and weights are of different models"
            )
            raise ModelError(msg)
        if tensor.dtype not in _DTYPES:
            msg = (
                f"{origin.name!r} of {files.name} is stored as {str(tensor.dtype).removeprefix('torch.')}: quantised "
                "towers are not supported, use the checkpoint that was not quantised"
            )
            raise ModelError(msg)
        tensor = tensor.chunk(origin.num_parts)[origin.part] if origin.num_parts > 1 else tensor
        tensor = permute_for_rope(tensor, num_heads) if origin.permuted else tensor
        tensors[name] = tensor = tensor.contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return tensors, digest.hexdigest()


def _read_tensor(path: Path, origin: _Origin, readers: dict[Path, _Reader]) -> torch.Tensor:
    try:
        if path not in readers:
            readers[path] = _Reader(path)
        return readers[path].get(origin.name)
    except FileNotFoundError as error:
        msg = f"{path} is not there, and it holds {origin.name!r} of the vision tower: fetch the model again"
        raise ModelError(msg) from error
    except (KeyError, SafetensorError) as error:
        msg = f"{path} lacks {origin.name!r} of the vision tower, which its index promises: fetch the model again"
        raise ModelError(msg) from error
