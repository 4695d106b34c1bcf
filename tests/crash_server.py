"""Starts runs that are killed: a process that has torch loaded, and forks one for every run.

Reads one JSON line per run from stdin: ``config``, and how it is to end: ``kill_after_seconds`` (SIGKILL), or
``die_at_operation`` (the process is gone at so many file operations, without any clean-up), or ``max_file_bytes`` (no
file may grow larger: a full disk), or ``breaks`` (a decoder that some pictures crash, see `breaking`). Answers with a
JSON line: ``code`` (of the exit, negative for a signal), ``seconds``, ``operations``, ``said`` (stderr).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

from breaking import BreakingPatcher

if TYPE_CHECKING:
    from collections.abc import Callable

DEAD = 99
"""Exit code of a process that has died at an operation."""

OPERATIONS = ("fsync", "replace", "unlink", "rmdir", "ftruncate")


def count_operations(die_at: int | None, counter: Any) -> None:  # noqa: ANN401  a shared ctypes value
    """Count what changes files; stop existing at one of them."""

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401  as the one it stands for
            counter.value += 1
            if counter.value == die_at:
                os._exit(DEAD)
            return function(*arguments, **options)

        return operation

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))


def child(order: dict[str, Any], counter: Any) -> None:  # noqa: ANN401  see above
    """The run itself."""
    import vlmembed.run  # noqa: PLC0415  loaded by then
    import vlmembed.stages  # noqa: PLC0415  the same
    from vlmembed.config import EncodeConfig  # noqa: PLC0415
    from vlmembed.errors import VlmembedError  # noqa: PLC0415

    if order.get("max_file_bytes"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["max_file_bytes"],) * 2)
    if order.get("breaks"):
        vlmembed.stages.Patcher = BreakingPatcher  # type: ignore[attr-defined]
    count_operations(order.get("die_at_operation"), counter)
    try:
        vlmembed.run.encode(EncodeConfig.from_dict(order["config"]))
    except VlmembedError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Fork, kill in time, wait."""
    import multiprocessing  # noqa: PLC0415  only the shared value

    counter = multiprocessing.RawValue("i", 0)
    with tempfile.TemporaryFile("w+") as said:
        began = time.monotonic()
        process = os.fork()
        if process == 0:
            os.dup2(said.fileno(), 2)
            child(order, counter)
        timer = None
        if (seconds := order.get("kill_after_seconds")) is not None:
            timer = threading.Timer(seconds, os.kill, (process, signal.SIGKILL))
            timer.start()
        _, status = os.waitpid(process, 0)
        if timer is not None:
            timer.cancel()
            timer.join()
        said.seek(0)
        return {
            "code": os.waitstatus_to_exitcode(status),
            "seconds": time.monotonic() - began,
            "operations": counter.value,
            "said": said.read(),
        }


def main() -> None:
    """Serve until stdin ends."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import transformers.models.dinov2.modeling_dinov2  # noqa: F401, PLC0415  so that no child has to

    import vlmembed.run  # noqa: F401, PLC0415

    for line in sys.stdin:
        answer = run(json.loads(line))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
