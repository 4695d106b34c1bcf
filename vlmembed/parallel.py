"""Bounded hand-over between threads: a queue that can be shut, a map that keeps the order, and threads that give a call
up when it takes too long."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from vlmembed.errors import StoppedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self

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
    submit: Callable[[T], Future[R]],
    items: Iterable[T],
    *,
    max_items: int,
    max_bytes: int,
    num_bytes: Callable[[T], int],
) -> Iterator[R]:
    """Hand items to a pool by `submit` and yield the results in the order of `items`.

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
            pending.append((submit(item), size))
            in_flight_bytes += size
        while pending:
            yield pending.popleft()[0].result()
    finally:
        for future, _ in pending:
            future.cancel()


class _Thread(Generic[T, R]):
    """A thread of a `DeadlinePool`, and what it is at."""

    def __init__(self, pool: DeadlinePool[T, R], name: str) -> None:
        self._pool = pool
        self.job: tuple[T, Future[R], float] | None = None  # with the time it began
        self.is_given_up = False
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)  # a call that hangs holds no exit up
        self.thread.start()

    def _work(self) -> None:
        while not self.is_given_up and (taken := self._pool.take(self)) is not None:
            item, future = taken
            try:
                result = self._pool.function(item)
            except BaseException as error:  # noqa: BLE001  for who waits for the result
                self._pool.settle(self, future, error=error)
            else:
                self._pool.settle(self, future, result=result)


class DeadlinePool(Generic[T, R]):
    """Threads that apply a function to items. One that takes longer than `seconds` over an item is given up: the item's
    result is then `late(item)`, and a new thread takes its place.

    A thread cannot be stopped, so one that hangs stays, asleep or not, until the process ends.

    Attributes:
        num_given_up: threads that were left behind.
    """

    def __init__(
        self,
        function: Callable[[T], R],
        *,
        num_threads: int,
        seconds: float,
        late: Callable[[T], R],
        name: str,
    ) -> None:
        self.function = function
        self._seconds = seconds
        self._late = late
        self._name = name
        self._waiting: queue.SimpleQueue[tuple[T, Future[R]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.num_given_up = 0
        self._closed = threading.Event()
        self._threads = [_Thread(self, f"{name}-{number}") for number in range(num_threads)]
        self._supervisor = threading.Thread(target=self._supervise, name=f"{name}-supervisor", daemon=True)
        self._supervisor.start()

    def submit(self, item: T) -> Future[R]:
        """Put an item in the queue. The time that it waits there does not count."""
        future: Future[R] = Future()
        self._waiting.put((item, future))
        return future

    def take(self, thread: _Thread[T, R]) -> tuple[T, Future[R]] | None:
        """The next item for a thread; None ends it."""
        while (taken := self._waiting.get()) is not None:
            if taken[1].set_running_or_notify_cancel():
                with self._lock:
                    thread.job = (*taken, time.monotonic())
                return taken
        self._waiting.put(None)  # for the next thread
        return None

    def settle(
        self, thread: _Thread[T, R], future: Future[R], *, result: R | None = None, error: BaseException | None = None
    ) -> None:
        """Note what a thread found, unless it was given up meanwhile."""
        with self._lock:
            thread.job = None
            if thread.is_given_up:
                return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("R", result))

    def _supervise(self) -> None:
        while not self._closed.wait(min(1.0, self._seconds / 4)):
            for number, thread in enumerate(self._threads):
                with self._lock:
                    if thread.job is None or time.monotonic() - thread.job[2] < self._seconds:
                        continue
                    thread.is_given_up = True
                    item, future, _ = thread.job
                self.num_given_up += 1
                self._threads[number] = _Thread(self, f"{self._name}-{number}")
                try:
                    future.set_result(self._late(item))
                except BaseException as error:  # noqa: BLE001  for who waits for the result
                    future.set_exception(error)

    def close(self) -> None:
        """Let the threads end; those that are at something end when that does, and nobody waits for them."""
        self._closed.set()
        self._waiting.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
