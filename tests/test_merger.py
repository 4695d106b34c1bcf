"""Shards of a run, merged: the output of the whole run, whatever its shards have in common, lost or left undone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkpoints import tiny_checkpoint
from test_end_to_end import many_pictures, run

from vlmembed import merger as merge_module
from vlmembed import overlap
from vlmembed.checking.verification import verify
from vlmembed.errors import AccountingError, InputError, NothingEmbeddedError, OutputError, StorageError
from vlmembed.finished import FinishedOutput
from vlmembed.inspection.reading import inspect
from vlmembed.merger import merge
from vlmembed.overlap import Overlap
from vlmembed.partfiles import PartRecord
from vlmembed.schema import with_provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vlmembed.report import RunReport

NUM_PICTURES = 60


def settings_of(tiny_model: Path, **settings: Any) -> dict[str, Any]:  # noqa: ANN401  of `EncodeConfig`
    return {"model": str(tiny_model), "rows_per_part": 20, **settings}


def run_shards(inputs: object, root: Path, count: int, *, ending: str = ".parquet", **settings: Any) -> list[str]:  # noqa: ANN401
    """Each shard's run; those in which nothing is embedded have raised what they raise."""
    outputs = [f"{root}/shard-{index}{ending}" for index in range(count)]
    for index, output in enumerate(outputs):
        try:
            run(inputs, output, **settings, shard=f"{index}/{count}")
        except NothingEmbeddedError:
            assert FinishedOutput.open(Path(output)) if ending == "/" else not Path(output).exists()
    return outputs


def rows_of(output: str | Path) -> pa.Table:
    path = Path(output)
    files = sorted(path.glob("part-*.parquet")) if path.is_dir() else [path]
    return pa.concat_tables([pq.read_table(file).replace_schema_metadata() for file in files])


def errors_of(output: str | Path) -> list[dict[str, Any]]:
    """Without messages: what of a failed copy is said depends on whether its first row was in the same run."""
    errors = pq.read_table(FinishedOutput.open(Path(output)).errors)
    assert all(errors["message"].to_pylist())
    return list(errors.drop_columns(["message"]).to_pylist())


def facts_of(output: str | Path) -> dict[str, Any]:
    return FinishedOutput.open(Path(output)).provenance


def assert_same(found: str | Path, expected: str | Path) -> None:
    """Rows and failures are the same, vectors within rounding, and duplicates have exactly their first row's."""
    one, other = rows_of(found), rows_of(expected)
    assert one.schema.equals(other.schema)
    for name in one.schema.names:
        if name == "embedding":
            ours, theirs = (np.array(table[name].to_pylist(), np.float32) for table in (one, other))
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
        else:
            assert one[name].to_pylist() == other[name].to_pylist(), name
    vector_of = dict(zip(one["id"].to_pylist(), one["embedding"].to_pylist(), strict=True))
    for row in one.select(["id", "duplicate_of"]).to_pylist():
        if row["duplicate_of"]:
            assert vector_of[row["id"]] == vector_of[row["duplicate_of"]]
    assert errors_of(found) == errors_of(expected)
    one_facts, other_facts = facts_of(found), facts_of(expected)
    assert one_facts["counts"] == other_facts["counts"]
    assert one_facts["fingerprint"] == other_facts["fingerprint"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies within shards of 20 and across them, of copies too; broken files, one of them a copy; a note."""
    folder = many_pictures(tmp_path_factory.mktemp("merge") / "in", NUM_PICTURES)
    for copy, first in ((21, 2), (23, 21), (44, 23), (45, 44), (58, 39), (59, 0)):
        shutil.copy(folder / f"{first:04}.png", folder / f"{copy:04}.png")
    (folder / "notes.txt").write_text("no picture")
    return folder


@pytest.fixture(scope="module")
def whole(pictures: Path, tiny_model: Path) -> Path:
    """The whole run's output."""
    output = pictures.parent / "whole.parquet"
    run(pictures, output, **settings_of(tiny_model))
    return output


@pytest.fixture(scope="module")
def shards(pictures: Path, tiny_model: Path) -> list[str]:
    """Those of its three shards."""
    return run_shards(pictures, pictures.parent, 3, **settings_of(tiny_model))


def test_merged_shards_are_the_whole_run(
    shards: list[str], whole: Path, pictures: Path, tiny_model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.parquet"
    num_own = sum(facts_of(shard)["counts"]["duplicates"] for shard in shards)
    report = merge([shards[2], shards[0], shards[1]], output)
    assert_same(output, whole)
    counts = facts_of(whole)["counts"]
    assert counts["duplicates"] == report.num_duplicates > num_own + 4
    assert (report.num_rows, report.num_embedded, report.num_failed) == (60, counts["embedded"], counts["failed"])
    assert report.codes == {"truncated": 3}
    assert report.skipped == {".txt": 1}
    assert (report.already_complete, report.output, report.errors) == (
        False,
        output,
        tmp_path / "out.errors.parquet",
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.errors.parquet", "out.parquet"]
    points = dict(zip(*rows_of(output).select(["id", "duplicate_of"]).to_pydict().values(), strict=True))
    assert {points[f"{row:04}.png"] for row in (21, 23, 44, 45)} == {"0002.png"}
    assert points["0002.png"] is None
    facts = facts_of(output)
    assert facts | {"merged_from": 0, "recipe": 0} == facts_of(whole) | {"merged_from": 0, "recipe": 0}
    assert facts["recipe"] == facts_of(whole)["recipe"].replace(str(whole), str(output))
    assert [entry["shard"] for entry in facts["merged_from"]] == ["0/3", "1/3", "2/3"]
    assert all(set(entry) == {"shard", "counts"} for entry in facts["merged_from"])
    assert run(pictures, output, **settings_of(tiny_model)).already_complete
    assert inspect(output).num_duplicates == counts["duplicates"]
    assert verify(output, num_rows=None).is_good


def test_a_merge_that_is_done_is_not_done_again(shards: list[str], tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    first = merge(shards, output)
    before = output.stat().st_mtime_ns
    again = merge(shards[::-1], output)
    assert again.already_complete
    assert (again.num_embedded, again.num_failed) == (first.num_embedded, first.num_failed)
    assert output.stat().st_mtime_ns == before
    assert not merge(shards, output, overwrite=True).already_complete
    assert not (tmp_path / "out.parquet.partial").exists()


def test_a_folder_gets_the_whole_runs_parts(whole: Path, pictures: Path, tiny_model: Path, tmp_path: Path) -> None:
    output, expected = f"{tmp_path}/out/", f"{tmp_path}/whole/"
    settings = settings_of(tiny_model, rows_per_part=25)
    run(pictures, expected, **settings)
    shards = run_shards(pictures, tmp_path, 2, **settings)
    merge(shards, output)
    assert_same(output, whole)
    one, other = facts_of(output), facts_of(expected)
    parts = [[PartRecord(**part) for part in facts["parts"]] for facts in (one, other)]
    assert [(part.number, part.first_row, part.num_rows) for part in parts[0]] == [
        (0, 0, 25),
        (1, 25, 25),
        (2, 50, 10),
    ]
    for merged, run_ in zip(*parts, strict=True):
        names = ("num_embedded", "num_duplicates", "num_failed")
        assert [getattr(merged, name) for name in names] == [getattr(run_, name) for name in names]
        path = Path(output) / merged.file_name
        assert pq.read_metadata(path).num_rows == merged.num_embedded + merged.num_duplicates
        assert "counts" not in FinishedOutput.open(path).provenance
    assert run(pictures, output, **settings).already_complete
    assert verify(Path(output), num_rows=None).is_good
    assert merge(shards, output).already_complete


def test_failed_rows_of_a_merged_folder_can_be_tried_again(pictures: Path, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(pictures, folder)
    shards = run_shards(folder, tmp_path, 2, ending="/", **settings_of(tiny_model))
    output = f"{tmp_path}/out/"
    merge(shards, output)
    merge(shards, tmp_path / "file.parquet")
    assert rows_of(output).equals(rows_of(tmp_path / "file.parquet"))
    assert_same(tmp_path / "file.parquet", output)
    shutil.copy(folder / "0007.png", folder / "0025.png")
    report = run(folder, output, **settings_of(tiny_model), retry_failed=True)
    assert report.num_recovered == 1
    run(folder, tmp_path / "fresh.parquet", **settings_of(tiny_model))
    assert_same(output, tmp_path / "fresh.parquet")


def test_one_shard_is_the_whole(pictures: Path, whole: Path, tiny_model: Path, tmp_path: Path) -> None:
    merge(run_shards(pictures, tmp_path, 1, **settings_of(tiny_model)), tmp_path / "out.parquet")
    assert_same(tmp_path / "out.parquet", whole)


@pytest.mark.parametrize("dedup", ["none", "pixels"])
def test_other_ways_to_find_duplicates(dedup: str, pictures: Path, tiny_model: Path, tmp_path: Path) -> None:
    settings = settings_of(tiny_model, dedup=dedup, limit=50)
    report = run(pictures, tmp_path / "whole.parquet", **settings)
    merge(run_shards(pictures, tmp_path, 3, **settings), tmp_path / "out.parquet")
    assert_same(tmp_path / "out.parquet", tmp_path / "whole.parquet")
    assert bool(report.num_duplicates) == (dedup != "none")


def test_parquet_with_kept_columns_and_a_limit(pictures: Path, tiny_model: Path, tmp_path: Path) -> None:
    files = sorted(pictures.glob("*.png"))
    table = pa.table(
        {
            "image": [path.read_bytes() for path in files],
            "label": pa.array([None if row % 7 == 0 else f"label {row % 3}" for row in range(len(files))]),
            "tags": [[str(tag) for tag in range(row % 4)] for row in range(len(files))],
        }
    )
    for number in range(2):
        pq.write_table(table.slice(30 * number, 30), tmp_path / f"{number}.parquet", row_group_size=11)
    inputs = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    settings = settings_of(tiny_model, keep_columns=("label", "tags"), limit=52)
    run(inputs, tmp_path / "whole.parquet", **settings)
    (tmp_path / "shards").mkdir()
    shards = run_shards(inputs, tmp_path / "shards", 3, **settings)
    merge(shards, tmp_path / "out.parquet")
    assert_same(tmp_path / "out.parquet", tmp_path / "whole.parquet")
    assert rows_of(tmp_path / "out.parquet").num_columns == 10
    assert facts_of(tmp_path / "out.parquet")["counts"]["rows"] == 52
    assert run(inputs, tmp_path / "out.parquet", **settings).already_complete
    assert verify(tmp_path / "out.parquet", num_rows=20).is_good


def test_tokens(pictures: Path, tmp_path: Path) -> None:
    tiny_checkpoint("qwen3_vl", tmp_path / "model")
    settings: dict[str, Any] = {
        "model": str(tmp_path / "model"),
        "emit": "tokens",
        "deepstack": True,
        "max_pixels": 64 * 64,
        "limit": 50,
        "dtype": "fp32",
    }
    run(pictures, tmp_path / "whole.parquet", **settings)
    merge(run_shards(pictures, tmp_path, 2, **settings), tmp_path / "out.parquet")
    one, other = rows_of(tmp_path / "out.parquet"), rows_of(tmp_path / "whole.parquet")
    assert one.schema.equals(other.schema)
    names = ["tokens", "deepstack_0", "deepstack_1"]
    assert one.drop_columns(names).equals(other.drop_columns(names))
    positions = {key: position for position, key in enumerate(one["id"].to_pylist())}
    for name in names:
        for position, (ours, theirs) in enumerate(zip(one[name], other[name], strict=True)):
            np.testing.assert_allclose(np.array(ours.as_py()), np.array(theirs.as_py()), atol=2e-2)
            if first := one["duplicate_of"][position].as_py():
                assert ours == one[name][positions[first]]
    assert errors_of(tmp_path / "out.parquet") == errors_of(tmp_path / "whole.parquet")


@pytest.mark.slow
def test_lance_datasets(pictures: Path, whole: Path, tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("lance")
    shards = run_shards(pictures, tmp_path, 3, ending=".lance", **settings_of(tiny_model))
    merge(shards, tmp_path / "file.parquet")
    assert_same(tmp_path / "file.parquet", whole)
    merge(sorted(tmp_path.glob("shard-*")), tmp_path / "out.lance")  # the errors files too
    columns = ["id", "duplicate_of", "embedding"]
    batches = FinishedOutput.open(tmp_path / "out.lance").batches(columns, 100)
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert rows == rows_of(tmp_path / "file.parquet").select(columns).to_pylist()
    assert merge(shards, tmp_path / "out.lance").already_complete
    assert not merge(shards, tmp_path / "out.lance", overwrite=True).already_complete


@pytest.fixture
def broken(pictures: Path, tmp_path: Path) -> Path:
    """Every picture of the second of three shards is broken."""
    shutil.copytree(pictures, tmp_path / "in")
    for path in sorted((tmp_path / "in").glob("*.png"))[20:40]:
        path.write_bytes(b"")
    return tmp_path / "in"


@pytest.mark.parametrize("ending", [".parquet", "/"])
def test_a_shard_in_which_nothing_is_embedded_loses_no_rows(
    ending: str, broken: Path, tiny_model: Path, tmp_path: Path
) -> None:
    shards = run_shards(broken, tmp_path, 3, ending=ending, **settings_of(tiny_model))
    run(broken, tmp_path / "whole.parquet", **settings_of(tiny_model))
    merge(shards, tmp_path / "out.parquet")
    assert_same(tmp_path / "out.parquet", tmp_path / "whole.parquet")
    assert facts_of(tmp_path / "out.parquet")["counts"]["codes"]["empty"] == 20
    merge(shards, f"{tmp_path}/out/")
    assert_same(tmp_path / "out", tmp_path / "whole.parquet")


def test_a_pattern_may_match_errors_files_too(broken: Path, tiny_model: Path, tmp_path: Path) -> None:
    run_shards(broken, tmp_path, 3, **settings_of(tiny_model))
    matched = sorted(tmp_path.glob("shard-*.parquet"))
    assert [path.name for path in matched] == [
        "shard-0.errors.parquet",
        "shard-0.parquet",
        "shard-1.errors.parquet",
        "shard-2.errors.parquet",
        "shard-2.parquet",
    ]
    report = merge(matched, tmp_path / "out.parquet")
    assert (report.num_rows, report.codes["empty"]) == (60, 20)
    assert merge([path for path in matched if "errors" in path.name], tmp_path / "out.parquet").already_complete


def test_no_shard_with_an_embedding_is_nothing_to_merge(broken: Path, tiny_model: Path, tmp_path: Path) -> None:
    for path in broken.glob("*.png"):
        path.write_bytes(b"")
    shards = run_shards(broken, tmp_path, 2, **settings_of(tiny_model))
    with pytest.raises(NothingEmbeddedError, match=r"not one of 60 rows has an embedding: .*/shard-0.errors.parquet"):
        merge(shards, tmp_path / "out.parquet")
    assert not list(tmp_path.glob("out*"))


def test_a_shard_whose_failed_rows_were_tried_again(
    broken: Path, pictures: Path, tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copy(pictures / "0024.png", broken / "0024.png")
    settings = settings_of(tiny_model)
    shards = run_shards(broken, tmp_path, 3, **settings)
    for path in sorted(broken.glob("*.png"))[20:40]:
        shutil.copy(pictures / path.name, path)
    report = run(broken, shards[1], **settings, shard="1/3", retry_failed=True)
    assert report.num_recovered == 18
    assert run(broken, shards[1], **settings, shard="1/3").already_complete
    merge(shards, tmp_path / "out.parquet")
    run(broken, tmp_path / "whole.parquet", **settings)
    assert_same(tmp_path / "out.parquet", tmp_path / "whole.parquet")
    assert run(broken, tmp_path / "out.parquet", **settings).already_complete
    assert [set(entry) for entry in facts_of(tmp_path / "out.parquet")["merged_from"]] == [
        {"shard", "counts"},
        {"shard", "counts", "retried"},
        {"shard", "counts"},
    ]


def test_missing_and_repeated_shards_are_listed(shards: list[str], tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    with pytest.raises(InputError, match=r"all 3 shards of a run are merged, each once; not given: 0/3, 2/3$"):
        merge(shards[1:2], output)
    with pytest.raises(InputError) as told:
        merge([shards[1], shards[0], shards[1]], output)
    assert str(told.value).endswith(f"not given: 2/3; 1/3 is given 2 times: {shards[1]}, {shards[1]}")
    with pytest.raises(InputError, match="no shards given"):
        merge([], output)
    with pytest.raises(InputError, match=r"'s3://bucket/out.parquet' is a URL, and shards are merged on a local disk"):
        merge(shards, "s3://bucket/out.parquet")
    with pytest.raises(InputError, match=r"none.parquet cannot be read as Parquet: it does not exist"):
        merge([*shards, tmp_path / "none.parquet"], output)
    assert not list(tmp_path.iterdir())


def test_what_is_no_shard_is_refused(shards: list[str], whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    with pytest.raises(InputError, match=r"whole.parquet is no shard: only outputs of --shard i/n can be merged"):
        merge([*shards, whole], output)
    merge(shards, output)
    with pytest.raises(InputError, match=r"out.parquet is no shard: .* and not what was merged"):
        merge([output], tmp_path / "twice.parquet")


def test_shards_of_other_runs_are_told_apart(
    shards: list[str], pictures: Path, tiny_model: Path, tmp_path: Path
) -> None:
    other, output = tmp_path / "other.parquet", tmp_path / "out.parquet"

    def told(shard: str, inputs: Path = pictures, **settings: Any) -> str:  # noqa: ANN401
        run(inputs, other, **settings_of(tiny_model, **settings), shard=shard, overwrite=True)
        with pytest.raises(InputError) as raised:
            merge([shards[0], other, shards[2]], output)
        return str(raised.value)

    message = told("1/3", pool="mean", dedup="pixels")
    assert message.splitlines()[:-1] == [
        "these are not shards of one run:",
        f'  dedup: "bytes" in {shards[0]}, "pixels" in {other}',
        f'  pool: "cls" in {shards[0]}, "mean" in {other}',
    ]
    assert f'shard: "of 3" in {shards[0]}, "of 4" in {other}' in told("1/4")
    assert f"rows of the whole: 60 in {shards[0]}, 50 in {other}" in told("1/3", limit=50)
    changed = tmp_path / "in"
    shutil.copytree(pictures, changed)
    os.utime(changed / "0022.png", (1, 1))
    assert "the inputs have changed between" in told("1/3", changed)
    (changed / "0022.png").rename(changed / "0022-b.png")
    assert f"the list of inputs: other names in {shards[0]} than in {other}" in told("1/3", changed)
    assert not list(tmp_path.glob("out*"))


def copied(shards: Sequence[str], folder: Path) -> list[Path]:
    """The shards' files, in a place of their own."""
    folder.mkdir()
    for shard in map(Path, shards):
        for path in (shard, shard.with_suffix(".errors.parquet")):
            shutil.copy(path, folder / path.name)
    return [folder / Path(shard).name for shard in shards]


def test_the_target_may_not_be_a_shard(shards: list[str], tmp_path: Path) -> None:
    own = copied(shards, tmp_path / "own")
    before = own[1].read_bytes()
    with pytest.raises(OutputError, match=r"shard-1.parquet is .*shard-1.parquet, one of the shards: choose another"):
        merge(own, own[1], overwrite=True)
    (tmp_path / "link.parquet").symlink_to(own[1])
    with pytest.raises(OutputError, match="one of the shards"):
        merge(own, tmp_path / "link.parquet", overwrite=True)
    assert own[1].read_bytes() == before


def test_what_lies_at_the_target_stays(shards: list[str], whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    output.write_text("not Parquet")
    with pytest.raises(OutputError, match=r"out.parquet exists, and is not what these shards make: .*--overwrite"):
        merge(shards, output)
    assert output.read_text() == "not Parquet"
    for path in (whole, whole.with_suffix(".errors.parquet")):
        shutil.copy(path, tmp_path / path.name.replace("whole", "out"))
    with pytest.raises(OutputError, match="is not what these shards make"):
        merge(shards, output)  # the same rows, but not of these shards
    merge(shards, output, overwrite=True)
    assert "merged_from" in facts_of(output)
    partial = tmp_path / "parts.parquet.partial"
    partial.mkdir()
    record = '{"number": 0, "first_row": 0, "num_rows": 1, "num_embedded": 1, "num_duplicates": 0, "num_failed": 0}\n'
    (partial / "parts.jsonl").write_text(record)
    (partial / "manifest.json").write_text("{}")
    with pytest.raises(OutputError, match=r"parts.parquet.partial has the parts of an unfinished run"):
        merge(shards, tmp_path / "parts.parquet")
    merge(shards, tmp_path / "parts.parquet", overwrite=True)
    assert not partial.exists()
    partial.mkdir()
    (partial / "mine.txt").write_text("not ours")
    with pytest.raises(OutputError, match="it is not a run of vlmembed: move it away"):
        merge(shards, tmp_path / "parts.parquet", overwrite=True)
    assert (partial / "mine.txt").read_text() == "not ours"


def test_files_that_do_not_belong_together_are_told(shards: list[str], tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    own = copied(shards, tmp_path / "own")
    errors = own[1].with_suffix(".errors.parquet")
    kept = errors.read_bytes()
    shutil.copy(own[0].with_suffix(".errors.parquet"), errors)
    with pytest.raises(InputError, match=r"shard-1.errors.parquet holds .* they do not belong together"):
        merge(own, output)
    errors.unlink()
    with pytest.raises(InputError, match="put it beside it again"):
        merge(own, output)
    errors.write_bytes(kept)
    table = pq.read_table(own[1])
    pq.write_table(table.slice(1), own[1])
    with pytest.raises(
        InputError, match=rf"shard-1.parquet holds {len(table) - 1} rows, and its run wrote {len(table)}"
    ):
        merge(own, output)
    own[1].unlink()
    with pytest.raises(InputError, match=r"shard-1.parquet is gone, and .* says that it holds embeddings"):
        merge(own, output)
    own[1].with_name("shard-1.parquet.partial").mkdir()
    with pytest.raises(InputError, match=r"shard-1.parquet is not finished: give the command that writes it once more"):
        merge(own, output)
    assert not list(tmp_path.glob("out*"))


def test_other_columns_are_told(shards: list[str], tmp_path: Path) -> None:
    own = copied(shards, tmp_path / "own")
    table = pq.read_table(own[2])
    pq.write_table(table.append_column("mine", pa.array(range(len(table)))), own[2])
    with pytest.raises(InputError, match=r"shard-0.parquet and .*shard-2.parquet have other columns"):
        merge(own, tmp_path / "out.parquet")


def damage(path: Path, column: str) -> None:
    """Write zeros into a page."""
    content = bytearray(path.read_bytes())
    metadata = pq.read_metadata(path).row_group(0)
    found = next(
        metadata.column(place)
        for place in range(metadata.num_columns)
        if metadata.column(place).path_in_schema.startswith(column)
    )
    start = found.data_page_offset + found.total_compressed_size - 20
    content[start : start + 10] = bytes(10)
    path.write_bytes(content)


@pytest.mark.parametrize("column", ["content_hash", "embedding", "id"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_damaged_shard_is_named_and_nothing_is_left(
    column: str, number: int, shards: list[str], tmp_path: Path
) -> None:
    own = copied(shards, tmp_path / "own")
    damage(own[number], column)
    with pytest.raises(InputError, match=rf"shard-{number}.parquet is damaged, or gone"):
        merge(own, tmp_path / "out.parquet")
    with pytest.raises(InputError, match=rf"shard-{number}.parquet is damaged, or gone"):
        merge(own, f"{tmp_path}/out/")
    assert not list(tmp_path.glob("out.*"))
    assert not list(tmp_path.glob("out/*"))


class Killed(BaseException):
    """As if the process had ended."""


def die(*_: object, **__: object) -> None:
    raise Killed


@pytest.mark.parametrize("name", ["out.parquet", "out/"])
@pytest.mark.parametrize("at", ["resolve", "write_errors", "finish_publication", "drop"])
def test_the_next_start_finishes_what_was_killed(
    at: str, name: str, shards: list[str], whole: Path, tmp_path: Path
) -> None:
    output = f"{tmp_path}/{name}"
    kill(at, shards, output)
    report = merge(shards, output)
    assert report.already_complete == (at in ("finish_publication", "drop"))
    assert_same(output, whole)
    assert not list(tmp_path.glob("*.partial"))
    assert not list(tmp_path.glob("out/_partial"))


def kill(at: str, shards: list[str], output: str) -> None:
    """A merge that ends in this function."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_module, "drop", lambda _: None)  # a killed process cleans nothing up
        if at == "drop":  # when all files have been moved
            patch.setattr("vlmembed.output.drop", die)
        elif at == "finish_publication":
            patch.setattr("vlmembed.output.finish_publication", die)
        elif at == "resolve":
            patch.setattr(Overlap, at, die)
        else:
            patch.setattr(merge_module, at, die)
        with pytest.raises(Killed):
            merge(shards, output)


def test_a_full_disk_is_told_and_leaves_nothing(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(StorageError, match="No space left on device"):
        merge(shards, tmp_path / "out.parquet")
    assert not list(tmp_path.glob("out*"))


def test_rows_that_would_be_lost_are_noticed(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(self: Overlap, table: pa.Table, position: int) -> pa.Table:  # noqa: ARG001
        return table

    monkeypatch.setattr(Overlap, "resolve", forgetful)
    with pytest.raises(AccountingError, match=r"the shards gave .* rows and promised"):
        merge(shards, tmp_path / "out.parquet")
    assert not list(tmp_path.glob("out*"))


def write_rows(path: Path, hashes: Sequence[int], points: dict[int, str], first: int) -> Path:
    """An output of rows `first`, `first` + 1, …, in row groups of three; a vector tells its row."""
    rows = range(first, first + len(hashes))
    table = pa.table(
        {
            "id": [f"row {row}" for row in rows],
            "embedding": pa.array([[row, row] for row in rows], pa.list_(pa.float32(), 2)),
            "content_hash": pa.array([number.to_bytes(32, "big") for number in hashes], pa.binary(32)),
            "duplicate_of": pa.array([points.get(row) for row in rows], pa.string()),
            **{name: pa.array([row] * len(rows), pa.int32()) for row, name in enumerate(("width", "height"))},
            **{name: pa.array(list(rows), pa.int32()) for name in ("grid_h", "grid_w")},
            "kept": [f"kept {row}" for row in rows],
        }
    )
    pq.write_table(table, path, row_group_size=3)
    return path


def resolved(found: Overlap, paths: Sequence[Path]) -> list[dict[str, Any]]:
    rows, position = [], 0
    for path in paths:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                rows += found.resolve(table, position).to_pylist()
                position += len(table)
    return rows


def test_rows_whose_content_came_before_become_its_duplicates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "FOUND_BYTES", 1)  # no row group stays
    paths = [
        write_rows(tmp_path / "0.parquet", [1, 2, 3, 4, 1], {0: "row 4"}, 0),  # after a retry: the later one is first
        write_rows(tmp_path / "1.parquet", [5, 1, 4, 6, 1, 5, 4], {9: "row 6", 10: "row 5", 11: "row 7"}, 5),
        write_rows(tmp_path / "2.parquet", [6, 7, 7, 1], {14: "row 13"}, 12),
    ]
    index = tmp_path / "index.sqlite"
    with Overlap([[path] for path in paths], vectors=["embedding"], index=index) as found:
        rows = resolved(found, paths)
        assert found.num_distinct == 7
    assert not index.exists()
    firsts = {6: 4, 7: 3, 9: 4, 11: 3, 12: 8, 15: 4}
    own = {0: "row 4", 10: "row 5", 14: "row 13"}
    for number, row in enumerate(rows):
        source = firsts.get(number, number)
        assert row["id"] == f"row {number}"
        assert row["kept"] == f"kept {number}"
        assert row["duplicate_of"] == (f"row {source}" if number in firsts else own.get(number))
        assert (row["embedding"], row["grid_h"]) == ([source, source], source)


def test_an_output_that_holds_a_content_twice_is_left_as_it_is(tmp_path: Path) -> None:
    paths = [
        write_rows(tmp_path / "0.parquet", [1, 1], {}, 0),
        write_rows(tmp_path / "1.parquet", [1, 1], {3: "row 2"}, 2),
    ]
    with Overlap([[path] for path in paths], vectors=["embedding"], index=tmp_path / "i.sqlite") as found:
        rows = resolved(found, paths)
        assert found.num_distinct == 2
    assert [row["duplicate_of"] for row in rows] == [None, None, "row 0", "row 0"]


def test_the_index_takes_few_bytes_a_row(tmp_path: Path) -> None:
    num_rows = 20_000
    generator = np.random.default_rng(0)
    hashes = [int.from_bytes(generator.bytes(32), "big") for _ in range(num_rows)]
    table = pa.table(
        {
            "content_hash": pa.array([number.to_bytes(32, "big") for number in hashes], pa.binary(32)),
            "duplicate_of": pa.nulls(num_rows, pa.string()),
        }
    )
    for number in range(2):
        pq.write_table(table.slice(0, num_rows - number), tmp_path / f"{number}.parquet")
    index = tmp_path / "index.sqlite"
    with Overlap([[tmp_path / f"{number}.parquet"] for number in range(2)], vectors=[], index=index) as found:
        found._database.execute("COMMIT")
        assert index.stat().st_size < 100 * num_rows
        assert found.num_distinct == num_rows


def test_what_the_shards_were_made_with_is_kept(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = copied(shards, tmp_path / "own")
    monkeypatch.chdir(tmp_path)
    alter(own[1], lambda facts: facts["versions"].update(torch="9.9"))
    alter(own[2], lambda facts: facts["backend"].update(device="another processor"))
    report: RunReport = merge([str(path) for path in own], "out.parquet")
    assert report.num_rows == 60
    entries = facts_of("out.parquet")["merged_from"]
    assert entries[1]["versions"] == {"torch": "9.9"}
    assert entries[2]["backend"] == {"device": "another processor"}
    assert "versions" not in entries[0] | entries[2]
    assert facts_of("out.parquet")["versions"] == facts_of(shards[0])["versions"]


def alter(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Give an output, and its errors, other provenance."""
    facts = facts_of(path)
    change(facts)
    for file in (path, path.with_suffix(".errors.parquet")):
        table = pq.read_table(file)
        pq.write_table(table.cast(with_provenance(table.schema, facts)), file)
