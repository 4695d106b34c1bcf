"""Order, bounds, and an end for every wait."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from vlmembed.errors import StoppedError
from vlmembed.parallel import Channel, ordered_map

if TYPE_CHECKING:
    from collections.abc import Iterator


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
