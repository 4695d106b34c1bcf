"""Work in flight on the way of a stream: the order is kept, and there is a bound for each kind of work."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")


@dataclass(slots=True)
class Lane:
    """What of one kind is in flight, in items or in bytes. A single item above the limit goes through alone."""

    limit: int
    used: int = 0


def through(
    start: Callable[[T], T | Future[T]],
    items: Iterable[T],
    lane_of: Callable[[T], tuple[Lane, int]],
) -> Iterator[T]:
    """Start work on items and yield what becomes of them, in their order.

    What `start` returns as it is, and not as a future, waits only for what comes before it. `lane_of` an item is where
    it counts until it is yielded, and how much it counts there; lanes do not hold each other up until one is full.
    """
    pending: deque[tuple[T | Future[T], Lane, int]] = deque()

    def first() -> T:
        entry, lane, amount = pending.popleft()
        lane.used -= amount
        try:
            return entry.result() if isinstance(entry, Future) else entry
        finally:
            del entry  # a future's exception leads back to here, and the circle would keep all alive

    try:
        for item in items:
            if pending:
                lane, amount = lane_of(item)
                while lane.used and lane.used + amount > lane.limit:
                    yield first()
                started = start(item)
            else:  # all lanes are free
                started = start(item)
                if not isinstance(started, Future):
                    yield started
                    continue
                lane, amount = lane_of(item)
            pending.append((started, lane, amount))
            del started  # see `first`
            lane.used += amount
            while pending and not isinstance(pending[0][0], Future):
                yield first()
        while pending:
            yield first()
    finally:
        while pending:
            waiting = pending.popleft()[0]
            if isinstance(waiting, Future):
                waiting.cancel()
            del waiting
