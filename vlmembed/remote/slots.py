"""Turns at a host: so many requests to it at a time, and the others wait in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    Pause: TypeAlias = Callable[[], AbstractContextManager[object]]
    """Makes a context in which no time counts against who waits."""

POLL_SECONDS = 0.1
"""How long one that waits does so before it looks whether there is any use in it."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Host:
    num_free: int
    num_given_back: int = 0
    waiting: deque[threading.Event] = field(default_factory=deque)


class HostSlots:
    """So many requests to a host at a time; hosts without any are forgotten, for lists name millions. Thread-safe."""

    def __init__(self, per_host: int, *, stuck_seconds: float) -> None:
        """`stuck_seconds`: a host that gives no slot back for so long is not waited for any longer."""
        self._per_host = per_host
        self._stuck_seconds = stuck_seconds
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._hosts: dict[str, _Host] = {}

    def close(self) -> None:
        """Give nothing more out, and end those that wait."""
        self._closed.set()

    @contextmanager
    def taken(self, host: str, shown: str, pause: Pause) -> Iterator[None]:
        """Wait for a slot, within `pause`, and hold it. `shown` is the URL for messages.

        Raises:
            OSError: all slots of the host are stuck, or everything is closed.
        """
        self._take(host, shown, pause)
        try:
            if self._closed.is_set():
                raise _ended(shown)
            yield
        finally:
            self._give_back(host)

    def _take(self, host: str, shown: str, pause: Pause) -> None:
        with self._lock:
            place = self._hosts.setdefault(host, _Host(num_free=self._per_host))
            if place.num_free:
                place.num_free -= 1
                return
            turn = threading.Event()
            place.waiting.append(turn)
        with pause():
            if self._comes(turn, place):
                return
        with self._lock:
            if turn.is_set():  # it came meanwhile
                return
            place.waiting.remove(turn)
        if self._closed.is_set():
            raise _ended(shown)
        msg = (
            f"{shown} is not read: none of {self._per_host} requests to {host} has ended for "
            f"{self._stuck_seconds:g} seconds: look after the server, or give --timeout more"
        )
        raise OSError(msg)

    def _comes(self, turn: threading.Event, place: _Host) -> bool:
        """Wait for a turn; false where that is no use. Only time in which this thread gets to run counts."""
        stuck_seconds, seen = 0.0, place.num_given_back
        while not turn.wait(POLL_SECONDS):
            stuck_seconds = stuck_seconds + POLL_SECONDS if place.num_given_back == seen else 0.0
            seen = place.num_given_back
            if self._closed.is_set() or stuck_seconds >= self._stuck_seconds:
                return False
        return True

    def _give_back(self, host: str) -> None:
        with self._lock:
            place = self._hosts[host]
            place.num_given_back += 1
            if place.waiting:
                place.waiting.popleft().set()
                return
            place.num_free += 1
            if place.num_free == self._per_host:
                del self._hosts[host]


def _ended(shown: str) -> OSError:
    return OSError(f"{shown} is not read: the reading of URLs was ended")
