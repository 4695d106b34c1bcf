"""`vlmembed run`."""

from __future__ import annotations

import click

from vlmembed.cli.encode import run_options, run_to_exit
from vlmembed.cli.options import set_up_logging
from vlmembed.recipes import load_recipe


@click.command()
@click.argument("recipe")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Stands over the file's. Repeatable.")
@run_options
def run(*, recipe: str, sets: tuple[str, ...], no_progress: bool, verbose: bool, log_json: str | None) -> None:
    """Run a recipe: a TOML file of encode's flags.

    RECIPE is one key = value a line: inputs = ["images"], output = "out.parquet", max-pixels = 50176, and so on.
    Relative paths count from the current folder.

    --set limit=100 changes a setting for this run, --set limit= puts it back to its default. Of settings that are
    lists: --set inputs=images, or --set 'inputs=["a", "b"]'.
    """
    set_up_logging(verbose=verbose)
    run_to_exit(load_recipe(recipe, sets), progress=not no_progress, log_json=log_json)
