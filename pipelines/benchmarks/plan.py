"""Claim: what ``vlmembed plan`` foresees of a run, its time and the size of its output, is within 25 % of what follows.

Three kinds of input: food photos (small JPEGs in a folder), Tux Paint stamps (PNGs with alpha, of hundreds of sizes, in
a tar), and a desktop's backgrounds (crops of 1 to 18 megapixels, in a Parquet file, encoded small, so that decoding is
much of the work). The estimate was not tuned on them: it was developed on other wallpapers (lomiri-wallpapers-16.04),
left out here for that reason; on photos and stamps its errors were looked at, and nothing was changed for them. Plan
and run alternate; set-up counts on both sides, and is also left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from floors import spread
from photos import fetch_photos
from PIL import Image
from record import ROOT, write_result

import vlmembed

LIMIT = 0.25
CALIBRATION_SECONDS = 4.0
"""Less than the default, so that the trial sees a small part of these short runs alone."""

BACKGROUNDS = "mate-backgrounds"
SETTINGS: dict[str, dict[str, Any]] = {
    "food photos, JPEG, folder": {},
    "stamps, PNG, tar": {},
    "backgrounds, JPEG, Parquet": {"resize": "native", "max_pixels": 128 * 14**2},
    "the same, a quarter of the tokens": {"resize": "native", "max_pixels": 32 * 14**2},
}


def photo_folder(scratch: Path, count: int) -> Path:
    """Food photos in a folder."""
    folder = scratch / "photos"
    folder.mkdir()
    for photo in fetch_photos(scratch)[:count]:
        photo.rename(folder / photo.name)
    return folder


def stamp_tar(scratch: Path, count: int) -> Path:
    """Stamps in a tar, taken evenly from all of them."""
    folder = ROOT / ".data" / "tuxpaint-stamps"
    if not folder.is_dir():
        fetch = ["sh", str(ROOT / "tests" / "fetch_stamps.sh"), str(folder)]
        subprocess.run(fetch, check=True)
    stamps = sorted(folder.rglob("*.png"))
    with tarfile.open(scratch / "stamps.tar", "w") as archive:
        for number in range(count):
            stamp = stamps[number * len(stamps) // count]
            archive.add(stamp, stamp.relative_to(folder).as_posix())
    return scratch / "stamps.tar"


def background_table(scratch: Path, count: int) -> Path:
    """Crops of the backgrounds, of 70 to 100 % of their sides, in row groups of ten."""
    download, update = ["apt-get", "download", BACKGROUNDS], ["apt-get", "update", "-qq"]
    if subprocess.run(download, cwd=scratch, capture_output=True, check=False).returncode:
        subprocess.run(update, capture_output=True, check=False)
        subprocess.run(download, cwd=scratch, capture_output=True, check=True)
    package = next(scratch.glob(f"{BACKGROUNDS}_*.deb"))
    unpack = ["dpkg-deb", "-x", str(package), str(scratch / "tree")]
    subprocess.run(unpack, check=True)
    pictures = sorted((scratch / "tree").rglob("*.jpg"))
    generator = np.random.default_rng(0)
    contents = []
    for number in range(count):
        with Image.open(pictures[number % len(pictures)]) as opened:
            image = opened.convert("RGB")
        width, height = (int(side * generator.uniform(0.7, 1.0)) for side in image.size)
        image.crop((0, 0, width, height)).save(scratch / "crop.jpg", quality=92)
        contents.append({"bytes": (scratch / "crop.jpg").read_bytes(), "path": None})
    column = pa.array(contents, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    pq.write_table(pa.table({"image": column}), scratch / "backgrounds.parquet", row_group_size=10)
    return scratch / "backgrounds.parquet"


def compare(source: Path, output: Path, settings: dict[str, Any]) -> dict[str, float]:
    """Plan, then run; what was foreseen over what was."""
    config = vlmembed.EncodeConfig(inputs=(str(source),), output=str(output), overwrite=True, **settings)
    foreseen = vlmembed.plan(config, calibration_seconds=CALIBRATION_SECONDS)
    report = vlmembed.encode(config)
    assert foreseen.seconds is not None
    assert foreseen.packing_efficiency == report.packing_efficiency
    print(
        f"{source.name}: {foreseen.seconds:.1f} + {foreseen.setup_seconds:.1f} s foreseen ({foreseen.slowest_stage}), "
        f"{report.seconds:.1f} + {report.setup_seconds:.1f} s run ({report.slowest_stage})",
        flush=True,
    )
    return {
        "seconds": foreseen.seconds / report.seconds,
        "seconds, set-up included": (foreseen.seconds + foreseen.setup_seconds)
        / (report.seconds + report.setup_seconds),
        "output bytes": foreseen.output_bytes / output.stat().st_size,
        "packing efficiency": foreseen.packing_efficiency / report.packing_efficiency,
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-pictures", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"pictures of each kind": arguments.num_pictures, "cores": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        makers = (photo_folder, stamp_tar, background_table)
        sources = [make(scratch, arguments.num_pictures) for make in makers]
        sources.append(sources[-1])
        warm = vlmembed.EncodeConfig(inputs=(str(sources[0]),), limit=1)
        vlmembed.plan(warm, calibration_seconds=0.1)  # imports are no part of either side
        ratios: dict[str, list[dict[str, float]]] = {kind: [] for kind in SETTINGS}
        for _ in range(arguments.repeats):
            for (kind, settings), source in zip(SETTINGS.items(), sources, strict=True):
                ratios[kind].append(compare(source, scratch / "out.parquet", settings))
    is_kept = True
    for kind, rounds in ratios.items():
        measured = {what: [each[what] for each in rounds] for what in rounds[0]}
        within = all(abs(statistics.median(values) - 1) <= LIMIT for values in measured.values())
        is_kept = is_kept and within
        shown = {what: spread(values) for what, values in measured.items()}
        figures[f"{kind}: foreseen / run, median (min to max)"] = shown | {"within 25 %": within}
    figures["all within 25 %"] = is_kept
    claim = "the time and the output's size that plan foresees are within 25 % of the run that follows"
    print(json.dumps(figures, indent=1))
    print(write_result("plan", claim, arguments.repeats, figures))
    if not is_kept:
        sys.exit("the claim is not kept")


if __name__ == "__main__":
    main()
