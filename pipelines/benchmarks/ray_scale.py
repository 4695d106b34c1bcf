"""Question: how does the engine for clusters grow with the rows, where no picture and no model is in the way?

- The aggregate by hash, over 1, 2 and 4 million hashes that are made of row numbers, one in five repeated. Buckets are
  smaller than the engine's, so that there are several and their number grows with the rows, as it does beyond
  `BUCKET_ROWS`; one more run has them as large as the engine does.
- The driver: parts of 8,192 results of 384 values, gathered, written by tasks and committed. The writing tasks, and the
  one that makes up the results, share the cores of this machine with it: so its own CPU seconds are told apart, which
  bound what one driver could take where others have cores of their own.

A line through all sizes but the largest predicts that one; what was measured stands beside it. Every size has a process
and a Ray of its own, with 2 CPUs; the median of the repeats counts.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
from typing import Any

import numpy as np
import ray
from floors import spread
from ray_hashes import aggregate
from ray_parts import ROWS_PER_PART, drive
from record import write_result

from vlmembed.engines.firsts import BUCKET_ROWS

NUM_CPUS = 2
STORE_BYTES = 2**31
DIGITS = 5


def in_fresh_process(*arguments: object) -> dict[str, Any]:
    """Call this script."""
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        msg = f"{command} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        raise RuntimeError(msg)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print({name: rounded(value) for name, value in found.items()}, flush=True)
    return found


def with_ray(measured: Any, *arguments: int) -> dict[str, Any]:  # noqa: ANN401  a function
    """Its answer, with a Ray on this machine."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        logging_level=logging.ERROR,
    )
    try:
        found: dict[str, Any] = measured(*arguments)
    finally:
        ray.shutdown()
    return found


def rounded(value: float) -> float:
    """To a few significant digits."""
    return float(f"{value:.{DIGITS}g}")


def predicted(runs: dict[int, list[dict[str, Any]]], name: str) -> dict[str, Any]:
    """A line through the medians of all sizes but the last, and what it says of that one."""
    sizes = sorted(runs)
    medians = [statistics.median(each[name] for each in runs[size]) for size in sizes]
    slope, start = np.polyfit(sizes[:-1], medians[:-1], 1).tolist()
    told = start + slope * sizes[-1]
    return {
        "at 0": rounded(start),
        "for each": rounded(slope),
        f"predicted at {sizes[-1]}": rounded(told),
        f"measured at {sizes[-1]}": rounded(medians[-1]),
        "measured / predicted": rounded(medians[-1] / told),
    }


def shown(runs: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """By size: counts, which are the same in all repeats, and spreads of what was measured."""
    return {
        f"{size}": {
            name: value if isinstance(value, int) else spread([each[name] for each in found], DIGITS)
            for name, value in found[0].items()
        }
        for size, found in runs.items()
    }


def measure(sizes: list[int], repeats: int, flag: str, *more: int) -> dict[int, list[dict[str, Any]]]:
    """All sizes in turn, there and back."""
    runs: dict[int, list[dict[str, Any]]] = {size: [] for size in sorted(sizes)}
    for number in range(repeats):
        for size in sorted(runs, reverse=number % 2 == 1):
            runs[size].append(in_fresh_process(flag, size, *more))
    return runs


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 2_000_000, 4_000_000], help="three or more")
    parser.add_argument("--bucket-rows", type=int, default=2**18)
    parser.add_argument("--parts", type=int, nargs="+", default=[25, 50, 100], help="three or more, of two at least")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--aggregate", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--drive", type=int, nargs=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.aggregate:
        print(json.dumps(with_ray(aggregate, *arguments.aggregate)))
        return
    if arguments.drive:
        print(json.dumps(with_ray(drive, *arguments.drive)))
        return
    hashes = measure(arguments.rows, arguments.repeats, "--aggregate", arguments.bucket_rows)
    whole = measure([max(arguments.rows)], arguments.repeats, "--aggregate", BUCKET_ROWS)
    parts = measure(arguments.parts, arguments.repeats, "--drive")
    cpu = predicted(parts, "CPU seconds of the driver")
    figures = {
        "CPUs": NUM_CPUS,
        "aggregate": {
            "rows a bucket": arguments.bucket_rows,
            "by rows": shown(hashes),
            "seconds, by rows": predicted(hashes, "seconds"),
            "peak MB, by rows": predicted(hashes, "peak MB, all processes and the object store"),
            f"with the engine's {BUCKET_ROWS} rows a bucket": shown(whole),
        },
        "driver": {
            "rows a part": ROWS_PER_PART,
            "by parts": shown(parts),
            "seconds, by parts": predicted(parts, "seconds"),
            "CPU seconds of the driver, by parts": cpu,
            "rows for each CPU second of the driver": rounded(ROWS_PER_PART / cpu["for each"]),
        },
    }
    claim = "rows without pictures: the aggregate by hash, and what one driver commits; predicted and measured"
    print(json.dumps(figures, indent=1))
    print(write_result("ray_scale", claim, arguments.repeats, figures))


if __name__ == "__main__":
    main()
