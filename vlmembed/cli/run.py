"""`vlmembed run`."""

from __future__ import annotations

import click

from vlmembed.cli.encode import run_options, run_to_exit
from vlmembed.cli.options import set_up_logging
from vlmembed.errors import UsageError
from vlmembed.recipes import load_recipe


class _RecipeCommand(click.Command):
    """Says how a flag of `encode` is given here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-")
            msg = f"{error.option_name} is no flag of run; settings are given as --set {name}=VALUE"
            raise UsageError(msg) from error


@click.command(cls=_RecipeCommand)
@click.argument("recipe")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Stands over the file's. Repeatable.")
@run_options
def run(*, recipe: str, sets: tuple[str, ...], no_progress: bool, verbose: bool, log_json: str | None) -> None:
    """Run a recipe: a TOML file of encode's flags.

    RECIPE (- is standard input) is one key = value a line: inputs = ["images"], output = "out.parquet", max-pixels =
    50176, and so on. Relative paths count from the current folder.

    --set limit=100 changes a setting for this run, --set limit= puts it back to its default. Of settings that are
    lists: --set inputs=images, or --set 'inputs=["a", "b"]'.
    """
    set_up_logging(verbose=verbose)
    run_to_exit(load_recipe(recipe, sets), progress=not no_progress, log_json=log_json)
