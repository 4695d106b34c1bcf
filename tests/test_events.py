"""What a run tells while it goes on, to a caller and to the file of `--log-json`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from conftest import ROOT
from test_end_to_end import many_pictures, run

from vlmembed.cli.encode import run_to_exit
from vlmembed.cli.eventlog import EventLog
from vlmembed.config import EncodeConfig
from vlmembed.errors import ConfigError, InputError, NothingEmbeddedError, RowFailedError, StorageError
from vlmembed.events import End, Error, Part, Start, now
from vlmembed.report import RunReport
from vlmembed.run import encode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vlmembed.events import Event

ROWS, ROWS_PER_PART = 50, 20
"""Pictures in three parts; rows 0 and 25 are broken, 40 is a copy of 3."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return many_pictures(tmp_path_factory.mktemp("events") / "in", ROWS)


@pytest.fixture
def config(folder: Path, tmp_path: Path, tiny_model: Path) -> Callable[..., EncodeConfig]:
    """The settings of a run, some of them others."""

    def make(**settings: Any) -> EncodeConfig:  # noqa: ANN401  any setting
        usual: dict[str, Any] = {
            "inputs": (str(folder),),
            "output": str(tmp_path / "out.parquet"),
            "model": str(tiny_model),
            "rows_per_part": ROWS_PER_PART,
            "max_error_rate": 0.1,
        }
        return EncodeConfig(**usual | settings)

    return make


def lines_of(path: Path) -> list[dict[str, Any]]:
    """A log: strict JSON, a line each."""

    def no_constant(name: str) -> float:
        raise AssertionError(name)

    text = path.read_text(encoding="ascii")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=no_constant) for line in text.splitlines()]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["event"] for event in events]


def test_a_run_tells_its_start_every_part_and_its_end(
    config: Callable[..., EncodeConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    before = datetime.now(UTC)
    run_to_exit(config(), progress=False, log_json=str(log))
    start, *parts, end = lines_of(log)

    assert start["output"] == str(tmp_path / "out.parquet")
    assert (start["num_rows"], start["num_resumed"], start["rows_per_part"]) == (50, 0, 20)
    assert (start["device"], start["retry_failed"]) == ("cpu", False)
    assert re.fullmatch("[0-9a-f]{64}", start["weights_sha256"])
    assert start["max_tokens_per_batch"] > 0

    assert kinds(parts) == ["part"] * 3
    names = ("number", "first_row", "num_rows", "num_embedded", "num_duplicates", "num_failed", "num_rows_done")
    assert [tuple(part[name] for name in names) for part in parts] == [
        (0, 0, 20, 19, 0, 1, 20),
        (1, 20, 20, 19, 0, 1, 40),
        (2, 40, 10, 9, 1, 0, 50),
    ]
    for part in parts:
        assert part["num_rows_total"] == 50
        assert part["slowest_stage"] in {"read", "dedup", "decode", "pack", "encode", "write"}
        assert 0 < part["slowest_share"] <= 1
        assert part["images_per_second"] > 0
        assert part["tokens_per_second"] > part["images_per_second"]
    assert parts[0]["eta_seconds"] > 0
    assert parts[-1]["eta_seconds"] == 0
    assert parts[0]["seconds"] < parts[1]["seconds"] < parts[2]["seconds"]

    assert (end["event"], end["status"], end["exit_code"], end["too_many_failed"]) == ("end", "done", 0, False)
    report = end["report"]
    assert RunReport(**report).num_rows == 50
    assert [report[f"num_{what}"] for what in ("embedded", "duplicates", "failed")] == [
        sum(part[f"num_{what}"] for part in parts) for what in ("embedded", "duplicates", "failed")
    ]
    assert (report["codes"], report["num_encoded"]) == ({"truncated": 2}, 47)

    times = [event["time"] for event in (start, *parts, end)]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time) for time in times)
    assert times == sorted(times)
    assert before - timedelta(milliseconds=1) <= datetime.fromisoformat(times[0]) <= datetime.now(UTC)
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out.parquet'}: 50 rows = 47 embedded")

    run_to_exit(config(), progress=False, log_json=str(log))  # again
    *earlier, again = lines_of(log)
    assert earlier == [start, *parts, end]
    assert (again["event"], again["status"], again["exit_code"]) == ("end", "already_complete", 0)
    assert again["report"]["num_rows"] == 50


def test_a_consumer_that_raises_ends_the_run_which_goes_on_in_the_same_log(
    config: Callable[..., EncodeConfig], tmp_path: Path
) -> None:
    class EnoughError(Exception):
        pass

    seen: list[Event] = []

    def stop_at_the_second(event: Event) -> None:
        seen.append(event)
        if event["event"] == "part" and event["number"] == 1:
            raise EnoughError

    with pytest.raises(EnoughError):
        encode(config(), on_event=stop_at_the_second)
    assert [event["event"] for event in seen] == ["start", "part", "part"]
    assert not (tmp_path / "out.parquet").exists()

    run_to_exit(config(), progress=False, log_json=str(tmp_path / "log.jsonl"))
    start, part, end = lines_of(tmp_path / "log.jsonl")
    assert (start["num_rows"], start["num_resumed"]) == (50, 40)
    assert (part["number"], part["first_row"], part["num_rows"], part["num_rows_done"]) == (2, 40, 10, 50)
    assert (end["report"]["num_rows"], end["report"]["num_resumed"], end["report"]["num_encoded"]) == (50, 40, 9)

    whole = run(config().inputs, tmp_path / "whole.parquet", model=config().model, rows_per_part=ROWS_PER_PART)
    assert (whole.num_embedded, whole.num_failed) == (end["report"]["num_embedded"], end["report"]["num_failed"])


def test_errors_are_the_last_line_with_their_exit_code(config: Callable[..., EncodeConfig], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"

    def fails(error: type[Exception], **settings: Any) -> dict[str, Any]:  # noqa: ANN401
        with pytest.raises(error):
            run_to_exit(config(**settings), progress=False, log_json=str(log))
        last = lines_of(log)[-1]
        assert last["event"] == "error"
        return last

    failed = fails(RowFailedError, on_error="fail")
    assert (failed["status"], failed["exit_code"], failed["kind"]) == ("failed", 1, "RowFailedError")
    assert failed["message"].startswith("0000.png: truncated")
    assert failed["num_rows_done"] == 0

    usage = fails(InputError, inputs=("nowhere",))
    assert (usage["status"], usage["exit_code"], usage["num_rows_done"]) == ("usage", 2, None)
    assert "'nowhere' does not exist" in usage["message"]

    nothing = fails(NothingEmbeddedError, limit=1, overwrite=True)
    assert (nothing["status"], nothing["exit_code"], nothing["num_rows_done"]) == ("failed", 1, 1)
    assert kinds(lines_of(log)) == ["start", "error", "error", "start", "part", "error"]


def test_too_many_failed_rows_are_an_end_with_exit_code_3(config: Callable[..., EncodeConfig], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with pytest.raises(SystemExit) as ended:
        run_to_exit(config(limit=10, max_error_rate=0.05), progress=False, log_json=str(log))
    assert ended.value.code == 3
    start, part, end = lines_of(log)
    assert (start["num_rows"], part["num_failed"]) == (10, 1)
    assert (end["event"], end["status"], end["exit_code"], end["too_many_failed"]) == ("end", "done", 3, True)


def test_failed_rows_that_are_tried_again_are_parts_of_their_own(
    config: Callable[..., EncodeConfig], folder: Path
) -> None:
    encode(config())
    broken = (folder / "0025.png").read_bytes()
    try:
        (folder / "0025.png").write_bytes((folder / "0001.png").read_bytes() + b"more")
        events: list[Any] = []
        report = encode(config(retry_failed=True), on_event=events.append)
    finally:
        (folder / "0025.png").write_bytes(broken)
    start, part, end = events
    assert (start["num_rows"], start["retry_failed"]) == (2, True)
    assert (part["first_row"], part["num_rows"], part["num_embedded"], part["num_failed"]) == (0, 2, 1, 1)
    assert (part["num_rows_done"], part["num_rows_total"]) == (2, 2)
    assert (report.num_recovered, end["report"]["num_recovered"]) == (1, 1)
    assert "exit_code" not in end  # which is the command line's


def test_rows_that_are_counted_by_reading_them_have_no_total(
    config: Callable[..., EncodeConfig], folder: Path, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for row in range(1, 25):
            tar.add(folder / f"{row:04}.png", f"{row:04}.png")
    events: list[Any] = []
    encode(config(inputs=(str(tmp_path / "shard.tar"),)), on_event=events.append)
    assert kinds(events) == ["start", "part", "part", "end"]
    assert events[0]["num_rows"] is None
    assert [(event["num_rows_total"], event["eta_seconds"]) for event in events[1:3]] == [(None, None)] * 2
    assert [event["num_rows_done"] for event in events[1:3]] == [20, 24]


@pytest.mark.slow
def test_several_devices_tell_the_same_parts(config: Callable[..., EncodeConfig]) -> None:
    events: list[Any] = []
    encode(config(device="cpu,cpu"), on_event=events.append)
    assert kinds(events) == ["start", "part", "part", "part", "end"]
    assert events[0]["device"] == "cpu,cpu"
    assert [event["num_rows_done"] for event in events[1:4]] == [20, 40, 50]
    assert sum(event["num_embedded"] for event in events[1:4]) == 47


# A run without a model: it commits a part, says so on stdout, and waits for a signal.
WAITING = """
import signal, sys, types
run = types.ModuleType("vlmembed.run")
sys.modules["vlmembed.run"] = run
def encode(config, *, progress, hung, on_event):
    on_event({"event": "start", "num_resumed": 20})
    on_event({"event": "part", "num_rows_done": 40})
    print("committed", flush=True)
    while True:
        signal.pause()
run.encode = encode
from vlmembed.cli import main
sys.argv = ["vlmembed", "encode", ".", "out.parquet", "--log-json", "log.jsonl"]
main()
"""


@pytest.mark.parametrize(
    ("number", "status", "code"), [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "terminated", 143)]
)
def test_a_signal_writes_its_line(number: signal.Signals, status: str, code: int, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WAITING], cwd=tmp_path, stdout=-1, stderr=-1, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "committed\n"
        process.send_signal(number)
        assert process.wait(timeout=60) == code
    last = lines_of(tmp_path / "log.jsonl")[-1]
    assert (last["event"], last["status"], last["exit_code"], last["num_rows_done"]) == ("error", status, code, 40)


def test_a_run_that_cannot_be_ended_says_so_before_it_exits(
    config: Callable[..., EncodeConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exit_at_once(code: int) -> None:
        raise SystemExit(code)

    def hang(_: EncodeConfig, *, hung: Callable[[], None], **__: object) -> None:
        hung()

    monkeypatch.setattr(os, "_exit", exit_at_once)
    monkeypatch.setattr("vlmembed.run.encode", hang)
    with pytest.raises(SystemExit):
        run_to_exit(config(), progress=False, log_json=str(tmp_path / "log.jsonl"))
    (line,) = lines_of(tmp_path / "log.jsonl")
    assert (line["status"], line["kind"], line["exit_code"]) == ("failed", "StalledError", 1)
    assert line["message"].startswith("nothing has moved for so long")


def part_of(number: int) -> Any:  # noqa: ANN401  as much of an event as a log looks at
    return {"event": "part", "time": now(), "number": number, "num_rows_done": number}


def test_every_event_is_one_write_of_a_whole_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    write = os.write

    def counted(descriptor: int, line: bytes) -> int:
        written.append(line)
        return write(descriptor, line)

    monkeypatch.setattr(os, "write", counted)
    log = EventLog(str(tmp_path / "log.jsonl"))
    for number in range(3):
        log.write(part_of(number))
        assert len(lines_of(tmp_path / "log.jsonl")) == number + 1  # there for readers at once
    log.close()
    assert [line.count(b"\n") for line in written] == [1, 1, 1]
    assert all(line.endswith(b"}\n") for line in written)


def test_a_line_that_a_crash_has_cut_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "start"}\n{"event": "pa')
    for number in range(2):
        log = EventLog(str(path))
        log.write(part_of(number))
        log.close()
    first, cut, *rest = path.read_text().splitlines()
    assert (first, cut) == ('{"event": "start"}', '{"event": "pa')
    assert [json.loads(line)["number"] for line in rest] == [0, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("-", "would mix events with results: name a file, or /dev/stderr"),
        ("nowhere/log.jsonl", "cannot be written .*: name a file in a folder that exists and is writable"),
        (".", "cannot be written .*Is a directory"),
        ("out.parquet", "lies where the output .* will be"),
        ("folder/log.jsonl", "lies where the output .* will be"),
        ("notes.txt", "exists and is no log of events: name another file"),
    ],
)
def test_a_log_that_cannot_be_is_refused_before_any_work(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    config = EncodeConfig(inputs=("x",), output="folder/" if name.startswith("folder") else "out.parquet")
    monkeypatch.delattr("vlmembed.run.encode")  # it is not come to
    with pytest.raises(ConfigError, match=message):
        run_to_exit(config, progress=False, log_json=name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "notes.txt"]
    assert not list((tmp_path / "folder").iterdir())
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_full_disk_ends_the_run_and_what_was_committed_is_kept(
    config: Callable[..., EncodeConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(StorageError, match=r"cannot write --log-json /dev/full .*No space left"):
        run_to_exit(config(), progress=False, log_json="/dev/full")
    assert "No space left" in caplog.text  # that the error could not be written either

    write = os.write

    def full(descriptor: int, line: bytes) -> int:
        if b'"part"' in line:
            raise OSError(28, "No space left on device")
        return write(descriptor, line)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageError, match="what was committed is kept"):
        run_to_exit(config(), progress=False, log_json=str(tmp_path / "log.jsonl"))
    last = lines_of(tmp_path / "log.jsonl")[-1]
    assert (last["event"], last["status"], last["num_rows_done"]) == ("error", "failed", 20)
    assert encode(config()).num_resumed == 20


def test_the_page_on_monitoring_names_every_field() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    for event in (Start, Part, End, Error):
        for name in event.__annotations__.keys() - {"event", "time"}:
            assert f"`{name}`" in page, name
