"""What hangs or crashes costs its row, or stops the run with a word about where."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from breaking import CRASH, HANG, BreakingPatcher
from test_end_to_end import many_pictures, run

import vlmembed.sources.readahead as reading
from vlmembed.errors import StalledError
from vlmembed.parts import PartStore

if TYPE_CHECKING:
    from pathlib import Path

READ = reading.read_content


def spoil(folder: Path, name: str, end: bytes) -> None:
    """A picture that decodes well, and ends in something that breaks `BreakingPatcher`."""
    (folder / name).write_bytes((folder / name).read_bytes() + end)


def codes_of(output: Path) -> dict[str, str]:
    errors = pq.read_table(output.with_suffix(".errors.parquet")).to_pylist()
    return {row["id"]: row["code"] for row in errors}


def test_a_read_that_hangs_fails_its_row_only(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = many_pictures(tmp_path / "in", 30)
    woken = threading.Event()

    def hanging(path: str, *rest: Any) -> Any:  # noqa: ANN401  as there
        if path.endswith(("0003.png", "0004.png", "0005.png", "0006.png", "0007.png")):  # more than there are threads
            woken.wait(30)
        return READ(path, *rest)

    monkeypatch.setattr(reading, "read_content", hanging)
    report = run(folder, tmp_path / "out.parquet", model=str(tiny_model), timeout=0.5)
    woken.set()
    assert report.codes["timeout"] == 5
    assert (report.num_rows, report.num_embedded) == (30, 23)
    assert [key for key, code in codes_of(tmp_path / "out.parquet").items() if code == "timeout"] == [
        f"000{row}.png" for row in range(3, 8)
    ]


@pytest.mark.parametrize("decode", ["threads", "processes"])
def test_a_decode_that_hangs_fails_its_row_only(
    decode: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = many_pictures(tmp_path / "in", 24)
    spoil(folder, "0007.png", HANG)
    monkeypatch.setattr("vlmembed.stages.Patcher", BreakingPatcher)
    settings = {"model": str(tiny_model), "timeout": 1.0, "decode": decode, "workers": 2}
    began = time.monotonic()
    report = run(folder, tmp_path / "out.parquet", **settings)
    assert time.monotonic() - began < 25
    assert codes_of(tmp_path / "out.parquet") == {"0000.png": "truncated", "0007.png": "timeout"}
    assert (report.num_embedded, report.num_replaced_decoders) == (22, 1)


def test_a_decoder_that_crashes_costs_one_row_with_processes(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = many_pictures(tmp_path / "in", 60)
    crashing = ["0004.png", "0005.png", "0033.png", "0059.png"]
    for name in crashing:
        spoil(folder, name, CRASH)
    monkeypatch.setattr("vlmembed.stages.Patcher", BreakingPatcher)
    report = run(folder, tmp_path / "out.parquet", model=str(tiny_model), decode="processes", workers=2)
    codes = codes_of(tmp_path / "out.parquet")
    assert [key for key, code in codes.items() if code == "decoder_crash"] == crashing
    assert report.num_rows == report.num_embedded + report.num_duplicates + report.num_failed == 60
    assert report.num_failed == len(crashing) + 2
    assert report.num_replaced_decoders == len(crashing)


def test_a_stage_that_hangs_is_named_and_the_run_given_up(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = many_pictures(tmp_path / "in", 60)
    settings: dict[str, Any] = {"model": str(tiny_model), "rows_per_part": 20}
    woken = threading.Event()
    commit = PartStore.commit

    def hanging(self: PartStore, record: Any, *rest: Any) -> None:  # noqa: ANN401  as there
        if record.number == 1:
            woken.wait(60)
        commit(self, record, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(PartStore, "commit", hanging)
        patch.setattr("vlmembed.pipeline.REPORT_SECONDS", 0.5)
        patch.setattr("vlmembed.pipeline.STALL_TIMEOUTS", 1)
        patch.setattr("vlmembed.pipeline.JOIN_SECONDS", 0.5)
        with caplog.at_level(logging.ERROR), pytest.raises(StalledError) as caught:
            run(folder, tmp_path / "out.parquet", **settings, timeout=3.0)
        said = [record.message for record in caplog.records if "nothing has moved" in record.message]
        assert said
        assert "writer: writes" in said[0]
        assert "the encoder waits for packs" in said[0] or "MainThread" not in said[0]
        assert "so the run was given up" in str(caught.value)
        assert "the same command goes on from there; a larger --timeout waits longer" in str(caught.value)
        woken.set()
        for thread in threading.enumerate():
            if thread.name == "writer":
                thread.join(10)
    assert run(folder, tmp_path / "out.parquet", **settings).num_resumed >= 20
