"""`--cache` and `--reuse` through whole runs: what is known is not encoded again, and is the same to the bit."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from test_end_to_end import many_pictures, run, stop_after

from vlmembed.errors import ConfigError, InputError, OutputError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return many_pictures(tmp_path_factory.mktemp("known") / "in", 60)


def settings_of(tiny_model: Path) -> dict[str, Any]:
    return {"model": str(tiny_model), "rows_per_part": 20}


@pytest.mark.parametrize("dedup", ["bytes", "pixels"])
def test_a_second_run_encodes_nothing(dedup: str, pictures: Path, tmp_path: Path, tiny_model: Path) -> None:
    settings = settings_of(tiny_model) | {"dedup": dedup}
    cached = settings | {"cache": str(tmp_path / "cache")}
    first = run(pictures, tmp_path / "first.parquet", **cached)
    assert first.num_found == 0
    expected = pq.read_table(tmp_path / "first.parquet")
    for name, known in (("cached", cached), ("reused", settings | {"reuse": (str(tmp_path / "first.parquet"),)})):
        again = run(pictures, tmp_path / f"{name}.parquet", **known)
        assert (again.num_encoded, again.num_found, again.num_failed) == (0, first.num_encoded, first.num_failed)
        assert pq.read_table(tmp_path / f"{name}.parquet").equals(expected)


def test_only_what_is_new_is_encoded_and_only_by_the_same_encoder(
    pictures: Path, tmp_path: Path, tiny_model: Path
) -> None:
    shutil.copytree(pictures, tmp_path / "in")
    cached = settings_of(tiny_model) | {"cache": str(tmp_path / "cache")}
    first = run(tmp_path / "in", f"{tmp_path}/first/", **cached)
    (tmp_path / "in" / "0001.png").unlink()
    many_pictures(tmp_path / "more", 70)
    shutil.copy(tmp_path / "more" / "0066.png", tmp_path / "in")
    grown = run(tmp_path / "in", tmp_path / "grown.parquet", **cached)
    assert (grown.num_encoded, grown.num_found) == (1, first.num_encoded - 1)
    other = run(tmp_path / "in", tmp_path / "other.parquet", **cached, pool="mean")
    assert (other.num_found, other.num_encoded) == (0, first.num_encoded)
    del cached["cache"]
    reused = run(tmp_path / "in", tmp_path / "reused.parquet", **cached, reuse=(f"{tmp_path}/first",))
    assert (reused.num_encoded, reused.num_found) == (1, first.num_encoded - 1)
    with pytest.raises(InputError, match='pool: "cls" there, "mean" now'):
        run(tmp_path / "in", tmp_path / "x.parquet", **cached, reuse=(f"{tmp_path}/first",), pool="mean")


def test_a_stopped_run_leaves_in_the_cache_what_it_has_committed(
    pictures: Path, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the rest of its rows are packed as in an undisturbed run: the same bytes."""
    settings = settings_of(tiny_model)
    run(pictures, tmp_path / "whole.parquet", **settings)
    with monkeypatch.context() as patch:
        stop_after(1, patch)
        with pytest.raises(KeyboardInterrupt):
            run(pictures, tmp_path / "out.parquet", **settings, cache=str(tmp_path / "cache"))
    again = run(pictures, tmp_path / "out.parquet", **settings, cache=str(tmp_path / "cache"))
    assert (again.num_resumed, again.num_found) == (20, 0)
    assert pq.read_table(tmp_path / "out.parquet").equals(pq.read_table(tmp_path / "whole.parquet"))


def test_what_cannot_be_used_is_told_before_a_model_is_loaded(pictures: Path, tmp_path: Path, tiny_model: Path) -> None:
    nowhere = {"model": str(tmp_path / "no model")}
    with pytest.raises(InputError, match=r"gone.parquet cannot be read as Parquet"):
        run(pictures, tmp_path / "x.parquet", **nowhere, reuse=(str(tmp_path / "gone.parquet"),))
    run(pictures, tmp_path / "first.parquet", **settings_of(tiny_model), limit=20)
    with pytest.raises(ConfigError, match="made with --dedup bytes, whose hashes are others than --dedup pixels"):
        run(pictures, tmp_path / "x.parquet", **nowhere, reuse=(str(tmp_path / "first.parquet"),), dedup="pixels")
    assert not (tmp_path / "x.parquet.partial").exists()
    with pytest.raises(OutputError, match=r"cannot write to .*first.parquet"):
        run(pictures, tmp_path / "x.parquet", **settings_of(tiny_model), cache=str(tmp_path / "first.parquet"))
    for timeout in (0, -1, float("nan"), float("inf"), "9"):
        with pytest.raises(ConfigError, match="it is a number of seconds, more than 0"):
            run(pictures, tmp_path / "x.parquet", **nowhere, timeout=timeout)
