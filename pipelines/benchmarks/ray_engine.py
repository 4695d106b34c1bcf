"""Question: what does the engine for clusters cost on one machine, and is another way to embed on Ray or Daft faster?

- Overhead: the whole process ``vlmembed encode FOLDER out.parquet``, on this machine as it is and with a Ray that it
  starts here (``--engine ray --ray-address local``), built-in model, all else by default, on distinct pictures; rounds
  there and back, after one over a few pictures that warms up. Both outputs must be the same bytes. Where the time went
  is told by the events of the run; a process's seconds also hold its imports and the end of Ray.
- Peers: the steady state beside Ray Data's documented recipe and Daft, as in ``peers.py`` (same photos, weights, dtype,
  cores, rounds; start-up taken off). What is counted of our side, ``peer_vlmembed_ray.py`` says. Its parts are smaller
  than by default, where all these pictures would be one part.
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
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from crops import write_crops
from floors import floor, quotients, spread
from peer_ways import PHOTOS
from peers import CPU, PEERS_PYTHON, STAMPS_FOLDER, Arena, choose, distinct, evenly, figures_of, measure, runtimes_here
from photos import fetch_photos
from ray_peers import NUMBER, PEERS, fastest, peer_floor, ray_contests
from record import write_result

from vlmembed.devices import pick_dtype
from vlmembed.finished import read_schema
from vlmembed.schema import read_provenance
from vlmembed.towers.builtin import model_folder

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


def beside_peers(photos: list[Path], scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The steady state of all sides in the same rounds."""
    dtype, threads = pick_dtype("fp32", CPU), torch.get_num_threads()
    settings = {"model": str(model_folder("dinov2-small")), "dtype": dtype, "threads": threads, "scratch": str(scratch)}
    with ExitStack() as stack:
        arena = Arena(stack, settings, arguments.peers_python, {PHOTOS: photos})
        entered = [
            contest
            for contest in ray_contests(dtype, arguments.runtimes, threads, arguments.rows_per_part)
            if not contest.is_foreign or arguments.peers_python.exists()
        ]
        part = max(4, min(32, len(photos) // 2))
        trials = {contest.title: choose(arena, contest, part) for contest in entered}
        chosen = {contest.title: (contest, trials[contest.title][0]) for contest in entered}
        rounds, first = measure(arena, chosen, arguments.peer_repeats)
        figures = figures_of(arena, chosen, rounds, first)
    ours = fastest(rounds, [title for title in rounds if title not in PEERS])
    cosines = {
        title: round(float((first[ours]["vectors"].astype("f8") * first[title]["vectors"]).sum(1).min()), 7)
        for title in PEERS
        if title in first
    }
    finished = [answer["num"] / answer["seconds until the file is finished"] for answer in rounds[ours]]
    return {
        "photos": len(photos),
        "dtype": dtype,
        **figures,
        f"images/s, {ours}, until the file is finished": spread(finished),
        "trials, images/s": {title: found for title, (_, found) in trials.items() if found},
        f"lowest cosine of {ours} to": cosines,
        "floors": [peer_floor(rounds, dtype)],
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-pictures", type=int, default=2000, help="of the whole processes")
    parser.add_argument("--repeats", type=int, default=3, help="of the whole processes")
    parser.add_argument("--num-photos", type=int, default=128, help="beside the peers")
    parser.add_argument("--peer-repeats", type=int, default=3)
    parser.add_argument("--rows-per-part", type=int, default=32, help="beside the peers")
    parser.add_argument("--runtimes", nargs="+", default=runtimes_here(), help="of ours, beside the peers")
    parser.add_argument("--peers-python", type=Path, default=PEERS_PYTHON)
    arguments = parser.parse_args()
    os.environ.pop("RAY_ADDRESS", None)  # no other cluster
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        photos, stamps = fetch_photos(scratch), distinct(list(STAMPS_FOLDER.rglob("*.png")))
        if not stamps:
            msg = f"there are no stamps in {STAMPS_FOLDER}: run `make data` first"
            raise SystemExit(msg)
        peers = beside_peers(evenly(photos, arguments.num_photos), scratch, arguments)
        print(json.dumps(peers, indent=1), flush=True)
        num_bytes = write_crops([*photos, *stamps], scratch / "pictures", arguments.num_pictures)
        write_crops([*photos, *stamps], scratch / "few", NUM_WARM_UP)
        whole = overhead(scratch / "pictures", scratch / "few", scratch, arguments.repeats)
    floors = whole.pop("floors") + peers.pop("floors")
    figures = {
        "overhead": whole | {"mean picture, kB": round(num_bytes / arguments.num_pictures / 1e3, 1)},
        "beside the peers": peers | {"repeats": arguments.peer_repeats},
        "floors": floors,
    }
    claim = "the engine for clusters, on one machine: overhead of whole processes, steady state beside its peers"
    print(json.dumps(figures, indent=1))
    print(write_result("ray_engine", claim, arguments.repeats, figures))


if __name__ == "__main__":
    main()
