"""`vlmembed export`: vectors and ids that line up, for faiss; and who else can read a folder of parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import datasets
import duckdb
import faiss
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from outputs import KINDS, Rows, key_of
from test_cache import HALVES, TOKENS
from test_reuse import write_output

from vlmembed.errors import ConfigError, InputError, OutputError, StorageError
from vlmembed.exporter import export
from vlmembed.finished import FinishedOutput
from vlmembed.schema import VectorColumn

if TYPE_CHECKING:
    from collections.abc import Callable

REPEATS = {15: 2, 41: 40}


def ids_of(path: Path) -> list[str]:
    return [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_and_ids_line_up(kind: str, tmp_path: Path) -> None:
    rows = Rows(f"{tmp_path}/{kind}", 50, failed=[0, 13, 29], duplicates=REPEATS)
    report = export(str(rows.assemble()), tmp_path / "npy")
    assert (report.num_rows, report.width, report.dtype) == (47, 48, "float32")
    vectors = np.load(report.embeddings, mmap_mode="r")
    assert vectors.flags.c_contiguous
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, np.stack(rows.vectors("embedding")))
    assert ids_of(report.ids) == [key_of(row) for row in rows.kept_rows]  # line breaks of all kinds are in them
    assert sorted(path.name for path in (tmp_path / "npy").iterdir()) == ["embeddings.npy", "ids.jsonl"]


def test_faiss_finds_every_vector_as_its_own_nearest(tmp_path: Path) -> None:
    rows = Rows(f"{tmp_path}/out/", 60, duplicates=REPEATS)
    report = export(str(rows.assemble()), tmp_path / "npy", duplicates=False)
    ids = ids_of(report.ids)
    assert ids == [key_of(row) for row in rows.kept_rows if row not in REPEATS]
    vectors = np.load(report.embeddings, mmap_mode="r")
    index = faiss.IndexFlatIP(report.width)
    unit = np.array(vectors)  # which those of the fixture are not
    faiss.normalize_L2(unit)
    index.add(unit)
    cosines, found = index.search(unit, 2)
    assert found[:, 0].tolist() == list(range(len(ids)))
    np.testing.assert_allclose(cosines[:, 0], 1, atol=1e-5)
    assert (cosines[:, 1] < 0.9).all()
    by_distance = faiss.IndexFlatL2(report.width)
    by_distance.add(vectors)  # straight from the file
    assert by_distance.search(vectors[17:18], 1)[1].tolist() == [[17]]


def test_half_floats_in_and_out(tmp_path: Path) -> None:
    rows = Rows(f"{tmp_path}/half.parquet", 12, HALVES)
    path = rows.assemble()
    wide, half = (np.load(export(path, tmp_path / dtype, dtype=dtype).embeddings) for dtype in ("float32", "float16"))
    assert (wide.dtype, half.dtype) == (np.float32, np.float16)
    np.testing.assert_array_equal(half, np.stack(rows.vectors("embedding")))
    np.testing.assert_array_equal(wide, half)


def test_a_value_beyond_half_floats_is_told_and_leaves_no_file(tmp_path: Path) -> None:
    column = VectorColumn(name="embedding", width=2)
    path = write_output(tmp_path / "out.parquet", range(3), (column,))
    table = pq.read_table(path)
    large = column.to_arrow([np.array([1, 2], np.float32), np.array([1, 7e4], np.float32), np.zeros(2, np.float32)])
    pq.write_table(table.set_column(1, table.schema.field(1), large), path)
    with pytest.raises(InputError, match=r"the embedding of '1.jpg' has values beyond float16: use float32"):
        export(path, tmp_path / "npy", dtype="float16")
    assert list((tmp_path / "npy").iterdir()) == []
    with pytest.raises(ConfigError, match="dtype is 'int8'; it can be float32, float16"):
        export(path, tmp_path / "npy", dtype="int8")
    assert np.load(export(path, tmp_path / "npy").embeddings)[1, 1] == 7e4


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds tokens, .* read them with vlmembed.read_tokens"):
        export(Rows(f"{tmp_path}/tokens.parquet", 5, TOKENS).assemble(), tmp_path / "npy")
    with pytest.raises(InputError, match="holds no rows: there is nothing to export"):
        export(write_output(tmp_path / "none.parquet", []), tmp_path / "npy")
    with pytest.raises(InputError, match="does not exist"):
        export(tmp_path / "absent.parquet", tmp_path / "npy")
    assert not (tmp_path / "npy").exists()


def test_an_export_is_replaced_only_when_asked(tmp_path: Path) -> None:
    first, second = (write_output(tmp_path / f"{count}.parquet", range(count)) for count in (4, 9))
    report = export(first, tmp_path / "npy")
    with pytest.raises(OutputError, match=r"npy holds 'embeddings.npy': name a folder that is new or empty, or repl"):
        export(second, tmp_path / "npy")
    assert np.load(report.embeddings).shape == (4, 48)
    assert export(second, tmp_path / "npy", overwrite=True).num_rows == 9
    assert np.load(report.embeddings).shape == (9, 48)
    assert len(ids_of(report.ids)) == 9
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"cannot write to .*file"):
        export(first, tmp_path / "file")


def test_an_export_that_is_killed_leaves_no_pair_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is stopped at: where there are ids, the vectors are theirs."""
    first, second = (write_output(tmp_path / f"{count}.parquet", range(count)) for count in (4, 9))
    replace: Callable[[Path, Path], Path] = Path.replace
    for num_renames in (0, 1):
        left = [None] * num_renames
        export(first, tmp_path / "npy", overwrite=True)

        def renamed(path: Path, target: Path, left: list[None] = left) -> Path:
            if not left:
                msg = "no space left on device"
                raise OSError(msg)
            left.pop()
            return replace(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", renamed)
            with pytest.raises(StorageError, match=r"no space left on device\): make room"):
                export(second, tmp_path / "npy", overwrite=True)
        assert not (tmp_path / "npy" / "ids.jsonl").exists()
        assert len(np.load(tmp_path / "npy" / "embeddings.npy")) == (4, 9)[num_renames]
    for name in ("embeddings.npy", "ids.jsonl"):
        (tmp_path / "npy" / f".{name}.tmp").touch()  # as SIGKILL leaves it
        (tmp_path / "npy" / name).unlink(missing_ok=True)
    assert export(second, tmp_path / "npy").num_rows == 9


def test_no_more_than_a_row_group_is_held(tmp_path: Path) -> None:
    wide = VectorColumn(name="embedding", width=4096)
    path = write_output(tmp_path / "out.parquet", range(400), (wide,), row_group_size=20)
    before, most = pa.total_allocated_bytes(), 0
    for _ in FinishedOutput.open(path).batches(["id", "embedding"], 1024):
        most = max(most, pa.total_allocated_bytes() - before)
    assert path.stat().st_size > 5 * 2**20
    assert 0 < most < 2 * 2**20


def test_other_readers_open_a_folder_of_parts(tmp_path: Path) -> None:
    rows = Rows(f"{tmp_path}/out/", 50, failed=[0, 29], duplicates=REPEATS)
    folder = rows.assemble()
    ids = [key_of(row) for row in rows.kept_rows]
    expected = np.stack(rows.vectors("embedding"))
    assert (folder / "_errors.parquet").exists()  # which is no part, and which readers pass over for its underscore

    table = ds.dataset(folder, format="parquet").to_table()
    assert table["id"].to_pylist() == ids
    np.testing.assert_array_equal(np.array(table["embedding"].to_pylist(), np.float32), expected)
    frame = pd.read_parquet(folder)
    assert frame["id"].tolist() == ids
    np.testing.assert_array_equal(np.stack(frame["embedding"].to_list()), expected)

    parts = f"{folder}/part-*.parquet"
    assert pl.read_parquet(parts)["id"].to_list() == ids
    similar = "SELECT id, list_cosine_similarity(embedding, (SELECT embedding FROM read_parquet(?) WHERE id = ?)) AS c"
    with duckdb.connect() as connection:
        query = f"{similar} FROM read_parquet(?) ORDER BY c DESC, id LIMIT 2"
        assert [row[0] for row in connection.execute(query, [parts, key_of(2), parts]).fetchall()] == [
            key_of(2),
            key_of(15),
        ]
    loaded = datasets.load_dataset("parquet", data_files=parts, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["id"][:] == ids
    np.testing.assert_array_equal(np.array(loaded.with_format("numpy")["embedding"][:]), expected)


def test_half_floats_of_a_folder_are_read_elsewhere(tmp_path: Path) -> None:
    rows = Rows(f"{tmp_path}/half/", 30, HALVES)
    folder = rows.assemble()
    expected = np.stack(rows.vectors("embedding")).astype(np.float32)
    parts = f"{folder}/part-*.parquet"
    read = [pl.read_parquet(parts)["embedding"].to_list(), duckdb.read_parquet(parts).df()["embedding"].to_list()]
    for found in read:
        np.testing.assert_array_equal(np.array([list(vector) for vector in found], np.float32), expected)
