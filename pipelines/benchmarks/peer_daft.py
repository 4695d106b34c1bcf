"""Daft, as a side of ``peers.py``, by the pattern of its guide to working with images: download, decode, a batch method
of a ``daft.cls`` class that holds the processor and the model.

Its native runner works in this process. The class is created once for every query, so the model is read anew in every
run; the seconds that takes are taken off (``load_seconds``), though decoding goes on beside it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import daft
import numpy as np
import torch
from daft.functions import decode_image, download
from peer_child import serve
from transformers import AutoImageProcessor, AutoModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WIDTH = 384
LOADS: list[float] = []
"""Seconds of each load: Daft makes the instances, in this process, and hands none of them out."""


def embedder(settings: Mapping[str, Any], batch: int) -> Any:  # noqa: ANN401  Daft's own
    """The class that Daft instantiates: of decoded pictures, their vectors."""

    @daft.cls(max_concurrency=1, use_process=False)
    class Embed:
        def __init__(self) -> None:
            began = time.perf_counter()
            torch.set_num_threads(settings["threads"])
            self.dtype = DTYPES[settings["dtype"]]
            self.processor = AutoImageProcessor.from_pretrained(settings["model"])
            self.model = AutoModel.from_pretrained(settings["model"], dtype=self.dtype).eval()
            LOADS.append(time.perf_counter() - began)

        @daft.method.batch(return_dtype=daft.DataType.fixed_size_list(daft.DataType.float32(), WIDTH), batch_size=batch)
        def embed(self, images: daft.Series) -> list[np.ndarray]:
            pixels = self.processor(images=images.to_pylist(), return_tensors="pt")["pixel_values"]
            with torch.inference_mode():
                vectors = self.model(pixels.to(self.dtype)).pooler_output.float()
            return list(torch.nn.functional.normalize(vectors, dim=-1).numpy())

    return Embed()


class Daft:
    """Ways differ in ``batch``."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        daft.set_runner_native(num_threads=settings["threads"])

    def run(self, paths: Sequence[str], way: Mapping[str, Any]) -> tuple[dict[str, Any], np.ndarray]:
        """Seconds of a query without those of reading the model, and the vectors."""
        LOADS.clear()
        embed = embedder(self._settings, way["batch"]).embed
        frame = daft.from_pydict({"path": list(paths)})
        frame = frame.with_column("image", decode_image(download(daft.col("path")), mode="RGB"))
        frame = frame.with_column("embedding", embed(daft.col("image"))).select("path", "embedding")
        began = time.perf_counter()
        table = frame.to_arrow()
        seconds = time.perf_counter() - began
        (load_seconds,) = LOADS
        found = dict(zip(table["path"].to_pylist(), table["embedding"].to_pylist(), strict=True))
        vectors = np.array([found[path] for path in paths], np.float32)
        return {"seconds": seconds - load_seconds, "load_seconds": load_seconds}, vectors


if __name__ == "__main__":
    serve(lambda settings: Daft(settings).run)
