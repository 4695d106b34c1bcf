"""Whole parts are written by tasks, when the earlier ones that they take vectors from are, and committed in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray

from vlmembed.engines.tasks import write_task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vlmembed.engines.blocks import PartEnd
    from vlmembed.engines.clusterwork import ClusterWork
    from vlmembed.engines.orders import RunOrder
    from vlmembed.engines.tasks import RemoteKnown
    from vlmembed.partfiles import PartRecord
    from vlmembed.parts import PartStore


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
        self._running: dict[Any, int] = {}
        self._written = store.noted()
        for record in store.records:
            work.take_record(record)

    def is_written(self, number: int) -> bool:
        """Whether a part's files are there."""
        return number < len(self._store.records) or number in self._written

    @property
    def num_open(self) -> int:
        """Parts that are gathered and not written yet."""
        return len(self._waiting) + len(self._running)

    def add(self, number: int, blocks: Sequence[Any], end: PartEnd) -> None:
        """A part is whole: `blocks` are references to all of it."""
        self._work.take_end(end)
        self._waiting[number] = blocks, end

    def go_on(self, seconds: float) -> bool:
        """Start what can be started, wait so long for what runs, commit what is next; whether anything moved.

        Raises:
            RayError: a part could not be written.
        """
        for number in sorted(self._waiting):
            if len(self._running) >= self._max_running:
                break
            blocks, end = self._waiting[number]
            if all(self.is_written(each) for each in end.needs):
                del self._waiting[number]
                self._running[self._task.remote(self._order, self._known, number, *blocks)] = number
        done = ray.wait(list(self._running), num_returns=1, timeout=seconds)[0] if self._running else []
        for answer in done:
            number = self._running.pop(answer)
            self._written[number] = ray.get(answer)
        return self._commit() or bool(done)

    def _commit(self) -> bool:
        moved = False
        while (record := self._written.get(len(self._store.records))) is not None:
            self._store.add(record)  # then from `_written`: another thread asks `is_written` meanwhile
            del self._written[record.number]
            self._work.take_record(record)
            self._on_commit(record)
            moved = True
        return moved
