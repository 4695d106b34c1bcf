"""Outputs that are Lance datasets: what is in them, how they appear and are replaced, and all that reads them."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from outputs import KINDS, Rows, key_of
from test_cache import HALVES, POOLED, TOKENS, hash_of
from test_end_to_end import many_pictures, run
from test_retry import repair, settings_of
from test_reuse import found_in, open_earlier

from vlmembed.checking.verification import verify
from vlmembed.errors import AccountingError, ConfigError, InputError, MissingExtraError, OutputError, StorageError
from vlmembed.finished import FinishedOutput, open_rows, read_tables
from vlmembed.inspection.reading import inspect
from vlmembed.lance_output import LanceRows, check_lance_schema, write_lance
from vlmembed.output import PUBLICATION, OutputPaths, drop, finish_publication
from vlmembed.parts import LINES
from vlmembed.schema import read_provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from vlmembed.schema import VectorColumn

REPEATS = {15: 2, 41: 40}
KEPT = pa.schema(
    [
        pa.field("label", pa.int64()),
        pa.field("word", pa.dictionary(pa.int32(), pa.string())),
        pa.field("day", pa.timestamp("us", tz="UTC")),
        pa.field("nested", pa.struct([("label", pa.int32()), ("names", pa.list_(pa.string()))])),
    ]
)


@pytest.mark.parametrize("columns", [POOLED, HALVES, TOKENS], ids=["float32", "float16", "two token columns"])
def test_a_dataset_holds_what_a_file_would(columns: tuple[VectorColumn, ...], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"failed": [0, 13, 29], "duplicates": REPEATS, "kept": KEPT}
    path = Rows(f"{tmp_path}/dataset.lance", 50, columns, **settings).assemble()
    file = Rows(f"{tmp_path}/file.parquet", 50, columns, **settings).assemble()
    table, expected = lance.dataset(path).to_table(), pq.read_table(file)
    assert table.schema.equals(expected.schema)  # which columns can be null too
    assert table.schema.metadata == expected.schema.metadata
    assert read_provenance(table.schema, "x")["counts"]["failed"] == 3
    assert table.to_pylist() == expected.to_pylist()
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "dataset.errors.parquet",
        "dataset.lance",
        "file.errors.parquet",
        "file.parquet",
    ]
    errors = pq.read_table(tmp_path / "dataset.errors.parquet")
    assert errors.to_pylist() == pq.read_table(tmp_path / "file.errors.parquet").to_pylist()


@pytest.mark.parametrize("columns", [POOLED, HALVES], ids=["float32", "float16"])
def test_the_nearest_row_is_found_by_lance(columns: tuple[VectorColumn, ...], tmp_path: Path) -> None:
    rows = Rows(f"{tmp_path}/out.lance", 50, columns, failed=[0])
    dataset = lance.dataset(rows.assemble())
    for row in (7, 44):
        query = rows.vectors("embedding")[rows.kept_rows.index(row)]
        found = dataset.to_table(columns=["id"], nearest={"column": "embedding", "q": query, "k": 1})
        assert found["id"].to_pylist() == [key_of(row)]


def test_it_is_read_like_the_other_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmembed.lance_output.MAX_FILE_ROWS", 18)
    monkeypatch.setattr("vlmembed.lance_output.READ_GROUP_ROWS", 7)
    positions = np.array([0, 3, 19, 20, 46], np.int64)
    found: list[tuple[object, ...]] = []
    for kind in KINDS:
        path = Rows(f"{tmp_path}/{len(found)}{kind}", 50, TOKENS, failed=[0, 13, 29], duplicates=REPEATS).assemble()
        output = FinishedOutput.open(path)
        columns = ["id", "tokens", "duplicate_of"]
        whole = [row for batch in output.batches(columns, 16) for row in batch.to_pylist()]
        assert [row["id"] for row in whole] == [key_of(row) for row in range(50) if row not in (0, 13, 29)]
        taken = output.take(positions, columns)
        assert taken.to_pylist() == [whole[at] for at in positions]
        tables = [table for file in output.files for table in read_tables(file, output.schema)]
        assert [row["id"] for table in tables for row in table.to_pylist()] == [row["id"] for row in whole]
        found.append((whole, output.num_rows, output.vectors, output.failed_rows().tolist(), inspect(path).num_rows))
    assert found[0] == found[1] == found[2]
    assert len(lance.dataset(tmp_path / "2out.lance").get_fragments()) == 3
    with open_rows(tmp_path / "2out.lance") as rows_:
        assert isinstance(rows_, LanceRows)
        assert (rows_.num_rows, rows_.group_rows, rows_.num_row_groups) == (47, 7, 7)
        groups = [rows_.read_row_group(number, columns=["id"])["id"].to_pylist() for number in range(7)]
        assert [len(group) for group in groups] == [7, 7, 7, 7, 7, 7, 5]
        some = list(rows_.iter_batches(3, columns=["id"], row_groups=[1, 6]))
        assert [key for batch in some for key in batch["id"].to_pylist()] == groups[1] + groups[6]
        assert max(batch.num_rows for batch in some) == 3


def test_what_lance_cannot_store_is_told_before_any_work() -> None:
    check_lance_schema(pa.schema([*KEPT, pa.field("x", pa.list_(pa.list_(pa.float16(), 4)), nullable=False)]))
    for name, type_, reason in (
        ("span", pa.month_day_nano_interval(), "Unsupported data type: Interval"),
        ("a.b", pa.int32(), "cannot contain `.`"),
        ("a`b", pa.int32(), "No field named"),
    ):
        with pytest.raises(ConfigError, match=rf"(?s)Lance cannot store column '{name}' .*{reason}.*--keep-columns"):
            check_lance_schema(pa.schema([pa.field("good", pa.int32()), pa.field(name, type_)]))


def test_without_lance_the_install_command_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Rows(f"{tmp_path}/out.lance", 5).assemble()
    monkeypatch.setattr("vlmembed.output.find_spec", lambda _: None)
    for look in (lambda: OutputPaths.of(tmp_path / "new.lance").check_writable(), lambda: FinishedOutput.open(path)):
        with pytest.raises(MissingExtraError, match=r"pip install 'vlmembed\[lance\]'"):
            look()
    OutputPaths.of(tmp_path / "new.parquet").check_writable()


def test_names_of_datasets(tmp_path: Path) -> None:
    for name in ("new.lance", "new.lance/"):
        paths = OutputPaths.of(f"{tmp_path}/{name}")
        assert (paths.format, paths.is_folder, paths.errors.name) == ("lance", False, "new.errors.parquet")
        assert paths.partial.name == "new.lance.partial"
    assert OutputPaths.of(f"{tmp_path}/new/").format == OutputPaths.of(f"{tmp_path}/new.parquet").format == "parquet"
    (tmp_path / "photos.lance").mkdir()
    (tmp_path / "file.lance").touch()
    for name in ("photos.lance", "file.lance"):
        with pytest.raises(OutputError, match="exists and is no Lance dataset: choose another name"):
            OutputPaths.of(tmp_path / name)
        with pytest.raises(InputError, match="cannot be read as Lance"):
            FinishedOutput.open(tmp_path / name)
    Rows(f"{tmp_path}/out.lance", 5).assemble()
    Rows(f"{tmp_path}/other.parquet", 5).assemble()
    for name, other in (("out.parquet", "out.lance"), ("other.lance", "other.parquet")):
        with pytest.raises(OutputError, match=rf"in common with .*{other}: choose another name"):
            OutputPaths.of(tmp_path / name)


def test_what_goes_wrong_while_it_is_written_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(f"{tmp_path}/out.lance", 50)
    part = rows.paths.partial / "part-000001.parquet"

    def pieces() -> Iterator[pa.Table]:
        yield pq.read_table(part)
        msg = "no such rows"
        raise AccountingError(msg)

    with pytest.raises(AccountingError, match="no such rows"):
        write_lance(tmp_path / "x.lance", rows.store.schema, pieces())
    with monkeypatch.context() as patch:
        patch.setattr("vlmembed.assembly.check_parts", lambda _: None)
        good = part.read_bytes()
        part.write_bytes(good[: len(good) // 2])
        with pytest.raises(StorageError, match=r"cannot write .*ready.lance"):
            rows.assemble()
        part.write_bytes(good)
    rows.store.records[0] = replace(rows.store.records[0], num_embedded=21)
    with pytest.raises(AccountingError, match=r"would hold 50 rows where its parts' lines promise 51"):
        rows.assemble()
    assert not rows.paths.output.exists()
    assert not list(rows.paths.partial.glob("*ready.lance*"))


def test_an_output_without_rows_takes_the_old_dataset_away(tmp_path: Path) -> None:
    path = Rows(f"{tmp_path}/out.lance", 5).assemble()
    Rows(f"{tmp_path}/out.lance", 2, failed=[0, 1]).assemble()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.errors.parquet"]
    with pytest.raises(InputError, match="it does not exist"):
        FinishedOutput.open(path)


class DeadError(BaseException):
    """The process is gone."""


OPERATIONS = ("fsync", "replace", "unlink", "rmdir")


def die_at(number: int, patch: pytest.MonkeyPatch) -> list[str]:
    """From the `number`-th operation on files on, none is done any more; returns those that were asked for."""
    asked: list[str] = []

    def mortal(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401  as the one it stands for
            asked.append(name)
            if len(asked) >= number:
                raise DeadError
            return function(*arguments, **options)

        return operation

    for name in OPERATIONS:
        patch.setattr(os, name, mortal(name, getattr(os, name)))
    return asked


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.crash)])
def test_a_publication_that_dies_anywhere_is_finished_by_the_next_start(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older dataset is replaced: at every moment there is that one, or none, or the new one."""
    old = Rows(f"{tmp_path}/old/out.lance", 5, failed=[4]).assemble().parent
    parts = Rows(f"{tmp_path}/new/out.lance", 30, failed=[1, 2])
    num_published, number, asked = 0, 1, list[str]()
    while True:
        folder = tmp_path / str(number)
        shutil.copytree(old, folder)
        shutil.copytree(parts.paths.partial, folder / "out.lance.partial")
        rows = parts.moved(folder / "out.lance")
        with monkeypatch.context() as patch:
            asked = die_at(number, patch)
            try:
                rows.assemble()
            except DeadError:
                pass
            else:
                break
        if rows.paths.output.exists():
            assert lance.dataset(rows.paths.output).count_rows() in (4, 28)
        if (rows.paths.partial / PUBLICATION).exists():
            num_published += 1
            assert finish_publication(rows.paths)
        elif (rows.paths.partial / LINES).exists():
            rows.assemble()
        elif rows.paths.partial.exists():
            drop(rows.paths.partial)
        assert sorted(each.name for each in folder.iterdir()) == ["out.errors.parquet", "out.lance"], number
        found = lance.dataset(rows.paths.output).to_table(columns=["id"])["id"].to_pylist()
        assert found == [key_of(row) for row in parts.kept_rows]
        assert pq.read_table(rows.paths.errors)["row"].to_pylist() == [1, 2]
        number += step
    assert set(asked) == set(OPERATIONS)
    assert num_published > 15 / step


def test_embeddings_of_a_dataset_are_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmembed.lance_output.READ_GROUP_ROWS", 7)
    for columns in (POOLED, HALVES, TOKENS):
        path = Rows(f"{tmp_path}/{columns[0].name}{columns[0].width}.lance", 50, columns, duplicates={9: 3}).assemble()
        with open_earlier([path], columns) as earlier:
            assert found_in(earlier, range(60), columns) == set(range(50)) - {9}
            assert earlier.find_key(hash_of(20)) == key_of(20)


def test_a_run_into_a_dataset(tmp_path: Path, tiny_model: Path) -> None:
    """Encode, see that it is complete, verify, try the failed rows again, reuse, overwrite."""
    folder, output, settings = many_pictures(tmp_path / "in", 60), tmp_path / "out.lance", settings_of(tiny_model)
    first = run(folder, output, **settings)
    assert first.codes == {"truncated": 2}
    assert run(folder, output, **settings).already_complete
    with pytest.raises(OutputError, match='pool: "cls" there, "mean" now'):
        run(folder, output, **settings, pool="mean")
    run(folder, tmp_path / "file.parquet", **settings)
    table = lance.dataset(output).to_table()
    assert table.to_pylist() == pq.read_table(tmp_path / "file.parquet").to_pylist()
    assert inspect(output).num_rows == first.num_embedded + first.num_duplicates == 58
    checked = verify(output, num_rows=None)
    assert (checked.num_checked, checked.is_good, checked.worst) == (58, True, 0)
    reused = run(folder, tmp_path / "second.parquet", **settings, reuse=(str(output),))
    assert reused.num_found == first.num_embedded
    repair(folder, ["0000.png", "0025.png"])
    again = run(folder, output, **settings, retry_failed=True)
    assert (again.num_retried, again.num_recovered, again.num_failed) == (2, 2, 0)
    rows = lance.dataset(output).to_table()
    assert rows["id"].to_pylist() == [f"{row:04}.png" for row in range(60)]
    run(folder, tmp_path / "fresh.parquet", **settings)
    fresh = pq.read_table(tmp_path / "fresh.parquet")
    assert rows.select(["id", "embedding", "content_hash"]).equals(fresh.select(["id", "embedding", "content_hash"]))
    assert FinishedOutput.open(output).provenance["counts"]["failed"] == 0
    replaced = run(folder, output, **settings, pool="mean", overwrite=True)
    assert replaced.num_rows == 60
    assert FinishedOutput.open(output).provenance["fingerprint"]["pool"] == "mean"
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.errors.parquet", "out.lance"]
