"""Ray Data, as a side of ``peers.py``, by its documented recipe for pictures: ``read_images``, ``map_batches`` with a
function that prepares them, ``map_batches`` with a class that holds the model in an actor.

The local cluster has as many CPUs as there are threads, is started for every run and shut down after it, so that its
processes are not there while others are measured. Steady state: seconds count from the moment at which the actor has
its model, tried out once, until the last vector is there; what came before is ``start_seconds``. Preparing waits for
that moment, for else it would be done for nothing while the actor starts; reading and decoding do not wait, which is
in Ray's favour. On a CPU, Ray joins both ``map_batches`` into the actor; the way ``apart`` keeps them in processes of
their own by asking for different resources.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import ray.data
import torch
from peer_child import serve
from PIL import Image
from transformers import AutoImageProcessor, AutoModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Batch = dict[str, Any]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZE = (224, 224)
PREPARING_CPUS = 0.5
MOST_SECONDS_TO_WAIT = 120.0


class Prepare:
    """Pictures to pixels, once the model is there."""

    def __init__(self, model: str, marker: Path) -> None:
        self.processor = AutoImageProcessor.from_pretrained(model)
        self.marker = marker

    def __call__(self, batch: Batch) -> Batch:
        """``image`` to ``pixels``."""
        give_up = time.time() + MOST_SECONDS_TO_WAIT
        while not self.marker.exists() and time.time() < give_up:
            time.sleep(0.01)
        images = [Image.fromarray(image) for image in batch["image"]]
        pixels = self.processor(images=images, return_tensors="np")["pixel_values"]
        return {"path": batch["path"], "pixels": pixels}


class Embed:
    """An actor: pixels to vectors."""

    def __init__(self, settings: Mapping[str, Any], marker: Path) -> None:
        torch.set_num_threads(settings["threads"])
        self.dtype = DTYPES[settings["dtype"]]
        self.model = AutoModel.from_pretrained(settings["model"], dtype=self.dtype).eval()
        pixels = torch.zeros(settings["batch"], 3, *settings["size"], dtype=self.dtype)
        with torch.inference_mode():
            self.model(pixels)
        unfinished = marker.with_suffix(".unfinished")
        unfinished.write_text(repr(time.time()))
        unfinished.rename(marker)

    def __call__(self, batch: Batch) -> Batch:
        """``pixels`` to ``embedding``."""
        with torch.inference_mode():
            vectors = self.model(torch.from_numpy(batch["pixels"]).to(self.dtype)).pooler_output.float()
        return {"path": batch["path"], "embedding": torch.nn.functional.normalize(vectors, dim=-1).numpy()}


class RayData:
    """Ways differ in ``batch``, and some are ``apart``."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # Scripts of this folder are imported by the workers, too.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

    def run(self, paths: Sequence[str], way: Mapping[str, Any]) -> tuple[dict[str, Any], np.ndarray]:
        """Seconds in the steady state, and the vectors."""
        began = time.time()
        ray.init(
            address="local",  # not one that happens to run here
            num_cpus=self._settings["threads"],
            include_dashboard=False,
            logging_level=logging.ERROR,
        )
        try:
            with tempfile.TemporaryDirectory() as name:
                marker = Path(name) / "ready"
                prepare = Prepare(self._settings["model"], marker)
                one_actor = ray.data.ActorPoolStrategy(size=1)
                settings = {**self._settings, "batch": way["batch"], "size": SIZE}
                resources = {"num_cpus": PREPARING_CPUS} if way.get("apart") else {}
                ray.data.DataContext.get_current().enable_progress_bars = False
                frame = ray.data.read_images(list(paths), mode="RGB", include_paths=True)
                frame = frame.map_batches(prepare.__call__, batch_size=way["batch"], **resources)
                frame = frame.map_batches(
                    Embed,
                    fn_constructor_args=(settings, marker),
                    batch_size=way["batch"],
                    compute=one_actor,
                    num_cpus=1,
                )
                rows = frame.take_all()
                ended = time.time()
                ready = float(marker.read_text())
        finally:
            ray.shutdown()
        found = {row["path"]: row["embedding"] for row in rows}
        vectors = np.array([found[path] for path in paths], np.float32)
        return {"seconds": ended - ready, "start_seconds": ready - began}, vectors


if __name__ == "__main__":
    serve(lambda settings: RayData(settings).run)
