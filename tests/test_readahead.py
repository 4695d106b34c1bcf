"""Rows that are files, URLs or neither, read ahead: the order, the bounds, and that no kind waits for another."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from vlmembed.errors import FailureCode, ImageError, StoppedError
from vlmembed.sources.inflight import Lane, through
from vlmembed.sources.readahead import MAX_LARGE_FILES_BYTES, SMALL_FILE_BYTES, ReadAhead, UnreadRow
from vlmembed.types import EncodedImage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from vlmembed.remote.slots import Pause
    from vlmembed.sources.readahead import Row


ODD = {"odd": UnicodeError("secret"), "overflow": OverflowError(), "bug": KeyError(1), "stopped": StoppedError()}


class FakeRemotes:
    """A server in memory: what a URL's name says, and `num_bytes` of it."""

    def __init__(self, *, wait: Callable[[str], object] = lambda _: None) -> None:
        self.wait = wait
        self.asked: list[tuple[str, int | None, bool]] = []
        self._lock = threading.Lock()
        self.num_now = self.most_now = 0

    def read(
        self,
        url: str,
        max_bytes: int,
        stop_bytes: int | None = None,
        *,
        trusted: bool = False,
        pause: Pause = nullcontext,
    ) -> bytes | ImageError | int:
        """As `Remotes.read`."""
        with self._lock:
            self.asked.append((url, stop_bytes, trusted))
            self.num_now += 1
            self.most_now = max(self.most_now, self.num_now)
        if url.endswith("turn"):
            with pause():
                self.wait(url)
        else:
            self.wait(url)
        with self._lock:
            self.num_now -= 1
        name = url.rpartition("/")[2]
        if name == "gone":
            return ImageError(FailureCode.MISSING, "404")
        if name == "memory":
            raise MemoryError
        if name in ODD:
            raise ODD[name]
        num_bytes = int(name.partition("-")[2] or 0)
        if num_bytes > max_bytes:
            return ImageError(FailureCode.TOO_LARGE, "too large")
        if stop_bytes is not None and num_bytes > stop_bytes:
            return num_bytes
        return url.encode()


def reader(remotes: FakeRemotes | None, *, timeout_seconds: float = 20, downloads: int = 4) -> ReadAhead:
    return ReadAhead(
        timeout_seconds=timeout_seconds,
        max_source_pixels=10**6,
        remotes=remotes,  # type: ignore[arg-type]  # as much of it as is used
        downloads=downloads,
    )


def url_row(row: int, name: str = "small", *, trusted: bool = False) -> UnreadRow:
    return UnreadRow(row=row, key=str(row), path=f"https://host/{row}/{name}", trusted=trusted)


def ready_row(row: int, content: bytes = b"ready") -> EncodedImage:
    return EncodedImage(row=row, key=str(row), content=content)


def test_what_becomes_of_urls() -> None:
    remotes = FakeRemotes()
    batch = pa.record_batch({"x": [1]})
    rows: list[Row] = [
        url_row(0),
        url_row(1, "gone"),
        url_row(2, "memory"),
        url_row(3, f"large-{SMALL_FILE_BYTES + 1}", trusted=True),
        url_row(4, f"giant-{2**40}"),
        UnreadRow(row=5, key="5", path="s3://bucket/x", columns=batch),
        url_row(6, "odd"),
        url_row(7, "overflow"),
        url_row(8, "bug"),
    ]
    images = list(reader(remotes).read(rows))
    assert [image.key for image in images] == list("012345678")
    codes = [image.content.code if isinstance(image.content, ImageError) else None for image in images]
    assert codes == [None, "missing", "out_of_memory", None, "too_large", None, *["fetch_failed"] * 3]
    assert images[3].content == f"https://host/3/large-{SMALL_FILE_BYTES + 1}".encode()
    assert images[5].columns is batch
    assert str(images[6].content).startswith("https://host/6/odd cannot be read (UnicodeError): leave it out")
    assert "(OverflowError)" in str(images[7].content)
    assert {url.split("/")[3] for url, stop_bytes, _ in remotes.asked if stop_bytes is None} == {"3"}
    assert {url.split("/")[3] for url, _, trusted in remotes.asked if trusted} == {"3"}
    assert {stop_bytes for _, stop_bytes, _ in remotes.asked} == {SMALL_FILE_BYTES, None}


def test_urls_fail_where_nothing_fetches_them() -> None:
    (image,) = reader(None).read([UnreadRow(row=0, key="a", path="https://me:secret@host/a")])
    assert isinstance(image.content, ImageError)
    assert image.content.code is FailureCode.UNREADABLE
    assert str(image.content) == "https://host/a is a URL: not read here"


def test_all_downloads_are_used_and_no_more_urls_are_taken_than_there_is_room_for() -> None:
    everyone = threading.Barrier(4)
    remotes = FakeRemotes(wait=lambda _: everyone.wait(20))
    num_taken = 0

    def rows() -> Iterator[Row]:
        nonlocal num_taken
        for row in range(40):
            num_taken += 1
            yield url_row(row)

    for num_given, _ in enumerate(reader(remotes, downloads=4).read(rows())):
        assert num_taken - num_given <= 9  # two each, and the one that waits for room
    assert remotes.most_now == 4


def test_kinds_that_alternate_do_not_wait_for_each_other(tmp_path: Path) -> None:
    everyone = threading.Barrier(4)  # only met if four URLs are under way at a time
    (tmp_path / "a.png").write_bytes(b"file")
    kinds: list[Callable[[int], Row]] = [
        url_row,
        lambda row: UnreadRow(row=row, key=str(row), path=str(tmp_path / "a.png")),
        ready_row,
    ]
    rows = [kinds[row % 3](row) for row in range(3 * 40)]
    images = list(reader(FakeRemotes(wait=lambda _: everyone.wait(20)), downloads=4).read(rows))
    assert [image.row for image in images] == list(range(120))
    assert [image.content for image in images[1::3]] == [b"file"] * 40
    assert [image.content for image in images[2::3]] == [b"ready"] * 40
    assert images[3].content == b"https://host/3/small"


def test_large_urls_are_few_at_a_time() -> None:
    size = MAX_LARGE_FILES_BYTES // 3
    remotes = FakeRemotes()
    most: list[int] = []

    def wait(url: str) -> None:
        most.append(sum(1 for _, stop_bytes, _ in remotes.asked if stop_bytes is None) - len(images))
        time.sleep(0.005)
        assert url.endswith(str(size))

    remotes.wait = wait
    images: list[EncodedImage] = []
    for image in reader(remotes, downloads=8).read([url_row(row, f"large-{size}") for row in range(24)]):
        images.append(image)  # noqa: PERF402  counted as they come
    assert [image.row for image in images] == list(range(24))
    assert max(most) <= 4  # three, and one that takes the place of the one that was just given


def test_rows_with_their_content_pass_at_once() -> None:
    taken: list[int] = []

    def rows() -> Iterator[Row]:
        for row in range(5):
            taken.append(row)
            yield ready_row(row)

    for image in reader(FakeRemotes()).read(rows()):
        assert taken[-1] == image.row


def test_rows_that_wait_behind_a_url_have_a_bound() -> None:
    release = threading.Event()
    taken: list[int] = []

    def rows() -> Iterator[Row]:
        yield url_row(0)
        for row in range(1, 100):
            taken.append(row)
            if len(taken) == 20:
                release.set()
            yield ready_row(row, bytes(3 * 2**20))

    threading.Timer(0.3, release.set).start()
    images = reader(FakeRemotes(wait=lambda _: release.wait(20))).read(rows())
    assert next(images).row == 0
    assert len(taken) == 11  # 32 MiB
    assert [image.row for image in images] == list(range(1, 100))


def test_a_url_that_hangs_costs_its_own_row() -> None:
    release = threading.Event()
    remotes = FakeRemotes(wait=lambda url: release.wait(60) if url.endswith("slow") else None)
    rows = [url_row(row, "slow" if row in {3, 20} else "small") for row in range(30)]
    images = list(reader(remotes, timeout_seconds=0.2).read(rows))
    late = {image.row: image.content for image in images if isinstance(image.content, ImageError)}
    assert list(late) == [3, 20]
    assert {content.code for content in late.values()} == {"timeout"}
    assert str(late[3]).startswith("reading took longer than 0.2 seconds: look after the server or network that holds")
    release.set()


def test_the_end_of_a_run_is_no_failed_row() -> None:
    with pytest.raises(StoppedError):
        list(reader(FakeRemotes()).read([url_row(0, "stopped")]))


def test_waiting_for_a_turn_costs_no_row() -> None:
    remotes = FakeRemotes(wait=lambda _: time.sleep(0.6))
    images = list(reader(remotes, timeout_seconds=0.2).read([url_row(0, "turn"), url_row(1, "turn")]))
    assert [image.content for image in images] == [b"https://host/0/turn", b"https://host/1/turn"]


def test_what_is_left_unread_is_cancelled() -> None:
    futures: list[Future[int]] = []

    def start(number: int) -> int | Future[int]:
        futures.append(Future())
        if number < 2:
            futures[-1].set_result(number * 10)
        return futures[-1]

    lane = Lane(limit=3)
    results = through(start, range(10), lambda _: (lane, 1))
    assert [next(results), next(results)] == [0, 10]
    results.close()  # type: ignore[attr-defined]  # it is a generator
    assert [future.cancelled() for future in futures] == [False, False, True, True]


def test_a_single_item_above_the_limit_goes_through_alone() -> None:
    lane = Lane(limit=10)
    used_before: list[int] = []

    def start(number: int) -> int | Future[int]:
        used_before.append(lane.used)
        future: Future[int] = Future()
        future.set_result(number)
        return future

    assert list(through(start, [5, 5, 50, 5, 5], lambda number: (lane, number))) == [5, 5, 50, 5, 5]
    assert used_before == [0, 5, 0, 0, 5]
    assert lane.used == 0


@pytest.mark.parametrize("rows", [[], [ready_row(0)]])
def test_no_thread_starts_without_a_need(rows: list[Row]) -> None:
    before = threading.active_count()
    for _ in reader(FakeRemotes()).read(rows):
        assert threading.active_count() == before
