"""Input order, duplicates far apart, failures that spread, parts that survive, and rows that must add up."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlmembed.assembly import assemble
from vlmembed.errors import AccountingError, ConfigError, FailureCode, OutputError, RowFailedError, StorageError
from vlmembed.output import OutputPaths, lock, read_manifest, write_manifest
from vlmembed.partfiles import PartRecord
from vlmembed.parts import PartStore, read_records
from vlmembed.schema import VectorColumn, output_schema, read_provenance
from vlmembed.types import EmbeddingBatch, Failure, ImageRef
from vlmembed.writer import Writer

if TYPE_CHECKING:
    from pathlib import Path

    from vlmembed.types import Embedded

VECTORS = (VectorColumn(name="embedding", width=4),)
EMPTY = pa.schema([])


def ref(row: int, first_row: int | None = None) -> ImageRef:
    first = row if first_row is None else first_row
    return ImageRef(row=row, key=f"k{row}", content_hash=bytes([first]) * 32, first_row=first)


def batch(*rows: int) -> EmbeddingBatch:
    return EmbeddingBatch(
        rows=np.array(rows, np.int64),
        grid_hw=np.array([[row, 2] for row in rows], np.int32),
        size_hw=np.array([[3, row] for row in rows], np.int32),
        vectors={"embedding": np.array([[row, 0.5, 1, 2] for row in rows], np.float32)},
    )


def broken(row: int) -> Failure:
    return Failure(row=row, stage="decode", code=FailureCode.CORRUPT, message="bad")


def make(
    folder: Path, num_rows: int, rows_per_part: int = 4, on_error: str = "skip"
) -> tuple[OutputPaths, PartStore, Writer]:
    paths = OutputPaths(output=folder / "out.parquet")
    paths.partial.mkdir(exist_ok=True)
    store = PartStore(paths.partial, output_schema(VECTORS, EMPTY), vectors=VECTORS, rows_per_part=rows_per_part)
    writer = Writer(
        store,
        num_rows=num_rows,
        rows_per_part=rows_per_part,
        kept=EMPTY,
        on_error=on_error,
        on_commit=lambda _: None,
        on_computed=lambda _: None,
    )
    return paths, store, writer


def feed(writer: Writer, *items: ImageRef | Failure | EmbeddingBatch) -> None:
    for item in items:
        writer.add(item)


def test_rows_come_out_in_input_order_with_duplicates_from_other_parts(tmp_path: Path) -> None:
    paths, store, writer = make(tmp_path, 10)
    feed(writer, *(ref(row, {3: 1, 6: 2, 9: 1}.get(row)) for row in range(10)))
    feed(writer, batch(8, 5), batch(2, 0), broken(4), batch(7))
    assert store.records == []  # row 1 is still missing
    feed(writer, batch(1))
    assert writer.finish(10) == {"embedded": 6, "duplicates": 3, "failed": 1}
    assemble(store, paths, {"what": "test"})
    table = pq.read_table(paths.output)
    assert table["id"].to_pylist() == ["k0", "k1", "k2", "k3", "k5", "k6", "k7", "k8", "k9"]
    assert table["duplicate_of"].to_pylist() == [None, None, None, "k1", None, "k2", None, None, "k1"]
    assert [vector[0] for vector in table["embedding"].to_pylist()] == [0, 1, 2, 1, 5, 2, 7, 8, 1]
    assert table["width"].to_pylist() == [0, 1, 2, 1, 5, 2, 7, 8, 1]
    assert table["grid_h"].to_pylist() == [0, 1, 2, 1, 5, 2, 7, 8, 1]
    assert table["content_hash"].to_pylist()[3] == bytes([1]) * 32
    assert table.schema.equals(output_schema(VECTORS, EMPTY))
    assert read_provenance(table.schema, "x") == {"what": "test"}
    errors = pq.read_table(paths.errors)
    assert errors.to_pylist() == [{"id": "k4", "row": 4, "stage": "decode", "code": "corrupt", "message": "bad"}]
    assert not paths.partial.exists()


def test_a_content_of_an_earlier_part_is_looked_up_once_a_part_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, store, writer = make(tmp_path, 12)
    looked_up: list[int] = []
    find = store.find

    def noted(row: int) -> tuple[str, Embedded | Failure]:
        looked_up.append(row)
        return find(row)

    monkeypatch.setattr(store, "find", noted)
    feed(writer, *map(ref, range(4)), broken(1), batch(0, 2, 3))
    feed(writer, ref(4, 3), ref(5, 0), ref(6, 1), ref(7, 3))
    feed(writer, ref(8, 0), ref(9), ref(10, 0), ref(11, 9), batch(9))
    assert looked_up == [0, 1, 3, 0]
    assert writer.finish(12) == {"embedded": 4, "duplicates": 6, "failed": 2}


def test_a_duplicate_of_a_failed_row_fails_with_its_code(tmp_path: Path) -> None:
    paths, store, writer = make(tmp_path, 6, rows_per_part=2)
    feed(writer, ref(0), ref(1, 0), broken(0), ref(2), ref(3, 0), batch(2), ref(4, 2), ref(5, 0))
    assert writer.finish(6) == {"embedded": 1, "duplicates": 1, "failed": 4}
    assert store.codes() == {"corrupt": 4}
    assemble(store, paths, {})
    errors = pq.read_table(paths.errors).to_pylist()
    assert [entry["id"] for entry in errors] == ["k0", "k1", "k3", "k5"]
    assert {entry["code"] for entry in errors} == {"corrupt"}
    assert errors[3]["message"] == "same content as 'k0': bad"


def test_values_that_are_not_finite_fail_their_row_only(tmp_path: Path) -> None:
    _, store, writer = make(tmp_path, 2)
    poisoned = batch(0, 1)
    poisoned.vectors["embedding"][0, 2] = np.nan
    feed(writer, ref(0), ref(1), poisoned)
    assert writer.finish(2) == {"embedded": 1, "duplicates": 0, "failed": 1}
    assert store.codes() == {"non_finite": 1}


def test_rows_that_do_not_add_up_are_a_crash_with_a_report(tmp_path: Path) -> None:
    _, _, writer = make(tmp_path, 6)
    feed(writer, *(ref(row) for row in range(6)), batch(0, 1, 2, 3, 4))
    with pytest.raises(AccountingError, match=r"6 read of 6 listed, 4 embedded .*part 1: 2 of 2 rows seen, 1 outcomes"):
        writer.finish(6)
    feed(writer, batch(5))
    with pytest.raises(AccountingError, match="5 read of 6 listed, 6 embedded"):
        writer.finish(5)
    assert writer.finish(6)["embedded"] == 6


def test_a_part_that_was_damaged_is_done_again_with_those_behind_it(tmp_path: Path) -> None:
    paths, store, writer = make(tmp_path, 12)
    feed(writer, *(ref(row) for row in range(12)), batch(*range(12)))
    part = paths.partial / "part-000001.parquet"
    content = bytearray(part.read_bytes())
    content[40] ^= 1
    part.write_bytes(content)
    with pytest.raises(StorageError, match="damaged on disk after they were written: the same command does their rows"):
        assemble(store, paths, {})
    assert not paths.output.exists()
    _, store, writer = make(tmp_path, 12)
    assert [record.number for record in store.records] == [0]
    (paths.partial / "part-000000.errors.parquet").unlink()
    assert store.check() == 1
    assert store.next_row == 0
    assert make(tmp_path, 12)[1].next_row == 0


def test_an_output_that_lacks_rows_is_not_published(tmp_path: Path) -> None:
    paths, store, writer = make(tmp_path, 4)
    feed(writer, *(ref(row) for row in range(4)), batch(0, 1, 2, 3))
    store.records[0] = replace(store.records[0], num_embedded=5)
    with pytest.raises(AccountingError, match="would hold 4 rows where its parts' lines promise 5"):
        assemble(store, paths, {})
    assert not paths.output.exists()
    assert paths.partial.exists()


def test_on_error_fail_stops_with_the_row(tmp_path: Path) -> None:
    _, _, writer = make(tmp_path, 2, on_error="fail")
    feed(writer, ref(0))
    with pytest.raises(RowFailedError, match=r"k0: corrupt \(bad\)"):
        feed(writer, broken(0))


def test_committed_parts_are_found_again(tmp_path: Path) -> None:
    paths, _, writer = make(tmp_path, 8)
    feed(writer, *(ref(row) for row in range(6)), batch(0, 1, 3, 4), broken(2))
    with (paths.partial / "parts.jsonl").open("a") as file:
        file.write('{"number": 1, "first_r')  # cut by a crash
    again = PartStore(paths.partial, output_schema(VECTORS, EMPTY), vectors=VECTORS, rows_per_part=4)
    assert again.next_row == 4
    assert list(again.hashes()) == [(row, bytes([row]) * 32) for row in range(4)]
    _, store, writer = make(tmp_path, 8)
    feed(writer, ref(4, 2), ref(5, 3), ref(6), ref(7, 6), batch(6))
    assert writer.finish(8) == {"embedded": 4, "duplicates": 2, "failed": 2}
    lines = (paths.partial / "parts.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [0, 1]
    assemble(store, paths, {})
    assert pq.read_table(paths.output)["id"].to_pylist() == ["k0", "k1", "k3", "k5", "k6", "k7"]


def test_row_groups_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmembed.assembly.MAX_GROUP_ROWS", 5)
    paths, store, writer = make(tmp_path, 17, rows_per_part=3)
    feed(writer, *(ref(row) for row in range(17)), batch(*range(17)))
    assemble(store, paths, {})
    metadata = pq.read_metadata(paths.output)
    assert [metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)] == [5, 5, 5, 2]
    column = metadata.row_group(0).column(1)
    assert column.compression == "ZSTD"
    assert "BYTE_STREAM_SPLIT" not in column.encodings
    assert metadata.row_group(0).column(0).statistics.min == "k0"


def test_two_processes_cannot_share_an_output(tmp_path: Path) -> None:
    with (
        lock(tmp_path / "out.parquet.partial"),
        pytest.raises(OutputError, match="another process is writing to"),
        lock(tmp_path / "out.parquet.partial"),
    ):
        pass


def test_manifests(tmp_path: Path) -> None:
    folder = tmp_path / "x.partial"
    assert read_manifest(folder) is None
    folder.mkdir()
    assert read_manifest(folder) is None
    write_manifest(folder, {"a": 1})
    assert read_manifest(folder) == {"a": 1}
    assert read_records(folder) == []
    (folder / "part-000000.parquet").touch()
    record = PartRecord(number=0, first_row=0, num_rows=1, num_embedded=1, num_duplicates=0, num_failed=0)
    (folder / "parts.jsonl").write_text(json.dumps(asdict(record)) + "\n{cut")
    assert read_records(folder) == [record]
    write_manifest(folder, {"a": 2})
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json"]
    (folder / "manifest.json").write_text("{")
    with pytest.raises(OutputError, match="is damaged"):
        read_manifest(folder)
    (folder / "manifest.json").rename(folder / "something else")
    with pytest.raises(OutputError, match="is not a run of vlmembed"):
        read_manifest(folder)


def test_outputs_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"does not end in .parquet"):
        OutputPaths.of(tmp_path / "out.csv")
    with pytest.raises(OutputError, match=r"in .parquet: name a file like out.parquet, or a folder like out/"):
        OutputPaths.of(tmp_path / "out")
    (tmp_path / "d.parquet").touch()
    with pytest.raises(OutputError, match="is a file: name it without the slash"):
        OutputPaths.of(f"{tmp_path}/d.parquet/")
    for names in (["part-000000.parquet"], ["_SUCCESS", "notes.txt"], [".git"]):
        folder = tmp_path / names[0].strip(".")
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        with pytest.raises(OutputError, match=f"holds '{names[-1]}', which is not a run's: choose another folder"):
            OutputPaths.of(folder)
    with pytest.raises(OutputError, match=f"cannot write to {tmp_path}/d.parquet: make it a folder"):
        OutputPaths.of(tmp_path / "d.parquet" / "out.parquet").check_writable()
    with pytest.raises(ConfigError, match="--keep-columns width: the output has a column of that name"):
        output_schema(VECTORS, pa.schema([("width", pa.int32())]))
