"""Order, bounds, and an end for every wait."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from vlmembed.errors import StoppedError
from vlmembed.parallel import Channel, DeadlinePool, ordered_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def test_a_channel_hands_over_in_order_and_ends() -> None:
    channel: Channel[int] = Channel(2, threading.Event())

    def put() -> None:
        for number in range(100):
            channel.put(number)
        channel.close()

    thread = threading.Thread(target=put)
    thread.start()
    assert list(channel) == list(range(100))
    thread.join(10)


def test_both_ends_of_a_channel_wake_up_when_the_run_stops() -> None:
    stop = threading.Event()
    full: Channel[int] = Channel(1, stop)
    full.put(1)
    empty: Channel[int] = Channel(1, stop)
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(StoppedError):
        full.put(2)
    with pytest.raises(StoppedError):
        next(iter(empty))


def test_ordered_map_keeps_the_order_and_its_bounds() -> None:
    lock = threading.Lock()
    in_flight: list[int] = []
    most_items = most_bytes = 0

    def work(size: int) -> int:
        time.sleep(0.001 * (size % 5))
        return size

    def started(sizes: list[int]) -> Iterator[int]:
        nonlocal most_items, most_bytes
        for size in sizes:
            yield size
            with lock:  # reached when the next item is asked for: this one is in flight now
                in_flight.append(size)
                most_items = max(most_items, len(in_flight))
                most_bytes = max(most_bytes, sum(in_flight))

    sizes = [(number * 7) % 50 for number in range(200)]
    found = []
    with ThreadPoolExecutor(4) as pool:
        results = ordered_map(
            lambda size: pool.submit(work, size),
            started(sizes),
            max_items=6,
            max_bytes=100,
            num_bytes=lambda size: size,
        )
        for result in results:
            found.append(result)
            with lock:
                in_flight.remove(result)
    assert found == sizes
    assert most_items <= 7  # the one being handed in beside the six
    assert most_bytes <= 150


def test_ordered_map_lets_a_single_large_item_through() -> None:
    with ThreadPoolExecutor(2) as pool:
        results = ordered_map(
            lambda size: pool.submit(str, size), [1000, 2000], max_items=6, max_bytes=10, num_bytes=lambda size: size
        )
        assert list(results) == ["1000", "2000"]


def test_ordered_map_raises_what_the_work_raised() -> None:
    with ThreadPoolExecutor(2) as pool, pytest.raises(ZeroDivisionError):
        list(
            ordered_map(
                lambda x: pool.submit(lambda: 1 // x), [1, 0, 1], max_items=2, max_bytes=9, num_bytes=lambda _: 1
            )
        )


def make_pool(
    function: Callable[[int], str], *, num_threads: int = 2, seconds: float = 0.2, name: str = "test"
) -> DeadlinePool[int, str]:
    return DeadlinePool(function, num_threads=num_threads, seconds=seconds, late=lambda item: f"late {item}", name=name)


def alive(name: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(name)]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def slow(item: int) -> str:
    time.sleep(0.05)
    return str(item)


class Gate:
    """A function that hangs over even numbers until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.num_hanging = 0

    def __call__(self, item: int) -> str:
        """The item in words, or never."""
        if item % 2 == 0:
            self.num_hanging += 1
            self.open.wait(60)
            raise AssertionError(item)  # nobody hears of it
        return str(item)


def test_a_deadline_pool_gives_results_and_what_was_raised_in_order() -> None:
    with make_pool(lambda x: str(10 // x), seconds=30) as pool:
        results = ordered_map(pool.submit, range(1, 50), max_items=8, max_bytes=100, num_bytes=lambda _: 1)
        assert list(results) == [str(10 // x) for x in range(1, 50)]
        with pytest.raises(ZeroDivisionError):
            pool.submit(0).result(10)
        assert pool.submit(5).result(10) == "2"
        assert pool.num_given_up == 0
    assert not alive("test")


def test_a_call_that_hangs_is_given_up_and_the_others_go_on() -> None:
    """As many hang as there are threads, three times over; there are as many threads as before after each."""
    gate = Gate()
    with make_pool(gate, name="hang") as pool:
        began = time.monotonic()
        assert [pool.submit(item).result(10) for item in (1, 0, 3, 2, 4, 5)] == [
            "1",
            "late 0",
            "3",
            "late 2",
            "late 4",
            "5",
        ]
        assert 0.6 <= time.monotonic() - began < 5
        futures = [pool.submit(item) for item in (6, 8, 7, 9)]
        assert [future.result(10) for future in futures] == ["late 6", "late 8", "7", "9"]
        assert pool.num_given_up == gate.num_hanging == 5
        assert len(alive("hang")) == 2 + 5 + 1  # at work, left behind, the supervisor
    gate.open.set()
    wait_until(lambda: not alive("hang"))
    assert [future.result() for future in futures] == ["late 6", "late 8", "7", "9"]


def test_waiting_in_the_queue_is_not_late() -> None:
    with make_pool(slow, num_threads=1, seconds=0.4) as pool:
        futures = [pool.submit(number) for number in range(16)]
        assert [future.result(10) for future in futures] == [str(number) for number in range(16)]
        assert pool.num_given_up == 0


def test_what_surrounds_a_call_is_not_on_the_clock_and_may_fail() -> None:
    entered = []

    @contextmanager
    def around(item: int) -> Iterator[None]:
        if item == 13:
            raise KeyError(item)
        time.sleep(0.3)
        entered.append(threading.get_ident())
        yield
        time.sleep(0.3)

    def work(item: int) -> int:
        assert entered[-1] == threading.get_ident()
        if item == 2:
            time.sleep(1)
        return item

    with DeadlinePool(work, num_threads=1, seconds=0.2, late=lambda _: -1, name="around", around=around) as pool:
        assert pool.submit(1).result(10) == 1
        with pytest.raises(KeyError):
            pool.submit(13).result(10)
        assert pool.submit(2).result(10) == -1
        assert pool.submit(3).result(10) == 3
        assert pool.num_given_up == 1


def test_the_oldest_call_can_be_seen() -> None:
    inside, go_on = threading.Barrier(2), threading.Event()

    def work(item: int) -> str:
        if item:
            inside.wait(10)
            go_on.wait(10)
        return str(item)

    with make_pool(work, seconds=60) as pool:
        assert pool.oldest() is None
        first = pool.submit(1)
        inside.wait(10)
        time.sleep(0.05)
        second = pool.submit(2)
        inside.wait(10)
        oldest = pool.oldest()
        assert oldest is not None
        assert oldest[0] == 1
        assert 0.05 <= oldest[1] < 10
        go_on.set()
        assert (first.result(10), second.result(10), pool.submit(0).result(10)) == ("1", "2", "0")
        assert pool.oldest() is None


def test_time_in_which_the_pool_itself_stood_still_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after Ctrl-Z, or where another thread has held the interpreter's lock: the clock jumps between two looks."""
    jump = 0.0
    monotonic = time.monotonic
    monkeypatch.setattr("vlmembed.parallel.time.monotonic", lambda: monotonic() + jump)
    inside, go_on = threading.Event(), threading.Event()

    def work(item: int) -> str:
        inside.set()
        go_on.wait(10)
        return str(item)

    with make_pool(work, seconds=4) as pool:
        future = pool.submit(1)
        assert inside.wait(10)
        jump = 1000.0
        time.sleep(1.2)  # two looks
        assert not future.done()
        go_on.set()
        assert future.result(10) == "1"


def test_closing_ends_every_result() -> None:
    """What is under way, hanging or not, and what waits: nobody who asks for one waits on."""
    gate = Gate()
    pool = make_pool(gate, seconds=60, name="close")
    futures = [pool.submit(item) for item in (0, 2, 4, 5)]
    wait_until(lambda: gate.num_hanging == 2)
    began = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - began < 5
    for future in futures[:2]:
        with pytest.raises(StoppedError):
            future.result(0)
    for future in futures[2:]:
        with pytest.raises(CancelledError):
            future.result(0)
    with pytest.raises(StoppedError):
        pool.submit(1)
    gate.open.set()


def test_calls_that_end_soon_are_waited_for_by_close() -> None:
    pool = make_pool(slow, seconds=60, name="soon")
    future = pool.submit(1)
    wait_until(lambda: pool.oldest() is not None)
    pool.close()
    assert isinstance(future.exception(0), StoppedError)
    assert [name for name in alive("soon") if "supervisor" not in name] == []


def test_cancelled_items_are_not_worked_on() -> None:
    done: list[int] = []
    first = threading.Event()

    def work(item: int) -> str:
        first.wait(10)
        done.append(item)
        return str(item)

    with make_pool(work, num_threads=1, seconds=60) as pool:
        futures = [pool.submit(item) for item in range(5)]
        assert [future.cancel() for future in futures[2:4]] == [True, True]
        first.set()
        assert futures[4].result(10) == "4"
    assert done == [0, 1, 4]


def test_every_result_comes_once_when_deadlines_and_ends_meet() -> None:
    """Calls that take about as long as they may: either answer is right, a lost or a second one is not."""
    generator = random.Random(0)  # noqa: S311  a test's
    delays = [generator.uniform(0.0, 0.12) for _ in range(150)]

    def work(item: int) -> str:
        time.sleep(delays[item])
        return str(item)

    with make_pool(work, num_threads=16, seconds=0.04, name="meet") as pool:
        futures = [pool.submit(item) for item in range(len(delays))]
        done, missing = wait(futures, timeout=30)
        assert not missing
        assert len(done) == 150
        found = [future.result(0) for future in futures]
        num_late = sum(answer.startswith("late") for answer in found)
        assert all(answer in (str(item), f"late {item}") for item, answer in enumerate(found))
        assert 0 < num_late == pool.num_given_up < 150
        assert len(pool._threads) == 16


def test_a_pool_that_can_start_no_thread_for_a_while_loses_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, start = Gate(), threading.Thread.start
    with make_pool(gate, num_threads=1) as pool:
        with monkeypatch.context() as patch:

            def refuse(_: threading.Thread) -> None:
                msg = "can't start new thread"
                raise RuntimeError(msg)

            patch.setattr(threading.Thread, "start", refuse)
            assert pool.submit(0).result(10) == "late 0"
            future: Future[str] = pool.submit(1)
            time.sleep(0.2)
            assert not future.done()
        assert threading.Thread.start is start
        assert future.result(10) == "1"
    gate.open.set()


@pytest.mark.parametrize("is_closed", [True, False])
def test_calls_that_hang_do_not_hold_the_interpreter_up(is_closed: bool) -> None:  # noqa: FBT001  a parameter
    script = f"""
import threading
from vlmembed.parallel import DeadlinePool
pool = DeadlinePool(lambda _: threading.Event().wait(), num_threads=3, seconds=0.2, late=str, name="hang")
print([pool.submit(number).result(30) for number in range(4)])
pool.submit(4)
if {is_closed}:
    pool.close()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "['0', '1', '2', '3']\n", "")
