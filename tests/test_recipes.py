"""Recipes: every one in pipelines/ runs, what is wrong in one is said, and an output's own recipe makes it again."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from checkpoints import tiny_checkpoint
from click.testing import CliRunner
from conftest import ROOT, SAMPLES
from docs_world import make_files
from servers import put_s3, s3_server, use_s3
from test_comparison import drifted

import vlmembed
from vlmembed.checking.comparison import compare
from vlmembed.cli import cli
from vlmembed.config import EncodeConfig
from vlmembed.errors import ConfigError, InputError, UsageError
from vlmembed.finished import FinishedOutput
from vlmembed.mirror.localcopy import local_copy
from vlmembed.provenance import versions
from vlmembed.recipes import load_recipe, recipe_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from click.testing import Result

PIPELINES = ROOT / "pipelines"


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What a recipe must make of the small data.

    Attributes:
        model_type: of the tiny random model that takes the place of the recipe's.
        output: as it names it. num_rows: in it. columns: among its columns.
        sets: settings that are changed too, since this machine has not what they ask for.
    """

    model_type: str
    output: str
    num_rows: int
    columns: tuple[str, ...] = ("embedding",)
    sets: tuple[str, ...] = ()


EXPECTED = {
    "demo": Expected(model_type="dinov2", output="out/demo.parquet", num_rows=21),
    "folder": Expected(model_type="dinov2", output="out/images.parquet", num_rows=8),
    "parquet": Expected(model_type="dinov2", output="out/train/", num_rows=6, columns=("embedding", "caption")),
    "webdataset_s3": Expected(
        model_type="siglip", output="s3://bucket/embeddings/", num_rows=6, columns=("embedding", "json.caption")
    ),
    "vlm_tokens": Expected(model_type="qwen3_vl", output="out/tokens/", num_rows=8, columns=("tokens", "deepstack_0")),
    "siglip2_index": Expected(model_type="siglip", output="out/siglip2.parquet", num_rows=8),
    "nightly": Expected(model_type="dinov2", output="out/nightly.parquet", num_rows=6),
    "cluster": Expected(
        model_type="dinov2",
        output="out/cluster/",
        num_rows=6,
        columns=("embedding", "caption"),
        sets=("engine=local", "device=", "towers=", "tower-gpus="),  # as it says itself; test_ray.py has a cluster
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small data, by the names that the recipes give it."""
    folder = tmp_path_factory.mktemp("recipes") / "files"
    make_files(folder)
    (folder / "sample_data").symlink_to(ROOT / "sample_data")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tiny models by model_type."""
    folder = tmp_path_factory.mktemp("models")
    for model_type in sorted({each.model_type for each in EXPECTED.values()}):
        tiny_checkpoint(model_type, folder / model_type)
    return folder


@pytest.fixture
def here(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the small data in it."""
    for path in files.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def s3(files: Path) -> Iterator[str]:
    """An S3 server with the shards and the Parquet file."""
    with s3_server() as endpoint:
        found = [path for folder in ("shards", "data") for path in (files / folder).iterdir()]
        put_s3(endpoint, {f"bucket/{path.relative_to(files).as_posix()}": path.read_bytes() for path in found})
        yield endpoint


def call(*words: str) -> Result:
    return CliRunner().invoke(cli, words)


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_every_recipe_has_a_test() -> None:
    assert {path.stem for path in PIPELINES.glob("*.toml")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recipe_runs_on_small_data(
    name: str, here: Path, models: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the model is changed, and what needs a cluster."""
    assert here == Path.cwd()
    use_s3(s3, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    expected = EXPECTED[name]
    words = ["run", str(PIPELINES / f"{name}.toml"), "--set", f"model={models / expected.model_type}"]
    shown = call(*words, *(word for each in expected.sets for word in ("--set", each)))
    assert shown.exit_code == 0, shown.output or shown.exception
    with local_copy(expected.output) as path:
        output = FinishedOutput.open(path)
        assert output.num_rows == expected.num_rows
        assert set(expected.columns) <= set(output.schema.names)
        for column in set(expected.columns) - {"embedding", "tokens", "deepstack_0"}:
            captions = [value for batch in output.batches([column], 100) for value in batch[column].to_pylist()]
            assert all(caption.startswith("a photo: ") for caption in captions)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recipe_says_what_it_is_for_and_how_it_is_run(name: str) -> None:
    text = (PIPELINES / f"{name}.toml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert f"#     vlmembed run pipelines/{name}.toml\n" in text
    for line in (line for line in text.splitlines() if line.startswith("#     vlmembed run pipelines/")):
        words = [word.strip("'") for word in line.split("  #")[0].removeprefix("#     ").split()]
        sets = [word for before, word in itertools.pairwise(words) if before == "--set"]
        load_recipe(ROOT / words[2], sets)


def test_the_nightly_job_takes_everything_from_the_cache_the_second_time(here: Path, models: Path) -> None:
    shutil.copytree(here / "photos", here / "growing")
    words = ["run", str(PIPELINES / "nightly.toml"), "--set", f"model={models / 'dinov2'}", "--set", "inputs=growing"]
    first = call(*words)
    assert "  5 images, " in first.output
    stored = pq.read_table("out/nightly.parquet")
    second = call(*words)
    assert "no image had to be encoded" in second.output
    assert "embeddings were known already" in second.output
    assert pq.read_table("out/nightly.parquet").equals(stored)
    shutil.copy(SAMPLES / "drawings" / "a.png", here / "growing")
    third = call(*words)
    assert "7 rows = 6 embedded" in third.output
    assert "1 images, " in third.output


POOLED = {"inputs": ("data/train.parquet",), "keep_columns": ("caption",), "rows_per_part": 4, "normalize": False}
TOKENS = {"inputs": ("images", "photos"), "emit": "tokens", "dedup": "pixels", "max_pixels": 10_000, "resize": "native"}


@pytest.mark.parametrize("settings", [POOLED, TOKENS])
def test_an_outputs_own_recipe_makes_it_again_to_the_bit(settings: dict[str, Any], here: Path, models: Path) -> None:
    vlmembed.encode(EncodeConfig(output="first.parquet", model=str(models / "dinov2"), **settings))
    text = recipe_text(FinishedOutput.open(here / "first.parquet").provenance)
    assert text.startswith(f"# Made an output with vlmembed {versions()['vlmembed']}, model {models / 'dinov2'} (")
    assert 'device = "cpu"\n' in text
    assert "rows-per-part = " in text
    assert "normalize = false\n" in text
    recipe = written(here / "own.toml", text)
    assert load_recipe(recipe).output == "first.parquet"
    vlmembed.encode(load_recipe(recipe, ["output=again.parquet"]))
    first, again = (pq.read_table(here / f"{name}.parquet") for name in ("first", "again"))
    assert again.equals(first)
    found = compare(here / "again.parquet", here / "first.parquet", tolerance=0)
    assert (found.is_good, found.differences) == (True, [])
    second = recipe_text(FinishedOutput.open(here / "again.parquet").provenance)
    assert second == text.replace("first.parquet", "again.parquet")


def provenance(model: Mapping[str, str] | None = None, **settings: Any) -> dict[str, Any]:  # noqa: ANN401
    config = EncodeConfig(**{"inputs": ("in",), "output": "out.parquet", **settings})
    model = {"name": "m", "revision": "r", "weights_sha256": "w", **(model or {})}
    return {"recipe": config.to_toml(), "model": model, "versions": {"vlmembed": "1"}}


def test_a_recipe_tells_what_it_cannot_hold() -> None:
    assert 'from standard input ("-")' in recipe_text(provenance(inputs=("-",)))
    assert "Logins, signatures and options of URLs" in recipe_text(provenance(inputs=("s3://bucket/a",)))
    assert "--set cache= --set reuse=" in recipe_text(provenance(reuse=("early.parquet",)))
    plain = recipe_text(provenance())
    assert plain.count("#") == 3
    assert "model m (r), weights w" in plain


def test_names_in_a_comment_cannot_become_settings(tmp_path: Path) -> None:
    text = recipe_text(provenance(model={"name": 'x\nlimit = 1\u2028"'}))
    assert load_recipe(written(tmp_path / "r.toml", text)).limit is None


def test_an_output_without_a_recipe_is_refused() -> None:
    for facts in ({}, {**provenance(), "recipe": "="}, {**provenance(), "model": None}):
        with pytest.raises(InputError, match="holds no recipe that can be read"):
            recipe_text(facts)


def test_keys_are_the_flags_names_or_the_fields(tmp_path: Path) -> None:
    text = 'inputs = ["a", "b"]\noutput = "o.parquet"\nmax-pixels = 10_000\nrows_per_part = 5\nmax-error-rate = 1\n'
    config = load_recipe(str(written(tmp_path / "r.toml", f"\ufeff# with a byte order mark\n{text}")))
    assert config == EncodeConfig(
        inputs=("a", "b"), output="o.parquet", max_pixels=10_000, rows_per_part=5, max_error_rate=1
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("limit = 1\nmodel = \n", r"r.toml is not valid TOML: Invalid value \(at line 2, column 9\)"),
        ("limit = " + "9" * 5000, "r.toml is not valid TOML: Exceeds the limit"),
        ("inputs = " + "[" * 5000, "r.toml is not valid TOML: brackets are nested too deeply"),
        ("[model]\nname = 'x'", r"r.toml: \[model\] is a table; settings stand alone, one key = value a line"),
        ("[[inputs]]\nname = 'x'", r"r.toml: \[inputs\] is a table"),
        ("model.name = 'x'", r"r.toml: \[model\] is a table"),
        ("max-pixel = 5", "r.toml: unknown setting 'max-pixel': is 'max-pixels' meant?"),
        ("xyzzy = 5", "r.toml: unknown setting 'xyzzy'; known are allow-local-urls"),
        ("max-pixels = 5\nmax_pixels = 5", "r.toml: 'max_pixels' is there twice, as max-pixels and as max_pixels"),
        ("max-pixels = '5'", "r.toml: max-pixels is '5'; it is a whole number"),
        ("max-pixels = 0", "r.toml: max-pixels is 0; it must be 1 or more"),
        ("limit = 1e3", "r.toml: limit is 1000.0; it is a whole number"),
        ("limit = true", "r.toml: limit is True; it is a whole number"),
        ("normalize = 'no'", "r.toml: normalize is 'no'; it is true or false"),
        ("timeout = 'long'", "r.toml: timeout is 'long'; it is a number of seconds, more than 0"),
        ("max-error-rate = nan", "r.toml: max-error-rate is nan; it is a share, 0 to 1"),
        ("dedup = 'hash'", "r.toml: dedup is 'hash'; it can be bytes, pixels, none"),
        ("dedup = ['bytes']", r"r.toml: dedup is \('bytes',\); it can be bytes, pixels, none"),
        ("model = 2020-01-01", r"r.toml: model is datetime.date\(2020, 1, 1\); it is text"),
        ("inputs = 'images'", r"r.toml: inputs is 'images'; it is a list: inputs = \[\"images\"\]"),
        ("keep-columns = 'a'", r"r.toml: keep-columns is 'a'; it is a list: keep-columns = \[\"a\"\]"),
        ("inputs = [1]", r"r.toml: inputs is \(1,\); it is a list of texts"),
        ("inputs = []", "r.toml: no input given"),
        ("shard = '4/4'", "r.toml: shard is '4/4'; i can be 0 to 3"),
        ("output = 'x'", r"r.toml has no inputs: add inputs = \[\"images\"\], or give --set inputs=images"),
        ("inputs = ['x']", r"r.toml has no output: add output = \"out.parquet\", or give --set output=out.parquet"),
        (
            "inputs = ['x']\noutput = 'o'\nretry-failed = true\noverwrite = true",
            "r.toml: retry_failed keeps what is embedded",
        ),
    ],
)
def test_what_is_wrong_in_a_recipe_is_said(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(written(tmp_path / "r.toml", text))


def test_settings_that_go_together_are_taken_together(tmp_path: Path) -> None:
    text = "inputs = ['a']\nformat = 'lance'\noutput = 'o.lance'\ndeterministic = true\ncuda-graphs = 'off'\n"
    assert load_recipe(written(tmp_path / "r.toml", text)).format == "lance"


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"recipe '.*gone.toml' cannot be read \(No such file or directory\): name a"):
        load_recipe(tmp_path / "gone.toml")
    with pytest.raises(InputError, match=r"cannot be read \(Is a directory\)"):
        load_recipe(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        load_recipe("a\0b")
    (tmp_path / "bytes.toml").write_bytes(b"model = '\xff'")
    with pytest.raises(InputError, match=r"bytes.toml is not text in UTF-8 \(invalid start byte at byte 9\)"):
        load_recipe(tmp_path / "bytes.toml")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """One with settings of all kinds."""
    text = "inputs = ['a']\noutput = 'o.parquet'\nlimit = 5\nnormalize = false\nkeep-columns = ['x']\ntimeout = 3\n"
    return written(tmp_path / "r.toml", text)


@pytest.mark.parametrize(
    ("sets", "changed"),
    [
        (["model=x=y"], {"model": "x=y"}),
        (["model = 'a b' "], {"model": "a b"}),
        (['model="a\\tb"'], {"model": "a\tb"}),
        (["model='it's"], {"model": "'it's"}),
        (["model='it's'"], {"model": "'it's'"}),
        (["shard=0/4"], {"shard": "0/4"}),
        (["limit=1_000"], {"limit": 1000}),
        (["limit="], {"limit": None}),
        (["limit=7", "limit=8"], {"limit": 8}),
        (["limit=7", "limit="], {"limit": None}),
        (["rows_per_part=3", "max-pixels=9"], {"rows_per_part": 3, "max_pixels": 9}),
        (["normalize=true", "overwrite=true"], {"normalize": True, "overwrite": True}),
        (["normalize="], {"normalize": True}),
        (["timeout=0.5"], {"timeout": 0.5}),
        (["timeout="], {"timeout": 120.0}),
        (["inputs=b c,d"], {"inputs": ("b c,d",)}),
        (['inputs="[b]"'], {"inputs": ("[b]",)}),
        (["inputs=[ab]*.jpg"], {"inputs": ("[ab]*.jpg",)}),
        (['inputs=["b", "c"]'], {"inputs": ("b", "c")}),
        (["keep-columns=b,c"], {"keep_columns": ("b", "c")}),
        (["keep-columns='b,c'"], {"keep_columns": ("b,c",)}),
        (['keep-columns=["b,c"]'], {"keep_columns": ("b,c",)}),
        (["keep-columns="], {"keep_columns": ()}),
        (["reuse=e,arly.parquet"], {"reuse": ("e,arly.parquet",)}),
    ],
)
def test_settings_that_are_set_stand_over_the_files(sets: Sequence[str], changed: dict[str, Any], recipe: Path) -> None:
    settings: dict[str, Any] = {
        "inputs": ("a",),
        "output": "o.parquet",
        "limit": 5,
        "normalize": False,
        "keep_columns": ("x",),
        "timeout": 3,
    }
    assert load_recipe(recipe, sets) == EncodeConfig(**(settings | changed))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("limit", "--set limit: there is no = behind it; write --set key=value, such as --set limit=100"),
        ("limt=5", "--set limt: unknown setting 'limt': is 'limit' meant?"),
        ("=5", "--set : unknown setting ''"),
        ("limit=many", "--set limit: limit is 'many'; it is a whole number"),
        ("limit=0", "--set limit: limit is 0; it must be 1 or more"),
        ("limit=1\nmodel='x'", "--set limit: limit is .*; it is a whole number"),
        ("normalize=yes", "--set normalize: normalize is 'yes'; it is true or false"),
        ("max-error-rate=2", "--set max-error-rate: max-error-rate is 2; it is a share, 0 to 1"),
        ("dtype=fp8", "--set dtype: dtype is 'fp8'; it can be auto, bf16, fp16, fp32"),
        ('inputs=["a"', r"--set inputs: inputs is no TOML array"),
        ("inputs=[a]", r"--set inputs: inputs is no TOML array, such as inputs=\[\"a\", \"b\"\]: Invalid value"),
        ("inputs=", r"has no inputs: add inputs = \[\"images\"\], or give --set inputs=images"),
        ("output=", "has no output"),
        ("format=lance", "r.toml --set format: format is lance, the output's name says another"),
    ],
)
def test_what_is_wrong_in_a_set_is_said(text: str, message: str, recipe: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe, [text])


def test_run_says_how_flags_of_encode_are_given(recipe: Path) -> None:
    error = call("run", str(recipe), "--overwrite").exception
    assert isinstance(error, UsageError)
    assert str(error) == "--overwrite is no flag of run; settings are given as --set overwrite=VALUE"
    error = call("plan", str(recipe)).exception
    assert isinstance(error, ConfigError)
    assert f"{recipe} is a recipe, and no picture: give --recipe {recipe}" in str(error)


def test_a_recipe_comes_through_standard_input(here: Path, models: Path) -> None:
    text = f'inputs = ["images"]\noutput = "piped.parquet"\nmodel = "{models / "dinov2"}"\n'
    assert CliRunner().invoke(cli, ["run", "-"], input=text).exit_code == 0
    assert (here / "piped.parquet").is_file()
    with pytest.raises(ConfigError, match=r"sets is 'limit=3'; it is a list of them: \['limit=3'\]"):
        load_recipe("-", "limit=3")


def test_a_name_that_toml_cannot_hold_is_left_to_the_command_line(tmp_path: Path) -> None:
    recorded = EncodeConfig(inputs=(f"{tmp_path}/b\udcff",), output="o.parquet")
    provenance = {
        "recipe": recorded.to_toml(),
        "model": {"name": "m", "revision": "r", "weights_sha256": "0"},
        "versions": {"vlmembed": "0.1.0"},
    }
    text = recipe_text(provenance)
    assert "# inputs names a file whose name is not UTF-8, which TOML cannot hold: give --set inputs=NAME." in text
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ConfigError, match="has no inputs"):
        load_recipe(tmp_path / "r.toml")
    given = load_recipe(tmp_path / "r.toml", [f"inputs={tmp_path}/b\udcff"])
    assert given.inputs == recorded.inputs


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """The project's own make, with this interpreter's programs; what is installed is not looked at."""
    command = ["make", "--old-file=.venv/.ready", f"BIN={Path(sys.executable).parent}", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_make_tells_what_is_missing() -> None:
    assert "make run RECIPE=FILE [SET='limit=10 output=out/try.parquet']" in make("run").stderr
    assert (
        "make reproduce RECIPE=pipelines/demo.toml AGAINST=OUTPUT"
        in make("reproduce", "RECIPE=pipelines/demo.toml").stderr
    )
    taken = make("reproduce", "RECIPE=pipelines/demo.toml", "AGAINST=./out/reproduce/demo")
    assert "./out/reproduce/demo is where it would be made again: move it" in taken.stderr
    assert (
        "there is no recipe nope.toml; there are: pipelines/cluster.toml pipelines/demo.toml"
        in make("run", "RECIPE=nope.toml").stderr
    )


def test_make_reproduces_the_demo_recipe_and_finds_nothing_changed(
    tmp_path: Path, builtin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert builtin_folder.exists()
    monkeypatch.chdir(ROOT)
    assert call("run", "pipelines/demo.toml", "--set", f"output={tmp_path / 'demo.parquet'}").exit_code == 0
    words = ["reproduce", "RECIPE=pipelines/demo.toml", f"REPRODUCED={tmp_path / 'again'}"]
    same = make(*words, f"AGAINST={tmp_path / 'demo.parquet'}")
    assert same.returncode == 0, same.stderr
    assert "demo.parquet: the same\n  21 rows have vectors in both, 6 failed in both\n" in same.stdout
    assert (tmp_path / "again" / "demo.parquet").is_file()


def test_make_runs_a_recipe_and_finds_a_planted_change(tmp_path: Path, models: Path) -> None:
    """With a tiny model, and into a folder; what an earlier try has left there does not count."""
    output = tmp_path / "demo"
    sets = [f"model={models / 'dinov2'}", "rows-per-part=40"]
    ran = make("run", "RECIPE=pipelines/demo.toml", f"SET={' '.join([*sets, f'output={output}/'])}")
    assert ran.returncode == 0, ran.stderr
    assert "27 rows = 19 embedded + 2 duplicates + 6 failed" in ran.stdout
    left = tmp_path / "again" / "demo" / "_partial"
    left.mkdir(parents=True)
    (left / "part-000000.parquet").write_bytes(b"of an earlier try")
    part = output / "part-000000.parquet"
    table = pq.read_table(part)
    pq.write_table(drifted(5)(table), part)
    words = ["reproduce", "RECIPE=pipelines/demo.toml", f"REPRODUCED={tmp_path / 'again'}", f"SET={' '.join(sets)}"]
    other = make(*words, f"AGAINST={output}/")
    assert other.returncode != 0
    assert f"demo against {output}: NOT the same\n" in other.stdout
    assert f"1 rows deviate more than the tolerance\n    {table['id'][5].as_py()}\n" in other.stdout
    assert (tmp_path / "again" / "demo" / "_SUCCESS").is_file()


def test_a_shard_that_is_missing_ends_the_run(models: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the recipe promises."""
    use_s3(s3, monkeypatch)
    inputs = "inputs=s3://bucket/shards/{000000..000002}.tar"
    words = ["run", str(PIPELINES / "webdataset_s3.toml"), "--set", f"model={models / 'siglip'}", "--set", inputs]
    error = call(*words).exception
    assert isinstance(error, InputError)
    assert "000002.tar" in str(error)


def test_outputs_behind_urls_are_compared(here: Path, models: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_s3(s3, monkeypatch)
    words = ["run", str(PIPELINES / "folder.toml"), "--set", f"model={models / 'dinov2'}", "--set", "decode=threads"]
    assert call(*words).exit_code == 0
    output = here / "out" / "images.parquet"
    errors = output.with_suffix(".errors.parquet")
    put_s3(s3, {f"bucket/a/{path.name}": path.read_bytes() for path in (output, errors)})
    shown = call("verify", "s3://bucket/a/images.parquet", "--against", str(output))
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith(f"s3://bucket/a/images.parquet against {output}: the same\n  8 rows have vectors")
    found = vlmembed.compare(output, "s3://bucket/a/images.parquet")
    assert (found.is_good, found.path, found.against) == (True, output, "s3://bucket/a/images.parquet")
    assert vlmembed.verify("s3://bucket/a/images.parquet", num_rows=2).path == "s3://bucket/a/images.parquet"
    assert vlmembed.export("s3://bucket/a/images.parquet", here / "arrays").num_rows == 8


def test_a_picture_that_has_changed_since_is_found(here: Path, models: Path) -> None:
    """As `make reproduce` does it, in this process."""
    shutil.copytree(here / "images", here / "mine")
    words = ["run", str(PIPELINES / "demo.toml"), "--set", f"model={models / 'dinov2'}", "--set", "inputs=mine"]
    assert call(*words).exit_code == 0
    again = [*words, "--set", "output=again.parquet", "--set", "overwrite=true"]
    assert call(*again).exit_code == 0
    assert call("verify", "again.parquet", "--against", "out/demo.parquet").exit_code == 0
    shutil.copy(here / "mine" / "alpha.png", here / "mine" / "a.png")
    assert call(*again).exit_code == 0
    shown = call("verify", "again.parquet", "--against", "out/demo.parquet")
    assert shown.exit_code == 3
    assert "  1 rows have other contents\n    a.png\n" in shown.output
    assert "the list of inputs: names, sizes or change times are not what they were" in shown.output
