"""Question: what does the engine for clusters cost on one machine?

The whole process ``vlmembed encode FOLDER out.parquet``, on this machine as it is and with a Ray that it starts here
(``--engine ray --ray-address local``), built-in model, all else by default, on distinct pictures; rounds there and
back, after one over a few pictures that warms up. Both outputs must be the same bytes. Where the time went is told by
the events of the run; a process's seconds also hold its imports and the end of Ray.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from crops import write_crops
from floors import floor, quotients, spread
from peers import STAMPS_FOLDER, distinct
from photos import fetch_photos
from ray_peers import NUMBER
from record import write_result

from vlmembed.finished import read_schema
from vlmembed.schema import read_provenance

MOST_OVERHEAD = 1.3
ENGINES = {"local": ["--engine", "local"], "ray": ["--engine", "ray", "--ray-address", "local"]}
NUM_WARM_UP = 8
FILES = ("out.parquet", "out.errors.parquet")


def one_process(engine: str, pictures: Path, folder: Path) -> dict[str, Any]:
    """Run the command in a new `folder`: seconds, where they went, and hashes of what it wrote."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "vlmembed", "encode", str(pictures), "out.parquet", *ENGINES[engine]]
    command += ["--log-json", "events.jsonl", "--no-progress"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    at, began = time.time(), time.perf_counter()
    with (folder / "stderr.txt").open("wb") as errors:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=errors, check=False
        )
    seconds = time.perf_counter() - began
    if done.returncode:
        msg = f"{command} ended with {done.returncode}:\n{(folder / 'stderr.txt').read_text()[-2000:]}"
        raise RuntimeError(msg)
    return {
        "seconds": seconds,
        **where_it_went((folder / "events.jsonl").read_text(), at, at + seconds),
        "runtime": read_provenance(read_schema(folder / FILES[0]), FILES[0])["backend"]["runtime"],
        "sha256": [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES],
    }


def where_it_went(log: str, began: float, ended: float) -> dict[str, Any]:
    """Of the events of one run: seconds between the process's beginning, `start`, the parts, and the process's end."""
    events = [json.loads(line) for line in log.splitlines()]
    times = [datetime.fromisoformat(event["time"]).timestamp() for event in events]
    parts = [number for number, event in enumerate(events) if event["event"] == "part"]
    first, last = parts[0], parts[-1]
    rows = sum(events[number]["num_rows"] for number in parts[1:])
    told = {
        "s until the model is loaded": times[0] - began,
        "of these setup_seconds of the report": events[-1]["report"]["setup_seconds"],
        "s from there to the first part": times[first] - times[0],
        "s from the first part to the last": times[last] - times[first],
        "s after the last part": ended - times[last],
    }
    return told | ({"images/s between parts": rows / (times[last] - times[first])} if rows else {})


def overhead(pictures: Path, few: Path, scratch: Path, repeats: int) -> dict[str, Any]:
    """Both engines in turn."""
    rounds: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
    warm = {engine: one_process(engine, few, scratch / f"{engine}-warm") for engine in ENGINES}
    for number in range(repeats):
        for engine in sorted(ENGINES, key=list(ENGINES).index, reverse=number % 2 == 1):
            rounds[engine].append(one_process(engine, pictures, scratch / f"{engine}-{number}"))
            print(number, engine, rounds[engine][-1], flush=True)
    answers = [answer for of_engine in rounds.values() for answer in of_engine]
    runtimes = {answer["runtime"] for answer in answers}
    outputs = {tuple(answer["sha256"]) for answer in answers}
    if len(outputs) != 1:
        msg = f"{len(answers)} runs wrote {len(outputs)} different outputs (runtimes: {sorted(runtimes)})"
        raise RuntimeError(msg)
    seconds = {engine: [answer["seconds"] for answer in of_engine] for engine, of_engine in rounds.items()}
    names = [name for name, value in rounds["ray"][0].items() if isinstance(value, float) and name != "seconds"]
    num = len(list(pictures.iterdir()))
    return {
        "pictures": num,
        "runtime, as decided": sorted(runtimes),
        "outputs of all runs are the same bytes": True,
        "s, whole process": {engine: spread(values) for engine, values in seconds.items()},
        "s, whole process, more with Ray": spread(
            [ray - local for ray, local in zip(seconds["ray"], seconds["local"], strict=True)]
        ),
        f"s, whole process, {NUM_WARM_UP} pictures, once": {
            engine: round(answer["seconds"], 2) for engine, answer in warm.items()
        },
        "where it went": {
            engine: {name: spread([answer[name] for answer in of_engine]) for name in names if name in of_engine[0]}
            for engine, of_engine in rounds.items()
        },
        "floors": [
            floor(
                NUMBER,
                f"wall time of the whole process on one machine, {num:,} pictures, --engine ray / local",
                quotients(seconds["ray"], seconds["local"]),
                at_most=MOST_OVERHEAD,
            )
        ],
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-pictures", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    os.environ.pop("RAY_ADDRESS", None)  # no other cluster
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        photos, stamps = fetch_photos(scratch), distinct(list(STAMPS_FOLDER.rglob("*.png")))
        if not stamps:
            msg = f"there are no stamps in {STAMPS_FOLDER}: run `make data` first"
            raise SystemExit(msg)
        num_bytes = write_crops([*photos, *stamps], scratch / "pictures", arguments.num_pictures)
        write_crops([*photos, *stamps], scratch / "few", NUM_WARM_UP)
        figures = overhead(scratch / "pictures", scratch / "few", scratch, arguments.repeats)
    figures |= {"mean picture, kB": round(num_bytes / arguments.num_pictures / 1e3, 1)}
    claim = "the engine for clusters, on one machine: what it adds to whole processes"
    print(json.dumps(figures, indent=1))
    print(write_result("ray_engine", claim, arguments.repeats, figures))


if __name__ == "__main__":
    main()
