"""A run in which nothing moves says who waits for whom, and ends."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import pytest

from vlmembed.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlmembed.errors import StalledError


def make(ended: list[StalledError], hung: list[bool], *, limit: float, grace: float = 9.0) -> Watchdog:
    return Watchdog(
        lambda: "reader waits for row 7",
        ended.append,
        limit_seconds=limit,
        grace_seconds=grace,
        hung=lambda: hung.append(True),
        report_seconds=0.1,
    )


def wait_for(values: Sequence[object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not values:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_waits_for_whom_is_said_ever_more_rarely_and_then_the_run_ends(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[StalledError] = []
    hung: list[bool] = []
    with caplog.at_level(logging.ERROR), make(ended, hung, limit=1.0).watching():
        wait_for(ended)
    said = [record.message for record in caplog.records]
    assert 2 <= len(said) <= 4  # after 0.1, 0.2, 0.4 and 0.8 s
    assert all(line.startswith("nothing has moved for") and "reader waits for row 7" in line for line in said)
    assert "the run was given up: reader waits for row 7. What was committed is kept" in str(ended[0])
    assert not hung  # it ended in time


def test_a_run_that_cannot_end_is_reported_as_hung() -> None:
    ended: list[StalledError] = []
    hung: list[bool] = []
    with make(ended, hung, limit=0.2, grace=0.1).watching():
        wait_for(hung)
    assert len(ended) == 1


def test_moves_keep_it_quiet(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[StalledError] = []
    with caplog.at_level(logging.ERROR), (watchdog := make(ended, [], limit=60.0)).watching():
        for _ in range(30):
            watchdog.moved()
            time.sleep(0.02)
    assert not ended
    assert not caplog.records
    with pytest.raises(ZeroDivisionError), watchdog.watching():
        _ = 1 // 0


def test_time_in_which_the_process_stood_still_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-Z, or where the machine slept."""
    ended: list[StalledError] = []
    clock, jump = time.monotonic, 0.0
    monkeypatch.setattr("vlmembed.watchdog.time.monotonic", lambda: clock() + jump)
    with make(ended, [], limit=60.0).watching():
        time.sleep(0.1)
        jump = 10_000.0
        time.sleep(0.2)
    assert not ended
