"""`make fuzz`: both targets in turn, a minute each, until the time is over. Crashers are kept in ``out/fuzz``."""

from __future__ import annotations

import argparse
import hashlib
import secrets
import sys
import time
from pathlib import Path

import fuzzing

TARGETS = ("fuzz_parquet", "fuzz_decode")
TURN_SECONDS = 60.0


def main() -> None:
    """Fuzz; exit code 1 if anything was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None, help="the same one makes the same examples")
    arguments = parser.parse_args()
    seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed
    sys.stdout.write(f"seed {seed}\n")
    kept = Path("out/fuzz")
    num_crashes = 0
    deadline = time.monotonic() + arguments.seconds
    counts = dict.fromkeys(TARGETS, 0)
    while (left := deadline - time.monotonic()) > 1:
        for target in TARGETS:
            report = fuzzing.fuzz(target, min(TURN_SECONDS, left / len(TARGETS)), seed)
            counts[target] += report.num_examples
            for crash in report.crashes:
                kept.mkdir(parents=True, exist_ok=True)
                path = kept / f"{target}-{hashlib.sha256(crash.example).hexdigest()[:12]}"
                path.write_bytes(crash.example)
                num_crashes += 1
                sys.stdout.write(f"{target}, seed {crash.seed}, example in {path}:\n{crash.reason}\n")
        seed += 100
    sys.stdout.write(f"{counts} examples, {num_crashes} findings\n")
    sys.exit(bool(num_crashes))


if __name__ == "__main__":
    main()
