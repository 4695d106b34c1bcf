"""A request made again after a failure that may pass, with growing pauses and within a bound of time."""

from __future__ import annotations

import logging
import random
import threading
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vlmembed.remote.slots import Pause

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


class Deadline:
    """When a request's time is over, `seconds` from now; for one thread."""

    def __init__(self, seconds: float, pause: Pause = nullcontext) -> None:
        """`pause` is entered in pauses: it stops other clocks that run for this request."""
        self._at = time.monotonic() + seconds
        self._pause = pause

    @property
    def left_seconds(self) -> float:
        """Less than nothing when it is over."""
        return self._at - time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is waited for in here does not count."""
        began_at = time.monotonic()
        try:
            with self._pause():
                yield
        finally:
            self._at += time.monotonic() - began_at


class Retries:
    """Makes requests again. Thread-safe; `close` ends pauses under way."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._closed = threading.Event()

    def close(self) -> None:
        """Begin no further tries."""
        self._closed.set()

    def run(
        self, action: Callable[[Deadline], T], *, timeout_seconds: float | None = None, pause: Pause = nullcontext
    ) -> T:
        """What `action` returns at the first try that does not raise a TransientError.

        It is given its deadline: `timeout_seconds` from now, or, where that is None, what this object was made with. No
        try begins after that. `pause` is as that of `Deadline`.

        Raises:
            OSError: the last try failed as well; or whatever else `action` raised.
        """
        began_at = time.monotonic()
        deadline = Deadline(self._timeout_seconds if timeout_seconds is None else timeout_seconds, pause)
        for attempt in range(1, TRIES + 1):
            try:
                return action(deadline)
            except TransientError as error:
                pause_seconds = _pause_seconds(attempt, error.pause_seconds)
                if attempt < TRIES and pause_seconds < deadline.left_seconds:
                    logger.debug("%s; try %d of %d in %.1f s", error, attempt + 1, TRIES, pause_seconds)
                    if not self._closed.wait(pause_seconds):
                        continue
                tries = "1 try" if attempt == 1 else f"{attempt} tries"
                msg = f"{error} ({tries} in {time.monotonic() - began_at:.1f} seconds)"
                raise OSError(msg) from error
        raise AssertionError


def _pause_seconds(attempt: int, asked_seconds: float | None) -> float:
    seconds: float = FIRST_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)  # noqa: S311  no secret
    return max(seconds, min(asked_seconds or 0.0, MAX_PAUSE_SECONDS))
