"""`vlmembed verify`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from vlmembed.cli.exits import EXIT_TOO_MANY_ERRORS
from vlmembed.cli.options import set_up_logging

if TYPE_CHECKING:
    from vlmembed.verification import Verification


@click.command()
@click.argument("file")
@click.argument("inputs", nargs=-1, metavar="[INPUT...]")
@click.option("--rows", "num_rows", type=int, default=100, show_default=True, help="How many, at random.")
@click.option("--all", "check_all", is_flag=True, help="All rows.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sample.")
@click.option("--tolerance", type=float, help="Largest |now - stored| / |stored|; 0.002 for fp32, 0.05 for bf16, fp16.")
@click.option("--device", default="auto", show_default=True, help="As of encode.")
@click.option("-v", "--verbose", is_flag=True, help="Log more on stderr.")
def verify(
    *,
    file: str,
    inputs: tuple[str, ...],
    num_rows: int,
    check_all: bool,
    verbose: bool,
    **settings: Any,  # noqa: ANN401
) -> None:
    """Read, hash and encode rows of the output FILE again, and report the largest deviation; exit code 3 beyond the
    tolerance. INPUT... stand for the recorded ones where the pictures have moved."""
    set_up_logging(verbose=verbose)
    from vlmembed.mirror.localcopy import local_copy  # noqa: PLC0415  keeps `--help` light
    from vlmembed.verification import verify as run_verify  # noqa: PLC0415  loads torch

    with local_copy(file) as path:
        found = run_verify(path, num_rows=None if check_all else num_rows, inputs=inputs, **settings)
    found.path = file
    click.echo(describe_verification(found))
    if not found.is_good:
        sys.exit(EXIT_TOO_MANY_ERRORS)


MAX_SHOWN = 10


def describe_verification(found: Verification) -> str:
    """What a check has found, for a person."""
    lines = [f"{found.path}: {found.num_checked:,} of {found.num_rows:,} rows were read and encoded again"]
    lines += [f"  wrong: {problem}" for problem in found.problems]
    shown = [f"    {key}" for key in found.changed[:MAX_SHOWN]]
    lines += [f"  {len(found.changed):,} have other contents now than those that were encoded", *shown]
    shown = [f"    {key}: {reason}" for key, reason in list(found.failed.items())[:MAX_SHOWN]]
    lines += [f"  {len(found.failed):,} cannot be read or encoded any more", *shown]
    verdict = "within" if found.worst <= found.tolerance else "BEYOND"
    at = f" ({found.worst_id})" if found.worst_id else ""
    lines.append(f"  largest deviation {found.worst:.2g}{at}, {verdict} the tolerance of {found.tolerance:g}")
    if found.differences:
        lines += ["  this installation is not the one that made it:", *(f"    {line}" for line in found.differences)]
    return "\n".join(lines)
