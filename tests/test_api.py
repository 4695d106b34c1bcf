"""What `import vlmembed` offers: names, signatures, docstrings, types, and examples that a type checker accepts."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import pytest
from conftest import ROOT
from docs_blocks import blocks

import vlmembed
from vlmembed import errors
from vlmembed.config import EncodeConfig
from vlmembed.errors import ConfigError
from vlmembed.keywords import Settings, make_config

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
STRICT_PAGES = ("README.md", "python.md")
"""Elsewhere an example's own functions may go without annotations."""

SIGNATURES = {
    "compare": "(path: 'str | os.PathLike[str]', against: 'str | os.PathLike[str]', *, tolerance: 'float | None' = "
    "None) -> 'Comparison'",
    "embed_pack": "(batch: 'PackedBatch', tower: 'Tower', *, pool: 'str' = 'auto', normalize: 'bool' = True) "
    "-> 'torch.Tensor'",
    "embed_tokens": "(batch: 'PackedBatch', tower: 'Tower') -> 'list[torch.Tensor]'",
    "encode": "(inputs: 'EncodeConfig | Name | Sequence[Name]', output: 'Name | None' = None, *, progress: 'bool' = "
    "False, on_event: 'Callable[[Event], None] | None' = None, **settings: 'Any') -> 'RunReport'",
    "export": "(path: 'str | os.PathLike[str]', folder: 'str | os.PathLike[str]', *, dtype: 'str' = 'float32', "
    "duplicates: 'bool' = True, overwrite: 'bool' = False) -> 'ExportReport'",
    "inspect": "(path: 'str | os.PathLike[str]', *, num_pairs: 'int' = 3) -> 'Inspection'",
    "load_recipe": "(path: 'str | os.PathLike[str]', sets: 'Sequence[str]' = ()) -> 'EncodeConfig'",
    "load_tower": "(model: 'str | os.PathLike[str]', *, revision: 'str | None' = None, dtype: 'str | torch.dtype' = "
    "'auto', device: 'str | torch.device' = 'auto') -> 'Tower'",
    "merge": "(outputs: 'Sequence[str | os.PathLike[str]]', target: 'str | os.PathLike[str]', *, overwrite: 'bool' = "
    "False) -> 'RunReport'",
    "pack_images": "(images: 'Sequence[Image.Image | UInt8Array]', tower: 'Tower', *, resize: 'str' = 'auto', "
    "min_pixels: 'int | None' = None, max_pixels: 'int | None' = None) -> 'PackedBatch'",
    "plan": "(inputs: 'EncodeConfig | Name | Sequence[Name]', *, hash_contents: 'bool' = False, num_sampled: "
    "'int | None' = None, seed: 'int' = 0, calibration_seconds: 'float' = 10.0, **settings: 'Any') -> 'Forecast'",
    "read_tokens": "(path: 'str | os.PathLike[str]', ids: 'Iterable[str]', *, allow_local_urls: 'bool' = False) -> "
    "'dict[str, TokenFeatures]'",
    "stream": "(inputs: 'EncodeConfig | Name | Sequence[Name]', **settings: 'Any') -> 'Stream'",
    "verify": "(path: 'str | os.PathLike[str]', *, num_rows: 'int | None' = 100, seed: 'int' = 0, tolerance: 'float | "
    "None' = None, inputs: 'Sequence[str]' = (), device: 'str' = 'auto') -> 'Verification'",
}

SAID = {
    "compare": ("|a - b| / |b|",),
    "EncodeConfig": ("in pixels", "in tokens", "seconds", "0 to 1"),
    "TokenFeatures": ("(tokens, D)", "float16 or float32"),
    "embed_pack": ("float32 (N, D)",),
    "embed_tokens": ("(M_i, D)",),
    "encode": ("one row per picture", "D", "values each"),
    "export": ("(rows, D)",),
    "load_tower": ("(N, D)",),
    "pack_images": ("uint8", "(height, width, 3)", "in pixels"),
    "plan": ("seconds",),
    "stream": ("(rows, D)", "256 MiB"),
    "verify": ("|now - stored| / |stored|",),
}
"""What a docstring must say: shapes, dtypes, units."""


def public(kind: Any) -> list[str]:  # noqa: ANN401  a predicate
    return [name for name in vlmembed.__all__ if kind(getattr(vlmembed, name))]


def test_the_names_are_these() -> None:
    assert sorted(vlmembed.__all__) == vlmembed.__all__
    assert public(inspect.isfunction) == list(SIGNATURES)
    assert public(inspect.isclass) == [
        "Comparison",
        "EncodeConfig",
        "Forecast",
        "Inspection",
        "RunReport",
        "Settings",
        "Stream",
        "TokenFeatures",
        "Verification",
        "VlmembedError",
    ]
    assert set(vlmembed.__all__) <= set(dir(vlmembed))


def test_every_name_is_in_the_documentation() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    missing = [name for name in vlmembed.__all__ if not re.search(rf"\b{name}\b", page)]
    assert missing == []


def test_no_module_has_the_name_of_a_function() -> None:
    """Importing ``vlmembed.stream``, were it a module, would put it in the function's place."""
    package = Path(vlmembed.__file__).parent
    for name in vlmembed.__all__:
        assert not (package / f"{name}.py").exists()
        assert not (package / name).exists()


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature_is(name: str) -> None:
    assert str(inspect.signature(getattr(vlmembed, name))) == SIGNATURES[name]


@pytest.mark.parametrize("name", vlmembed.__all__)
def test_the_docstring_says_what_is_needed(name: str) -> None:
    item = getattr(vlmembed, name)
    doc = inspect.getdoc(item)
    assert doc
    flat = " ".join(doc.split())
    assert [text for text in SAID.get(name, ()) if text not in flat] == []
    if inspect.isfunction(item):
        assert_raises_are_errors(doc)
    for method_name, method in vars(item).items() if inspect.isclass(item) else ():
        if not method_name.startswith("_") and (isinstance(method, property) or callable(method)):
            assert inspect.getdoc(method), f"{name}.{method_name}"


def assert_raises_are_errors(doc: str) -> None:
    """There is a section, and what it names exists."""
    _, found, section = doc.partition("Raises:\n")
    assert found
    names = re.findall(r"\b((?:torch\.)?[A-Z]\w+Error)\b", section)
    assert names
    for name in names:
        assert name.startswith("torch.") or hasattr(errors, name) or hasattr(builtins, name)


def test_settings_are_the_fields_of_the_config() -> None:
    ours = get_type_hints(Settings, localns={"Path": Path})
    theirs = get_type_hints(EncodeConfig)
    assert list(ours) == [field.name for field in dataclasses.fields(EncodeConfig)][2:]
    for name, hint in ours.items():
        tuples = [each for each in (hint, *get_args(hint)) if get_origin(each) is tuple]
        assert (tuples[0] if tuples else hint) == theirs[name], name
    assert Settings.__required_keys__ == frozenset()


def test_a_call_makes_a_config() -> None:
    expected = EncodeConfig(inputs=("a",), output="o.parquet", keep_columns=("x",), limit=3)
    assert make_config("a", "o.parquet", {"keep_columns": ["x"], "limit": 3}) == expected
    assert make_config(["a", Path("b")], None, {}) == EncodeConfig(inputs=("a", Path("b")))
    assert make_config(Path("a"), Path("o/"), {}).output == Path("o")
    assert make_config(expected, None, {}) is expected
    with pytest.raises(ConfigError, match="unknown setting 'max_pixel': is 'max_pixels' meant"):
        make_config("a", "o.parquet", {"max_pixel": 3})
    with pytest.raises(ConfigError, match="output, limit beside an EncodeConfig"):
        make_config(expected, "x.parquet", {"limit": 3})
    with pytest.raises(ConfigError, match="keep_columns is 'x'; it is a tuple of them"):
        make_config("a", "o.parquet", {"keep_columns": "x"})
    with pytest.raises(ConfigError, match="no input given"):
        make_config([], "o.parquet", {})


def test_encode_takes_settings_and_configs(tmp_path: Path, tiny_model: Path) -> None:
    inputs = ROOT / "sample_data" / "images" / "drawings"
    report = vlmembed.encode([inputs], tmp_path / "a.parquet", model=tiny_model, limit=2)
    assert report.num_rows == 2
    config = EncodeConfig(inputs=(inputs,), output=tmp_path / "b.parquet", model=tiny_model, limit=2)
    events: list[Mapping[str, Any]] = []
    assert vlmembed.encode(config, on_event=events.append).num_embedded == report.num_embedded
    assert events
    with pytest.raises(ConfigError, match="no output given: name a file like"):
        vlmembed.encode("images", "")


WRONG = """
import vlmembed

vlmembed.encode("images")
vlmembed.encode("images", "o.parquet", max_pixel=3)
vlmembed.encode("images", "o.parquet", max_pixels="3")
vlmembed.encode(vlmembed.EncodeConfig(inputs=("images",)), limit=3)
vlmembed.encode(["images"], "o.parquet", keep_columns="caption")
vlmembed.stream("images", output="o.parquet")
vlmembed.stream("images").report.num_row
vlmembed.load_tower("dinov2-small", dtype=16)
vlmembed.pack_images("a.png", vlmembed.load_tower("dinov2-small"))
vlmembed.read_tokens("o.parquet", [3])
"""

RIGHT = """
from pathlib import Path
from typing import Unpack, assert_type

import numpy as np
import torch

import vlmembed

outputs = [Path("a.parquet")]
names = ["a", "b"]
assert_type(vlmembed.encode("images", Path("o.parquet"), keep_columns=names, reuse=outputs), vlmembed.RunReport)
assert_type(vlmembed.encode(vlmembed.EncodeConfig(inputs=("a",), output="o.parquet")), vlmembed.RunReport)
assert_type(vlmembed.stream(names, cache=None), vlmembed.Stream)
assert_type(vlmembed.stream(vlmembed.EncodeConfig(inputs=("a",))).num_rows, int | None)
tower = vlmembed.load_tower(Path("model"), dtype=torch.float16, device="cuda:1")
batch = vlmembed.pack_images([np.zeros((2, 3, 3), np.uint8)], tower)
assert_type(vlmembed.embed_pack(batch, tower, pool="cls"), torch.Tensor)
assert_type(vlmembed.embed_tokens(batch, tower), list[torch.Tensor])
assert_type(vlmembed.inspect("o.parquet"), vlmembed.Inspection)
assert_type(vlmembed.verify(Path("o.parquet"), num_rows=None), vlmembed.Verification)
assert_type(vlmembed.plan(vlmembed.load_recipe("run.toml")), vlmembed.Forecast)
assert_type(vlmembed.plan(["a", "b"], num_sampled=3, max_pixels=9), vlmembed.Forecast)


def mine(**settings: Unpack[vlmembed.Settings]) -> vlmembed.Stream:
    return vlmembed.stream("images", **settings)
"""


def test_examples_type_check_and_mistakes_do_not(tmp_path: Path) -> None:
    """All Python of the documentation, what callers write, and what they get wrong."""
    assert tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["strict"] is True
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "right.py").write_text(RIGHT)
    for page in PAGES:
        code = [block.text for block in blocks(page.read_text(encoding="utf-8")) if block.tag == "python"]
        head = "" if page.name in STRICT_PAGES else "# mypy: allow-untyped-defs\n"
        (tmp_path / f"page_{page.stem.replace('-', '_')}.py").write_text(head + "\n".join(code))
    (tmp_path / "faiss.pyi").write_text("from typing import Any\ndef __getattr__(name: str) -> Any: ...\n")
    # with the project's own settings, strict among them, and no others: they share its cache
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(tmp_path)]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    checked = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert not checked.stderr, checked.stderr
    problems = [line for line in checked.stdout.splitlines() if ": error: " in line]
    assert [line for line in problems if "wrong.py" not in line] == []
    found = {int(line.split(":")[1]) for line in problems}
    mistakes = {number for number, line in enumerate(WRONG.splitlines(), 1) if line.startswith("vlmembed.")}
    assert found == mistakes


def test_the_package_is_marked_as_typed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "py.typed" in settings["tool"]["setuptools"]["package-data"]["vlmembed"]
    assert (Path(vlmembed.__file__).parent / "py.typed").is_file()
    assert distribution("vlmembed").metadata["Name"] == "vlmembed"
