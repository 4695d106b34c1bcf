"""Says which stage waits for which when nothing moves, and ends a run that stays like that."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vlmembed.errors import StalledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)


class Watchdog:
    """Watches the moves of a run: rows read, images decoded, packs encoded, parts written.

    After `report_seconds` without a move it logs what `describe` says, then again after twice, four times as long.
    `give_up` gets the `StalledError` after `limit_seconds` without one. A thread that is stuck in foreign code cannot
    be ended from here: `hung` is called when the run has not ended `grace_seconds` later.
    """

    def __init__(
        self,
        describe: Callable[[], str],
        give_up: Callable[[StalledError], None],
        *,
        report_seconds: float,
        limit_seconds: float,
        grace_seconds: float,
        hung: Callable[[], None],
    ) -> None:
        self._describe = describe
        self._give_up = give_up
        self._hung = hung
        self._report_seconds = report_seconds
        self._limit_seconds = limit_seconds
        self._grace_seconds = grace_seconds
        self._still_seconds = 0.0
        self._over = threading.Event()

    def moved(self) -> None:
        """Something has moved."""
        self._still_seconds = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs."""
        self.moved()
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        report_after = self._report_seconds
        tick = min(1.0, self._report_seconds / 4, self._limit_seconds / 4)
        before = time.monotonic()
        while not self._over.wait(tick):
            now = time.monotonic()
            self._still_seconds += min(now - before, 2 * tick)  # time in which the process stood still does not count
            still, before = self._still_seconds, now
            if still < self._report_seconds:
                report_after = self._report_seconds
            if still >= self._limit_seconds:
                self._end(still)
                return
            if still >= report_after:
                logger.error("nothing has moved for %.0f s: %s", still, self._describe())
                report_after *= 2

    def _end(self, still: float) -> None:
        msg = (
            f"nothing has moved for {still:.0f} s, so the run was given up: {self._describe()}. What was committed is "
            "kept, and the same command goes on from there; a larger --timeout waits longer"
        )
        self._give_up(StalledError(msg))
        if not self._over.wait(self._grace_seconds):
            logger.critical("%s", msg)
            self._hung()
