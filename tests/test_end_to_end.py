"""The command, whole: what becomes of every sample, who can read the output, and what a stopped run leaves."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import datasets
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import SAMPLES
from PIL import Image

import vlmembed
from vlmembed.cli import main
from vlmembed.config import EncodeConfig
from vlmembed.encoder import Encoder
from vlmembed.errors import ConfigError, InputError, NothingEmbeddedError, OutputError, RowFailedError
from vlmembed.inspection.reading import inspect
from vlmembed.parts import PartStore
from vlmembed.schema import read_provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from vlmembed.report import RunReport

EMBEDDED = {
    "café ☕ コーヒー.jpg": (13, 19),
    "drawings/a.jpg": (14, 18),
    "drawings/a.png": (14, 18),
    "drawings/alpha.png": (14, 18),
    "drawings/animated.gif": (14, 18),
    "drawings/forty-to-one.png": (2, 101),
    "drawings/one-pixel.png": (16, 16),
    "drawings/palette-transparent.png": (14, 18),
    "drawings/sixteen-bit.png": (14, 18),
    "no-extension": (13, 19),
    "photos/astronaut.webp": (16, 16),
    "photos/cat copy.jpg": (13, 19),
    "photos/cmyk.jpg": (13, 19),
    "photos/exif-rotated.jpg": (13, 19),
    "photos/galaxies.avif": (15, 17),
    "photos/gravel.png": (16, 16),
    "photos/rocket.jpg": (13, 19),
    "photos/same-pixels.bmp": (13, 19),
    "photos/same-pixels.png": (13, 19),
}
DUPLICATES = {"photos/cat.jpg": "photos/cat copy.jpg", "photos/coffee.jpg": "café ☕ コーヒー.jpg"}
FAILED = {
    "broken/flipped-byte.png": "corrupt",
    "broken/text.jpg": "unsupported_format",
    "broken/truncated copy.jpg": "truncated",
    "broken/truncated.jpg": "truncated",
    "broken/truncated.png": "truncated",
    "broken/zero-bytes.jpg": "empty",
}


def run(inputs: object, output: Path | str, **settings: Any) -> RunReport:  # noqa: ANN401
    names = tuple(map(str, inputs)) if isinstance(inputs, (list, tuple)) else (str(inputs),)
    return vlmembed.encode(EncodeConfig(inputs=names, output=str(output), **settings))


def embeddings_of(path: Path) -> dict[str, np.ndarray]:
    table = pq.read_table(path)
    return dict(zip(table["id"].to_pylist(), np.array(table["embedding"].to_pylist(), np.float32), strict=True))


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory, builtin_folder: Path) -> Path:
    """The samples through the built-in model with default settings."""
    assert builtin_folder.exists()
    output = tmp_path_factory.mktemp("demo") / "demo.parquet"
    report = run(SAMPLES, output)
    assert (report.num_rows, report.num_embedded, report.num_duplicates, report.num_failed) == (27, 19, 2, 6)
    assert report.skipped == {".txt": 1, ".json": 1}
    return output


def test_every_sample_has_its_declared_outcome(demo: Path) -> None:
    rows = {row["id"]: row for row in pq.read_table(demo).to_pylist()}
    assert {key: row["duplicate_of"] for key, row in rows.items() if row["duplicate_of"]} == DUPLICATES
    assert set(rows) == set(EMBEDDED) | set(DUPLICATES)
    for key, grid_hw in EMBEDDED.items():
        assert (rows[key]["grid_h"], rows[key]["grid_w"]) == grid_hw, key
        assert np.linalg.norm(rows[key]["embedding"]) == pytest.approx(1, abs=1e-5)
    for key, first in DUPLICATES.items():
        assert rows[key] == rows[first] | {"id": key, "duplicate_of": first}
    errors = pq.read_table(demo.with_suffix(".errors.parquet")).to_pylist()
    assert {row["id"]: row["code"] for row in errors} == FAILED
    assert (rows["photos/exif-rotated.jpg"]["width"], rows["photos/exif-rotated.jpg"]["height"]) == (320, 214)
    similar = np.dot(rows["photos/exif-rotated.jpg"]["embedding"], rows["photos/rocket.jpg"]["embedding"])
    assert similar > 0.995
    same = rows["photos/same-pixels.png"], rows["photos/same-pixels.bmp"]
    np.testing.assert_allclose(same[0]["embedding"], same[1]["embedding"], atol=1e-5)
    assert same[0]["content_hash"] != same[1]["content_hash"]


def test_ids_are_in_input_order(demo: Path) -> None:
    ids = pq.read_table(demo)["id"].to_pylist()
    assert ids == sorted(ids, key=lambda key: key.split("/"))


def test_dedup_by_pixels(tmp_path: Path, tiny_model: Path) -> None:
    report = run(SAMPLES, tmp_path / "out.parquet", model=str(tiny_model), dedup="pixels")
    assert (report.num_embedded, report.num_duplicates, report.num_failed) == (18, 3, 6)
    table = pq.read_table(tmp_path / "out.parquet")
    found = {row["id"]: row["duplicate_of"] for row in table.to_pylist() if row["duplicate_of"]}
    assert found == DUPLICATES | {"photos/same-pixels.png": "photos/same-pixels.bmp"}
    report = run(SAMPLES, tmp_path / "none.parquet", model=str(tiny_model), dedup="none")
    assert (report.num_embedded, report.num_duplicates, report.num_failed) == (21, 0, 6)


def test_the_output_opens_in_the_tools_people_use(demo: Path, tmp_path: Path) -> None:
    written = pq.read_table(demo)
    vectors = np.array(written["embedding"].to_pylist(), np.float32)
    ids = written["id"].to_pylist()

    frame = pd.read_parquet(demo)
    assert frame["id"].tolist() == ids
    np.testing.assert_array_equal(np.stack(frame["embedding"].tolist()), vectors)
    assert frame["content_hash"].tolist() == written["content_hash"].to_pylist()

    lazy = pl.read_parquet(demo)
    assert lazy["id"].to_list() == ids
    assert lazy.schema["embedding"] == pl.Array(pl.Float32, 384)
    np.testing.assert_array_equal(lazy["embedding"].to_numpy(), vectors)

    query = """
        SELECT a.id, b.id, list_cosine_similarity(a.embedding, b.embedding) AS cosine
        FROM read_parquet(?) a JOIN read_parquet(?) b ON a.id < b.id
        WHERE a.duplicate_of IS NULL AND b.duplicate_of IS NULL ORDER BY cosine DESC LIMIT 1
    """
    with duckdb.connect() as connection:
        first, second, cosine = connection.execute(query, [str(demo), str(demo)]).fetchall()[0]
    assert (first, second) == ("photos/same-pixels.bmp", "photos/same-pixels.png")
    assert cosine == pytest.approx(1, abs=1e-5)

    dataset = datasets.load_dataset("parquet", data_files=str(demo), split="train", cache_dir=str(tmp_path))
    dataset = dataset.with_format("numpy")
    np.testing.assert_array_equal(np.stack([row["embedding"] for row in dataset]), vectors)
    assert list(dataset["id"]) == ids

    errors = demo.with_suffix(".errors.parquet")
    assert pl.read_parquet(errors)["code"].to_list() == pd.read_parquet(errors)["code"].tolist()


def test_provenance_says_where_it_comes_from(demo: Path) -> None:
    facts = read_provenance(pq.read_schema(demo), "demo")
    assert facts["counts"] == {
        "rows": 27,
        "embedded": 19,
        "duplicates": 2,
        "failed": 6,
        "codes": {"truncated": 3, "corrupt": 1, "unsupported_format": 1, "empty": 1},
        "skipped": {".txt": 1, ".json": 1},
    }
    assert facts["model"]["name"] == "dinov2-small"
    assert len(facts["model"]["weights_sha256"]) == 64
    assert set(facts["versions"]) >= {"vlmembed", "torch", "transformers", "pillow", "pyarrow", "python"}
    recipe = EncodeConfig.from_toml(facts["recipe"])
    assert "auto" not in (recipe.dtype, recipe.pool, recipe.resize, recipe.device)
    assert (recipe.max_pixels, recipe.min_pixels, recipe.rows_per_part) == (50176, 50176, 1024)
    assert read_provenance(pq.read_schema(demo.with_suffix(".errors.parquet")), "errors") == facts


def test_inspect_counts_and_finds_the_nearest(demo: Path, tmp_path: Path) -> None:
    found = inspect(demo)
    assert (found.num_rows, found.width, found.num_duplicates, found.num_compared) == (21, 384, 2, 19)
    assert found.codes == {"truncated": 3, "corrupt": 1, "unsupported_format": 1, "empty": 1}
    assert [(pair.first, pair.second) for pair in found.nearest[:2]] == [
        ("photos/same-pixels.bmp", "photos/same-pixels.png"),
        ("photos/exif-rotated.jpg", "photos/rocket.jpg"),
    ]
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(InputError, match="holds no vlmembed provenance"):
        inspect(tmp_path / "other.parquet")
    assert inspect(demo.with_suffix(".errors.parquet")).kind == "errors"


def test_a_parquet_of_the_same_files_gives_identical_embeddings(demo: Path, tmp_path: Path) -> None:
    # the folder's order, so that the packs are the same
    names = sorted([*EMBEDDED, *DUPLICATES, *FAILED], key=lambda key: key.split("/"))
    images = [{"bytes": (SAMPLES / name).read_bytes(), "path": None} for name in names]
    table = pa.table({"name": names, "image": images, "number": pa.array(range(len(names)), pa.int16())})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=10)
    run(tmp_path / "in.parquet", tmp_path / "out.parquet", id_column="name", keep_columns=("number",))
    ours, theirs = embeddings_of(tmp_path / "out.parquet"), embeddings_of(demo)
    assert set(ours) == set(theirs)
    for key, vector in ours.items():
        assert np.array_equal(vector, theirs[key]), key
    kept = pq.read_table(tmp_path / "out.parquet", columns=["id", "number"])
    assert kept.schema.field("number").type == pa.int16()
    assert all(names[number] == key for key, number in zip(*kept.to_pydict().values(), strict=True))


def many_pictures(folder: Path, count: int) -> Path:
    """Small pictures; every tenth a copy of one 37 places earlier, every 25th broken."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for row in range(count):
        path = folder / f"{row:04}.png"
        if row % 10 == 0 and row >= 37:
            shutil.copy(folder / f"{row - 37:04}.png", path)
        elif row % 25 == 0:
            path.write_bytes(b"\x89PNG\r\n\x1a\n broken" + str(row).encode())
        else:
            height, width = generator.integers(5, 60, 2)
            Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
    return folder


def test_a_run_that_goes_on_keeps_what_the_first_start_decided(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = many_pictures(tmp_path / "in", 40)
    settings = {"model": str(tiny_model), "rows_per_part": 10}
    monkeypatch.setattr("vlmembed.attention.backends.preferred", lambda *_: ("cpu",))
    monkeypatch.setattr("vlmembed.attention.varlen.preferred", lambda *_: ("cpu",))

    with monkeypatch.context() as patch:
        stop_after(1, patch)
        with pytest.raises(KeyboardInterrupt):
            run(folder, tmp_path / "out.parquet", **settings)
    monkeypatch.undo()
    report = run(folder, tmp_path / "out.parquet", **settings)
    assert report.num_resumed == 10
    facts = read_provenance(pq.read_schema(tmp_path / "out.parquet"), "x")
    assert facts["backend"]["attention"] == "cpu: bmm per run of equal segments"
    assert EncodeConfig.from_toml(facts["recipe"]).attention == "cpu"
    assert (facts["backend"]["compile"], facts["backend"]["cuda_graphs"]) == ("off", "off")
    run(folder, tmp_path / "anew.parquet", **settings)
    assert read_provenance(pq.read_schema(tmp_path / "anew.parquet"), "x")["backend"]["attention"].startswith("sdpa: ")


def test_what_the_first_start_decided_gives_way_where_it_cannot_be_done(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decided on a GPU whose package is not here any more, say."""
    folder = many_pictures(tmp_path / "in", 40)
    settings = {"model": str(tiny_model), "rows_per_part": 10}

    with monkeypatch.context() as patch:
        stop_after(1, patch)
        with pytest.raises(KeyboardInterrupt):
            run(folder, tmp_path / "out.parquet", **settings)
    manifest = tmp_path / "out.parquet.partial" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('attention = \\"sdpa\\"', 'attention = \\"flash2\\"'))
    assert "flash2" in manifest.read_text()
    assert run(folder, tmp_path / "out.parquet", **settings).num_resumed == 10
    with pytest.raises(ConfigError, match="--attention flash2 needs a GPU: use sdpa"):
        run(folder, tmp_path / "asked.parquet", attention="flash2", **settings)


def test_the_same_run_twice_writes_the_same_file(tmp_path: Path, tiny_model: Path) -> None:
    folder = many_pictures(tmp_path / "in", 120)
    settings = {"model": str(tiny_model), "rows_per_part": 25, "max_tokens_per_batch": 100}
    first = run(folder, tmp_path / "a.parquet", **settings)
    assert first.num_rows == first.num_embedded + first.num_duplicates + first.num_failed == 120
    assert first.num_duplicates > 5
    assert first.num_failed > 2
    content = (tmp_path / "a.parquet").read_bytes()
    run(folder, tmp_path / "a.parquet", **settings, overwrite=True)
    assert (tmp_path / "a.parquet").read_bytes() == content
    run(folder, tmp_path / "b.parquet", **settings, workers=3)
    assert pq.read_table(tmp_path / "b.parquet").equals(pq.read_table(tmp_path / "a.parquet"))


COMMAND = [sys.executable, "-m", "vlmembed", "encode"]


def cli(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


def wait_for_parts(process: subprocess.Popen[str], output: Path, count: int) -> Path:
    """Until a run has committed so many parts; their list."""
    lines = output.with_name(f"{output.name}.partial") / "parts.jsonl"
    deadline = time.monotonic() + 120
    while not (lines.exists() and lines.read_text().count("\n") >= count):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    return lines


def test_ctrl_c_keeps_the_committed_parts_and_the_next_start_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    folder = many_pictures(tmp_path / "in", 1500)
    settings: dict[str, Any] = {"model": str(tiny_model), "rows_per_part": 50, "max_tokens_per_batch": 100}
    run(folder, tmp_path / "whole.parquet", **settings)
    options = ["--model", tiny_model, "--rows-per-part", 50, "--max-tokens-per-batch", 100]
    process = subprocess.Popen(
        [*COMMAND, *map(str, [folder, tmp_path / "out.parquet", *options])], stderr=-1, text=True
    )
    lines = wait_for_parts(process, tmp_path / "out.parquet", 3)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; whatever was committed is kept" in stderr
    assert "Traceback" not in stderr
    committed = lines.read_text().count("\n")
    assert 3 <= committed < 30
    assert not (tmp_path / "out.parquet").exists()

    with pytest.raises(OutputError, match='pool: "cls" there, "mean" now'):
        run(folder, tmp_path / "out.parquet", **settings, pool="mean")
    assert lines.read_text().count("\n") == committed

    assert run(folder, tmp_path / "out.parquet", **settings).num_resumed == committed * 50
    assert pq.read_table(tmp_path / "out.parquet").equals(pq.read_table(tmp_path / "whole.parquet"))
    facts = [read_provenance(pq.read_schema(tmp_path / f"{name}.parquet"), name) for name in ("out", "whole")]
    assert facts[0].pop("recipe") == facts[1].pop("recipe").replace("whole.parquet", "out.parquet")
    assert facts[0] == facts[1]
    assert not (tmp_path / "out.parquet.partial").exists()


@pytest.fixture
def main_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """`cli` within this process, where torch is loaded already: for commands after a first real one."""

    def main_of(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = ["vlmembed", "encode", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", command)
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else -1
        said = capsys.readouterr()
        return subprocess.CompletedProcess(command, code, said.out, said.err)

    yield main_of
    logging.captureWarnings(capture=False)


def test_exit_codes_and_what_is_said(
    tmp_path: Path, tiny_model: Path, main_here: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    model = ["--model", tiny_model]
    out = tmp_path / "out.parquet"
    done = cli(SAMPLES, out, *model, "--max-error-rate", "0.5")
    assert done.returncode == 0, done.stderr
    assert "27 rows = 19 embedded + 2 duplicates + 6 failed" in done.stdout
    assert "failed: 3 truncated, 1 " in done.stdout
    assert "skipped files: 1 .txt, 1 .json" in done.stdout
    assert "packing efficiency" in done.stdout
    assert done.stderr == ""  # no terminal, no bar

    again = main_here(SAMPLES, out, *model)
    assert again.returncode == 0
    assert again.stdout.startswith(f"{out} is already complete: 27 rows = 19 embedded")

    before = out.read_bytes()
    refused = cli(SAMPLES, out, *model, "--resize", "official")
    assert refused.returncode == 2
    assert 'resize: "native" there, "official" now' in refused.stderr
    assert "--overwrite" in refused.stderr
    assert out.read_bytes() == before

    too_many = main_here(SAMPLES, out, *model, "--overwrite", "--max-error-rate", "0.2")
    assert too_many.returncode == 3
    assert "22.2% of the rows failed, more than --max-error-rate 20.0%" in too_many.stderr

    nothing = main_here(SAMPLES / "broken", tmp_path / "none.parquet", *model)
    assert nothing.returncode == 1
    assert "not one of 6 rows has an embedding (3 truncated" in nothing.stderr
    assert not (tmp_path / "none.parquet").exists()
    assert pq.read_table(tmp_path / "none.errors.parquet").num_rows == 6

    first_failure = main_here(SAMPLES, tmp_path / "f.parquet", *model, "--on-error", "fail")
    assert first_failure.returncode == 1
    assert "broken/flipped-byte.png: corrupt" in first_failure.stderr

    for arguments, message in (
        ([SAMPLES, tmp_path / "x.csv"], "does not end in .parquet"),
        (["nowhere", out], "'nowhere' does not exist"),
        ([SAMPLES, out, "--limit", "0"], "limit is 0; it must be 1 or more"),
        ([SAMPLES, out, "--max-error-rate", "2"], "it is a share, 0 to 1"),
        ([SAMPLES, out, "--device", "tpu"], "device 'tpu' is not known"),
        ([SAMPLES, out, *model, "--max-tokens-per-batch", "3"], "one image can have 10 tokens"),
        ([SAMPLES], "Missing argument"),
        ([SAMPLES, out, "--resize", "stretch"], "'stretch' is not one of"),
    ):
        usage = main_here(*arguments)
        assert usage.returncode == 2, message
        assert message in usage.stderr
        assert "Traceback" not in usage.stderr


def test_errors_of_the_library(tmp_path: Path, tiny_model: Path) -> None:
    model = str(tiny_model)
    (tmp_path / "other.parquet").write_text("not Parquet")
    with pytest.raises(OutputError, match="exists and is no output of vlmembed"):
        run(SAMPLES, tmp_path / "other.parquet", model=model)
    with pytest.raises(ConfigError, match="--min-pixels and --max-pixels belong to --resize native"):
        run(SAMPLES, tmp_path / "out.parquet", model=model, resize="official", max_pixels=99999)
    with pytest.raises(RowFailedError):
        run(SAMPLES, tmp_path / "out.parquet", model=model, on_error="fail")
    with pytest.raises(NothingEmbeddedError):
        run(SAMPLES / "broken", tmp_path / "none.parquet", model=model)


def test_limit_and_max_source_pixels(tmp_path: Path, tiny_model: Path) -> None:
    report = run(SAMPLES, tmp_path / "out.parquet", model=str(tiny_model), limit=9, max_source_pixels=20_000)
    assert report.num_rows == 9
    assert report.codes["too_large"] == 3  # broken/truncated, its copy, and café; drawings of 160 x 120 pass
    assert len(inspect(tmp_path / "out.parquet").nearest) <= 3


def test_growing_inputs_are_another_run(tmp_path: Path, tiny_model: Path) -> None:
    shutil.copytree(SAMPLES / "drawings", tmp_path / "in")
    run(tmp_path / "in", tmp_path / "out.parquet", model=str(tiny_model))
    shutil.copy(SAMPLES / "photos" / "cat.jpg", tmp_path / "in")
    with pytest.raises(OutputError, match=r"(?s)num_rows: 8 there, 9 now.*the list of inputs: names, sizes"):
        run(tmp_path / "in", tmp_path / "out.parquet", model=str(tiny_model))
    report = run(tmp_path / "in", tmp_path / "out.parquet", model=str(tiny_model), overwrite=True)
    assert report.num_rows == 9


def test_the_output_may_lie_in_the_input(tmp_path: Path, tiny_model: Path) -> None:
    shutil.copytree(SAMPLES / "drawings", tmp_path / "in")
    first = run(tmp_path / "in", tmp_path / "in" / "out.parquet", model=str(tiny_model))
    again = run(tmp_path / "in", tmp_path / "in" / "out.parquet", model=str(tiny_model))
    assert again.already_complete
    assert again.num_rows == first.num_rows


def stop_after(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the run end, as by Ctrl-C, after it has committed so many parts."""
    commit = PartStore.commit

    def counted(self: PartStore, *arguments: Any) -> None:  # noqa: ANN401
        if len(self.records) == parts:
            raise KeyboardInterrupt
        commit(self, *arguments)

    monkeypatch.setattr(PartStore, "commit", counted)


def test_an_interrupted_overwrite_goes_on_too(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = many_pictures(tmp_path / "in", 100)
    out = tmp_path / "out.parquet"
    old = {"model": str(tiny_model), "pool": "mean", "rows_per_part": 20}
    new = {"model": str(tiny_model), "pool": "cls", "rows_per_part": 20}
    run(folder, out, **old)
    before = out.read_bytes()
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(KeyboardInterrupt):
            run(folder, out, **new, overwrite=True)
    assert out.read_bytes() == before
    with pytest.raises(OutputError, match=r'pool: "mean" there, "cls" now'):
        run(folder, out, **new)
    report = run(folder, out, **new, overwrite=True)
    assert report.num_resumed == 40
    assert run(folder, out, **new).already_complete
    assert run(folder, out, **new, overwrite=True).num_resumed == 0

    with monkeypatch.context() as patch:  # parts of one run, then --overwrite with other settings: they go
        stop_after(2, patch)
        with pytest.raises(KeyboardInterrupt):
            run(folder, out, **old, overwrite=True)
    assert run(folder, out, **new, overwrite=True).num_resumed == 0
    assert not (tmp_path / "out.parquet.partial").exists()


def test_a_run_in_which_nothing_is_embedded_leaves_no_older_output(tmp_path: Path, tiny_model: Path) -> None:
    model = str(tiny_model)
    shutil.copytree(SAMPLES / "drawings", tmp_path / "in")
    run(tmp_path / "in", tmp_path / "out.parquet", model=model)
    for path in (tmp_path / "in").iterdir():
        path.write_bytes(b"")
    for overwrite in (True, False):  # the second time only the errors file is there: the run is tried again
        with pytest.raises(NothingEmbeddedError, match="8 empty"):
            run(tmp_path / "in", tmp_path / "out.parquet", model=model, overwrite=overwrite)
        assert not (tmp_path / "out.parquet").exists()
        assert pq.read_table(tmp_path / "out.errors.parquet").num_rows == 8
    for _ in range(2):  # nor is a folder of nothing but failures a finished output
        with pytest.raises(NothingEmbeddedError, match="8 empty"):
            run(tmp_path / "in", f"{tmp_path}/folder/", model=model)
    (tmp_path / "other.errors.parquet").write_text("somebody's")
    with pytest.raises(OutputError, match=r"other.errors.parquet exists and is no output of vlmembed"):
        run(tmp_path / "in", tmp_path / "other.parquet", model=model)


def test_a_kill_between_output_and_clean_up(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, partial = tmp_path / "out.parquet", tmp_path / "out.parquet.partial"

    def killed(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("vlmembed.output.drop", killed)
        with pytest.raises(KeyboardInterrupt):
            run(SAMPLES, out, model=str(tiny_model))
    assert partial.exists()
    assert run(SAMPLES, out, model=str(tiny_model)).already_complete
    assert not partial.exists()


def test_another_process_that_came_first(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"model": str(tiny_model)}
    load = Encoder.load

    def slow_load(*inputs: Any) -> Encoder:  # noqa: ANN401  as there
        with monkeypatch.context() as patch:
            patch.setattr(Encoder, "load", load)
            run(SAMPLES, tmp_path / "out.parquet", **settings)  # starts and finishes meanwhile
        return load(*inputs)

    monkeypatch.setattr(Encoder, "load", slow_load)
    with pytest.raises(OutputError, match="another process has just written to"):
        run(SAMPLES, tmp_path / "out.parquet", **settings)
    assert pq.read_metadata(tmp_path / "out.parquet").num_rows == 21


def test_names_that_do_not_decode(
    tmp_path: Path, tiny_model: Path, main_here: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    folder = os.path.join(os.fsencode(tmp_path), b"caf\xe9")  # noqa: PTH118  bytes
    os.mkdir(folder)  # noqa: PTH102  bytes
    for name in (b"a.png", b"b\xff.png"):
        source = os.fsencode(SAMPLES / "drawings" / "a.png")
        shutil.copy(source, os.path.join(folder, name))  # noqa: PTH118  bytes
    done = cli(os.fsdecode(folder), tmp_path / "out.parquet", "--model", tiny_model)
    assert done.returncode == 0, done.stderr
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["id"].to_pylist() == ["a.png", "b\\xff.png"]
    again = main_here(os.fsdecode(folder), tmp_path / "out.parquet", "--model", tiny_model)
    assert "is already complete" in again.stdout
    missing = main_here(os.fsdecode(folder) + "x", tmp_path / "out.parquet", "--model", tiny_model)
    assert missing.returncode == 2
    assert "does not exist" in missing.stderr


KEPT = {
    "int8": pa.array([1, None, 3], pa.int8()),
    "float": pa.array([0.5, None, float("nan")], pa.float64()),
    "bool": pa.array([True, None, False]),
    "string": pa.array(["a", None, "ü"]),
    "large_string": pa.array(["a", None, "c"], pa.large_string()),
    "binary": pa.array([b"a", None, b"\xff"], pa.large_binary()),
    "fixed": pa.array([b"ab", None, b"cd"], pa.binary(2)),
    "decimal": pa.array([Decimal("1.25"), None, Decimal("-3.50")], pa.decimal128(10, 2)),
    "date": pa.array([1, None, 3], pa.date32()),
    "timestamp": pa.array([1, None, 3], pa.timestamp("ns", "UTC")),
    "dictionary": pa.array(["x", None, "y"]).dictionary_encode(),
    "list": pa.array([[1, 2], None, []]),
    "struct": pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": "y"}]),
    "nested": pa.array([[{"a": [1]}], None, [{"a": []}]]),
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    "null": pa.nulls(3),
}


def test_kept_columns_keep_their_type_and_values(tmp_path: Path, tiny_model: Path) -> None:
    images = [(SAMPLES / "drawings" / name).read_bytes() for name in ("a.png", "alpha.png", "animated.gif")]
    source = pa.table({"img": images, **KEPT})
    pq.write_table(source, tmp_path / "in.parquet", row_group_size=2)
    kept = tuple(KEPT)
    run(tmp_path / "in.parquet", tmp_path / "out.parquet", model=str(tiny_model), image_column="img", keep_columns=kept)
    expected = pq.read_table(tmp_path / "in.parquet", columns=list(kept))
    found = pq.read_table(tmp_path / "out.parquet", columns=list(kept))
    assert found.schema.equals(expected.schema)
    for name in kept:
        assert repr(found[name].to_pylist()) == repr(expected[name].to_pylist()), name


def test_settings_that_are_refused_before_anything_is_written(tmp_path: Path, tiny_model: Path) -> None:
    images = [(SAMPLES / "drawings" / "a.png").read_bytes()]
    pq.write_table(pa.table({"image": images, "width": [1]}), tmp_path / "in.parquet")
    out = tmp_path / "out.parquet"
    for settings, message in (
        ({"keep_columns": ("width",)}, "--keep-columns width: the output has a column of that name"),
        ({"keep_columns": ("width", "width")}, "keep_columns names 'width' more than once"),
        ({"max_tokens_per_batch": 5}, "one image can have 10 tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(tmp_path / "in.parquet", out, model=str(tiny_model), **settings)
    with pytest.raises(ConfigError, match="inputs is 'images'; it is a tuple"):
        EncodeConfig(inputs="images", output="o.parquet")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is input and output of the same run"):
        run(out.with_name("in.parquet"), out.with_name("in.parquet"), model=str(tiny_model), overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet"]
    assert pq.read_table(tmp_path / "in.parquet")["image"].to_pylist() == images


def test_other_limits_on_a_finished_output_are_another_run(tmp_path: Path, tiny_model: Path) -> None:
    run(SAMPLES / "drawings", tmp_path / "out.parquet", model=str(tiny_model))
    with pytest.raises(OutputError, match=r"max_pixels: 1764 there, 4000000 now"):
        run(SAMPLES / "drawings", tmp_path / "out.parquet", model=str(tiny_model), max_pixels=4_000_000)


def test_a_link_as_output_stays_a_link(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "link.parquet").symlink_to(tmp_path / "real.parquet")
    run(SAMPLES / "drawings", tmp_path / "link.parquet", model=str(tiny_model))
    assert (tmp_path / "link.parquet").is_symlink()
    assert pq.read_metadata(tmp_path / "real.parquet").num_rows == 8


@pytest.mark.parametrize("settings", [{"resize": "official"}, {"dedup": "pixels"}, {"dedup": "none"}, {"limit": 90}])
def test_every_kind_of_run_can_be_resumed_and_repeated(
    settings: dict[str, Any], tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = many_pictures(tmp_path / "in", 100)
    settings = settings | {"model": str(tiny_model), "rows_per_part": 20}
    run(folder, tmp_path / "whole.parquet", **settings)
    assert run(folder, tmp_path / "whole.parquet", **settings).already_complete
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(KeyboardInterrupt):
            run(folder, tmp_path / "out.parquet", **settings)
    assert run(folder, tmp_path / "out.parquet", **settings).num_resumed == 40
    assert pq.read_table(tmp_path / "out.parquet").equals(pq.read_table(tmp_path / "whole.parquet"))


def test_a_dtype_that_was_asked_for_binds_only_who_asks(tmp_path: Path, tiny_model: Path) -> None:
    out = tmp_path / "out.parquet"
    run(SAMPLES / "drawings", out, model=str(tiny_model), dtype="fp16")
    assert run(SAMPLES / "drawings", out, model=str(tiny_model), dtype="fp16").already_complete
    with pytest.raises(OutputError, match='dtype: "fp16" there'):
        run(SAMPLES / "drawings", out, model=str(tiny_model))
    run(SAMPLES / "drawings", out, model=str(tiny_model), overwrite=True)
    assert read_provenance(pq.read_schema(out), "out")["fingerprint"]["dtype"] != "fp16"


def test_a_kill_in_the_middle_of_clean_up(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = many_pictures(tmp_path / "in", 60)
    out = tmp_path / "out.parquet"
    settings = {"model": str(tiny_model), "rows_per_part": 20}
    unlink, calls = Path.unlink, 0

    def killed(self: Path, *, missing_ok: bool = False) -> None:
        nonlocal calls
        calls += ".partial" in str(self) and self.name.startswith("part")
        if calls == 4:
            raise KeyboardInterrupt
        unlink(self, missing_ok=missing_ok)

    for overwrite in (False, True):
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", killed)
            with pytest.raises(KeyboardInterrupt):
                run(folder, out, **settings, overwrite=True)
        assert out.exists()
        report = run(folder, out, **settings, overwrite=overwrite)
        assert report.already_complete is not overwrite
        assert not (tmp_path / "out.parquet.partial").exists()


def test_a_damaged_publication_says_what_to_do(tmp_path: Path, tiny_model: Path) -> None:
    partial = tmp_path / "out.parquet.partial"
    partial.mkdir()
    (partial / "publication.json").write_text("{")
    with pytest.raises(OutputError, match=r"publication.json is damaged .*: delete it"):
        run(SAMPLES / "drawings", tmp_path / "out.parquet", model=str(tiny_model))


def test_a_damaged_manifest_goes_with_overwrite(tmp_path: Path, tiny_model: Path) -> None:
    partial = tmp_path / "out.parquet.partial"
    partial.mkdir()
    (partial / "manifest.json").write_text("{")
    with pytest.raises(OutputError, match=r"is damaged.*--overwrite"):
        run(SAMPLES / "drawings", tmp_path / "out.parquet", model=str(tiny_model))
    run(SAMPLES / "drawings", tmp_path / "out.parquet", model=str(tiny_model), overwrite=True)
    partial.mkdir()
    (partial / "lock").touch()
    (partial / ".manifest.json.tmp").write_text("{")
    assert run(SAMPLES / "drawings", tmp_path / "other.parquet", model=str(tiny_model)).num_embedded == 8


def test_failures_of_an_earlier_start_count_for_on_error_fail(tmp_path: Path, tiny_model: Path) -> None:
    run(SAMPLES, tmp_path / "out.parquet", model=str(tiny_model))
    with pytest.raises(RowFailedError, match="6 rows failed in an earlier start"):
        run(SAMPLES, tmp_path / "out.parquet", model=str(tiny_model), on_error="fail")


def test_paths_are_taken_as_they_are(tmp_path: Path, tiny_model: Path) -> None:
    config = EncodeConfig(inputs=(SAMPLES / "drawings",), output=tmp_path / "out.parquet", model=tiny_model)
    assert vlmembed.encode(config).num_embedded == 8
    assert EncodeConfig.from_toml(config.to_toml()).output == str(tmp_path / "out.parquet")
    for settings in ({"workers": "2"}, {"limit": 2.0}):
        with pytest.raises(ConfigError, match="it is a whole number"):
            EncodeConfig(inputs=("a",), output="o.parquet", **settings)
    with pytest.raises(OutputError, match="is not a name in Unicode"):
        run(SAMPLES, tmp_path / "o\udcff.parquet", model=str(tiny_model))


def test_kept_columns_of_files_that_differ_in_nullability(tmp_path: Path, tiny_model: Path) -> None:
    content = (SAMPLES / "drawings" / "a.png").read_bytes()
    for name, nullable in (("a", True), ("b", False), ("c", True)):
        schema = pa.schema([pa.field("image", pa.binary()), pa.field("label", pa.string(), nullable=nullable)])
        pq.write_table(pa.table({"image": [content], "label": [name]}, schema=schema), tmp_path / f"{name}.parquet")
    names = [tmp_path / f"{name}.parquet" for name in "bac"]
    run(names, tmp_path / "out.parquet", model=str(tiny_model), keep_columns=("label",))
    assert pq.read_table(tmp_path / "out.parquet")["label"].to_pylist() == ["b", "a", "c"]
