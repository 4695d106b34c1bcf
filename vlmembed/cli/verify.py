"""`vlmembed verify`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from vlmembed.cli.exits import EXIT_TOO_MANY_ERRORS
from vlmembed.cli.options import set_up_logging
from vlmembed.errors import UsageError

if TYPE_CHECKING:
    from vlmembed.checking.comparison import Comparison
    from vlmembed.checking.verification import Verification

_OF_ENCODING = {"num_rows": "--rows", "check_all": "--all", "seed": "--seed", "device": "--device"}
"""Options that are of no use where nothing is encoded."""


@click.command()
@click.argument("file")
@click.argument("inputs", nargs=-1, metavar="[INPUT...]")
@click.option("--against", metavar="OTHER", help="Compare all rows with those of this output; nothing is encoded.")
@click.option("--rows", "num_rows", type=int, default=100, show_default=True, help="How many, at random.")
@click.option("--all", "check_all", is_flag=True, help="All rows.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sample.")
@click.option("--tolerance", type=float, help="Largest |now - stored| / |stored|; 0.002 for fp32, 0.05 for bf16, fp16.")
@click.option("--device", default="auto", show_default=True, help="As of encode.")
@click.option("-v", "--verbose", is_flag=True, help="Log more on stderr.")
@click.pass_context
def verify(
    context: click.Context,
    *,
    file: str,
    inputs: tuple[str, ...],
    against: str | None,
    num_rows: int,
    check_all: bool,
    seed: int,
    tolerance: float | None,
    device: str,
    verbose: bool,
) -> None:
    """Read, hash and encode rows of the output FILE again, and report the largest deviation; exit code 3 beyond the
    tolerance. INPUT... stand for the recorded ones where the pictures have moved.

    With --against, FILE is compared with another output row by row; exit code 3 where they are not the same.
    """
    set_up_logging(verbose=verbose)
    if against is not None:
        _check_alone(context)
        _verify_against(file, against, tolerance)
        return
    from vlmembed.checking.verification import verify as run_verify  # noqa: PLC0415  loads torch

    found = run_verify(
        file, num_rows=None if check_all else num_rows, seed=seed, tolerance=tolerance, inputs=inputs, device=device
    )
    click.echo(describe_verification(found))
    if not found.is_good:
        sys.exit(EXIT_TOO_MANY_ERRORS)


def _check_alone(context: click.Context) -> None:
    given = [
        *(["INPUT"] if context.params["inputs"] else []),
        *(
            flag
            for name, flag in _OF_ENCODING.items()
            if context.get_parameter_source(name) is not ParameterSource.DEFAULT
        ),
    ]
    if given:
        msg = f"--against compares all rows of two outputs and reads no pictures: leave {', '.join(given)} out"
        raise UsageError(msg)


def _verify_against(file: str, against: str, tolerance: float | None) -> None:
    from vlmembed.checking.comparison import compare  # noqa: PLC0415  keeps `--help` light

    found = compare(file, against, tolerance=tolerance)
    click.echo(describe_comparison(found))
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
    if found.num_checked:
        lines.append(_deviation(found))
    if found.differences:
        lines += ["  this installation is not the one that made it:", *(f"    {line}" for line in found.differences)]
    return "\n".join(lines)


def describe_comparison(found: Comparison) -> str:
    """How two outputs differ, for a person."""
    verdict = "the same" if found.is_good else "NOT the same"
    lines = [
        f"{found.path} against {found.against}: {verdict}",
        f"  {found.num_compared:,} rows have vectors in both, {found.num_failed:,} failed in both",
        *(f"  wrong: {problem}" for problem in found.problems),
    ]
    for what, rows in found.findings():
        more = [f"    and {rows.count - len(rows.ids):,} more"] if rows.count > len(rows.ids) else []
        lines += [f"  {rows.count:,} rows {what}", *(f"    {key}" for key in rows.ids), *more]
    if found.num_compared:
        lines.append(_deviation(found))
    if found.differences:
        lines += ["  settings and versions that differ:", *(f"    {line}" for line in found.differences)]
    return "\n".join(lines)


def _deviation(found: Verification | Comparison) -> str:
    verdict = "within" if found.worst <= found.tolerance else "BEYOND"
    at = f" ({found.worst_id})" if found.worst_id else ""
    return f"  largest deviation {found.worst:.2g}{at}, {verdict} the tolerance of {found.tolerance:g}"
