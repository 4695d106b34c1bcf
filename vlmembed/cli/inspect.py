"""`vlmembed inspect`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from vlmembed.inspection import Inspection


@click.command()
@click.argument("file")
def inspect(file: str) -> None:
    """Show rows, width, duplicates, failures, provenance and the nearest pairs of an output FILE."""
    from vlmembed.inspection import inspect as run_inspect  # noqa: PLC0415  keeps `--help` light
    from vlmembed.mirror.localcopy import local_copy  # noqa: PLC0415  the same

    with local_copy(file) as path:
        click.echo(describe_inspection(dataclasses.replace(run_inspect(path), path=file)))


def describe_inspection(found: Inspection) -> str:
    """An output's facts, for a person."""
    facts = found.provenance
    lines = [
        f"{found.path}",
        f"  rows        {found.num_rows:,}, of them {found.num_duplicates:,} duplicates",
        f"  vectors     {', '.join(found.vectors)}: {found.width} x {found.dtype}"
        + ("" if found.num_tokens is None else f", {found.num_tokens:,} tokens in all rows"),
    ]
    if found.codes is None:
        lines.append("  failed      unknown: the errors file is not beside it")
    else:
        codes = ", ".join(f"{count} {code}" for code, count in found.codes.items())
        lines.append(f"  failed      {sum(found.codes.values()):,}" + (f": {codes}" if codes else ""))
    fingerprint, model, backend = facts["fingerprint"], facts["model"], facts["backend"]
    normalised = "normalised" if fingerprint["normalize"] else "not normalised"
    aligned = "aligned with text" if model.get("aligned_with_text") else "not aligned with text"
    shown = [name for name in ("dtype", "emit", "pool", "resize", "dedup") if fingerprint.get(name) is not None]
    settings = ", ".join(f"{name} {fingerprint[name]}" for name in shown)
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    lines += [
        f"  model       {model['name']} ({model['revision']}), weights {model['weights_sha256'][:12]}",
        f"  settings    {settings}, {normalised}, {aligned}",
        f"  pixels      {fingerprint['pixel_policy']}; {fingerprint['resizer']}",
        f"  computed    on {backend['device']} ({backend['processor']}), attention {backend['attention']}, {versions}",
    ]
    if found.num_tokens is None:
        lines.append(f"  nearest     among {found.num_compared:,} distinct rows:")
        lines += [f"    {pair.cosine:.4f}  {pair.first}  {pair.second}" for pair in found.nearest]
    return "\n".join(lines)
