"""A picture that hangs or crashes its decoder costs one row."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
from conftest import SAMPLES, make_rule
from odd_children import NeverReady, OddPatcher, TwoReasonsError
from test_layout import LAYOUT

import vlmembed.decode_processes
from vlmembed.decode_processes import ProcessDecoders
from vlmembed.decoders import ThreadDecoders
from vlmembed.errors import FailureCode, ImageError, StoppedError, WorkerError
from vlmembed.parallel import ordered_map
from vlmembed.patcher import Patched, Patcher
from vlmembed.suspects import SuspectRows, read_suspects
from vlmembed.types import EncodedImage, Failure, PatchedImage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from vlmembed.decoders import DecodePool
    from vlmembed.patcher import Patch

PATCHER = Patcher(rule=make_rule(LAYOUT), max_source_pixels=10**8, hash_pixels=True)
KINDS = ["threads", "processes"]


def make_decoders(kind: str, patcher: Patch, number: int = 1, *, seconds: float = 60.0) -> DecodePool:
    if kind == "threads":
        return ThreadDecoders(patcher, num_threads=number, timeout_seconds=seconds)
    return ProcessDecoders(patcher, num_processes=number, timeout_seconds=seconds)


def images(contents: Sequence[bytes | ImageError]) -> Iterator[EncodedImage]:
    for row, content in enumerate(contents):
        yield EncodedImage(row=row, key=f"{row}.jpg", content=content)


def through(decoders: DecodePool, contents: Sequence[bytes | ImageError]) -> list[Patched]:
    """All of them, in order, as the pipeline takes them."""
    return list(ordered_map(decoders.submit, images(contents), max_items=8, max_bytes=10**9, num_bytes=lambda _: 1))


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes_of(decoders: DecodePool) -> list[psutil.Process]:
    assert isinstance(decoders, ProcessDecoders)
    with decoders._lock:
        return [psutil.Process(child.process.pid) for child in (*decoders._idle, *decoders._at_work.values())]


def failure(patched: Patched) -> tuple[str, str]:
    """Code and message."""
    assert isinstance(patched.result, Failure)
    assert patched.result.stage == "decode"
    return patched.result.code.value, patched.result.message


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = psutil.Process().children()
    yield
    assert psutil.Process().children() == before


@pytest.fixture(scope="module")
def odd() -> Iterator[DecodePool]:
    """One process, which is at work."""
    with make_decoders("processes", OddPatcher()) as decoders:
        through(decoders, [b"echo"])
        yield decoders
        assert decoders.num_replaced == 0


@pytest.mark.parametrize("kind", KINDS)
def test_all_samples_become_what_they_become_without_a_pool(kind: str) -> None:
    paths = sorted(path for path in SAMPLES.rglob("*") if path.is_file())
    contents: list[bytes | ImageError] = [path.read_bytes() for path in paths]
    contents.insert(3, ImageError(FailureCode.MISSING, "gone"))
    with make_decoders(kind, PATCHER, 2) as decoders:
        found = through(decoders, contents)
        assert decoders.num_replaced == 0
        assert decoders.oldest() is None
    assert len(found) == len(paths) + 1 == 30
    for row, (patched, content) in enumerate(zip(found, contents, strict=True)):
        expected = PATCHER(row, content)
        assert (patched.pixel_hash, patched.exif_problem) == (expected.pixel_hash, expected.exif_problem)
        if isinstance(expected.result, Failure):
            assert patched.result == expected.result
            continue
        assert isinstance(patched.result, PatchedImage)
        assert patched.seconds > 0
        assert patched.result.row == row
        assert (patched.result.grid_hw, patched.result.size_hw) == (expected.result.grid_hw, expected.result.size_hw)
        assert patched.result.patches.dtype == expected.result.patches.dtype
        np.testing.assert_array_equal(patched.result.patches, expected.result.patches)
    failed = [patched.result for patched in found if isinstance(patched.result, Failure)]
    assert {result.stage for result in failed} == {"read", "decode"}
    assert {"missing", "empty", "truncated", "corrupt", "unsupported_format"} == {result.code for result in failed}


def test_a_patcher_is_the_same_in_another_process() -> None:
    assert pickle.loads(pickle.dumps(PATCHER)) == PATCHER  # noqa: S301  our own


@pytest.mark.parametrize(("stage", "name"), [("decode", "decode"), ("preprocess", "preprocess")])
def test_no_memory_is_the_rows_failure_and_a_bug_is_not(stage: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = (SAMPLES / "photos" / "cat.jpg").read_bytes()
    for error, code in [(MemoryError(), "out_of_memory"), (ImageError(FailureCode.ASPECT_RATIO, "x"), "aspect_ratio")]:

        def broken(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(f"vlmembed.patcher.{name}", broken)
        patched = PATCHER(3, content)
        assert isinstance(patched.result, Failure)
        assert (patched.result.row, patched.result.stage, patched.result.code) == (3, stage, code)
        assert (patched.pixel_hash is None) == (stage == "decode")

    def bug(*_: object, **__: object) -> None:
        raise KeyError(stage)

    monkeypatch.setattr(f"vlmembed.patcher.{name}", bug)
    with pytest.raises(KeyError), make_decoders("threads", PATCHER) as decoders:
        through(decoders, [content])


def test_a_decoding_process_has_no_torch_and_pillows_settings(odd: DecodePool) -> None:
    (process,) = processes_of(odd)
    for content in (b"echo", b"", bytes(30_000_000)):
        (patched,) = through(odd, [content])
        told = f"{len(content)} bytes in process {process.pid}, torch False, Pillow's limit 50000000"
        assert failure(patched) == ("corrupt", told)
        assert patched.seconds == 0.25


def test_a_decoder_that_crashes_costs_its_row() -> None:
    contents = [b"echo", b"die SIGSEGV", b"echo", b"die SIGKILL", b"exit 3", b"x" * 5, b"x" * 6]
    reasons = {
        1: "signal SIGSEGV",
        3: "killed; where memory is short, by the system",
        4: "exit code 3",
    }
    with make_decoders("processes", OddPatcher(), 2) as decoders:
        found = through(decoders, contents)
        assert decoders.num_replaced == 3
        assert len(processes_of(decoders)) <= 2
    for row, patched in enumerate(found):
        assert isinstance(patched.result, Failure)
        assert patched.result.row == row
        if row in reasons:
            assert failure(patched) == ("decoder_crash", f"the process that decoded it died ({reasons[row]})")
        else:
            assert failure(patched)[1].startswith(f"{len(contents[row])} bytes")


@pytest.mark.parametrize(
    ("kind", "content"), [("threads", b"sleep 5"), ("processes", b"sleep 60"), ("processes", b"spin")]
)
def test_a_decoder_that_hangs_costs_its_row(kind: str, content: bytes) -> None:
    """In a process even with the interpreter's lock held."""
    began = time.monotonic()
    with make_decoders(kind, OddPatcher(), seconds=0.5) as decoders:
        found = through(decoders, [b"echo", content, b"echo"])
        assert decoders.num_replaced == 1
        if kind == "processes":
            assert len(processes_of(decoders)) == 1
    assert time.monotonic() - began < 30
    assert failure(found[1]) == ("timeout", "decoding did not end within 0.5 s: --timeout can give it longer")
    assert found[1].seconds == 0.5
    assert [failure(found[row])[0] for row in (0, 2)] == ["corrupt"] * 2


def test_a_stopped_process_that_is_sent_a_large_picture_is_late_too() -> None:
    """It blocks the sender, not the receiver."""
    with make_decoders("processes", OddPatcher(), seconds=0.5) as decoders:
        through(decoders, [b"echo"])
        processes_of(decoders)[0].suspend()
        (patched,) = through(decoders, [bytes(5_000_000)])
        assert failure(patched)[0] == "timeout"
        assert failure(through(decoders, [b"echo"])[0])[0] == "corrupt"


def test_a_process_that_dies_while_it_has_nothing_to_do_costs_no_row() -> None:
    with make_decoders("processes", OddPatcher()) as decoders:
        through(decoders, [b"echo"])
        child = processes_of(decoders)[0]
        child.kill()
        psutil.wait_procs([child], 0.1)
        (patched,) = through(decoders, [b"echo"])
        assert failure(patched)[0] == "corrupt"
        assert decoders.num_replaced == 1


def test_a_bug_in_a_process_is_raised_here(odd: DecodePool) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        through(odd, [b"divide 1", b"divide 0"])
    assert "in divide" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match=r"TwoReasonsError: this and another") as other:
        through(odd, [b"refuse this"])
    assert not isinstance(other.value, TwoReasonsError)


def test_no_memory_in_a_process_is_its_rows_failure(odd: DecodePool) -> None:
    found = through(odd, [b"allocate 100000000000000", b"echo"])
    assert [failure(patched)[0] for patched in found] == ["out_of_memory", "corrupt"]


def test_ctrl_c_does_not_reach_the_decoders(odd: DecodePool) -> None:
    before = through(odd, [b"echo"])
    processes_of(odd)[0].send_signal(signal.SIGINT)
    assert failure(before[0]) == failure(through(odd, [b"echo"])[0])


@pytest.mark.parametrize(
    ("patcher", "seconds", "num_starts", "match"),
    [
        (NeverReady(deed=b"exit", argument="7"), 60, 3, r"3 ended before .* ready \(exit code 7\).*--decode threads"),
        (NeverReady(deed=b"sleep", argument="60"), 0.2, 1, r"not ready after 0.2 s.*--decode threads"),
    ],
)
def test_processes_that_never_start_end_the_run(
    patcher: OddPatcher, seconds: float, num_starts: int, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert vlmembed.decode_processes.MAX_FAILED_STARTS == 3
    monkeypatch.setattr(vlmembed.decode_processes, "MAX_FAILED_STARTS", num_starts)
    monkeypatch.setattr(vlmembed.decode_processes, "START_SECONDS", seconds)
    with make_decoders("processes", patcher) as decoders, pytest.raises(WorkerError, match=match):
        through(decoders, [b"echo"])


def test_what_cannot_be_read_in_a_process_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        make_decoders("processes", NeverReady(deed=b"divide", argument="0")) as decoders,
        pytest.raises(ZeroDivisionError),
    ):
        through(decoders, [b"echo"])
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with (
        make_decoders("processes", OddPatcher()) as decoders,
        pytest.raises(WorkerError, match=r"No such file .*--decode threads"),
    ):
        through(decoders, [b"echo"])


def test_closing_does_not_wait_for_what_is_under_way() -> None:
    decoders = make_decoders("processes", OddPatcher(), 2)
    futures = [decoders.submit(image) for image in images([b"spin", b"sleep 60", b"echo"])]
    wait_until(lambda: len(processes_of(decoders)) == 2)
    children = processes_of(decoders)
    oldest = decoders.oldest()
    assert oldest is not None
    assert oldest[0].row in (0, 1)
    assert oldest[1] > 0
    began = time.monotonic()
    decoders.close()
    decoders.close()
    assert time.monotonic() - began < 5
    assert not psutil.wait_procs(children, 5)[1]
    for future in futures[:2]:
        assert isinstance(future.exception(0), StoppedError)
    assert futures[2].cancelled()
    with pytest.raises(StoppedError):
        decoders.submit(next(images([b"echo"])))


PARENT = """
import sys, time
sys.path.insert(0, {tests!r})
from odd_children import OddPatcher
from vlmembed.decode_processes import ProcessDecoders
from vlmembed.types import EncodedImage
decoders = ProcessDecoders(OddPatcher(), num_processes=3, timeout_seconds=600)
futures = [decoders.submit(EncodedImage(row=row, key="", content=content)) for row, content in enumerate({contents})]
futures[0].result(60)
deadline = time.monotonic() + 60
while len(decoders._at_work) < {busy}:
    assert time.monotonic() < deadline
    time.sleep(0.02)
time.sleep(0.5)
print("ready", flush=True)
time.sleep(60)
"""


def test_no_process_is_left_when_the_run_is_killed() -> None:
    """Not one that waits, nor one that sleeps, nor one that hangs with the interpreter's lock held."""
    contents = [b"echo", b"spin", b"sleep 600"]
    script = PARENT.format(tests=os.path.dirname(__file__), contents=contents, busy=2)  # noqa: PTH120
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    children = psutil.Process(process.pid).children()
    assert len(children) >= 2
    process.kill()
    process.communicate()
    assert not psutil.wait_procs(children, 10)[1]


def test_threads_mark_the_rows_that_they_are_at(tmp_path: Path) -> None:
    """One that hangs stays marked: if it crashes later, it was that one."""
    path = tmp_path / "decoding.slots"
    suspects = SuspectRows(path, 8)
    with ThreadDecoders(OddPatcher(), num_threads=2, timeout_seconds=0.4, suspects=suspects) as decoders:
        found = through(decoders, [b"echo", b"sleep 1.5", b"echo", b"echo"])
        assert [failure(patched)[0] for patched in found] == ["corrupt", "timeout", "corrupt", "corrupt"]
        assert read_suspects(path) == [(1, "1.jpg")]
        wait_until(lambda: not read_suspects(path))
    suspects.close()
