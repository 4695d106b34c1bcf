"""A request made again after a failure that may pass, with growing pauses and within a bound of time."""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

logger = logging.getLogger(__name__)

TRIES = 4
FIRST_PAUSE_SECONDS = 0.5
"""Before the second try; twice as long before each further one, less up to a half by chance, so that many that failed
together do not come back together."""

MAX_PAUSE_SECONDS = 20.0
"""Limit of what a server can ask for by Retry-After."""


class TransientError(OSError):
    """A failure that may pass: the request is worth another try.

    Attributes:
        pause_seconds: what the server asked to wait, or None.
    """

    def __init__(self, message: str, pause_seconds: float | None = None) -> None:
        super().__init__(message)
        self.pause_seconds = pause_seconds


class Retries:
    """Makes requests again. Thread-safe; `close` ends pauses under way."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._closed = threading.Event()

    def close(self) -> None:
        """Begin no further tries."""
        self._closed.set()

    def run(self, action: Callable[[float], T], *, timeout_seconds: float | None = None) -> T:
        """What `action` returns at the first try that does not raise a TransientError.

        It is given the time, by `time.monotonic`, at which its time is over: `timeout_seconds` from now, or, where that
        is None, what this object was made with. No try begins after that.

        Raises:
            OSError: the last try failed as well; or whatever else `action` raised.
        """
        began_at = time.monotonic()
        deadline = began_at + (self._timeout_seconds if timeout_seconds is None else timeout_seconds)
        for attempt in range(1, TRIES + 1):
            try:
                return action(deadline)
            except TransientError as error:
                pause = _pause_seconds(attempt, error.pause_seconds)
                if attempt < TRIES and time.monotonic() + pause < deadline:
                    logger.debug("%s; try %d of %d in %.1f s", error, attempt + 1, TRIES, pause)
                    if not self._closed.wait(pause):
                        continue
                tries = "1 try" if attempt == 1 else f"{attempt} tries"
                msg = f"{error} ({tries} in {time.monotonic() - began_at:.1f} seconds)"
                raise OSError(msg) from error
        raise AssertionError


def _pause_seconds(attempt: int, asked_seconds: float | None) -> float:
    seconds: float = FIRST_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)  # noqa: S311  no secret
    return max(seconds, min(asked_seconds or 0.0, MAX_PAUSE_SECONDS))
