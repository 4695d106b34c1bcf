"""A process of one's own: a fresh interpreter that serves this process through a pipe, and ends when this one does."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

CLOSE_SECONDS = 10.0
"""How long a process may take to end by itself."""

_START = "import sys; sys.path[:] = {path!r}; from vlmembed.child import serve; serve({module!r}, {arguments!r})"


class Child:
    """A process that runs `main` of a module, and the way to it.

    Attributes:
        connection: this end of the pipe. The other end's file number is the first argument of `main`.
    """

    def __init__(self, module: str, *arguments: object, descriptors: Sequence[int] = ()) -> None:
        """Start `module.main(socket, *arguments)`; `arguments` are literals, `descriptors` files to be open there too.

        Raises:
            OSError: no process could be started.
        """
        self.is_killed = False
        self.connection, theirs = multiprocessing.Pipe()
        code = _START.format(path=sys.path, module=module, arguments=(theirs.fileno(), *arguments))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until `serve` ignores it
        try:
            self.process = subprocess.Popen(  # noqa: S603  not a fork, which CUDA and threads cannot take; nor the caller's script anew
                [sys.executable, "-c", code],
                pass_fds=(theirs.fileno(), *descriptors),
                stdin=subprocess.PIPE,  # nothing is ever written: see `_end_with_parent`
                stdout=2,  # stderr, whatever `sys.stderr` is now: stdout is for results
            )
        except BaseException:
            self.connection.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    @property
    def is_alive(self) -> bool:
        """Neither ended nor killed."""
        return not self.is_killed and self.process.poll() is None

    def exit(self) -> str:
        """How it ended, for people."""
        try:
            code = self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            return "it does not answer"
        if code == -signal.SIGKILL:
            return "killed; where memory is short, by the system"
        if code >= 0:
            return f"exit code {code}"
        with suppress(ValueError):  # not all numbers have a name
            return f"signal {signal.Signals(-code).name}"
        return f"signal {-code}"

    def kill(self) -> None:
        """End the process at once, stopped or not. Whoever waits for its answer finds the connection closed."""
        self.is_killed = True
        self.process.kill()

    def close(self) -> None:
        """End the process: kindly, and if it does not hear, by force."""
        self.connection.close()
        try:
            self.process.wait(CLOSE_SECONDS if self.process.poll() is None else 0)
        except subprocess.TimeoutExpired:
            self.kill()
            with suppress(subprocess.TimeoutExpired):  # not even that, where a disk does not answer
                self.process.wait(CLOSE_SECONDS)
        assert self.process.stdin is not None
        self.process.stdin.close()


def close_all(children: Sequence[Child]) -> None:
    """End processes, all at a time."""
    for child in children:
        child.connection.close()
    for child in children:
        child.close()


def serve(module: str, arguments: tuple[object, ...]) -> None:
    """Run `main` of a module, in the process that was started for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the parent decides
    _end_with_parent()
    import_module(module).main(*arguments)


def _end_with_parent() -> None:
    """Let the system end this process as soon as the other end of its stdin is closed, as it is when the parent dies.

    A process that waits for its parent finds the connection closed by itself; one that hangs in the middle of foreign
    code, perhaps with the interpreter's lock held, hears of nothing else.
    """
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)  # SIGIO, which ends a process
    if select.select([0], [], [], 0)[0]:
        sys.exit("the process that started this one has ended")
