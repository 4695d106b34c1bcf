"""Whatever breaks, in whatever stage: the run ends, says why, and keeps what was committed."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_end_to_end import many_pictures, run

from vlmembed.encoder import Encoder
from vlmembed.preprocess import preprocess
from vlmembed.progress import StageClock
from vlmembed.sources.folder import FolderSource
from vlmembed.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from PIL.Image import Image

    from vlmembed.draft import Draft
    from vlmembed.layout import ResizeRule
    from vlmembed.types import PatchedImage


class BrokenStageError(Exception):
    """What the tests make a stage raise."""


def breaks_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, but its `call`-th call raises."""
    calls = 0

    def wrapped(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
        nonlocal calls
        calls += 1
        if calls == call:
            raise BrokenStageError(str(call))
        return function(*arguments, **keywords)

    return wrapped


STAGES = {
    "read": (FolderSource, "read", 1),
    "decode": ("vlmembed.patcher", "preprocess", 60),
    "pack": ("vlmembed.packer", "make_batch", 8),
    "encode": (Encoder, "_submit", 8),
    "write": (Writer, "add", 100),
    "commit": (Writer, "_commit", 3),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_breaks_ends_the_run_and_the_next_start_goes_on(
    stage: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = many_pictures(tmp_path / "in", 120)
    settings = {"model": str(tiny_model), "rows_per_part": 20, "max_tokens_per_batch": 40}
    whole = run(folder, tmp_path / "whole.parquet", **settings)
    place, name, call = STAGES[stage]
    with monkeypatch.context() as patch:
        if isinstance(place, str):
            target = f"{place}.{name}"
            module = __import__(place, fromlist=[name])
            patch.setattr(target, breaks_at(call, getattr(module, name)))
        else:
            patch.setattr(place, name, breaks_at(call, getattr(place, name)))
        with pytest.raises(BrokenStageError):
            run(folder, tmp_path / "out.parquet", **settings)
    assert not [thread for thread in threading.enumerate() if thread.name in ("reader", "writer")]
    assert not (tmp_path / "out.parquet").exists()
    again = run(folder, tmp_path / "out.parquet", **settings)
    assert again.num_rows == again.num_embedded + again.num_duplicates + again.num_failed == 120
    assert again.num_resumed % 20 == 0
    assert again.num_encoded <= whole.num_encoded
    assert pq.read_table(tmp_path / "out.parquet").equals(pq.read_table(tmp_path / "whole.parquet"))
    errors = [pq.read_table(tmp_path / f"{name}.errors.parquet") for name in ("out", "whole")]
    assert errors[0].equals(errors[1])


def test_no_memory_for_one_image_is_its_rows_failure(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = many_pictures(tmp_path / "in", 30)

    def short_of_memory(rgb: Image, row: int, rule: ResizeRule, draft: Draft | None) -> PatchedImage:
        if row == 5:
            raise MemoryError
        return preprocess(rgb, row, rule, draft)

    monkeypatch.setattr("vlmembed.patcher.preprocess", short_of_memory)
    report = run(folder, tmp_path / "out.parquet", model=str(tiny_model))
    assert report.codes["out_of_memory"] == 1


def test_duplicates_and_failures_alone_fill_parts(tmp_path: Path, tiny_model: Path) -> None:
    """Parts without a single image to encode, and a last part that is short."""
    folder = tmp_path / "in"
    many_pictures(folder, 3)
    content = (folder / "0001.png").read_bytes()
    for row in range(3, 55):
        (folder / f"{row:04}.png").write_bytes(content if row % 2 else b"")
    report = run(folder, tmp_path / "out.parquet", model=str(tiny_model), rows_per_part=10)
    assert (report.num_rows, report.num_embedded, report.num_duplicates) == (55, 2, 26)
    assert report.codes == {"empty": 26, "truncated": 1}
    table = pq.read_table(tmp_path / "out.parquet")
    assert set(table["duplicate_of"].to_pylist()[2:]) == {"0001.png"}
    assert table["embedding"][0] == table["embedding"][27]  # row 0 failed: row 1 comes first


def test_the_clock_knows_what_every_thread_is_at() -> None:
    clock, inside, over = StageClock(), threading.Event(), threading.Event()

    def work() -> None:
        with clock.measure("encode"):
            inside.set()
            over.wait()

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    inside.wait()
    with clock.measure("write"), clock.measure("find"):
        assert clock.doing() == {"worker": "encode", threading.current_thread().name: "find"}
    over.set()
    thread.join()
    assert clock.doing() == {}


def test_the_clock_leaves_waiting_out() -> None:
    clock = StageClock()
    with clock.measure("outer"), clock.measure("inner"):
        threading.Event().wait(0.05)
    assert clock.seconds["inner"] >= 0.05
    assert clock.seconds["outer"] < 0.02
    assert clock.busiest({"outer": 1, "inner": 1}, 0.1)[0] == "inner"


def test_memory_does_not_grow_with_the_rows(tmp_path: Path, tiny_model: Path) -> None:
    generator = np.random.default_rng(0)
    script = """
import sys, vlmembed
config = vlmembed.EncodeConfig(inputs=(sys.argv[1],), output=sys.argv[2], model=sys.argv[3])
report = vlmembed.encode(config)
peak = open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]
print(report.num_embedded, peak)
"""
    peaks = []
    for count in (1000, 5000):
        images = []
        for _ in range(count):
            buffer = io.BytesIO()
            pixels = generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            PIL.Image.fromarray(pixels).save(buffer, "PNG", compress_level=0)
            images.append(buffer.getvalue())
        source, output = tmp_path / f"{count}.parquet", tmp_path / f"out{count}.parquet"
        pq.write_table(pa.table({"image": images}), source, row_group_size=2000)
        command = [sys.executable, "-c", script, str(source), str(output), str(tiny_model)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        embedded, peak_kib = map(int, printed.split())
        assert embedded == count
        peaks.append(peak_kib)
    assert peaks[1] - peaks[0] < 60 * 1024, peaks
