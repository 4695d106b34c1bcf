"""`--log-json`: the events of a run as lines of a file, for job schedulers."""

from __future__ import annotations

import json
import logging
import os
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vlmembed.cli.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_TOO_MANY_ERRORS, EXIT_USAGE
from vlmembed.errors import ConfigError, StorageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Literal

    from vlmembed.config import EncodeConfig
    from vlmembed.events import Event

logger = logging.getLogger(__name__)

HUNG = "nothing has moved for so long that the run was given up, and a thread that hangs kept it from ending"


class EventLog:
    """A file to which every event is appended as one line, by one write, so that a reader finds whole lines.

    With `name` None nothing is written.
    """

    def __init__(self, name: str | None) -> None:
        """Open it, before any work.

        Raises:
            ConfigError: nothing can be appended to it, or it holds something else.
        """
        self._name = name
        self._descriptor: int | None = None
        self._is_cut = False
        self._num_rows_done: int | None = None
        if name is None:
            return
        if name == "-":
            msg = "--log-json - would mix events with results: name a file, or /dev/stderr"
            raise ConfigError(msg)
        try:
            self._is_cut = _ends_within_a_line(name)
            self._descriptor = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
            os.set_blocking(self._descriptor, True)  # only opening must not wait: for the reader of a FIFO
        except OSError as error:
            msg = f"--log-json {name} cannot be written ({error}): name a file in a folder that exists and is writable"
            raise ConfigError(msg) from error

    def write(self, event: Event) -> None:
        """Append an event; with its exit code, where it is the last.

        Raises:
            StorageError: it could not be written.
        """
        if event["event"] == "start":
            self._num_rows_done = event["num_resumed"]
        elif event["event"] == "part":
            self._num_rows_done = event["num_rows_done"]
        elif event["event"] == "end":
            event["exit_code"] = EXIT_TOO_MANY_ERRORS if event["too_many_failed"] else 0
        if self._descriptor is None:
            return
        line = b"\n" * self._is_cut + json.dumps(event, allow_nan=False).encode() + b"\n"
        try:
            written = os.write(self._descriptor, line)
            self._is_cut = written < len(line)
            if self._is_cut:  # the disk is full: the rest says so
                os.write(self._descriptor, line[written:])
                self._is_cut = False
        except OSError as error:
            msg = (
                f"cannot write --log-json {self._name} ({error}): what was committed is kept; make room, and the same "
                "command goes on from there"
            )
            raise StorageError(msg) from error

    def failed(self, error: BaseException | None = None) -> None:
        """Append how the command ends where `error` ends it, or, if that is None, a thread that hangs. A log that
        cannot be written must not hide that."""
        from vlmembed.events import now  # noqa: PLC0415  keeps `--help` light

        status, code = _outcome_of(error)
        try:
            self.write(
                {
                    "event": "error",
                    "time": now(),
                    "status": status,
                    "kind": "StalledError" if error is None else type(error).__name__.lstrip("_"),
                    "message": HUNG if error is None else (str(error) or status),
                    "exit_code": code,
                    "num_rows_done": self._num_rows_done,
                }
            )
        except StorageError as problem:
            logger.error("%s", problem)  # noqa: TRY400  the trace is of no use to anybody

    def close(self) -> None:
        """No event follows."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextmanager
def event_log(name: str | None, config: EncodeConfig) -> Iterator[EventLog]:
    """The log of a run; what passes through the block is its last line.

    Raises:
        ConfigError: as `EventLog`, or it lies where the output is.
    """
    output = Path(config.output)
    if name is not None and os.fspath(config.output) and Path(name).absolute().is_relative_to(output.absolute()):
        msg = f"--log-json {name} lies where the output {output} will be: name another file"
        raise ConfigError(msg)
    log = EventLog(name)
    try:
        yield log
    except (Exception, KeyboardInterrupt) as error:
        log.failed(error)
        raise
    finally:
        log.close()


def _outcome_of(error: BaseException | None) -> tuple[Literal["failed", "usage", "interrupted", "terminated"], int]:
    """What `vlmembed.cli.main` makes of an error."""
    if isinstance(error, KeyboardInterrupt):  # that of SIGTERM is of a class of its own
        interrupted = type(error) is KeyboardInterrupt
        return ("interrupted", EXIT_INTERRUPTED) if interrupted else ("terminated", EXIT_TERMINATED)
    return ("usage", EXIT_USAGE) if isinstance(error, UsageError) else ("failed", EXIT_FAILED)


def _ends_within_a_line(name: str) -> bool:
    """Whether a crash has cut the last line of a log, to which the next must not be joined.

    Raises:
        ConfigError: the file is no log. OSError: it cannot be read.
    """
    try:
        status = os.stat(name)  # noqa: PTH116  as the name was given
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return False
    with open(name, "rb") as file:  # noqa: PTH123  as above
        begin = file.read(1)
        file.seek(-1, os.SEEK_END)
        end = file.read(1)
    if begin not in (b"{", b"\n"):
        msg = f"--log-json {name} exists and is no log of events: name another file"
        raise ConfigError(msg)
    return end != b"\n"
