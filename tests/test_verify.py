"""`vlmembed verify`: drift, changed pictures and lost files are found, and nothing else is."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import SAMPLES
from test_end_to_end import many_pictures, run

from vlmembed.checking.deviation import deviation_of
from vlmembed.checking.verification import verify
from vlmembed.errors import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder of pictures and its output beside it."""
    root = tmp_path_factory.mktemp("verify")
    run(many_pictures(root / "in", 60), root / "out.parquet", model=str(tiny_model), rows_per_part=20)
    return root / "out.parquet"


def altered(output: Path, target: Path, change: Callable[[pa.Table], pa.Table]) -> Path:
    """The output with another table in it, but its own provenance, and the errors beside it."""
    table = pq.read_table(output)
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), target)
    shutil.copy(output.with_suffix(".errors.parquet"), target.with_suffix(".errors.parquet"))
    return target


def test_an_output_that_is_as_it_was_is_good(finished: Path) -> None:
    found = verify(finished, num_rows=None)
    assert found.is_good
    assert (found.num_rows, found.num_checked) == (58, 58)
    assert found.worst < 1e-5
    assert found.differences == []
    assert found.tolerance == 2e-3
    found = verify(finished, num_rows=10, seed=3)
    assert (found.num_checked, found.is_good) == (10, True)


def test_a_vector_that_has_drifted_is_named(finished: Path, tmp_path: Path) -> None:
    def drift(table: pa.Table) -> pa.Table:
        vectors = np.array(table["embedding"].to_pylist(), np.float32)
        vectors[7] += 0.01
        return table.set_column(1, table.schema.field(1), pa.array(list(vectors), table.schema.field(1).type))

    output = altered(finished, tmp_path / "out.parquet", drift)
    found = verify(output, num_rows=None)
    assert not found.is_good
    assert found.worst == pytest.approx(0.01 * 32**0.5, rel=1e-2)
    assert found.worst_id == pq.read_table(output)["id"][7].as_py()
    assert verify(output, num_rows=None, tolerance=0.06).is_good


def test_rows_that_are_gone_from_the_file_are_noticed(finished: Path, tmp_path: Path) -> None:
    found = verify(altered(finished, tmp_path / "out.parquet", lambda table: table.slice(0, 50)), num_rows=1)
    assert not found.is_good
    assert "holds 50 rows, and its run wrote 58" in found.problems[0]


def test_changed_vanished_and_moved_pictures(tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(SAMPLES / "drawings", folder)
    output = f"{tmp_path}/out/"
    run(folder, output, model=str(tiny_model))
    shutil.copy(folder / "a.jpg", folder / "alpha.png")
    content = (folder / "one-pixel.png").read_bytes()
    (folder / "one-pixel.png").write_bytes(b"")
    found = verify(tmp_path / "out", num_rows=None)
    assert found.changed == ["alpha.png", "one-pixel.png"]
    assert not found.is_good
    folder.rename(tmp_path / "moved")
    (tmp_path / "moved" / "one-pixel.png").write_bytes(content)
    found = verify(tmp_path / "out", num_rows=None, inputs=[str(tmp_path / "moved")])
    assert (found.changed, found.failed) == (["alpha.png"], {})
    (tmp_path / "moved" / "a.png").unlink()
    (tmp_path / "moved" / "a.png").symlink_to("nowhere")
    found = verify(tmp_path / "out", num_rows=None, inputs=[str(tmp_path / "moved")])
    assert found.failed == {"a.png": "missing: the file does not exist"}
    (tmp_path / "moved" / "a.png").unlink()
    with pytest.raises(InputError, match="moved does not have the ids that they had"):
        verify(tmp_path / "out", inputs=[str(tmp_path / "moved")])


@pytest.mark.parametrize("settings", [{"dedup": "pixels"}, {"embedding_dtype": "float16"}, {"deterministic": True}])
def test_other_kinds_of_output(settings: dict[str, Any], tmp_path: Path, tiny_model: Path) -> None:
    run(SAMPLES, tmp_path / "out.parquet", model=str(tiny_model), **settings)
    found = verify(tmp_path / "out.parquet", num_rows=None)
    assert found.is_good, found
    assert found.num_checked == 21


def test_what_is_no_output(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds rows that failed"):
        verify(finished.with_suffix(".errors.parquet"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="is a folder without _SUCCESS"):
        verify(tmp_path / "folder")


def test_a_tolerance_of_nothing_is_one(finished: Path, tmp_path: Path) -> None:
    def nudge(table: pa.Table) -> pa.Table:
        vectors = np.array(table["embedding"].to_pylist(), np.float32)
        vectors[3] *= np.float32(1.0001)
        return table.set_column(1, table.schema.field(1), pa.array(list(vectors), table.schema.field(1).type))

    output = altered(finished, tmp_path / "out.parquet", nudge)
    assert verify(output, num_rows=None).is_good
    assert not verify(output, num_rows=None, tolerance=0.0).is_good
    for settings in ({"tolerance": -1.0}, {"tolerance": float("nan")}, {"num_rows": 0}):
        with pytest.raises(ConfigError, match="the other 0 or more"):
            verify(output, **settings)


def test_outputs_that_were_renamed_damaged_or_taken_apart(finished: Path, tmp_path: Path, tiny_model: Path) -> None:
    def same(table: pa.Table) -> pa.Table:
        return table

    assert verify(altered(finished, tmp_path / "renamed.pq", same), num_rows=5).is_good
    content = bytearray(finished.read_bytes())
    start = pq.read_metadata(finished).row_group(0).column(1).data_page_offset
    content[start + 60 : start + 90] = bytes(30)
    (tmp_path / "out.parquet").write_bytes(content)
    shutil.copy(finished.with_suffix(".errors.parquet"), tmp_path / "out.errors.parquet")
    with pytest.raises(InputError, match=r"out.parquet is damaged, or gone \(.*put a sound copy in its place"):
        verify(tmp_path / "out.parquet", num_rows=None)
    folder = f"{tmp_path}/out/"
    run(SAMPLES / "drawings", folder, model=str(tiny_model))
    (tmp_path / "out" / "README.md").write_text("about these vectors")
    assert verify(tmp_path / "out", num_rows=None).is_good
    with pytest.raises(InputError, match="is a part of an output, not a whole one: name the folder"):
        verify(tmp_path / "out" / "part-000000.parquet")
    with pytest.raises(InputError, match="'nowhere' does not exist; if the pictures have moved, name them behind"):
        verify(tmp_path / "out", inputs=["nowhere"])
    with pytest.raises(InputError, match=r"gone.parquet cannot be read as Parquet: it does not exist; name the output"):
        verify(tmp_path / "gone.parquet")


def test_deviation_is_relative_to_the_stored_length() -> None:
    stored = np.array([3, 4], np.float16)
    assert deviation_of(np.array([3, 4.5], np.float32), stored) == pytest.approx(0.1)
    assert deviation_of(np.zeros(3, np.float32), stored) == float("inf")
    assert np.isnan(deviation_of(np.array([np.nan, 0], np.float32), stored))
