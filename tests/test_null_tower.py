"""The benchmarks' null tower: a run with it is a run, and its vectors are hashes of the pixels."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import noise

import vlmembed

FOLDER = Path(__file__).parent.parent / "pipelines" / "benchmarks"


@pytest.mark.parametrize("layout", ["photo_layout", "small_layout"])
def test_equal_pixels_have_equal_vectors_and_others_others(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    benchmark: Any = importlib.import_module("null_tower")
    folder = tmp_path / "in"
    folder.mkdir()
    one = noise(40, 60, seed=1)
    other = one.copy()
    other.putpixel((30, 20), (1, 2, 3))
    one.save(folder / "a.png")
    one.save(folder / "b.png", compress_level=1)  # another file, the same pixels
    other.save(folder / "c.png")
    noise(40, 60, seed=2).save(folder / "d.png")
    with benchmark.null_tower(getattr(benchmark, layout)()):
        report = vlmembed.encode(inputs=[folder], output=tmp_path / "out.parquet", normalize=False)
    assert (report.num_embedded, report.num_duplicates, report.width) == (4, 0, benchmark.WIDTH)
    vectors = [tuple(vector) for vector in pq.read_table(tmp_path / "out.parquet")["embedding"].to_pylist()]
    assert vectors[0] == vectors[1]
    assert len(set(vectors)) == 3


def test_every_pixel_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    benchmark: Any = importlib.import_module("null_tower")
    patches = np.zeros((3, 12), np.uint8)
    hashes = {tuple(benchmark.pixel_hash(patches).tolist())}
    for index in np.ndindex(patches.shape):
        changed = patches.copy()
        changed[index] = 128
        hashes.add(tuple(benchmark.pixel_hash(changed).tolist()))
    assert len(hashes) == 1 + patches.size
