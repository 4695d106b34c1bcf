"""What a loaded tower and its device decide of a run: attention, token budget, compiling, CUDA graphs.

Measured on a calibration pack before the first real one, and recorded: a run that goes on later takes these decisions
over, so that it makes the same bytes.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from vlmembed.attention.backends import BACKENDS, HEAD_DIM_UNIT
from vlmembed.attention.varlen import pick_attention
from vlmembed.calibration import MAX_PACK_TOKENS, CudaMeter, auto_budget, calibration_batch, try_out
from vlmembed.devices import is_out_of_memory, processor_name
from vlmembed.encoder import Encoder, pick_pool
from vlmembed.errors import ConfigError, MissingExtraError
from vlmembed.graphs import CudaGraphs
from vlmembed.towers.openvino_layers import check_openvino, openvino_version
from vlmembed.variants import MIN_PACKS_TO_MEASURE, Variants

if TYPE_CHECKING:
    from collections.abc import Callable

    from vlmembed.batch import PackCost
    from vlmembed.calibration import Meter
    from vlmembed.config import EncodeConfig
    from vlmembed.graphs import GraphApi
    from vlmembed.layout import ResizeRule
    from vlmembed.schema import VectorColumn
    from vlmembed.towers.blueprint import Blueprint

logger = logging.getLogger(__name__)

MIN_SECONDS_TO_COMPILE = 1800.0
"""A shorter job is not worth the minute that compiling may take."""

MIN_SECONDS_TO_CONVERT = 600.0
"""A shorter job is not worth the seconds that converting the layers for OpenVINO takes."""

GRAPHS_CONFIRMED = False
"""Whether the path through CUDA graphs has run on a GPU and been seen to give what the plain layers give."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """What was decided, and what is to be recorded.

    Attributes:
        config: with `attention`, `runtime`, `compile`, `cuda_graphs` and `max_tokens_per_batch` decided.
        model: what was loaded. backend: what computes it.
        cost: of the tower's forward.
    """

    config: EncodeConfig
    model: dict[str, Any]
    backend: dict[str, Any]
    cost: PackCost


def load_encoder(
    config: EncodeConfig,
    blueprint: Blueprint,
    vectors: tuple[VectorColumn, ...],
    *,
    rule: ResizeRule,
    num_rows: int,
    device: torch.device,
) -> tuple[Encoder, Settled]:
    """Load the tower, and decide what is left to decide.

    Raises:
        ConfigError: a setting that this device, or this tower on it, cannot do.
        ModelError: from `Blueprint.load`. MissingExtraError: a package that a setting needs.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    encoder = Encoder.load(config, blueprint, vectors, device)
    meter = CudaMeter(device) if device.type == "cuda" else None
    settled, reasons = settle(config, encoder, rule=rule, num_rows=num_rows, meter=meter)
    for name, reason in reasons.items():  # not recorded: what is measured differs from run to run
        logger.info("%s %s: %s", name, getattr(settled, name), reason)
    files = blueprint.files
    model = {
        "weights_sha256": encoder.tower.weights_sha256,
        "width": vectors[0].width,
        "patches_per_token": blueprint.layout.merge_size**2,
        "name": os.fspath(config.model),
        "revision": files.revision,
        "config_sha256": files.config_sha256,
        "family": blueprint.family.title,
        "aligned_with_text": blueprint.family.aligned and pick_pool(config, blueprint) == "head",
    }
    backend = {
        "device": settled.device,
        "processor": processor_name(device),
        "runtime": f"openvino {openvino_version()}" if settled.runtime == "openvino" else "torch",
        "attention": "openvino" if settled.runtime == "openvino" else _described(settled.attention),
        "compile": settled.compile,
        "cuda_graphs": settled.cuda_graphs,
    }
    return encoder, Settled(config=settled, model=model, backend=backend, cost=encoder.tower.cost)


def _described(attention: str) -> str:
    """A backend as it is recorded, with the version of its package."""
    backend = BACKENDS[attention]
    shown = f"{attention}: {backend.title}"
    try:
        return f"{shown} ({backend.package} {version(backend.package)})" if backend.package else shown
    except PackageNotFoundError:  # built in place, or under another name
        return f"{shown} (version unknown)"


def check_choices(config: EncodeConfig, device: torch.device) -> None:
    """What can be said of the choices for a device before any weight is read.

    Raises:
        ConfigError: the device cannot do it. MissingExtraError: a package is not installed.
    """
    attention = pick_attention(config.attention, device=device, dtype=config.dtype, head_dim=HEAD_DIM_UNIT)
    if config.cuda_graphs == "on":
        _check_graphs(device, attention)
    if config.runtime == "openvino":
        check_openvino(config.dtype, device)
        if config.compile == "on":
            msg = "--compile on is of --runtime torch; OpenVINO compiles in its own way: leave one out"
            raise ConfigError(msg)


def settle(
    config: EncodeConfig,
    encoder: Encoder,
    *,
    rule: ResizeRule,
    num_rows: int,
    meter: Meter | None = None,
    graph_api: Callable[[], GraphApi] = CudaGraphs,
) -> tuple[EncodeConfig, dict[str, str]]:
    """Decide attention, token budget, runtime, compiling and graphs, in this order, and set the encoder up accordingly.

    Returns the config with them, and a reason for each that was `auto`.

    Raises:
        ConfigError, MissingExtraError: as for `load_encoder`.
    """
    tower, reasons = encoder.tower, {}
    attention = pick_attention(
        config.attention, device=encoder.device, dtype=config.dtype, head_dim=tower.head_dim, try_out=True
    )
    tower.use_attention(attention)
    config = replace(config, attention=attention)
    if config.cuda_graphs == "on":
        _check_graphs(encoder.device, attention)
    budget = config.max_tokens_per_batch
    if budget is None:
        budget = auto_budget(encoder, rule, meter)
        config = replace(config, max_tokens_per_batch=budget)
    batch = calibration_batch(rule, min(budget, MAX_PACK_TOKENS))  # a budget may stand for "no limit"
    variants = Variants(encoder, batch, budget=budget, dtype=config.dtype, graph_api=graph_api)
    num_packs = num_rows / len(batch.rows)
    openvino, reasons["runtime"] = _settle_runtime(config, variants, num_packs=num_packs)
    if openvino:
        compiling, graphs = False, False
        reasons["compile"] = reasons["cuda_graphs"] = "not with OpenVINO"
    else:
        compiling, reasons["compile"] = _settle_compile(config, variants, num_packs=num_packs)
        graphs, reasons["cuda_graphs"] = _settle_graphs(config, variants, num_packs=num_packs, compiled=compiling)
    variants.use(openvino=openvino, compiled=compiling, graphs=graphs)
    encoder.num_splits = 0  # trials are not the run's
    settled = replace(
        config,
        runtime="openvino" if openvino else "torch",
        compile="on" if compiling else "off",
        cuda_graphs="on" if graphs else "off",
    )
    return settled, reasons


def _check_graphs(device: torch.device, attention: str) -> None:
    if device.type != "cuda":
        msg = f"--cuda-graphs on needs a GPU, and the device is {device}: use off or auto"
        raise ConfigError(msg)
    if not BACKENDS[attention].is_flash:
        msg = (
            f"--cuda-graphs on cannot hold --attention {attention}, which goes by lengths on the host: use a flash "
            "backend or torch (they need --dtype bf16 or fp16), or --cuda-graphs off"
        )
        raise ConfigError(msg)


def _settle_runtime(config: EncodeConfig, variants: Variants, *, num_packs: float) -> tuple[bool, str]:
    """Whether OpenVINO runs the layers.

    Raises:
        ConfigError: it is asked for, and cannot.
    """
    if config.runtime == "openvino":
        _check_openvino(config, variants.encoder)
        variants.use(openvino=True)
        try_out(variants.encoder, variants.batch)
        return True, "as asked for"
    if config.runtime == "torch":
        return False, "as asked for"
    if openvino_version() is None or variants.encoder.device.type != "cpu" or config.compile == "on":
        return False, "OpenVINO is not installed, or not for this device, or the layers are to be compiled"
    seconds = variants.job_seconds(num_packs)
    if not seconds or seconds < MIN_SECONDS_TO_CONVERT:
        return False, _too_short(num_packs, seconds)
    try:
        _check_openvino(config, variants.encoder)
        return variants.is_faster({"openvino": True}, {"openvino": False})
    except (ConfigError, MissingExtraError, RuntimeError) as error:  # the last is OpenVINO's own
        if is_out_of_memory(error):
            raise
        return False, f"it failed: {_first_line(error)}"


def _check_openvino(config: EncodeConfig, encoder: Encoder) -> None:
    check_openvino(config.dtype, encoder.device, windowed=encoder.layout.window_size is not None)


def _too_short(num_packs: float, seconds: float) -> str:
    size = f"{seconds:.0f} s" if seconds else f"{num_packs:.0f} packs"
    return f"about {size} are too short a run to pay for it"


def _settle_compile(config: EncodeConfig, variants: Variants, *, num_packs: float) -> tuple[bool, str]:
    if config.compile == "off":
        return False, "as asked for"
    if config.compile == "on":
        try:
            variants.use(compiled=True, graphs=False)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            msg = (
                f"--compile on failed ({_first_line(error)}): install what torch.compile needs (a C++ compiler; on a "
                "GPU, Triton), or use --compile off"
            )
            raise MissingExtraError(msg) from error
        return True, "as asked for"
    seconds = variants.job_seconds(num_packs)
    if not seconds or seconds < MIN_SECONDS_TO_COMPILE:
        return False, _too_short(num_packs, seconds)
    try:
        return variants.is_faster({"compiled": True, "graphs": False}, {"compiled": False, "graphs": False})
    except RuntimeError as error:  # no C++ compiler, an operation that it does not know
        if is_out_of_memory(error):
            raise
        variants.use(compiled=False, graphs=False)
        return False, f"it failed: {_first_line(error)}"


def _settle_graphs(config: EncodeConfig, variants: Variants, *, num_packs: float, compiled: bool) -> tuple[bool, str]:
    if config.cuda_graphs != "auto":
        return config.cuda_graphs == "on", "as asked for"
    if config.deterministic:
        return False, "every image has its own shape with --deterministic"
    if not GRAPHS_CONFIRMED:
        return False, "not confirmed on a GPU yet"
    if variants.encoder.device.type != "cuda" or not BACKENDS[config.attention].is_flash:
        return False, f"not possible with {variants.encoder.device.type} and {config.attention} attention"
    if num_packs < MIN_PACKS_TO_MEASURE:
        return False, _too_short(num_packs, 0.0)
    return variants.is_faster({"compiled": compiled, "graphs": True}, {"compiled": compiled, "graphs": False})


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:200]
