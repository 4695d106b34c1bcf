"""Fuzzes in child processes, so that a crash, a hang or a lack of memory is a finding and not the end of the run.

A target is a module in this folder with `EXAMPLES`, a hypothesis strategy of bytes, and `check(data)`, which raises if
something is wrong with what the product makes of them.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_MEMORY_BYTES = 2 * 2**30
"""Beyond what the child has mapped when it starts."""

EXAMPLE_SECONDS = 30
CHILD_SECONDS = 60.0
EXAMPLES_PER_ROUND = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Crash:
    """What went wrong with an example."""

    seed: int
    reason: str
    example: bytes


@dataclass(kw_only=True, slots=True)
class FuzzReport:
    """What a fuzz run came to."""

    num_examples: int = 0
    crashes: list[Crash] = field(default_factory=list)


def fuzz(target: str, seconds: float, seed: int, example_seconds: int = EXAMPLE_SECONDS) -> FuzzReport:
    """Fuzz a module of this folder for so long; the same seed makes the same examples, as far as the time lets them."""
    report = FuzzReport()
    deadline = time.monotonic() + seconds
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}
    while (left := deadline - time.monotonic()) > 0:
        with tempfile.TemporaryDirectory() as folder:
            arguments = [target, str(seed), str(min(left, CHILD_SECONDS)), str(example_seconds), folder]
            child = subprocess.run(
                [sys.executable, __file__, *arguments],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=CHILD_SECONDS + 10 * example_seconds,
                check=False,
            )
            done = Path(folder) / "count"
            report.num_examples += int(done.read_text()) if done.exists() else 0
            if child.returncode:
                example = Path(folder) / "example"
                how = signal.Signals(-child.returncode).name if child.returncode < 0 else "raised"
                reason = f"{how}\n{child.stderr.decode(errors='replace')[-4000:]}"
                content = example.read_bytes() if example.exists() else b""
                report.crashes.append(Crash(seed=seed, reason=reason, example=content))
        seed += 1
    return report


def _child(target: str, seed: int, seconds: float, example_seconds: int, folder: Path) -> None:
    """Try examples until the time is over. What is tried lies in the folder, for whoever finds this process dead."""
    import hypothesis  # noqa: PLC0415  of the child alone

    module = importlib.import_module(target)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MAX_MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    deadline = time.monotonic() + seconds
    count = 0

    def one(data: bytes) -> None:
        nonlocal count
        (folder / "example").write_bytes(data)
        signal.alarm(example_seconds)  # its default action ends the process, whatever that is stuck in
        module.check(data)
        signal.alarm(0)
        count += 1
        (folder / "count").write_text(str(count))

    settings = hypothesis.settings(
        max_examples=EXAMPLES_PER_ROUND,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    for number in range(10**9):
        if time.monotonic() > deadline:
            break
        test: Callable[[], None] = settings(hypothesis.given(module.EXAMPLES)(one))  # type: ignore[no-untyped-call]
        hypothesis.seed(seed * 10**6 + number)(test)()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        _child(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
    except BaseException:  # noqa: BLE001  a finding, whatever it is
        traceback.print_exc()
        sys.exit(1)
