"""The command line is thin: light to start, its defaults the config's own."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import click
import pytest
from conftest import SAMPLES

import vlmembed
from vlmembed.cli.encode import encode
from vlmembed.config import EncodeConfig
from vlmembed.errors import ConfigError

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
    assert vlmembed.encode.__module__ == "vlmembed.api"
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
    with pytest.raises(ConfigError, match="unknown setting 'batch_size'; known are allow_local_urls, attention, "):
        EncodeConfig.from_toml('inputs = ["a"]\noutput = "o"\nbatch_size = 8')
    for key, message in {
        "max-pixel": "unknown setting 'max-pixel': is 'max-pixels' meant?",
        "max_pixel": "unknown setting 'max_pixel': is 'max_pixels' meant?",
        "no-normalize": "unknown setting 'no-normalize': is normalize = false meant?",
        "log-json": "'log-json' changes nothing in an output, so it is no setting: give --log-json to the command",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            EncodeConfig.from_dict({"inputs": ["a"], key: False})
    with pytest.raises(ConfigError, match="not valid TOML"):
        EncodeConfig.from_toml("=")
    with pytest.raises(ConfigError, match="dedup is 'hash'; it can be bytes, pixels, none"):
        EncodeConfig(inputs=("a",), output="o", dedup="hash")
