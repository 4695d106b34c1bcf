"""A thread that does one job after the other, such as uploads, away from the one that asks for them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""How long a wait may keep Ctrl-C from getting through."""


class Uploader:
    """Jobs wait without a bound: what they upload is on the disk already, so a slow network holds nothing up before
    the end. The first error ends all that is left; whoever asks next gets it."""

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._is_busy = False
        self._is_over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="uploader", daemon=True)

    def submit(self, job: Callable[[], None]) -> None:
        """Have something done; raises what an earlier job has raised."""
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._thread.ident is None:
                self._thread.start()
            self._jobs.append(job)
            self._changed.notify_all()

    def wait(self) -> None:
        """Until all is done; raises what a job has raised."""
        with self._changed:
            if self._jobs:
                logger.info("%d uploads are still to be done", len(self._jobs))
            while (self._jobs or self._is_busy) and self._error is None:
                self._changed.wait(POLL_SECONDS)
            if self._error is not None:
                raise self._error

    def close(self, timeout_seconds: float) -> bool:
        """Begin no other job; tells whether the one at hand has ended within this time."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001  handed to whoever asks next
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            while not self._jobs and not self._is_over:
                self._changed.wait()
            if self._is_over:
                return None
            self._is_busy = True
            return self._jobs.popleft()
