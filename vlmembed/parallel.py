"""Bounded hand-over between threads: a queue that can be shut, a map that keeps the order, and threads that give a call
up when it takes too long."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from vlmembed.errors import StoppedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from typing import Self

T = TypeVar("T")
R = TypeVar("R")

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
"""How long a blocked stage waits before it looks whether the run was stopped."""

JOIN_SECONDS = 1.0
"""How long the end of a `DeadlinePool` waits for the calls that are under way, all together."""


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
                in_flight_bytes -= pending[0][1]
                yield pending.popleft()[0].result()
            pending.append((submit(item), size))
            in_flight_bytes += size
        while pending:
            yield pending.popleft()[0].result()
    finally:
        while pending:  # no name is left for a future, whose exception would lead back here, and keep all alive
            pending.popleft()[0].cancel()


@dataclass(slots=True, eq=False)
class _Job(Generic[T, R]):
    """A call. `taken_at` by `time.monotonic`; `began_at`, while the function runs, by the pool's own clock."""

    item: T
    future: Future[R]
    taken_at: float
    began_at: float | None = None


class _Thread(Generic[T, R]):
    """A thread of a `DeadlinePool`, and what it is at."""

    def __init__(self, serve: Callable[[_Thread[T, R]], bool], name: str) -> None:
        self._serve = serve
        self.job: _Job[T, R] | None = None
        self.is_given_up = False
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)  # a call that hangs holds no exit up
        self.thread.start()

    def _work(self) -> None:
        while self._serve(self):
            pass


class DeadlinePool(Generic[T, R]):
    """Threads that apply a function to items. One that takes longer than `seconds` over an item is given up: the item's
    result is then `late(item)`, and a new thread takes its place.

    A thread cannot be stopped, so one that hangs stays, asleep or not, until the process ends. A call that hangs with
    the interpreter's lock held stops this pool with everything else: only another process helps against that.

    Only time in which the pool itself gets to run counts, so that nothing is late because the process was stopped
    (Ctrl-Z) or another thread held the interpreter's lock.

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
        around: Callable[[T], AbstractContextManager[object]] | None = None,
    ) -> None:
        """`around` is entered before the function and left after it, in the same thread; its own time does not count.
        What it raises is the item's result."""
        self._function = function
        self._seconds = seconds
        self._late = late
        self._name = name
        self._around = around or (lambda _: nullcontext())
        self._waiting: queue.SimpleQueue[tuple[T, Future[R]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._clock_seconds = 0.0
        self._current = threading.local()
        self.num_given_up = 0
        self._num_threads = num_threads
        self._num_started = 0
        self._threads: list[_Thread[T, R]] = []
        while len(self._threads) < num_threads:
            self._start_thread()
        self._supervisor = threading.Thread(target=self._supervise, name=f"{name}-supervisor", daemon=True)
        self._supervisor.start()

    def submit(self, item: T) -> Future[R]:
        """Put an item in the queue. The time that it waits there does not count.

        Raises:
            StoppedError: the pool is closed.
        """
        future: Future[R] = Future()
        with self._lock:
            if self._closed.is_set():
                raise StoppedError
            self._waiting.put((item, future))
        return future

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For the function, in a thread of the pool: what it waits for in here does not count. Elsewhere no matter."""
        job: _Job[T, R] | None = getattr(self._current, "job", None)
        if job is None or job.began_at is None:
            yield
            return
        spent_seconds = self._clock_seconds - job.began_at
        job.began_at = None
        try:
            yield
        finally:
            job.began_at = self._clock_seconds - spent_seconds

    def oldest(self) -> tuple[T, float] | None:
        """The item that has been under way for longest, and for how many seconds; None where nothing is."""
        with self._lock:
            jobs = [thread.job for thread in self._threads if thread.job is not None]
        if not jobs:
            return None
        job = min(jobs, key=lambda job: job.taken_at)
        return job.item, time.monotonic() - job.taken_at

    def close(self) -> None:
        """End the threads. What still waits is cancelled, and what is under way has a StoppedError for its result; such
        calls are waited for, but not for longer than `JOIN_SECONDS`."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            threads = list(self._threads)
            jobs = [thread.job for thread in threads if thread.job is not None]
            for thread in threads:
                thread.is_given_up = True
        for job in jobs:
            job.future.set_exception(StoppedError())
        with suppress(queue.Empty):
            while (entry := self._waiting.get_nowait()) is not None:
                entry[1].cancel()
        self._waiting.put(None)
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in threads:
            thread.thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_thread(self) -> None:
        self._threads.append(_Thread(self._serve, f"{self._name}-{self._num_started}"))
        self._num_started += 1

    def _serve(self, thread: _Thread[T, R]) -> bool:
        """Wait for an item and do it. False: the thread is to end."""
        entry = self._waiting.get()
        if entry is None:
            self._waiting.put(None)  # for the next thread
            return False
        job = _Job(*entry, taken_at=time.monotonic())
        with self._lock:
            if thread.is_given_up:  # closed meanwhile
                job.future.cancel()
            if not job.future.set_running_or_notify_cancel():
                return True
            thread.job = job
        try:
            result = self._call(job)
        except BaseException as error:  # noqa: BLE001  for who waits for the result
            if self._is_wanted(thread):
                job.future.set_exception(error)
        else:
            if self._is_wanted(thread):
                job.future.set_result(result)
        return not thread.is_given_up

    def _call(self, job: _Job[T, R]) -> R:
        with self._around(job.item):
            self._current.job = job
            job.began_at = self._clock_seconds
            try:
                return self._function(job.item)
            finally:
                job.began_at = self._current.job = None

    def _is_wanted(self, thread: _Thread[T, R]) -> bool:
        """Note that a call has ended; false where its result was decided without it."""
        with self._lock:
            thread.job = None
            return not thread.is_given_up

    def _supervise(self) -> None:
        tick = min(0.5, self._seconds / 4)
        before = time.monotonic()
        while not self._closed.wait(tick):
            now = time.monotonic()
            self._clock_seconds += min(now - before, 2 * tick)
            before = now
            jobs = self._give_up_late(self._seconds + tick)  # the clock may have been a tick slow when a call began
            self.num_given_up += len(jobs)
            try:
                while len(self._threads) < self._num_threads and not self._closed.is_set():
                    self._start_thread()
            except RuntimeError:  # no more threads can be started now: perhaps at the next look
                logger.warning("%s goes on with %d of %d threads", self._name, len(self._threads), self._num_threads)
            for job in jobs:
                try:
                    job.future.set_result(self._late(job.item))
                except BaseException as error:  # noqa: BLE001  for who waits for the result
                    job.future.set_exception(error)

    def _give_up_late(self, seconds: float) -> list[_Job[T, R]]:
        """Let go of the threads that have been at a call for so long."""
        jobs = []
        with self._lock:
            for thread in self._threads:
                if thread.is_given_up or (job := thread.job) is None or (began_at := job.began_at) is None:
                    continue
                if self._clock_seconds - began_at >= seconds:
                    thread.is_given_up = True
                    jobs.append(job)
            self._threads = [thread for thread in self._threads if not thread.is_given_up]
        return jobs
