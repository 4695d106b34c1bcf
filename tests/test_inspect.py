"""`vlmembed inspect`: outputs of every kind, runs that are not finished, and the rows that failed."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from conftest import ROOT
from memory_store import MemoryStore
from outputs import KINDS, Rows, key_of
from test_cache import POOLED, TOKENS
from test_end_to_end import many_pictures

from vlmembed.cli import cli
from vlmembed.cli.inspect import describe_inspection
from vlmembed.config import EncodeConfig
from vlmembed.errors import ConfigError, InputError, OutputError
from vlmembed.inspection.reading import inspect
from vlmembed.inspection.unfinished import is_held
from vlmembed.mirror.remoterun import line_of, run_of
from vlmembed.output import lock
from vlmembed.recipes import load_recipe
from vlmembed.remote.remotes import Remotes
from vlmembed.run import encode
from vlmembed.schema import ERRORS_SCHEMA, with_provenance

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vlmembed.schema import VectorColumn

ROWS = 50
FAILED = (7, 21, 22)
DUPLICATES = {30: 1, 31: 1, 49: 0}

RECIPE = EncodeConfig(
    inputs=("pictures",), output="out.parquet", pool="cls", dtype="fp32", keep_columns=("a",), timeout=60.0
)


def rows_of(output: Path | str, columns: tuple[VectorColumn, ...] = POOLED, failed: Sequence[int] = FAILED) -> Rows:
    """Rows on their way into an output, in parts of 20, whose provenance is whole."""
    rows = Rows(str(output), ROWS, columns, failed=failed, duplicates=DUPLICATES)
    rows.facts["fingerprint"] |= {"num_rows": ROWS, "resizer": "r", "emit": "pooled", "shard": "1/4"}
    rows.facts["model"] |= {"name": "tiny", "revision": "local", "weights_sha256": "ab" * 32}
    rows.facts |= {
        "backend": {"device": "cpu", "processor": "abacus", "attention": "cpu"},
        "versions": {"vlmembed": "0.1.0"},
        "recipe": RECIPE.to_toml(),
        "decided": ["dtype", "pool", "device"],
    }
    facts = {name: value for name, value in rows.facts.items() if name != "counts"}
    (rows.paths.partial / "manifest.json").write_text(json.dumps(facts))
    return rows


def shown_json(path: Path | str) -> dict[str, Any]:
    """What `--json` prints: one line of strict JSON."""

    def no_constant(name: str) -> float:
        raise AssertionError(name)

    result = CliRunner().invoke(cli, ["inspect", str(path), "--json"], catch_exceptions=False)
    assert result.stdout.count("\n") == 1
    found = json.loads(result.stdout, parse_constant=no_constant)
    assert isinstance(found, dict)
    return found


def shown(path: Path | str, *options: str) -> str:
    return CliRunner().invoke(cli, ["inspect", str(path), *options], catch_exceptions=False).stdout


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_of_any_kind(kind: str, tmp_path: Path) -> None:
    path = rows_of(f"{tmp_path}/{kind}").assemble()
    found = shown_json(path)
    assert (found["kind"], found["path"], found["version"]) == ("output", str(path), 1)
    names = ("num_rows_read", "num_rows", "num_embedded", "num_duplicates", "num_failed")
    assert [found[name] for name in names] == [50, 47, 44, 3, 3]
    assert found["codes"] == {"corrupt": 3}
    (group,) = found["failures"]
    assert (group["code"], group["stage"], group["num_rows"]) == ("corrupt", "decode", 3)
    assert group["first"][0] == {"id": key_of(7), "row": 7, "message": "bad"}
    assert (found["vectors"], found["width"], found["dtype"], found["num_tokens"]) == (
        ["embedding"],
        48,
        "float32",
        None,
    )
    assert found["provenance"]["recipe"] == found["recipe"] == RECIPE.to_toml()
    assert found["decided"] == {"dtype": "fp32", "pool": "cls"}
    assert found["asked"] == {"keep_columns": ["a"], "timeout": 60.0}
    assert found["shard"] == {"index": 1, "count": 4}
    assert found["unfinished"] is None
    assert (found["num_compared"], len(found["nearest"])) == (44, 3)
    cosines = [pair["cosine"] for pair in found["nearest"]]
    assert cosines == sorted(cosines, reverse=True)

    here = {each.name: each for each in (path if kind == "out/" else tmp_path).iterdir()}
    assert found["files"].keys() == here.keys() - {"out"}
    for name, num_bytes in found["files"].items():
        files = [here[name]] if here[name].is_file() else [each for each in here[name].rglob("*") if each.is_file()]
        assert num_bytes == sum(each.stat().st_size for each in files), name
    beside = sum(num_bytes for name, num_bytes in found["files"].items() if "errors" in name or name == "_SUCCESS")
    assert found["num_bytes"] == sum(found["files"].values()) - beside > 47 * 48 * 4
    assert found["bytes_per_row"] == found["num_bytes"] / 47

    lines = shown(path).splitlines()
    assert lines[0] == str(path)
    assert "  rows        47, of them 3 duplicates" in lines
    assert "  failed      3: 3 corrupt" in lines
    assert f"  on disk     {found['num_bytes']:,} bytes, {found['num_bytes'] / 47:,.0f} a row" in lines
    assert "  asked for   timeout 60.0, keep-columns a" in lines
    assert "  decided     dtype fp32, pool cls" in lines
    assert "  shard       1/4: piece 2 of 4, for `vlmembed merge`" in lines


def test_tokens_and_a_missing_errors_file(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "out.parquet", TOKENS)
    rows.facts["fingerprint"] |= {"emit": "tokens"}
    rows.assemble()
    (tmp_path / "out.errors.parquet").unlink()
    found = inspect(tmp_path / "out.parquet")
    assert (found.vectors, found.width, found.dtype) == (("tokens", "deepstack_0"), 8, "float16")
    assert found.num_tokens == sum(3 * (rows.content_of(row) % 11) for row in rows.kept_rows)
    assert (found.codes, found.num_failed, found.nearest, found.num_compared) == (None, 3, [], 0)
    assert "failed      unknown: the errors file is not beside it" in describe_inspection(found)
    assert list(found.files) == ["out.parquet"]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "out.parquet")
    rows.facts["odd"] = [float("nan"), float("inf"), 1.5]
    assert shown_json(rows.assemble())["provenance"]["odd"] == [None, None, 1.5]


@pytest.mark.parametrize("kind", KINDS)
def test_an_unfinished_run_is_seen_by_either_name_and_not_disturbed(kind: str, tmp_path: Path) -> None:
    paths = rows_of(f"{tmp_path}/{kind}").paths
    lines = paths.partial / "parts.jsonl"
    lines.write_text("".join(lines.read_text().splitlines(keepends=True)[:2]) + '{"number": 2, "fir')  # a commit began
    with lock(paths.partial):
        before = {path.name: path.read_bytes() for path in paths.partial.iterdir()}
        held = shown_json(paths.output)
        assert {path.name: path.read_bytes() for path in paths.partial.iterdir()} == before
        with pytest.raises(OutputError, match="another process is writing"), lock(paths.partial):
            pass  # still held
    free = shown_json(paths.output)
    for found, is_held_now in ((held, True), (free, False)):
        assert (found["kind"], found["path"]) == ("unfinished", str(paths.output))
        names = ("num_rows_read", "num_rows", "num_embedded", "num_duplicates", "num_failed")
        assert [found[name] for name in names] == [40, 37, 35, 2, 3]
        assert found["codes"] == {"corrupt": 3}
        assert (found["vectors"], found["width"], found["dtype"]) == (["embedding"], 48, "float32")
        assert found["num_bytes"] == sum(found["files"][f"part-00000{number}.parquet"] for number in range(2))
        run = found["unfinished"]
        assert (run["num_rows_done"], run["num_rows_total"], run["num_parts"]) == (40, 50, 2)
        assert (run["partial"], run["output"]) == (str(paths.partial), str(paths.output))
        assert (run["is_held"], run["is_retry"], run["is_assembled"]) == (is_held_now, False, False)
        assert abs(time.time() - lines.stat().st_mtime) < 600
        assert run["last_commit"].endswith("Z")
    assert shown_json(paths.partial)["unfinished"] == free["unfinished"]
    text = shown(paths.output)
    assert text.startswith(f"{paths.output}: not finished\n  unfinished  40 of 50 rows are committed, in 2 parts, the")
    assert "  state       no process is writing to it; the same command goes on at row 40\n" in text
    assert "  rows        37, of them 2 duplicates" in text
    with lock(paths.partial):
        assert "  state       a process is writing to it now\n" in shown(paths.partial)


def test_a_run_beside_a_finished_output_is_told_with_it(tmp_path: Path) -> None:
    old = rows_of(tmp_path / "out.parquet", failed=(7,)).assemble()
    rows_of(tmp_path / "out.parquet")
    found = shown_json(old)
    assert (found["kind"], found["num_rows"], found["num_rows_read"]) == ("output", 49, 50)
    assert (found["unfinished"]["num_rows_done"], found["unfinished"]["num_failed"]) == (50, 3)
    assert "unfinished  50 of 50 rows are committed, in 3 parts" in shown(old)
    shutil.rmtree(tmp_path / "out.parquet.partial")
    (tmp_path / "out.parquet.partial").mkdir()
    (tmp_path / "out.parquet.partial" / "mine.txt").touch()  # somebody else's
    assert inspect(old).unfinished is None


def test_what_is_no_output_is_said_to_be_none(tmp_path: Path) -> None:
    def says(name: str, message: str) -> None:
        with pytest.raises(InputError, match=message):
            inspect(tmp_path / name)

    says("nothing.parquet", "does not exist; name the output of an earlier run")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    says("other.parquet", "holds no vlmembed provenance")
    pq.write_table(pa.table({name: [] for name in ERRORS_SCHEMA.names}), tmp_path / "like.parquet")
    says("like.parquet", "holds no vlmembed provenance")
    (tmp_path / "text.parquet").write_text("words")
    says("text.parquet", "cannot be read as Parquet")
    (tmp_path / "folder").mkdir()
    says("folder", "is a folder without _SUCCESS")
    (tmp_path / "a.partial").mkdir()
    says("a.partial", "holds no parts: a run began there and ended before it had any")
    (tmp_path / "b.partial").mkdir()
    (tmp_path / "b.partial" / "mine.txt").touch()
    says("b.partial", "holds no manifest.json, so it is not a run of vlmembed")
    rows_of(tmp_path / "c.parquet").store.folder.joinpath("part-000001.errors.parquet").write_bytes(b"PAR1")
    says("c.parquet", "is damaged, or gone")
    result = CliRunner().invoke(cli, ["inspect", "x", "--json", "--recipe"])
    assert isinstance(result.exception, ConfigError)


def test_a_run_that_finishes_while_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(tmp_path / "out.parquet")

    def finished_meanwhile(_: object) -> None:
        rows.assemble()
        raise InputError

    monkeypatch.setattr("vlmembed.inspection.reading.read_failures", finished_meanwhile)
    with pytest.raises(InputError, match="has changed while it was read: look again"):
        inspect(tmp_path / "out.parquet")
    monkeypatch.undo()
    assert inspect(tmp_path / "out.parquet").kind == "output"


def test_files_that_a_killed_run_was_moving_into_place(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "out.parquet")
    (rows.paths.partial / "publication.json").write_text('{"moves": {}, "removes": []}')
    found = inspect(tmp_path / "out.parquet")
    assert found.unfinished is not None
    assert found.unfinished.is_assembled
    assert "all rows are done, and the same command puts the files in place" in describe_inspection(found)


def test_a_lock_that_cannot_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(95, "not supported")

    assert is_held(tmp_path / "lock") is False
    (tmp_path / "lock").touch()
    assert is_held(tmp_path / "lock") is False
    monkeypatch.setattr("fcntl.flock", fails)
    assert is_held(tmp_path / "lock") is None
    monkeypatch.setattr("os.open", fails)
    assert is_held(tmp_path / "lock") is None


def test_an_errors_file_tells_the_rows_by_code_and_stage(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "out.parquet")
    rows.assemble()
    kinds = [("decode", "truncated"), ("read", "missing"), ("decode", "truncated"), ("encode", "truncated")]
    stages, codes = zip(*(kinds[row % 4] for row in range(40)), strict=True)
    texts = [f"why {row}" for row in range(40)]
    values = [[f"{row}.jpg" for row in range(40)], np.arange(40) * 3, stages, codes, texts]
    arrays = dict(zip(ERRORS_SCHEMA.names, values, strict=True))
    path = tmp_path / "out.errors.parquet"
    pq.write_table(pa.table(arrays, schema=with_provenance(ERRORS_SCHEMA, rows.facts)), path)

    found = shown_json(path)
    assert (found["kind"], found["num_failed"], found["num_rows"], found["num_rows_read"]) == ("errors", 40, 47, 50)
    assert found["codes"] == {"truncated": 30, "missing": 10}
    assert [(each["code"], each["stage"], each["num_rows"]) for each in found["failures"]] == [
        ("truncated", "decode", 20),
        ("missing", "read", 10),
        ("truncated", "encode", 10),
    ]
    assert found["failures"][1]["first"] == [
        {"id": f"{row}.jpg", "row": 3 * row, "message": f"why {row}"} for row in (1, 5, 9)
    ]
    assert found["files"] == {"out.errors.parquet": path.stat().st_size}
    text = shown(path)
    assert text.startswith(f"{path}: 40 rows that failed\n  20 truncated, in decode\n    row 0  0.jpg  why 0\n")
    assert "  10 missing, in read\n    row 3  1.jpg  why 1\n" in text
    assert text.count("    and 17 more\n") == 1
    assert text.count("    and 7 more\n") == 2


def test_the_recipe_of_an_unfinished_run_goes_on_with_it(tmp_path: Path, tiny_model: Path) -> None:
    folder = many_pictures(tmp_path / "in", 40)
    out = tmp_path / "out.parquet"

    def stop(event: Any) -> None:  # noqa: ANN401  any event
        if event["event"] == "part":
            raise KeyboardInterrupt

    config = EncodeConfig(inputs=(str(folder),), output=str(out), model=str(tiny_model), rows_per_part=15)
    with pytest.raises(KeyboardInterrupt):
        encode(config, on_event=stop)
    found = shown_json(out)
    assert (found["kind"], found["unfinished"]["num_rows_done"], found["unfinished"]["is_held"]) == (
        "unfinished",
        15,
        False,
    )
    assert found["asked"] == {"model": str(tiny_model), "rows_per_part": 15}
    (tmp_path / "run.toml").write_text(shown(out, "--recipe"))
    assert encode(load_recipe(tmp_path / "run.toml")).num_resumed == 15
    assert load_recipe(tmp_path / "run.toml") == EncodeConfig.from_toml(shown_json(out)["recipe"])
    assert found["recipe"] == shown_json(out)["recipe"]


@pytest.mark.parametrize("url", ["s3://bucket/run/out.parquet", "s3://bucket/run/out/"])
def test_an_output_and_a_run_behind_a_url(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    monkeypatch.setattr(Remotes, "filesystem", lambda *_: (store, ""))
    monkeypatch.setattr(Remotes, "open", lambda _, url: store.open(url))
    monkeypatch.setattr("vlmembed.mirror.objects.PAUSES_SECONDS", ())
    rows = rows_of(str(tmp_path / "out.parquet") if url.endswith("t") else f"{tmp_path}/out/")
    name = "bucket/run/out.parquet.partial" if url.endswith("t") else "bucket/run/out/_partial"
    manifest = (rows.paths.partial / "manifest.json").read_bytes()

    def put(file_name: str, content: bytes) -> None:
        with store.open_output_stream(f"{name}/{file_name}", compression=None) as sink:
            sink.write(pa.py_buffer(content))

    put("manifest.json", manifest)
    for record in rows.store.records:
        for file_name in (record.file_name, record.errors_name):
            put(file_name, (rows.paths.partial / file_name).read_bytes())
        put(f"part-{record.number:06}.json", line_of(record, run_of(manifest)))
    put("owner.json", b'{"token": "somebody"}')
    for named in (url, f"s3://{name}"):
        found = shown_json(named)
        assert (found["kind"], found["path"], found["num_rows"]) == ("unfinished", named, 47)
        assert found["codes"] == {"corrupt": 3}
        run = found["unfinished"]
        assert (run["num_rows_done"], run["is_held"]) == (50, True)
        assert (run["partial"], run["output"]) == (f"s3://{name}", url.rstrip("/"))
        assert found["num_bytes"] == sum(len(store.objects[f"{name}/part-{n:06}.parquet"]) for n in range(3))

    output = rows.assemble()
    name = "bucket/run/out" if output.is_dir() else "bucket/run"
    for file in output.iterdir() if output.is_dir() else tmp_path.iterdir():
        put(file.name, file.read_bytes())
    found = shown_json(url)
    assert (found["kind"], found["path"], found["num_rows"], found["codes"]) == ("output", url, 47, {"corrupt": 3})
    store.objects.clear()
    with pytest.raises(InputError, match="does not exist: name the output of an earlier run"):
        inspect(url)


def test_the_page_on_monitoring_names_every_key(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    found = shown_json(rows_of(tmp_path / "out.parquet").paths.output)
    for name in [*found, *found["unfinished"], *found["shard"]]:
        assert f"`{name}`" in page, name
