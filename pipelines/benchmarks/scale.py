"""Question: do time per row and memory stay what they are when there are more rows, and what does the dedup index take?

Runs with the null tower over 10,000, 100,000 and 1,000,000 different pictures of 32x32 in Parquet, each in a process of
its own, after a short run that warms it up. Memory is the peak of the process over what it held before its first run.
The index is filled with 10,000,000 hashes, in a process of its own too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from floors import floor, spread
from null_tower import null_tower, small_layout
from record import write_result
from small_images import write_pictures

import vlmembed
from vlmembed.dedup import HashIndex

WARM_UP_ROWS = 2000
NUM_LOOKUPS = 100_000
DECODERS = 2


def memory_mb(name: str) -> float:
    """Of this process, as Linux counts it: ``VmRSS`` now, ``VmHWM`` at most so far."""
    (kilobytes,) = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(kilobytes) / 1e3


def run_rows(parquet: Path, scratch: Path, limit: int) -> float:
    """Seconds of a run over the first rows."""
    config = vlmembed.EncodeConfig(
        inputs=(str(parquet),),
        output=str(scratch / "out.parquet"),
        limit=limit,
        workers=DECODERS,
        normalize=False,
        overwrite=True,
    )
    with null_tower(small_layout()):
        report = vlmembed.encode(config)
    assert report.num_encoded == limit
    return report.seconds


def one_run(parquet: Path, num_rows: int) -> dict[str, float]:
    """Microseconds a row, and memory; to be called in a fresh process."""
    idle_mb = memory_mb("VmRSS")
    with tempfile.TemporaryDirectory(dir=parquet.parent) as name:
        run_rows(parquet, Path(name), WARM_UP_ROWS)
        warm_mb = memory_mb("VmHWM")
        seconds = run_rows(parquet, Path(name), num_rows)
    return {
        "us a row": seconds / num_rows * 1e6,
        "MB over idle": memory_mb("VmHWM") - idle_mb,
        "of these after the warm-up": memory_mb("VmHWM") - warm_mb,
    }


def hash_of(number: int) -> bytes:
    """A content hash; another number has another one."""
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def lookup_ns(index: HashIndex, num_known: int) -> float:
    """Of a hash that is known, anywhere among all; making the hash is left out."""
    hashes = [hash_of(number) for number in np.random.default_rng(0).integers(0, num_known, NUM_LOOKUPS).tolist()]
    began = time.perf_counter()
    for content_hash in hashes:
        index.first_row(content_hash, -1)
    return (time.perf_counter() - began) / NUM_LOOKUPS * 1e9


def fill_index(scratch: Path, num_hashes: int) -> dict[str, Any]:
    """What the index takes, and how long, on the way to so many hashes; to be called in a fresh process."""
    found: dict[str, Any] = {}
    idle_mb = memory_mb("VmRSS")
    path, number = scratch / "index", 0
    with HashIndex(path) as index:
        for stop in (num_hashes // 10, num_hashes):
            while number < stop - NUM_LOOKUPS:
                index.first_row(hash_of(number), number)
                number += 1
            last = [hash_of(each) for each in range(number, stop)]
            began = time.perf_counter()
            for content_hash in last:
                index.first_row(content_hash, number)
                number += 1
            insert_ns = (time.perf_counter() - began) / len(last) * 1e9
            del last
            found[f"{stop} hashes"] = {
                "ns for a new one": insert_ns,
                "ns for a known one": lookup_ns(index, stop),
                "bytes in memory, each": (memory_mb("VmRSS") - idle_mb) * 1e6 / stop,
                "bytes in memory at most, each": (memory_mb("VmHWM") - idle_mb) * 1e6 / stop,
                "bytes on disk, each": path.stat().st_size / stop,
            }
    return found


def in_fresh_process(*arguments: object) -> Any:  # noqa: ANN401  what was printed there, as JSON
    """Call this script."""
    command = [sys.executable, __file__, *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def measure_runs(sizes: list[int], repeats: int) -> dict[str, Any]:
    """Every size, the small ones several times."""
    found: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory() as name:
        parquet = Path(name) / "pictures.parquet"
        write_pictures(parquet, max(sizes))
        for number in range(repeats):
            for size in sizes:
                if size * number < max(sizes):
                    found[size].append(in_fresh_process("--one-run", parquet, size))
                    print(size, {key: round(value, 1) for key, value in found[size][-1].items()}, flush=True)
    figures: dict[str, Any] = {
        f"{size} rows": {key: spread([each[key] for each in runs]) for key in runs[0]} for size, runs in found.items()
    }
    few, many = found[min(sizes)], found[max(sizes)]
    base = statistics.median(each["us a row"] for each in few)
    least_mb = min(each["MB over idle"] for each in few)
    rows = f"{min(sizes):,} to {max(sizes):,} rows of small pictures, null tower"
    floors = [
        floor("scale", f"time a row, {rows}", [each["us a row"] / base for each in many], at_most=1.1),
        floor("scale", f"peak memory, {rows}", [each["MB over idle"] / least_mb for each in many], at_most=1.1),
        floor(
            "memory",
            f"peak MB over the idle process, {max(sizes):,} rows, index included",
            [each["MB over idle"] for each in many],
            at_most=400,
        ),
    ]
    return figures | {"floors": floors}


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="ascending")
    parser.add_argument("--repeats", type=int, default=3, help="of all sizes but the largest")
    parser.add_argument("--hashes", type=int, default=10_000_000)
    parser.add_argument("--one-run", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--fill-index", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one_run:
        print(json.dumps(one_run(Path(arguments.one_run[0]), int(arguments.one_run[1]))))
        return
    if arguments.fill_index:
        print(json.dumps(fill_index(Path(arguments.fill_index[0]), int(arguments.fill_index[1]))))
        return
    with tempfile.TemporaryDirectory() as name:
        index = in_fresh_process("--fill-index", name, arguments.hashes)
    rounded = {size: {key: round(value, 1) for key, value in each.items()} for size, each in index.items()}
    print(json.dumps(rounded, indent=1), flush=True)
    runs = measure_runs(arguments.rows, arguments.repeats)
    last = index[f"{arguments.hashes} hashes"]
    taken = last["bytes in memory at most, each"] + last["bytes on disk, each"]
    what = f"bytes a content in the dedup index, memory and disk, {arguments.hashes:,} of them"
    floors = [*runs.pop("floors"), floor("memory", what, [taken], at_most=100)]
    figures = {"runs": runs, "index": rounded, "floors": floors}
    claim = "time a row and memory by the number of rows, with the null tower; the dedup index"
    print(json.dumps(figures, indent=1))
    print(write_result("scale", claim, arguments.repeats, figures))


if __name__ == "__main__":
    main()
