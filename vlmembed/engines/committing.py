"""Whole parts are written by tasks, when the earlier ones that they take vectors from are, and committed in order."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from vlmembed.engines.cluster import own_error
from vlmembed.engines.tasks import write_task
from vlmembed.errors import AccountingError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vlmembed.engines.blocks import PartEnd
    from vlmembed.engines.clusterwork import ClusterWork
    from vlmembed.engines.orders import RunOrder
    from vlmembed.engines.tasks import RemoteKnown
    from vlmembed.partfiles import PartRecord
    from vlmembed.parts import PartStore

logger = logging.getLogger(__name__)

CANCEL_SECONDS = 60.0


class Committer:
    """Writes and commits the parts of one run. At most `max_running` are written at a time."""

    def __init__(
        self,
        order: RunOrder,
        store: PartStore,
        known: RemoteKnown | None,
        work: ClusterWork,
        on_commit: Callable[[PartRecord], None],
        *,
        max_running: int,
        max_tries: int,
    ) -> None:
        self._store = store
        self._known = known
        self._work = work
        self._on_commit = on_commit
        self._max_running = max_running
        self._order = ray.put(order)
        self._task: Any = ray.remote(num_cpus=0, max_retries=max_tries, scheduling_strategy="SPREAD")(write_task)
        self._waiting: dict[int, tuple[Sequence[Any], PartEnd]] = {}
        self._running: dict[Any, tuple[int, PartEnd]] = {}
        self._written = store.noted()
        for record in store.records:
            work.take_record(record)

    def is_written(self, number: int) -> bool:
        """Whether a part's files are there."""
        return number < len(self._store.records) or number in self._written

    @property
    def is_busy(self) -> bool:
        """Whether a part is being written, or can be. (Others wait for one that is to be fed again.)"""
        return bool(self._running) or any(self._can_start(number) for number in self._waiting)

    def describe(self) -> str:
        """What there is to do, for people."""
        return f"{len(self._running)} parts are being written, {len(self._waiting)} wait for earlier ones"

    def add(self, number: int, blocks: Sequence[Any], end: PartEnd) -> None:
        """A part is whole: `blocks` are references to all of it."""
        self._waiting[number] = blocks, end

    def _can_start(self, number: int) -> bool:
        return all(self.is_written(each) for each in self._waiting[number][1].needs)

    def go_on(self, seconds: float) -> bool:
        """Start what can be started, wait so long for what runs, commit what is next; whether anything moved.

        Raises:
            RayError: a part could not be written.
        """
        for number in sorted(self._waiting):
            if len(self._running) >= self._max_running:
                break
            if self._can_start(number):
                blocks, end = self._waiting.pop(number)
                self._running[self._task.remote(self._order, self._known, number, *blocks)] = number, end
        done = ray.wait(list(self._running), num_returns=1, timeout=seconds)[0] if self._running else []
        for answer in done:
            number, end = self._running.pop(answer)
            try:
                self._written[number] = ray.get(answer)
            except RayError as error:
                if not isinstance(found := own_error(error), AccountingError):
                    raise
                logger.error("part %d is fed again: %s", number, found)  # noqa: TRY400  no bug, so no traceback
            else:
                self._work.take_end(end)
        return self._commit() or bool(done)

    def close(self) -> None:
        """Let nothing be written behind the end of the run."""
        for answer in self._running:
            ray.cancel(answer, force=True)
        if self._running:
            ray.wait(list(self._running), num_returns=len(self._running), timeout=CANCEL_SECONDS)

    def _commit(self) -> bool:
        moved = False
        while (record := self._written.get(len(self._store.records))) is not None:
            self._store.add(record)  # then from `_written`: another thread asks `is_written` meanwhile
            del self._written[record.number]
            self._work.take_record(record)
            self._on_commit(record)
            moved = True
        return moved
