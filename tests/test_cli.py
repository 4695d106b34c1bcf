"""The command line is thin: light to start, its defaults the config's own, its commands those of the README."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner
from conftest import ROOT, SAMPLES

import vlmembed
from vlmembed.attention import backends
from vlmembed.cli import cli, exits
from vlmembed.cli.encode import encode
from vlmembed.config import EncodeConfig
from vlmembed.errors import ConfigError, FailureCode
from vlmembed.towers.families import table

if TYPE_CHECKING:
    from pathlib import Path

LIGHT = """
import sys
from vlmembed.cli import main
sys.argv = ["vlmembed", *{arguments!r}]
try:
    main()
finally:
    heavy = {{"torch", "transformers"}} & set(sys.modules)
    assert not heavy, heavy
"""


@pytest.mark.parametrize("arguments", [["--help"], ["encode", "--help"], ["--version"], ["models"]])
def test_light_commands_do_not_load_torch(arguments: list[str]) -> None:
    script = LIGHT.format(arguments=arguments)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout


def test_inspect_does_not_load_torch(tmp_path: Path, tiny_model: Path) -> None:
    config = EncodeConfig(
        inputs=(str(SAMPLES / "drawings"),), output=str(tmp_path / "o.parquet"), model=str(tiny_model)
    )
    vlmembed.encode(config)
    script = LIGHT.format(arguments=["inspect", str(tmp_path / "o.parquet")])
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "rows        8, of them 0 duplicates" in run.stdout
    assert "embedding: 32 x float32" in run.stdout
    assert len(re.findall(r"^    [01]\.\d{4}  ", run.stdout, re.MULTILINE)) == 3


def test_importing_the_package_does_not_load_torch() -> None:
    script = "import sys, vlmembed; vlmembed.EncodeConfig; assert 'torch' not in sys.modules; vlmembed.load_tower"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert set(vlmembed.__all__) <= set(dir(vlmembed)) | set(vlmembed._HOMES)
    assert vlmembed.encode.__module__ == "vlmembed.run"
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        vlmembed.nope  # noqa: B018  the look-up is the test


def test_every_setting_is_an_option_with_the_configs_default() -> None:
    options = {option.name: option for option in encode.params if isinstance(option, click.Option)}
    for field in dataclasses.fields(EncodeConfig):
        if field.name in ("inputs", "output"):
            continue
        assert options[field.name].default == field.default or field.name == "keep_columns"
        assert options[field.name].help


def test_models_is_honest() -> None:
    run = subprocess.run([sys.executable, "-m", "vlmembed", "models"], capture_output=True, text=True, check=True)
    assert "the first 11 of 12 layers" in run.stdout
    assert "tuned for saliency" in run.stdout
    assert "facebook/dinov2-small" in run.stdout


def test_models_usage() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "vlmembed", "models", "--get", "x"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert "no built-in model is called 'x'; there is: dinov2-small" in run.stderr


def test_config_round_trips_through_toml() -> None:
    config = EncodeConfig(inputs=("a b", "ü\n"), output="o.parquet", keep_columns=("x", "y"), limit=3, normalize=False)
    assert EncodeConfig.from_toml(config.to_toml()) == config
    assert tomllib.loads(config.to_toml())["inputs"] == ["a b", "ü\n"]
    with pytest.raises(ConfigError, match="unknown setting 'batch_size'; known are allow-local-urls, attention, "):
        EncodeConfig.from_toml('inputs = ["a"]\noutput = "o"\nbatch_size = 8')
    with pytest.raises(ConfigError, match="not valid TOML"):
        EncodeConfig.from_toml("=")
    with pytest.raises(ConfigError, match="dedup is 'hash'; it can be bytes, pixels, none"):
        EncodeConfig(inputs=("a",), output="o", dedup="hash")


def test_the_readme_lists_every_code_and_exit_code() -> None:
    readme = (ROOT / "README.md").read_text()
    for code in FailureCode:
        assert f"`{code}`" in readme
    for number in (exits.EXIT_FAILED, exits.EXIT_USAGE, exits.EXIT_TOO_MANY_ERRORS, exits.EXIT_INTERRUPTED):
        assert re.search(rf"^\| {number} \|", readme, re.MULTILINE)


def test_what_the_readme_says_of_faults_is_shown_by_tests_that_exist() -> None:
    table = (ROOT / "README.md").read_text().split("### What happens when…")[1].split("\n\n")[1]
    named = [line.split("|")[3].strip().strip("`") for line in table.splitlines()[2:]]
    assert len(named) > 12
    for test in named:
        file, _, name = test.partition("::")
        content = (ROOT / "tests" / file).read_text()
        assert f"def {name}(" in content if name else "def test_" in content, test


def test_the_readme_is_finished() -> None:
    assert "@@" not in (ROOT / "README.md").read_text()


def readme_commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("vlmembed ")]


def test_the_readmes_commands_run(tmp_path: Path, builtin_folder: Path) -> None:
    """`make` and `pip` lines are CI's own business; every `vlmembed` line is run here, in order."""
    assert builtin_folder.exists()
    (tmp_path / "images").symlink_to(SAMPLES / "drawings")
    commands = readme_commands()
    assert len(commands) >= 4
    for command in commands:
        words = [sys.executable, "-m", "vlmembed", *shlex.split(command)[1:]]
        run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert run.returncode == 0, f"{command}: {run.stderr}"


def test_the_readmes_python_runs(tmp_path: Path, builtin_folder: Path) -> None:
    assert builtin_folder.exists()
    (tmp_path / "images").symlink_to(SAMPLES / "drawings")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True)


def test_the_readmes_table_of_models_is_the_programs() -> None:
    head, *rows = table()
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    assert "\n".join(lines) in (ROOT / "README.md").read_text()
    shown = CliRunner().invoke(cli, ["models"]).output
    for row in rows:
        assert all(cell in shown for cell in row)


def test_the_readmes_table_of_attention_is_the_programs() -> None:
    head, *rows = backends.table()
    commands = [[f"`{cell}`" if n == 3 and cell != "-" else cell for n, cell in enumerate(row)] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *commands)]
    assert "\n".join(lines) in (ROOT / "README.md").read_text()
    shown = CliRunner().invoke(cli, ["models"]).output
    for row in rows:
        assert all(cell in shown for cell in row)
