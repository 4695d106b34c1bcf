"""`--retry-failed`: only what failed is read again, and comes back in its place."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_end_to_end import many_pictures, run, stop_after

from vlmembed.errors import ConfigError, InputError, OutputError
from vlmembed.finished import FinishedOutput, input_rows
from vlmembed.merging import merge_rows
from vlmembed.schema import read_provenance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlmembed.types import Int64Array


def settings_of(tiny_model: Path) -> dict[str, Any]:
    return {"model": str(tiny_model), "rows_per_part": 20, "deterministic": True}


def repair(folder: Path, names: list[str]) -> None:
    """Write good pictures where broken ones were; the first one a copy of a later picture."""
    shutil.copy(folder / "0031.png", folder / names[0])
    for name in names[1:]:
        shutil.copy(Path(__file__).parent.parent / "sample_data" / "images" / "photos" / "gravel.png", folder / name)


def rows_of(output: Path) -> dict[str, tuple[object, ...]]:
    """By id: everything but the errors."""
    files = sorted(output.glob("part-*.parquet")) if output.is_dir() else [output]
    rows = pa.concat_tables([pq.read_table(path).replace_schema_metadata() for path in files]).to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: tuple(row.values()) for row in rows}


@pytest.mark.parametrize("kind", ["out.parquet", "out/"])
def test_failed_rows_come_back_in_their_places(kind: str, tmp_path: Path, tiny_model: Path) -> None:
    folder, output = many_pictures(tmp_path / "in", 100), f"{tmp_path}/{kind}"
    first = run(folder, output, **settings_of(tiny_model))
    broken = ["0000.png", "0025.png", "0075.png"]
    before = rows_of(Path(output))
    assert first.codes == {"truncated": 3}
    repair(folder, broken)
    again = run(folder, output, **settings_of(tiny_model), retry_failed=True)
    assert (again.num_retried, again.num_recovered, again.num_failed, again.num_encoded) == (3, 3, 0, 1)
    assert again.num_rows == again.num_embedded + again.num_duplicates == 100
    after = rows_of(Path(output))
    assert sorted(after) == list(after) == [f"{row:04}.png" for row in range(100)]
    assert {key: row for key, row in after.items() if key not in broken} == before
    points = {key: row[3] for key, row in after.items() if key in broken}
    assert points == {"0000.png": "0031.png", "0025.png": None, "0075.png": "0025.png"}

    fresh = run(folder, tmp_path / "fresh.parquet", **settings_of(tiny_model))
    expected = rows_of(tmp_path / "fresh.parquet")
    assert {key: row[1:3] for key, row in after.items()} == {key: row[1:3] for key, row in expected.items()}
    assert (again.num_embedded, again.num_duplicates) == (fresh.num_embedded, fresh.num_duplicates)
    assert run(folder, output, **settings_of(tiny_model)).already_complete  # the changed files are known now
    assert not list(tmp_path.glob("*.partial"))
    facts = FinishedOutput.open(Path(output)).provenance
    assert facts["counts"] | {"skipped": {}} == {
        "rows": 100,
        "embedded": fresh.num_embedded,
        "duplicates": fresh.num_duplicates,
        "failed": 0,
        "codes": {},
        "skipped": {},
    }
    assert len(facts["retried"]) == 1
    assert set(facts["retried"][0]) == {"backend", "versions"}


def test_what_still_fails_stays_in_the_errors_file(tmp_path: Path, tiny_model: Path) -> None:
    folder, output = many_pictures(tmp_path / "in", 60), tmp_path / "out.parquet"
    run(folder, output, **settings_of(tiny_model))
    shutil.copy(folder / "0001.png", folder / "0050.png")  # row 50 was a copy of 13 and is no failure: not read again
    (folder / "0025.png").write_bytes(b"")
    again = run(folder, output, **settings_of(tiny_model), retry_failed=True)
    assert (again.num_retried, again.num_recovered) == (2, 0)
    errors = pq.read_table(tmp_path / "out.errors.parquet")
    assert [(row["id"], row["row"], row["code"]) for row in errors.to_pylist()] == [
        ("0000.png", 0, "truncated"),
        ("0025.png", 25, "empty"),
    ]
    assert read_provenance(errors.schema, "x")["counts"]["codes"] == {"truncated": 1, "empty": 1}
    assert pq.read_metadata(output).num_rows == 58
    for path in folder.glob("00[02]*.png"):
        if path.name in ("0000.png", "0025.png"):
            shutil.copy(folder / "0003.png", path)
    again = run(folder, output, **settings_of(tiny_model), retry_failed=True)
    assert (again.num_recovered, again.num_found) == (2, 1)
    again = run(folder, output, **settings_of(tiny_model), retry_failed=True)
    assert again.already_complete


def test_a_retry_can_be_stopped_and_gone_on_with(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, output = tmp_path / "in", tmp_path / "out.parquet"
    many_pictures(folder, 60)
    broken = [f"{row:04}.png" for row in range(12, 36)]
    kept = {name: (folder / name).read_bytes() for name in broken}
    for name in broken:
        (folder / name).write_bytes(b"")
    settings = settings_of(tiny_model) | {"rows_per_part": 5}
    run(folder, output, **settings)
    before = output.read_bytes()
    for name, content in kept.items():
        (folder / name).write_bytes(content)
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(KeyboardInterrupt):
            run(folder, output, **settings, retry_failed=True)
    assert output.read_bytes() == before
    with pytest.raises(OutputError, match=r"num_rows|list of inputs"):
        run(folder, output, **settings)  # the inputs are others than those of the output
    again = run(folder, output, **settings, retry_failed=True)
    assert again.num_resumed == 10
    run(folder, tmp_path / "fresh.parquet", **settings)
    fresh = rows_of(tmp_path / "fresh.parquet")
    assert {key: row[1:3] for key, row in rows_of(output).items()} == {key: row[1:3] for key, row in fresh.items()}


def test_a_retry_that_cannot_be(tmp_path: Path, tiny_model: Path) -> None:
    folder, output = many_pictures(tmp_path / "in", 30), tmp_path / "out.parquet"
    settings = settings_of(tiny_model)
    with pytest.raises(OutputError, match=r"--retry-failed needs a finished output, and .*out.parquet is none"):
        run(folder, output, **settings, retry_failed=True)
    run(folder, output, **settings)
    with pytest.raises(OutputError, match='pool: "cls" there, "mean" now'):
        run(folder, output, **settings, pool="mean", retry_failed=True)
    with pytest.raises(ConfigError, match="leave one out"):
        run(folder, output, **settings, overwrite=True, retry_failed=True)
    (folder / "0001.png").rename(folder / "0001-b.png")
    with pytest.raises(OutputError, match="the list of inputs: other names"):
        run(folder, output, **settings, retry_failed=True)
    (folder / "0001-b.png").unlink()
    with pytest.raises(InputError, match="the inputs have 29 rows and had 30"):
        run(folder, output, **settings, retry_failed=True)
    errors = tmp_path / "out.errors.parquet"
    errors.rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="put it beside it again"):
        run(folder, output, **settings, retry_failed=True)


def test_a_damaged_output_is_named_and_not_replaced(tmp_path: Path, tiny_model: Path) -> None:
    folder, output = many_pictures(tmp_path / "in", 40), tmp_path / "out.parquet"
    run(folder, output, **settings_of(tiny_model))
    content = bytearray(output.read_bytes())
    start = pq.read_metadata(output).row_group(0).column(1).data_page_offset
    content[start + 60 : start + 90] = bytes(30)
    output.write_bytes(content)
    repair(folder, ["0025.png"])
    with pytest.raises(InputError, match=r"out.parquet is damaged, or gone"):
        run(folder, output, **settings_of(tiny_model), retry_failed=True)
    assert output.read_bytes() == content


def test_a_part_that_gets_a_row_keeps_what_its_run_recorded(tmp_path: Path, tiny_model: Path) -> None:
    folder, output = many_pictures(tmp_path / "in", 60), f"{tmp_path}/out/"
    run(folder, output, **settings_of(tiny_model))
    before = [pq.read_schema(path) for path in sorted(Path(output).glob("part-*.parquet"))]
    repair(folder, ["0025.png"])
    run(folder, output, **settings_of(tiny_model), retry_failed=True)
    after = [pq.read_schema(path) for path in sorted(Path(output).glob("part-*.parquet"))]
    assert [schema.metadata for schema in after] == [schema.metadata for schema in before]


def test_input_rows_are_those_that_did_not_fail() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        failed = np.flatnonzero(generator.random(40) < generator.random())
        others = np.setdiff1d(np.arange(40), failed)
        positions = np.arange(len(others))
        np.testing.assert_array_equal(input_rows(failed, positions), others)
        np.testing.assert_array_equal(input_rows(failed, positions[::3]), others[::3])


def test_two_streams_of_rows_become_one_in_order() -> None:
    generator = np.random.default_rng(1)

    def stream(rows: Int64Array) -> Iterator[tuple[Int64Array, pa.Table]]:
        for part in np.split(rows, np.sort(generator.integers(0, len(rows) + 1, 3))):
            yield part, pa.table({"row": part})

    for _ in range(200):
        is_new = generator.random(30) < generator.random()
        rows = np.flatnonzero(generator.random(30) < 0.9)
        old, new = rows[~is_new[rows]], rows[is_new[rows]]
        merged = [number for table in merge_rows(stream(old), stream(new)) for number in table["row"].to_pylist()]
        assert merged == rows.tolist()
