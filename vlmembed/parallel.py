"""Bounded hand-over between threads: a queue that can be shut, and a map that keeps the order."""

from __future__ import annotations

import queue
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from vlmembed.errors import StoppedError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Executor, Future

T = TypeVar("T")
R = TypeVar("R")

POLL_SECONDS = 0.1
"""How long a blocked stage waits before it looks whether the run was stopped."""


class Channel(Generic[T]):
    """A bounded queue between two stages. Every wait ends when `stop` is set.

    Iterating ends after `close`, when everything put before it was taken.
    """

    def __init__(self, max_items: int, stop: threading.Event) -> None:
        self._queue: queue.Queue[T | None] = queue.Queue(max_items)
        self._stop = stop

    def put(self, item: T) -> None:
        """Hand an item over; waits while the channel is full.

        Raises:
            StoppedError: the run was stopped.
        """
        self._put(item)

    def close(self) -> None:
        """Say that nothing more will come."""
        self._put(None)

    def _put(self, item: T | None) -> None:
        while True:
            self.check()
            try:
                self._queue.put(item, timeout=POLL_SECONDS)
            except queue.Full:
                continue
            return

    def check(self) -> None:
        """Look whether the run goes on.

        Raises:
            StoppedError: it was stopped.
        """
        if self._stop.is_set():
            raise StoppedError

    def polled(self) -> Iterator[T | None]:
        """Like iterating, but None comes whenever there was nothing for `POLL_SECONDS`."""
        while True:
            self.check()
            try:
                item = self._queue.get(timeout=POLL_SECONDS)
            except queue.Empty:
                yield None
                continue
            if item is None:
                return
            yield item

    def __iter__(self) -> Iterator[T]:
        return (item for item in self.polled() if item is not None)


def ordered_map(
    function: Callable[[T], R],
    items: Iterable[T],
    pool: Executor,
    *,
    max_items: int,
    max_bytes: int,
    num_bytes: Callable[[T], int],
) -> Iterator[R]:
    """Apply `function` in `pool` and yield the results in the order of `items`.

    At most `max_items` are in flight, and no more once their `num_bytes` reach `max_bytes` (a single larger item goes
    through alone).
    """
    pending: deque[tuple[Future[R], int]] = deque()
    in_flight_bytes = 0
    try:
        for item in items:
            size = num_bytes(item)
            while pending and (len(pending) >= max_items or in_flight_bytes + size > max_bytes):
                future, freed = pending.popleft()
                in_flight_bytes -= freed
                yield future.result()
            pending.append((pool.submit(function, item), size))
            in_flight_bytes += size
        while pending:
            yield pending.popleft()[0].result()
    finally:
        for future, _ in pending:
            future.cancel()
