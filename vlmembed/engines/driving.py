"""The loop of the process that has started a run on a cluster: results are taken as they come, parts are committed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from vlmembed.config import STALL_TIMEOUTS
from vlmembed.errors import StoppedError
from vlmembed.parallel import Channel
from vlmembed.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa

    from vlmembed.engines.clusterwork import ClusterWork
    from vlmembed.engines.collecting import Gatherer
    from vlmembed.engines.committing import Committer
    from vlmembed.progress import ProgressBar

BLOCKS_WAITING = 2
WAIT_SECONDS = 0.1

REPORT_SECONDS = 300.0
"""After how long without a result it is said that nothing comes: nodes take their time to start."""

GRACE_SECONDS = 120.0

JOIN_SECONDS = 10.0
"""How long the end of a run that failed waits for the thread that waits for results."""


class Driver:
    """Brings results to the committer. `timeout_seconds` is the run's; `hung` is called where giving up does not end
    it."""

    def __init__(
        self,
        gatherer: Gatherer,
        committer: Committer,
        work: ClusterWork,
        bar: ProgressBar,
        *,
        timeout_seconds: float,
        hung: Callable[[], None],
    ) -> None:
        self._gatherer = gatherer
        self._committer = committer
        self._work = work
        self._bar = bar
        self._stop = threading.Event()
        self._blocks: Channel[pa.Table] = Channel(BLOCKS_WAITING, self._stop)
        self._errors: list[BaseException] = []
        self._watchdog = Watchdog(
            self._describe,
            self._give_up,
            report_seconds=REPORT_SECONDS,
            limit_seconds=max(REPORT_SECONDS, STALL_TIMEOUTS * timeout_seconds),
            grace_seconds=GRACE_SECONDS,
            hung=hung,
        )

    def run(self, results: Callable[[], Iterator[pa.Table]]) -> None:
        """Take all that `results` yields, in a thread of its own, since it waits; return when all is committed.

        Raises:
            BaseException: whatever ended it.
        """
        thread = threading.Thread(target=self._take, args=(results,), name="results", daemon=True)
        with self._watchdog.watching():
            thread.start()
            try:
                for block in self._blocks.polled():
                    if block is not None:
                        self._add(block)
                    self._go_on(0.0)
                self._go_on(0.0)  # parts may wait that an earlier start has written, and nothing else may have come
                while not self._errors and self._committer.is_busy:
                    self._go_on(WAIT_SECONDS)
            except StoppedError:
                pass  # why, is in `_errors`
            finally:
                self._stop.set()
                thread.join(JOIN_SECONDS)
        if self._errors:
            raise self._errors[0]

    def _take(self, results: Callable[[], Iterator[pa.Table]]) -> None:
        try:
            for block in results():
                self._blocks.put(block)
            self._blocks.close()
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001  handed to the main thread, which raises it
            self._give_up(error)

    def _add(self, block: pa.Table) -> None:
        self._watchdog.moved()
        self._work.take_block(block)
        for number, blocks, end in self._gatherer.add(block):
            self._committer.add(number, blocks, end)

    def _go_on(self, seconds: float) -> None:
        if self._committer.go_on(seconds):
            self._watchdog.moved()
            self._work.show(self._bar)

    def _give_up(self, error: BaseException) -> None:
        self._errors.append(error)
        self._stop.set()

    def _describe(self) -> str:
        return (
            f"no results come from the cluster; {self._gatherer.num_open} parts have begun to come, "
            f"{self._committer.describe()} (see `ray status`)"
        )
