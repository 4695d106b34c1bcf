"""The fenced blocks of a documentation page, and how each kind of line in them is run."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from vlmembed.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_RUN_HERE = {
    "make demo": "sets up this checkout, which CI does by the same command",
    "make test": "runs this test",
    "pip install . onnx": "sets up an environment; `make demo` installs the same",
    "pip install openvino": "is in the environment already, as its extra brings it",
    "make bench-gpu": "needs a GPU",
    "pip install 'vlmembed[ray]'": "is in the environment already, as its extra brings it",
    "vlmembed encode photos out/photos/ --engine ray": "starts a cluster, as test_ray.py does",
    "vlmembed encode photos out/photos/ --ray-address HOST:6379": "needs a cluster at a fixed address",
    'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)': "needs Slurm",
    "export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300": "needs Slurm",
    'srun ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" '
    '--num-cpus "$SLURM_CPUS_PER_TASK" -- vlmembed run pipelines/cluster.toml': "needs Slurm",
}
"""Whole lines that a page may show without their being run by it, and why. Of another kind are only `make run` and
`make reproduce`, with their variables: test_recipes.py runs them."""

MADE_ELSEWHERE = ("make run ", "make reproduce ")
FILE_TOOLS = ("cat", "cp", "find", "ls", "mv", "rm", "tail")
PIPE_SECONDS = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block: the word behind its opening fence, its text, and the number of its first line."""

    tag: str
    text: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A line of a block of commands, continued ones joined, and the exit code that its comment promises."""

    text: str
    exit_code: int
    line: int


def blocks(text: str) -> Iterator[Block]:
    """All of a page, in order."""
    tag, start, held = None, 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith("```"):
            held.append(line)
        elif tag is None:
            tag, start, held = line.strip().removeprefix("```"), number + 1, []
        else:
            yield Block(tag=tag, text="\n".join(held) + "\n", line=start)
            tag = None
    assert tag is None, f"the block that begins in line {start} has no end"


def commands(block: Block) -> Iterator[Command]:
    """The lines of a block that do something."""
    held, start = "", block.line
    for number, line in enumerate(block.text.splitlines(), block.line):
        held = f"{held} {line.strip()}" if held else line
        if held.endswith("\\"):
            held = held[:-1].rstrip()
            continue
        text, _, comment = re.sub(r"^\s*#", " # ", held).partition(" # ")
        promised = re.search(r"exit code (\d+)", comment)
        if text.strip():
            yield Command(text=text.strip(), exit_code=int(promised[1]) if promised else 0, line=start)
        held, start = "", number + 1


def run_command(command: Command) -> None:
    """Run a line in this process where that can be, in a shell where it takes one.

    Raises:
        AssertionError: another exit code than it promises, or a kind of line that nothing is known to run.
    """
    text = command.text
    if text in NOT_RUN_HERE or text.startswith(MADE_ELSEWHERE):
        return
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.commenters = ""
    signs = [word for word in lexer if set(word) <= set("();<>|&")]
    first = text.split()[0]
    if first == "vlmembed" and signs in ([], [">"]):
        code = _run_here(text)
    elif first in {"vlmembed", *FILE_TOOLS} and set(signs) <= {"|", ">"}:
        code = _run_in_shell(text)
    else:
        msg = f"line {command.line}: nothing runs {text!r}; see tests/docs_blocks.py for what is run"
        raise AssertionError(msg)
    assert code == command.exit_code, f"line {command.line}: exit code {code} and not {command.exit_code}: {text}"


def _run_here(text: str) -> int:
    """A `vlmembed` command by its own entry point; its exit code."""
    text, _, target = text.partition(" > ")
    old_argv, old_handler = sys.argv, signal.getsignal(signal.SIGTERM)
    with ExitStack() as stack:
        if target:
            file = stack.enter_context(Path(target.strip()).open("w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(file))
        stack.enter_context(patch("os._exit", sys.exit))  # an interrupt ends the command, not the tests
        sys.argv = _words(text)
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
        finally:
            sys.argv = old_argv
            signal.signal(signal.SIGTERM, old_handler)
            logging.captureWarnings(capture=False)
    return 0


def _words(text: str) -> list[str]:
    """The words that a shell makes of a command: patterns and braces expanded."""
    shell = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {text}"],  # noqa: S607  any bash
        capture_output=True,
        check=True,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    return os.fsdecode(shell.stdout).split("\0")[:-1]


def _run_in_shell(text: str) -> int:
    """A line of several commands, in a process of its own; its exit code is that of the last one."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = subprocess.run(
        ["bash", "-o", "pipefail", "-c", text],  # noqa: S607  any bash
        env={**os.environ, "PATH": path},
        timeout=PIPE_SECONDS,
        check=False,
    )
    return shell.returncode


def run_python(block: Block, namespace: dict[str, Any], page: str) -> None:
    """Run a block of Python with the names that earlier ones of its page have left."""
    padding = "\n" * (block.line - 1)  # so that a traceback names the page's own line
    exec(compile(padding + block.text, page, "exec"), namespace)  # noqa: S102  our own documentation


def differing_lines(shown: str, printed: str) -> list[str]:
    """The lines of `shown` that are not in `printed`, whatever numbers are in them. What is shown may leave lines out,
    and the end of a line, by an ellipsis."""
    lines = {_without_numbers(line) for line in printed.splitlines()}
    missing = []
    for line in shown.splitlines():
        start, cut, _ = _without_numbers(line).partition("…")
        if not any(each.startswith(start) if cut else each == start for each in lines | {""}):
            missing.append(line)
    return missing


def _without_numbers(line: str) -> str:
    return re.sub(r"\d[\d,.]*", "0", line.rstrip())
