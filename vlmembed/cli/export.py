"""`vlmembed export`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("output")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["float32", "float16"]), default="float32", show_default=True)
@click.option("--no-duplicates", is_flag=True, help="Leave rows out that repeat another's content.")
@click.option("--overwrite", is_flag=True, help="Replace what an earlier export left in FOLDER.")
def export(*, output: str, folder: Path, dtype: str, no_duplicates: bool, overwrite: bool) -> None:
    """Write the vectors of OUTPUT as FOLDER/embeddings.npy, and their ids as FOLDER/ids.jsonl, a JSON string a line:
    what faiss and other indexes take."""
    from vlmembed.exporter import export as run_export  # noqa: PLC0415  keeps `--help` light

    found = run_export(output, folder, dtype=dtype, duplicates=not no_duplicates, overwrite=overwrite)
    click.echo(f"{found.folder}: {found.num_rows:,} rows of {found.width} values in embeddings.npy, ids in ids.jsonl")
