"""The README and the pages under docs/: every command and every line of Python in them is run, and what they list is
what the program has."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from click.testing import CliRunner
from conftest import ROOT
from docs_blocks import NOT_RUN_HERE, Block, blocks, commands, differing_lines, run_command, run_python
from docs_world import make_world

from vlmembed.attention import backends
from vlmembed.cli import cli, exits
from vlmembed.errors import FailureCode
from vlmembed.towers.families import table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import ModuleType

    from docs_world import World

README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]
REFERENCE = "docs/cli.md"

MAX_README_LINES = 150


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Files and servers for all pages."""
    with make_world(tmp_path_factory.mktemp("docs")) as made:
        yield made


def page_blocks(name: str) -> list[Block]:
    return list(blocks((ROOT / name).read_text(encoding="utf-8")))


def is_run(name: str) -> bool:
    return any(block.tag in {"sh", "python"} for block in page_blocks(name))


@pytest.mark.parametrize("name", [name for name in NAMES if is_run(name)])
def test_every_command_of_a_page_runs(  # noqa: PLR0917  fixtures
    name: str,
    world: World,
    builtin_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """From top to bottom in one folder; the README's with the real built-in model, the others' with a tiny one. What is
    shown below a block is what the block prints, but for the numbers."""
    world.enter(tmp_path, builtin_folder.parent if name == "README.md" else world.models, monkeypatch)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = [""]
    try:
        for block in page_blocks(name):
            if not block.tag and printed[-1] and name != "README.md":  # which shows `make demo`: see the next test
                assert differing_lines(block.text, printed[-1]) == [], f"{name}:{block.line}"
            if block.tag == "python":
                run_python(block, namespace, name)
            elif block.tag == "sh":
                for command in commands(block):
                    run_command(command)
            printed.append("".join(capfd.readouterr()))
    finally:
        sys.stdout.write("".join(printed))  # for whoever reads why it failed


def test_the_readme_shows_what_the_demo_prints(
    world: World,
    builtin_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    target = makefile.partition("\ndemo: ")[2].partition("\n\n")[0]
    lines = re.findall(r"^\t\$\(BIN\)/(vlmembed .*)$", target, re.MULTILINE)
    assert len(lines) == 2
    world.enter(tmp_path, builtin_folder.parent, monkeypatch)
    (tmp_path / "work" / "sample_data").symlink_to(ROOT / "sample_data")
    for command in commands(Block(tag="sh", text="\n".join(lines), line=1)):
        run_command(command)
    printed = "".join(capfd.readouterr())
    shown = next(block.text for block in page_blocks("README.md") if not block.tag)
    assert differing_lines(shown, printed) == []


@pytest.mark.parametrize("name", [name for name in NAMES if name != REFERENCE])
def test_what_is_not_run_is_no_command(name: str) -> None:
    """Untagged blocks show output; settings and values in TOML and JSON parse."""
    for block in page_blocks(name):
        where = f"{name}:{block.line}"
        if block.tag == "toml":
            tomllib.loads(block.text)
        elif block.tag == "json":
            for line in block.text.splitlines() if block.text.count("\n{") else [block.text]:
                json.loads(line)
        elif block.tag == "yaml":
            assert yaml.safe_load(block.text), where
        elif not block.tag:
            for line in block.text.splitlines():
                assert not re.match(r"\s*(vlmembed |\$ |import |from \S+ import |make |pip )", line), f"{where}: {line}"
        else:
            assert block.tag in {"sh", "python"}, f"{where}: blocks tagged {block.tag!r} are not run"


def test_what_is_shown_of_make_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    shown = {command.text for name in NAMES for block in page_blocks(name) for command in commands(block)}
    assert set(NOT_RUN_HERE) <= shown, "what no page shows needs no exception"
    lines = {line for line in shown if line.startswith("make ")}
    recipes = {recipe for line in lines for recipe in re.findall(r"RECIPE=(\S+\.toml)", line)}
    assert {recipe for recipe in recipes if recipe.startswith("pipelines/") and not (ROOT / recipe).exists()} == set()
    targets = {line.split()[1] for line in lines}
    for name in NAMES:
        targets |= set(re.findall(r"`make\s([a-z-]+)", (ROOT / name).read_text(encoding="utf-8")))
    assert {target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)} == set()


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def headings(path: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        file, _, anchor = link.partition("#")
        if "://" in file:
            continue
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(link)
    assert broken == []


def test_the_index_lists_every_page() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[[^\]]+\]\(([a-z]+\.md)\)", index, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in PAGES if path.parent == DOCS and path.name != "README.md")


def test_the_readme_is_short() -> None:
    num_lines = len(README.read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_README_LINES, f"{num_lines} lines: a page under docs/ takes what answers one task"


@pytest.mark.parametrize("name", NAMES)
def test_pages_are_finished(name: str) -> None:
    assert "@@" not in (ROOT / name).read_text(encoding="utf-8")


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cli_reference", DOCS / "cli_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_of_the_command_line_is_what_the_program_says() -> None:
    expected = load_generator().reference()
    assert (ROOT / REFERENCE).read_text(encoding="utf-8") == expected, "run `make docs`"
    for command in cli.commands:
        assert f"\n## vlmembed {command}\n\n```\nUsage: vlmembed {command} " in expected


def test_the_generator_tells_a_page_that_is_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator, page = load_generator(), tmp_path / "cli.md"
    assert generator.main(["--check"], page) == 1
    assert generator.main([], page) == 0
    assert generator.main(["--check"], page) == 0
    page.write_text(page.read_text(encoding="utf-8").replace("--model", "--mode"), encoding="utf-8")
    assert generator.main(["--check"], page) == 1
    assert "run `make docs`" in capsys.readouterr().err
    assert generator.main(["--help"], page) == 2


def test_every_code_and_exit_code_is_explained() -> None:
    page = (DOCS / "failures.md").read_text(encoding="utf-8")
    for code in FailureCode:
        assert re.search(rf"^\| `{code}` \|", page, re.MULTILINE), code
    for number in (value for name, value in vars(exits).items() if name.startswith("EXIT_")):
        assert re.search(rf"^\| {number} \|", page, re.MULTILINE), number


def test_what_is_said_of_faults_is_shown_by_tests_that_exist() -> None:
    rows = (DOCS / "failures.md").read_text(encoding="utf-8").split("## What happens when…")[1].split("\n\n")[1]
    named = [line.split("|")[3].strip().strip("`") for line in rows.splitlines()[2:]]
    assert len(named) > 20
    for test in named:
        file, _, name = test.partition("::")
        content = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"def {name}(" in content if name else "def test_" in content, test


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table as pages have it."""
    head, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *others))


def test_the_table_of_models_is_the_programs() -> None:
    assert markdown(table()) in (DOCS / "models.md").read_text(encoding="utf-8")
    shown = CliRunner().invoke(cli, ["models"]).output
    for row in table()[1:]:
        assert all(cell in shown for cell in row)


def test_the_table_of_attention_is_the_programs() -> None:
    head, *rows = backends.table()
    quoted = [[f"`{cell}`" if n == 3 and cell != "-" else cell for n, cell in enumerate(row)] for row in rows]
    assert markdown([head, *quoted]) in (DOCS / "devices.md").read_text(encoding="utf-8")
    shown = CliRunner().invoke(cli, ["models"]).output
    for row in rows:
        assert all(cell in shown for cell in row)


def test_a_line_that_nothing_runs_is_refused() -> None:
    for line in ("curl https://example.org", "vlmembed models && rm -rf /", "python x.py", "make deploy"):
        (command,) = commands(Block(tag="sh", text=f"{line}\n", line=1))
        with pytest.raises(AssertionError, match="nothing runs"):
            run_command(command)


def test_lines_are_joined_and_their_exit_codes_read() -> None:
    text = "# a comment\nvlmembed verify o \\\n    --all  # exit code 3\n\nvlmembed inspect 'f.parquet#1'  # shows it\n"
    found = [(each.text, each.exit_code, each.line) for each in commands(Block(tag="sh", text=text, line=10))]
    assert found == [("vlmembed verify o --all", 3, 11), ("vlmembed inspect 'f.parquet#1'", 0, 14)]


def test_another_exit_code_than_the_promised_one_fails() -> None:
    (command,) = commands(Block(tag="sh", text="vlmembed models --wheel x.whl\n", line=1))
    with pytest.raises(AssertionError, match="exit code 2 and not 0"):
        run_command(command)


def test_shown_lines_are_compared_without_their_numbers() -> None:
    printed = "out.parquet: 12 rows\n  3.6 s + 5.7 s set-up\n  computed    on cpu, numpy 2.4.6\n"
    assert differing_lines("out.parquet: 1,024 rows\n\n  computed    on cpu, …\n", printed) == []
    assert differing_lines("out.parquet: 12 files\n  3.6 s\n", printed) == ["out.parquet: 12 files", "  3.6 s"]
