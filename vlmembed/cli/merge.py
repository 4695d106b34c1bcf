"""`vlmembed merge`."""

from __future__ import annotations

import click

from vlmembed.cli.encode import describe_report
from vlmembed.cli.options import set_up_logging


@click.command()
@click.argument("output")
@click.argument("shards", nargs=-1, required=True, metavar="SHARD...")
@click.option("--overwrite", is_flag=True, help="Replace an existing OUTPUT.")
@click.option("-v", "--verbose", is_flag=True, help="Log more on stderr.")
def merge(*, output: str, shards: tuple[str, ...], overwrite: bool, verbose: bool) -> None:
    """Put the outputs of all shards (encode --shard i/n) together: OUTPUT then is what one run would have written.

    Duplicates are found across shards.
    """
    set_up_logging(verbose=verbose)
    from vlmembed.merger import merge as run_merge  # noqa: PLC0415  keeps `--help` light

    click.echo(describe_report(run_merge(shards, output, overwrite=overwrite)))
