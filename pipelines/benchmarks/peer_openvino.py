"""OpenVINO, as a side of ``peers.py``: the model alone, at its best.

The same layers are converted from the transformers module; pixels are prepared beforehand and so are the positions that
belong to each shape, so that no file, no resizing and no resampling of positions is in its time. Ways differ in
``batch``, in ``hint`` (LATENCY: one request at a time over all threads; THROUGHPUT: as many streams as threads, fed
through its asynchronous queue), and in ``native``: one picture at a time at its own shape, through one model with
dynamic shapes. Static shapes are compiled into the model otherwise. What reading and resizing took beside it is told
as ``prepare_seconds``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
import torch
from peer_child import serve
from peer_plain import Pixels
from transformers import AutoModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Inputs = tuple[np.ndarray, np.ndarray]

PRECISIONS = {"fp32": "f32", "bf16": "bf16"}
SIDE = 224
MOST_COMPILED = 2
"""Models kept: the rounds need two, and each has weights and buffers of its own."""


class Layers(torch.nn.Module):
    """transformers' DINOv2 with its positions from outside: pixels (N, 3, H, W), positions (1, T, C) to (N, C)."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401  transformers' own
        super().__init__()
        self.model = model

    def forward(self, pixels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """CLS embeddings."""
        patches = self.model.embeddings.patch_embeddings(pixels)
        cls = self.model.embeddings.cls_token.expand(patches.shape[0], -1, -1)
        hidden = torch.cat([cls, patches], dim=1) + positions
        output: torch.Tensor = self.model.layernorm(self.model.encoder(hidden).last_hidden_state)[:, 0]
        return output


class OpenVino:
    """Compiled models by way, and the pixels of the pictures that were asked for last."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self._threads, self._precision = settings["threads"], PRECISIONS[settings["dtype"]]
        self._pixels = Pixels(settings["model"])
        self._model = AutoModel.from_pretrained(settings["model"], dtype=torch.float32).eval()
        self._core = ov.Core()
        self._positions: dict[tuple[int, int], np.ndarray] = {}
        self._converted = self._convert()
        self._compiled: dict[tuple[Any, ...], ov.CompiledModel] = {}
        self._prepared: dict[tuple[Any, ...], tuple[list[Inputs], float]] = {}

    def _convert(self) -> ov.Model:
        """The layers as OpenVINO's own model."""
        example = (torch.zeros(1, 3, SIDE, SIDE), torch.from_numpy(self._positions_of(SIDE, SIDE)))
        with torch.inference_mode():
            return ov.convert_model(Layers(self._model), example_input=example)

    def _compile(self, batch: int | None, hint: str) -> ov.CompiledModel:
        """For batches of one size at 224x224, or (None) for single pictures of any size."""
        key = (batch, hint)
        if key not in self._compiled:
            _, tokens, width = self._positions_of(SIDE, SIDE).shape
            shapes = [[1, 3, -1, -1], [1, -1, width]]
            if batch is not None:
                shapes = [[batch, 3, SIDE, SIDE], [1, tokens, width]]
            model = self._converted.clone()
            ports = [port.get_any_name() for port in model.inputs]
            model.reshape({port: ov.PartialShape(shape) for port, shape in zip(ports, shapes, strict=True)})
            options = {
                "PERFORMANCE_HINT": hint,
                "INFERENCE_NUM_THREADS": self._threads,
                "NUM_STREAMS": 1 if hint == "LATENCY" else self._threads,
                "INFERENCE_PRECISION_HINT": self._precision,
            }
            self._compiled[key] = self._core.compile_model(model, "CPU", options)
        self._compiled[key] = compiled = self._compiled.pop(key)  # the last one is the newest
        for old in list(self._compiled)[:-MOST_COMPILED]:
            del self._compiled[old]
        return compiled

    @torch.inference_mode()
    def _positions_of(self, height: int, width: int) -> np.ndarray:
        if (height, width) not in self._positions:
            embeddings, patch = self._model.embeddings, self._model.config.patch_size
            tokens = torch.zeros(1, 1 + (height // patch) * (width // patch), self._model.config.hidden_size)
            resampled = embeddings.interpolate_pos_encoding(tokens, height, width)
            self._positions[height, width] = resampled.float().numpy().copy()
        return self._positions[height, width]

    def _prepare(self, paths: Sequence[str], way: Mapping[str, Any]) -> tuple[list[Inputs], float]:
        """Pixels and positions of every request. A last batch that is not full is filled up with its last picture."""
        key = (way.get("native"), way.get("batch"), tuple(paths))
        if key not in self._prepared:
            self._prepared = {each: kept for each, kept in self._prepared.items() if each[2] != key[2]}
            began = time.perf_counter()
            pixels = [each.numpy() for each in self._pixels.batches(paths, way)]
            seconds = time.perf_counter() - began
            if missing := way.get("batch", 1) - len(pixels[-1]):
                pixels[-1] = np.concatenate([pixels[-1], *[pixels[-1][-1:]] * missing])
            self._prepared[key] = [(each, self._positions_of(*each.shape[2:])) for each in pixels], seconds
        return self._prepared[key]

    def run(self, paths: Sequence[str], way: Mapping[str, Any]) -> tuple[dict[str, Any], np.ndarray]:
        """Seconds of the model alone, and normalised vectors. The part of the last batch that is filling is no
        picture, so its time is given back."""
        compiled = self._compile(None if way.get("native") else way["batch"], way["hint"])
        requests, prepare_seconds = self._prepare(paths, way)
        found: list[np.ndarray] = [np.empty(0)] * len(requests)
        if way["hint"] == "LATENCY":
            request = compiled.create_infer_request()
            began = time.perf_counter()
            for number, inputs in enumerate(requests):
                request.infer(inputs, share_inputs=True)
                found[number] = request.get_output_tensor().data.copy()
        else:
            queue = ov.AsyncInferQueue(compiled, self._threads)

            def keep(request: Any, number: int) -> None:  # noqa: ANN401  OpenVINO's own
                found[number] = request.get_output_tensor().data.copy()

            queue.set_callback(keep)
            began = time.perf_counter()
            for number, inputs in enumerate(requests):
                queue.start_async(inputs, number, share_inputs=True)
            queue.wait_all()
        seconds = time.perf_counter() - began
        seconds *= len(paths) / sum(len(vectors) for vectors in found)
        vectors = np.concatenate(found)[: len(paths)].astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return {"seconds": seconds, "prepare_seconds": prepare_seconds}, vectors


if __name__ == "__main__":
    serve(lambda settings: OpenVino(settings).run)
