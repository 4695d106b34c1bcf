"""Question: what does a second run cost, and one over 1 % more files, with ``--cache`` and with ``--reuse``?

2,000 distinct pictures (crops of the food photos, JPEG), the built-in model, files in and Parquet out. Start-up
(listing, importing, loading the model) is left out on all sides: it is what a run costs that has nothing to do.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from floors import quotients, spread
from photos import fetch_photos
from PIL import Image
from record import write_result

import vlmembed

CROPS_PER_PHOTO = 5


def make_pictures(photos: list[Path], folder: Path, count: int) -> list[Path]:
    """Distinct crops of the photos, of 60 to 100 % of their sides."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    made: list[Path] = []
    for number in range(CROPS_PER_PHOTO):
        for photo in photos[: count - len(made)]:
            with Image.open(photo) as opened:
                image = opened.convert("RGB")
            width, height = (int(side * generator.uniform(0.6, 1.0)) for side in image.size)
            left, top = generator.integers(0, image.width - width + 1), generator.integers(0, image.height - height + 1)
            path = folder / f"{photo.stem}-{number}.jpg"
            image.crop((left, top, left + width, top + height)).save(path, quality=90)
            made.append(path)
    assert len(made) == count
    return made


def encode(inputs: list[Path], output: Path, **settings: Any) -> vlmembed.RunReport:  # noqa: ANN401
    """One run of vlmembed."""
    names = tuple(str(path) for path in inputs)
    return vlmembed.encode(vlmembed.EncodeConfig(inputs=names, output=str(output), overwrite=True, **settings))


def largest_difference(first: Path, second: Path) -> float:
    """Over all values of the rows that both have."""
    ours, theirs = (
        dict(zip(table["id"].to_pylist(), np.array(table["embedding"].to_pylist(), np.float32), strict=True))
        for table in (pq.read_table(path, columns=["id", "embedding"]) for path in (first, second))
    )
    return max(float(np.abs(ours[key] - theirs[key]).max()) for key in ours.keys() & theirs.keys())


def measure(pictures: Path, more: list[Path], scratch: Path, repeats: int) -> dict[str, Any]:
    """The runs of one round after the other; every round begins without a cache."""
    seconds: dict[str, list[float]] = {}
    differences: list[float] = []
    for number in range(repeats):
        cache = scratch / f"cache-{number}"
        first = encode([pictures], scratch / "first.parquet", cache=str(cache))
        second = encode([pictures], scratch / "second.parquet", cache=str(cache))
        reused = encode([pictures], scratch / "reused.parquet", reuse=(str(scratch / "first.parquet"),))
        assert (second.num_encoded, second.num_found, reused.num_encoded) == (0, first.num_encoded, 0)
        differences += [
            largest_difference(scratch / "first.parquet", scratch / name)
            for name in ("second.parquet", "reused.parquet")
        ]
        moved = [path.rename(pictures / path.name) for path in more]
        grown = encode([pictures], scratch / "grown.parquet", cache=str(cache))
        for path, original in zip(moved, more, strict=True):
            path.rename(original)
        assert grown.num_encoded == len(more)
        runs = {"first": first, "second, --cache": second, "second, --reuse": reused, "1 % more, --cache": grown}
        for name, report in runs.items():
            seconds.setdefault(name, []).append(report.seconds)
        print(number, {name: round(report.seconds, 2) for name, report in runs.items()}, flush=True)
    first_seconds = seconds["first"]
    return {
        "seconds, median (min to max)": {name: spread(each) for name, each in seconds.items()},
        "first / second, --cache": spread(quotients(first_seconds, seconds["second, --cache"])),
        "first / second, --reuse": spread(quotients(first_seconds, seconds["second, --reuse"])),
        "1 % more / first": spread(quotients(seconds["1 % more, --cache"], first_seconds)),
        "largest difference of a value, first to second": max(differences),
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-pictures", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        count = arguments.num_pictures
        made = make_pictures(fetch_photos(scratch), scratch / "pictures", count + count // 100)
        (scratch / "more").mkdir()
        more = [path.rename(scratch / "more" / path.name) for path in made[count:]]
        figures = {"pictures": count, "more": len(more)} | measure(
            scratch / "pictures", more, scratch, arguments.repeats
        )
    claim = "a second run over the same pictures, and one over 1 % more, beside the first"
    print(json.dumps(figures, indent=1))
    print(write_result("cache", claim, arguments.repeats, figures))


if __name__ == "__main__":
    main()
