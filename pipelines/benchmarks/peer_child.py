"""A side of ``peers.py`` in a process of its own, which works when it is asked and sleeps otherwise.

So every side has its own libraries, thread pools and environment, and none disturbs another. The protocol is a line of
JSON each way on the standard streams: the settings are the only argument, ``{"versions": …}`` is said once, then every
order (`paths`, `way`, and perhaps `vectors`, a file to write them to) is answered with ``seconds`` and what else the
side has to tell. Knows neither torch nor vlmembed: sides run under other environments, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    Run = Callable[[Sequence[str], Mapping[str, Any]], tuple[dict[str, Any], np.ndarray | None]]

FOLDER = Path(__file__).parent
PACKAGES = ("torch", "transformers", "pillow", "pyarrow", "openvino", "daft", "ray")
GOODBYE_SECONDS = 30.0


def serve(open_side: Callable[[dict[str, Any]], Run]) -> None:
    """Be a side: `open_side` gets the settings and returns what runs a way over paths; that returns its figures and the
    vectors, float (N, D), in the order of the paths."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    run = open_side(json.loads(sys.argv[1]))
    say({"versions": installed()})
    for line in sys.stdin:
        order = json.loads(line)
        figures, vectors = run(order["paths"], order["way"])
        if order.get("vectors") and vectors is not None:
            np.save(order["vectors"], vectors)
        say({"num": len(order["paths"]), **figures})


def installed() -> dict[str, str]:
    """Versions of what a side may use, as far as it is there."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


class Side:
    """A running side, as ``peers.py`` sees it.

    Attributes:
        startup_seconds: from starting the process until it was ready: imports, and what it loads once.
        versions: what it runs on.
    """

    def __init__(self, script: str, python: str, settings: Mapping[str, Any], log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            began = time.perf_counter()
            self._process = subprocess.Popen(
                [python, str(FOLDER / script), json.dumps(dict(settings))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": str(settings["threads"])},
            )
        self.versions: dict[str, str] = self._answer()["versions"]
        self.startup_seconds = time.perf_counter() - began

    def run(self, paths: Sequence[Path], way: Mapping[str, Any], vectors: Path | None = None) -> dict[str, Any]:
        """Let it run one way over the pictures; ends when it has answered."""
        order = {"paths": [str(path) for path in paths], "way": dict(way), "vectors": vectors and str(vectors)}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _fail(self) -> NoReturn:
        self.close()
        tail = self._log.read_text(errors="replace")[-2000:]
        msg = f"{self._process.args!r:.200} ended with {self._process.returncode}:\n{tail}"
        raise RuntimeError(msg)

    def close(self) -> None:
        """End it: its standard input is at its end, so it leaves its loop."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        try:
            self._process.wait(GOODBYE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
