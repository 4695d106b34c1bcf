"""The plain transformers script, as a side of ``peers.py``: open, image processor, model, batch by batch.

Pictures of their own shapes go one by one, as transformers takes them: the processor is told the size that vlmembed's
own rule gives, and the model resamples its positions for it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from peer_child import serve
from PIL import Image
from transformers import AutoImageProcessor, AutoModel

from vlmembed.towers import open_tower

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def open_rgb(path: str) -> Image.Image:
    """A picture as RGB, transparency on white."""
    with Image.open(path) as image:
        if image.mode == "RGB":
            return image.copy()
        rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


class Pixels:
    """What the model's own processor makes of pictures."""

    def __init__(self, model: str) -> None:
        self._processor = AutoImageProcessor.from_pretrained(model)
        self._layout = open_tower(model).layout

    def official(self, paths: Sequence[str]) -> torch.Tensor:
        """(N, 3, 224, 224) float32."""
        images = [open_rgb(path) for path in paths]
        pixels: torch.Tensor = self._processor(images=images, return_tensors="pt")["pixel_values"]
        return pixels

    def native(self, path: str) -> torch.Tensor:
        """(1, 3, height, width) float32, of the size that vlmembed would give it."""
        image, patch = open_rgb(path), self._layout.patch_size
        height, width = (side * patch for side in self._layout.native.grid((image.height, image.width)))
        pixels: torch.Tensor = self._processor(
            images=image, size={"height": height, "width": width}, do_center_crop=False, return_tensors="pt"
        )["pixel_values"]
        assert pixels.shape[2:] == (height, width)
        return pixels

    def batches(self, paths: Sequence[str], way: Mapping[str, Any]) -> Iterator[torch.Tensor]:
        """All the pictures, in batches of ``way["batch"]``, or one by one at their own shapes."""
        if way.get("native"):
            yield from (self.native(path) for path in paths)
            return
        size = way["batch"]
        yield from (self.official(paths[begin : begin + size]) for begin in range(0, len(paths), size))


class PlainScript:
    """transformers as its documentation shows it; ways differ in ``dtype`` and ``batch``, or are ``native``."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self._folder = settings["model"]
        self._pixels = Pixels(self._folder)
        self._models: dict[str, Any] = {}
        self._model(settings["dtype"])

    def _model(self, dtype: str) -> Any:  # noqa: ANN401  transformers' own
        if dtype not in self._models:
            self._models[dtype] = AutoModel.from_pretrained(self._folder, dtype=DTYPES[dtype]).eval()
        return self._models[dtype]

    @torch.inference_mode()
    def run(self, paths: Sequence[str], way: Mapping[str, Any]) -> tuple[dict[str, Any], np.ndarray]:
        """Seconds from files to vectors in memory, and the vectors."""
        model, dtype = self._model(way["dtype"]), DTYPES[way["dtype"]]
        began = time.perf_counter()
        found = [model(pixels.to(dtype)).pooler_output.float() for pixels in self._pixels.batches(paths, way)]
        vectors = torch.nn.functional.normalize(torch.cat(found), dim=-1)
        return {"seconds": time.perf_counter() - began}, vectors.numpy()


if __name__ == "__main__":
    serve(lambda settings: PlainScript(settings).run)
