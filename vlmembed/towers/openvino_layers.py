"""A tower's layers on a CPU by OpenVINO, which fuses what torch does one by one. All around the layers stays torch's.

transformers' own layers are traced and converted, attention inside one picture size included: a pack is then one call
per run of pictures of equal length, whatever their number and length.

Shape legend: as in `vlmembed.towers.base`; L tokens per image.
"""

from __future__ import annotations

import copy
import importlib
import logging
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from torch import nn

from vlmembed.attention.metadata import DeviceMetadata, DeviceSegments
from vlmembed.errors import ConfigError, MissingExtraError
from vlmembed.towers.base import attentions_of, run_last_layer, run_layer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlmembed.towers.base import Rope, Tower

logger = logging.getLogger(__name__)

CAPABILITIES = {"fp32": "FP32", "bf16": "BF16", "fp16": "FP16"}
"""OpenVINO's names for what a processor computes, by ours for a dtype."""

HINTS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}

TRACED_IMAGES, TRACED_TOKENS = 2, 8
"""Size of the pack that is traced. Neither is 1, which would be taken for an axis to broadcast along."""


def openvino_version() -> str | None:
    """The installed version, or None."""
    try:
        return version("openvino")
    except PackageNotFoundError:
        return None


def check_openvino(dtype: str, device: torch.device, *, windowed: bool = False) -> None:
    """Whether OpenVINO can compute layers of `dtype` here.

    Raises:
        ConfigError: not on this device, in this dtype, or for a tower with window attention.
        MissingExtraError: it is not installed.
    """
    if device.type != "cpu":
        msg = f"--runtime openvino is for the CPU, and the device is {device}: use --runtime torch"
        raise ConfigError(msg)
    if windowed:
        msg = "--runtime openvino knows no window attention, which this tower has: use --runtime torch"
        raise ConfigError(msg)
    possible = _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if CAPABILITIES[dtype] not in possible:
        msg = (
            f"--runtime openvino computes no {dtype} on this processor, which does {', '.join(sorted(possible))}: use "
            "--dtype fp32 or --runtime torch"
        )
        raise ConfigError(msg)


def _core() -> Any:  # noqa: ANN401  openvino has no types of its own
    try:
        return importlib.import_module("openvino").Core()
    except (ImportError, RuntimeError) as error:
        msg = f"--runtime openvino needs OpenVINO ({error}): pip install openvino"
        raise MissingExtraError(msg) from error


class OpenVinoLayers:
    """The `LayerStack` of a tower. Its weights are copies: OpenVINO keeps them in an order of its own."""

    def __init__(self, tower: Tower, dtype: str) -> None:
        self._tower = tower
        self._dtype = dtype
        self._compiled: dict[tuple[bool, tuple[int, ...]], Any] = {}

    def run(
        self, hidden_TC: torch.Tensor, metadata: DeviceMetadata, rope: Rope | None, *, taps: Sequence[int]
    ) -> list[torch.Tensor]:
        """All layers, (T, C) each."""
        return self._run(hidden_TC, metadata, rope, first_only=False, taps=tuple(taps))

    def run_first(self, hidden_TC: torch.Tensor, metadata: DeviceMetadata, rope: Rope | None) -> torch.Tensor:
        """The first token of each image, (N, C)."""
        return self._run(hidden_TC, metadata, rope, first_only=True, taps=())[0]

    def _run(
        self,
        hidden_TC: torch.Tensor,
        metadata: DeviceMetadata,
        rope: Rope | None,
        *,
        first_only: bool,
        taps: tuple[int, ...],
    ) -> list[torch.Tensor]:
        request = self._request(first_only=first_only, taps=taps, rope=rope, width=hidden_TC.shape[1])
        inputs = [hidden_TC.float(), *(rope or ())]
        outputs: list[list[torch.Tensor]] = []
        start = 0
        for length, count in metadata.segments.runs:
            stop = start + length * count
            hidden_NLC, *angles = (each[start:stop].contiguous() for each in inputs)
            given = [hidden_NLC.view(count, length, -1), *angles]
            found = request.infer([each.numpy() for each in given], share_inputs=True)  # outputs are copies
            outputs.append([torch.from_numpy(found[number]) for number in range(1 + len(taps))])
            start = stop
        assert start == len(hidden_TC)
        return [torch.cat(each).to(hidden_TC.dtype) for each in zip(*outputs, strict=True)]

    def _request(self, *, first_only: bool, taps: tuple[int, ...], rope: Rope | None, width: int) -> Any:  # noqa: ANN401  openvino's
        key = (first_only, taps)
        if key not in self._compiled:
            layers = _Traced(self._tower.layers, first_only=first_only, taps=taps)
            rotary_width = None if rope is None else rope[0].shape[1]
            self._compiled[key] = _compile(layers, self._dtype, width=width, rotary_width=rotary_width)
        return self._compiled[key]


def _compile(layers: _Traced, dtype: str, *, width: int, rotary_width: int | None) -> Any:  # noqa: ANN401  openvino's
    """The layers as an inference request for any number of images and tokens.

    Raises:
        ConfigError: OpenVINO cannot convert them.
    """
    openvino, began = importlib.import_module("openvino"), time.perf_counter()
    example = [torch.zeros(TRACED_IMAGES, TRACED_TOKENS, width)]
    shapes = [openvino.PartialShape([-1, -1, width])]
    if rotary_width is not None:
        example += [torch.zeros(TRACED_IMAGES * TRACED_TOKENS, rotary_width)] * 2
        shapes += [openvino.PartialShape([-1, rotary_width])] * 2
    settings = {
        "INFERENCE_PRECISION_HINT": HINTS[dtype],
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,  # decoding needs the cores too
    }
    try:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a trace warns of each size that Python looks at
            model = openvino.convert_model(layers, example_input=tuple(example), input=shapes)
        compiled = openvino.Core().compile_model(model, "CPU", settings)
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        msg = f"--runtime openvino cannot run this tower ({reason}): use --runtime torch"
        raise ConfigError(msg) from error
    logger.info("converted for OpenVINO in %.1f s", time.perf_counter() - began)
    return compiled.create_infer_request()


class _Traced(nn.Module):
    """What is converted: the layers in float32 over images of one length."""

    def __init__(self, layers: nn.ModuleList, *, first_only: bool, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = copy.deepcopy(layers).float()
        self.first_only = first_only
        self.taps = taps

    def forward(self, hidden_NLC: torch.Tensor, *angles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(N, L, C) and what `Rope` holds, each (N * L, d), to what `LayerStack` returns."""
        num_images, length, width = hidden_NLC.shape
        for attention in attentions_of(self.layers):
            attention.attend = _DenseAttention(num_images)
        rope = (angles[0], angles[1]) if angles else None
        metadata, hidden_TC, tapped = _no_metadata(), hidden_NLC.reshape(-1, width), {}
        for number, layer in enumerate(self.layers):
            if self.first_only and number == len(self.layers) - 1:
                first_N = torch.arange(num_images) * length
                return (run_last_layer(layer, hidden_TC, first_N, metadata, rope),)
            hidden_TC = run_layer(layer, hidden_TC, metadata, rope)
            if number in self.taps:
                tapped[number] = hidden_TC
        return (hidden_TC, *(tapped[number] for number in self.taps))


class _DenseAttention:
    """Attention inside `num_images` images of one length, in the place of `varlen_attention`."""

    def __init__(self, num_images: int) -> None:
        self._num_images = num_images

    def __call__(
        self,
        q_THd: torch.Tensor,
        k_THd: torch.Tensor,
        v_THd: torch.Tensor,
        _segments: object,
        *,
        scale: float,
        **_: object,
    ) -> torch.Tensor:
        q, k, v = (
            x.reshape(self._num_images, -1, x.shape[1], x.shape[2]).transpose(1, 2) for x in (q_THd, k_THd, v_THd)
        )
        out_NHLd = F.scaled_dot_product_attention(q, k, v, scale=scale)
        return out_NHLd.transpose(1, 2).reshape(-1, q_THd.shape[1], q_THd.shape[2])


def _no_metadata() -> DeviceMetadata:
    """A pack's metadata of which nothing is used, since all images have one length."""
    nothing = torch.zeros(1, dtype=torch.int32)
    return DeviceMetadata(
        segments=DeviceSegments(cu_seqlens=nothing, max_seqlen=0, runs=()),
        windows=None,
        prefix_positions=nothing,
        patch_positions=nothing,
        interp_indices=None,
        interp_weights=None,
        rope_positions=None,
        window_index=None,
        window_reverse=None,
        merge_index=None,
    )
