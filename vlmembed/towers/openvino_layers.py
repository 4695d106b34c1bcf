"""A tower's layers on a CPU by OpenVINO, which fuses what torch does one by one. All around the layers stays torch's.

transformers' own layers are traced and converted, attention within pictures of one length included: a pack is then some
calls, each of one picture or of a few of equal length.

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

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from torch import nn

from vlmembed.attention.metadata import DeviceMetadata, DeviceSegments
from vlmembed.errors import ConfigError, MissingExtraError
from vlmembed.towers.base import attentions_of, run_last_layer, run_layer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vlmembed.towers.base import Rope, Tower

logger = logging.getLogger(__name__)

CAPABILITIES = {"fp32": "FP32", "bf16": "BF16", "fp16": "FP16"}
"""OpenVINO's names for what a processor computes, by ours for a dtype."""

HINTS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}

TRACED_IMAGES, TRACED_TOKENS = 2, 8
"""Size of the pack that is traced. Neither is 1, which would be taken for an axis to broadcast along."""


PIECE_TOKENS = 256
"""Small images are put together to so many tokens a call."""


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
        self._engines: dict[tuple[bool, tuple[int, ...]], _Engine] = {}

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
        engine = self._engine(first_only=first_only, taps=taps, rope=rope, width=hidden_TC.shape[1])
        inputs = [each.float().contiguous().numpy() for each in (hidden_TC, *(rope or ()))]
        pieces: list[list[npt.NDArray[np.float32]]] = []
        start = 0
        for length, count in metadata.segments.runs:
            for num_images in _piece_sizes(length, count):
                stop = start + length * num_images
                hidden_TC_piece, *angles = (each[start:stop] for each in inputs)
                pieces.append([hidden_TC_piece.reshape(num_images, length, -1), *angles])
                start = stop
        assert start == len(hidden_TC)
        outputs = engine.infer(pieces)
        found = [torch.from_numpy(np.concatenate(each)) for each in zip(*outputs, strict=True)]
        return [each.to(hidden_TC.dtype) for each in found]

    def _engine(self, *, first_only: bool, taps: tuple[int, ...], rope: Rope | None, width: int) -> _Engine:
        key = (first_only, taps)
        if key not in self._engines:
            layers = _Traced(self._tower.layers, first_only=first_only, taps=taps)
            rotary_width = None if rope is None else rope[0].shape[1]
            model = _convert(layers, width=width, rotary_width=rotary_width)
            self._engines[key] = _Engine(model, self._dtype)
        return self._engines[key]


def _piece_sizes(length: int, count: int) -> list[int]:
    """Images of each call for a run of `count` images."""
    size = max(1, PIECE_TOKENS // length)
    return [min(size, count - begin) for begin in range(0, count, size)]


class _Engine:
    """Calls of converted layers. Those of a pack go over streams of one thread each, which need not wait for each other
    inside a call; all threads go into one call where the pack holds too few, or one much longer than the others."""

    def __init__(self, model: Any, dtype: str) -> None:  # noqa: ANN401  openvino's
        self._model = model
        self._dtype = dtype
        self._num_threads = torch.get_num_threads()
        self._queues: dict[int, Any] = {}  # by number of streams, since each holds the weights once more

    def infer(self, pieces: list[list[npt.NDArray[np.float32]]]) -> list[list[npt.NDArray[np.float32]]]:
        """The outputs of each call, in order; the first input of a piece is (N, L, C)."""
        sizes = [piece[0].shape[0] * piece[0].shape[1] for piece in pieces]
        is_even = max(sizes) * self._num_threads <= sum(sizes)
        queue = self._queue(self._num_threads if is_even else 1)
        outputs: list[list[npt.NDArray[np.float32]]] = [[] for _ in pieces]

        def keep(request: Any, number: int) -> None:  # noqa: ANN401  openvino's
            outputs[number] = [tensor.data.copy() for tensor in request.output_tensors]

        queue.set_callback(keep)
        for number, piece in enumerate(pieces):
            queue.start_async(piece, userdata=number, share_inputs=True)
        queue.wait_all()
        return outputs

    def _queue(self, num_streams: int) -> Any:  # noqa: ANN401  openvino's
        if num_streams not in self._queues:
            settings = {
                "INFERENCE_PRECISION_HINT": HINTS[self._dtype],
                "INFERENCE_NUM_THREADS": self._num_threads,
                "NUM_STREAMS": num_streams,
                "ENABLE_CPU_PINNING": False,  # decoding needs the cores too
            }
            openvino = importlib.import_module("openvino")
            try:
                compiled = openvino.Core().compile_model(self._model, "CPU", settings)
            except Exception as error:
                raise _refused(error) from error
            self._queues[num_streams] = openvino.AsyncInferQueue(compiled, num_streams)
        return self._queues[num_streams]


def _refused(error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    return ConfigError(f"--runtime openvino cannot run this tower ({reason}): use --runtime torch")


def _convert(layers: _Traced, *, width: int, rotary_width: int | None) -> Any:  # noqa: ANN401  openvino's
    """The layers as OpenVINO's, for any number of images and tokens.

    Raises:
        ConfigError: OpenVINO cannot convert them.
    """
    openvino, began = importlib.import_module("openvino"), time.perf_counter()
    example = [torch.zeros(TRACED_IMAGES, TRACED_TOKENS, width)]
    shapes = [openvino.PartialShape([-1, -1, width])]
    if rotary_width is not None:
        example += [torch.zeros(TRACED_IMAGES * TRACED_TOKENS, rotary_width)] * 2
        shapes += [openvino.PartialShape([-1, rotary_width])] * 2
    try:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a trace warns of each size that Python looks at
            model = openvino.convert_model(layers, example_input=tuple(example), input=shapes)
    except Exception as error:
        raise _refused(error) from error
    logger.info("converted for OpenVINO in %.1f s", time.perf_counter() - began)
    return model


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
