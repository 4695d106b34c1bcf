"""The GPU benchmark without a GPU: its dry run, what it says, and the clocks that only a GPU would use."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from vlmembed.lanes import CudaLanes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "pipelines" / "benchmarks" / "gpu.py"
RESULTS = SCRIPT.parent / "results"
CUDA = torch.device("cuda", 0)

EXPECTED = {
    "numerics": ("sdpa: attention, heads of 72", "cpu: Qwen3-VL-8B tower, packed and alone", "by a graph and alone"),
    "a": ("MoonViT, 2 images", "max_seqlen by .item() in every block"),
    "b": (
        "matmul peak",
        *(f"{name} x" for name in ("360p", "720p", "1080p", "mixed")),
        *("per-image loop", "packed, eager", "packed, compiled", "packed, graph", "the best of them"),
    ),
    "c": ("packed, eager", "packed, graph"),
    "d": ("dinov2-small", "ViT-L/14"),
    "e": ("one by one", "batches bucketed by size", "images, packed", "packed beside one by one"),
}
"""By part, what some row of it says."""


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401  a module
    """A module of the script, which finds its neighbours in its own folder."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module(name)


def results() -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in RESULTS.iterdir()}


def test_the_dry_run_goes_through_every_part(tmp_path: Path) -> None:
    """Without a network, without the built-in model, and without a result file that nobody asked for."""
    before, output = results(), tmp_path / "gpu.json"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--output", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert results() == before
    lines = run.stdout.splitlines()
    for part, cases in EXPECTED.items():
        own = [line for line in lines if line.startswith(f"{part} ")]
        for case in cases:
            assert any(case in line for line in own), (part, case, own)
    assert "figures mean nothing" in run.stdout
    rows = json.loads(output.read_text())["figures"]["rows"]
    assert {row["part"] for row in rows} == set(EXPECTED)
    for row in rows:
        expected = "met" if row["part"] == "numerics" else "not measured"  # no floor is met on a CPU
        assert row.get("verdict", expected) == expected, row
        assert "failed" not in row.get("note", ""), row


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--device cpu --tiny is the dry run"),
        (("--device", "cpu"), "add --tiny"),
        (("--device", "cpu", "--tiny", "--only", "a,z"), "--only z is no part"),
        (("--device", "cpu", "--tiny", "--attention", "flash3"), "--attention flash3 needs a GPU"),
        (("--device", "cpu", "--tiny", "--output", "nowhere/gpu.json"), "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_run_is_told_with_exit_code_2(
    arguments: Sequence[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = load("gpu", monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_part_that_breaks_keeps_its_rows_and_lets_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu, gpu_table = load("gpu", monkeypatch), load("gpu_table", monkeypatch)

    def breaks(_: object) -> Iterator[Any]:
        yield gpu_table.Row(part="a", case="measured before")
        msg = "the GPU is lost"
        raise RuntimeError(msg)

    def runs(_: object) -> Iterator[Any]:
        yield gpu_table.Row(part="b", case="measured after")

    monkeypatch.setattr(gpu, "PARTS", {"a": breaks, "b": runs})
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "cpu", "--tiny"])
    assert gpu.main() == 1
    out = capsys.readouterr().out
    assert all(each in out for each in ("measured before", "the GPU is lost", "measured after"))


def test_a_check_that_does_not_hold_fails_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, gpu_table = load("gpu", monkeypatch), load("gpu_table", monkeypatch)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "cpu", "--tiny"])
    for cosine, code in ((0.9991, 0), (0.9989, 1), (float("nan"), 1), (None, 1)):
        row = gpu_table.Row(
            part="numerics",
            case="a backend",
            figures={} if cosine is None else {"cosine": cosine},
            floor=gpu_table.Floor(unit="cosine", limit=0.999),
            is_check=True,
        )
        monkeypatch.setattr(gpu, "PARTS", {"numerics": lambda _, row=row: [row]})
        assert gpu.main() == code


@pytest.mark.parametrize(
    ("figure", "at_most", "verdict"),
    [(26.0, True, "met"), (26.1, True, "not met"), (26.0, False, "met"), (25.9, False, "not met")],
)
def test_a_floor_is_judged_in_a_real_run_alone(
    figure: float,
    at_most: bool,  # noqa: FBT001  a parameter of the test
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu_table = load("gpu_table", monkeypatch)
    floor = gpu_table.Floor(unit="ms", limit=26.0, at_most=at_most)
    row = gpu_table.Row(part="a", case="a forward", figures={"ms": figure}, floor=floor)
    assert row.verdict(is_real=True) == verdict
    assert row.verdict(is_real=False) == "not measured"
    assert gpu_table.Row(part="a", case="a forward", floor=floor).verdict(is_real=True) == "not measured"
    assert gpu_table.Row(part="a", case="a forward", figures={"ms": figure}).verdict(is_real=True) == ""


@dataclass
class FakeEvent:
    """A CUDA event on a device whose clock the test turns."""

    enable_timing: bool
    at: list[float] = field(default_factory=list)

    now = 0.0

    def record(self) -> None:
        """Now."""
        self.at.append(FakeEvent.now)

    def elapsed_time(self, other: FakeEvent) -> float:
        """Milliseconds."""
        (start,), (stop,) = self.at, other.at
        return stop - start


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events in milliseconds of `FakeEvent.now`, and lanes that run their work at once."""
    monkeypatch.setattr(FakeEvent, "now", 0.0)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(CudaLanes, "run", lambda _lanes, _lane, work, _after=(): work())


@pytest.mark.usefixtures("fake_cuda")
def test_a_forward_takes_the_median_of_what_the_events_say(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = load("gpu_clocks", monkeypatch)
    milliseconds = iter([100.0, 100.0, 3.0, 9.0, 4.0])

    def work() -> None:
        FakeEvent.now += next(milliseconds)

    assert clocks.forward_seconds(work, CUDA, warm_ups=2, repeats=3) == pytest.approx(4e-3)


@pytest.mark.usefixtures("fake_cuda")
def test_the_lane_clock_counts_the_compute_lane_of_the_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither copies, nor what was queued before the run, nor a forward that did not fit."""
    clocks, lanes = load("gpu_clocks", monkeypatch), object.__new__(CudaLanes)
    host_seconds = 0.0
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: host_seconds)

    def takes(milliseconds: float) -> None:
        FakeEvent.now += milliseconds

    def does_not_fit() -> None:
        raise torch.OutOfMemoryError

    clock = clocks.LaneClock()
    with clock.watching():
        lanes.run("compute", lambda: takes(500.0))
        host_seconds = 10.0
        lanes.run("in", lambda: takes(70.0))
        lanes.run("compute", lambda: takes(20.0))
        with pytest.raises(torch.OutOfMemoryError):
            lanes.run("compute", does_not_fit)
        lanes.run("out", lambda: takes(70.0))
        lanes.run("compute", lambda: takes(30.0))
    lanes.run("compute", lambda: takes(500.0))
    assert clock.busy_seconds(since=10.0) == pytest.approx(0.05)


def test_syncs_are_counted_by_what_torch_warns_of(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = load("gpu_clocks", monkeypatch)
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def work() -> None:
        for message in ["called a synchronizing CUDA operation", "something else"] * 3:
            warnings.warn(message, stacklevel=1)

    assert clocks.count_syncs(work, CUDA) == 3
    assert modes == ["warn", "default"]


def test_on_a_cpu_syncs_are_counted_among_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, numbers = load("gpu_clocks", monkeypatch), torch.arange(4)
    assert clocks.count_syncs(lambda: numbers.max().item() + len(numbers.nonzero()), torch.device("cpu")) == 2
    assert clocks.count_syncs(lambda: numbers + 1, torch.device("cpu")) == 0
