"""After a crash of the whole process the rows that it was decoding are known."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from vlmembed.suspects import SLOT_BYTES, SuspectRows, read_suspects

if TYPE_CHECKING:
    from pathlib import Path


def test_a_row_is_a_suspect_while_it_is_marked(tmp_path: Path) -> None:
    path = tmp_path / "decoding.slots"
    suspects = SuspectRows(path, 3)
    assert path.stat().st_size == 3 * SLOT_BYTES
    assert read_suspects(path) == []
    with suspects.mark(7, "b.jpg"), suspects.mark(2**40, "a.jpg"):
        assert read_suspects(path) == [(7, "b.jpg"), (2**40, "a.jpg")]
        with suspects.mark(0, ""):
            assert read_suspects(path)[0] == (0, "")
            with suspects.mark(1, "a fourth finds no slot"):
                assert len(read_suspects(path)) == 3
    assert read_suspects(path) == []
    with pytest.raises(ZeroDivisionError), suspects.mark(3, "c.jpg"):
        _ = 1 // 0
    assert read_suspects(path) == []
    suspects.close()
    assert not path.exists()


@pytest.mark.parametrize("kill", ["SIGSEGV", "SIGKILL"])
def test_marks_survive_the_process(kill: str, tmp_path: Path) -> None:
    path = tmp_path / "decoding.slots"
    script = f"""
import os, pathlib, signal, threading
from vlmembed.suspects import SuspectRows
suspects, inside = SuspectRows(pathlib.Path({str(path)!r}), 8), threading.Barrier(3)
def hang(row):
    with suspects.mark(row, "café/%d.jpg" % row):
        inside.wait()
        threading.Event().wait()
for row in range(20):
    with suspects.mark(row, "done"):
        pass
for row in (31, 30):
    threading.Thread(target=hang, args=(row,), daemon=True).start()
inside.wait()
os.kill(os.getpid(), signal.{kill})
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode < 0
    assert read_suspects(path) == [(30, "café/30.jpg"), (31, "café/31.jpg")]
    SuspectRows(path, 8).close()
    assert read_suspects(path) == []


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("x" * 1000, "x" * 494),
        ("€" * 1000, "€" * 164),  # three bytes each: 494 is no multiple of them
        ("a\nb\0'\"\x1b", "a\nb\0'\"\x1b"),
        ("undecodable \udcff", "undecodable \\udcff"),
    ],
)
def test_any_key_is_kept_as_far_as_it_fits(key: str, found: str, tmp_path: Path) -> None:
    suspects = SuspectRows(tmp_path / "slots", 1)
    with suspects.mark(5, key):
        assert read_suspects(tmp_path / "slots") == [(5, found)]
    with suspects.mark(6, "short"):
        assert read_suspects(tmp_path / "slots") == [(6, "short")]
    suspects.close()


def test_what_is_no_file_of_marks_holds_none(tmp_path: Path) -> None:
    path = tmp_path / "slots"
    assert read_suspects(path) == []
    assert read_suspects(tmp_path) == []
    suspects = SuspectRows(path, 2)
    with suspects.mark(4, "four"), suspects.mark(3, "three"):
        content = path.read_bytes()
    suspects.close()
    four, three = content[SLOT_BYTES:], content[:SLOT_BYTES]
    for garbage, found in [
        (b"", []),
        (bytes(100), []),
        (b"\xff" * 5000, []),
        (content[: SLOT_BYTES + 20], [(3, "three")]),
        (content[: SLOT_BYTES + 12], [(3, "three")]),
        (three.replace(b"three", b"thr\xffe") + four, [(4, "four")]),
        (three[:8] + b"\xff" * 8 + three[16:] + four, [(4, "four")]),  # row -1
        (three[:16] + b"\xff\xff" + three[18:] + four, [(4, "four")]),  # a key longer than its slot
    ]:
        path.write_bytes(garbage)
        assert read_suspects(path) == found, garbage[:32]


def test_a_file_that_cannot_be_made_is_an_error_for_the_caller(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SuspectRows(tmp_path / "no folder" / "slots", 4)
    (tmp_path / "slots").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        SuspectRows(tmp_path / "slots", 4)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_later_costs_the_marks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suspects = SuspectRows(tmp_path / "slots", 1)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with suspects.mark(1, "one"):
        assert read_suspects(tmp_path / "slots") == []
    suspects.close()


def test_a_thread_that_hangs_may_end_after_the_file_is_closed(tmp_path: Path) -> None:
    """It must not write into whatever file has the number then."""
    suspects, inside, go_on = SuspectRows(tmp_path / "slots", 2), threading.Event(), threading.Event()

    def hang() -> None:
        with suspects.mark(1, "one"):
            inside.set()
            go_on.wait()

    thread = threading.Thread(target=hang)
    thread.start()
    inside.wait()
    suspects.close()
    assert not (tmp_path / "slots").exists()
    assert not suspects._file.closed
    with suspects.mark(2, "comes too late"):
        pass
    go_on.set()
    thread.join()
    assert suspects._file.closed


def test_many_threads_mark_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "slots"
    suspects, barrier = SuspectRows(path, 16), threading.Barrier(16)
    seen: list[int] = []

    def work(number: int) -> None:
        for step in range(50):
            with suspects.mark(100 * step + number, f"{number}"):
                barrier.wait(30)
                if number == 0:
                    seen.append(len(read_suspects(path)))
                barrier.wait(30)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [16] * 50
    assert read_suspects(path) == []
    suspects.close()
