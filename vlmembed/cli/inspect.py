"""`vlmembed inspect`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from vlmembed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vlmembed.inspection.reading import Inspection
    from vlmembed.inspection.unfinished import UnfinishedRun


@click.command()
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
@click.option("--recipe", "as_recipe", is_flag=True, help="The run as a recipe for `vlmembed run`.")
def inspect(*, file: str, as_json: bool, as_recipe: bool) -> None:
    """Show rows, width, duplicates, failures, settings, provenance and the nearest pairs of an output FILE.

    Of an unfinished run what it has so far, of an errors file which rows failed and why.
    """
    if as_json and as_recipe:
        msg = "--json has the recipe in it: leave --json or --recipe out"
        raise ConfigError(msg)
    from vlmembed.inspection.as_json import to_plain  # noqa: PLC0415  the same
    from vlmembed.inspection.reading import inspect as run_inspect  # noqa: PLC0415  keeps `--help` light

    found = run_inspect(file, num_pairs=0 if as_recipe else 3)
    if as_recipe:
        from vlmembed.recipes import recipe_text  # noqa: PLC0415  the same

        click.echo(recipe_text(found.provenance), nl=False)
    elif as_json:
        click.echo(json.dumps(to_plain(found), allow_nan=False))
    else:
        click.echo(describe_inspection(found))


def describe_inspection(found: Inspection) -> str:
    """What was found, for a person."""
    head = [f"{found.path}{_kind(found)}"]
    if found.kind == "errors":
        return "\n".join([*head, *_failures(found)])
    lines = [
        *head,
        *_run(found.unfinished),
        f"  rows        {found.num_rows:,}, of them {found.num_duplicates:,} duplicates",
        f"  vectors     {', '.join(found.vectors)}: {found.width} x {found.dtype}"
        + ("" if found.num_tokens is None else f", {found.num_tokens:,} tokens in all rows"),
    ]
    if found.codes is None:
        lines.append("  failed      unknown: the errors file is not beside it")
    else:
        codes = ", ".join(f"{count} {code}" for code, count in found.codes.items())
        lines.append(f"  failed      {sum(found.codes.values()):,}" + (f": {codes}" if codes else ""))
    if found.bytes_per_row is not None:
        lines.append(f"  on disk     {found.num_bytes:,} bytes, {found.bytes_per_row:,.0f} a row")
    lines += _provenance(found)
    if found.nearest:
        lines.append(f"  nearest     among {found.num_compared:,} distinct rows:")
        lines += [f"    {pair.cosine:.4f}  {pair.first}  {pair.second}" for pair in found.nearest]
    return "\n".join(lines)


def _kind(found: Inspection) -> str:
    if found.kind == "errors":
        return f": {found.num_failed:,} rows that failed"
    return ": not finished" if found.kind == "unfinished" else ""


def _run(run: UnfinishedRun | None) -> list[str]:
    """How far a run is, and what is to be done about it."""
    if run is None:
        return []
    total = "" if run.num_rows_total is None else f" of {run.num_rows_total:,}"
    what = "failed rows are tried again" if run.is_retry else "rows are committed"
    parts = f"{len(run.records):,} part{'s' * (len(run.records) != 1)}"
    when = "" if run.last_commit is None else f", the last at {run.last_commit}"
    lines = [f"  unfinished  {run.num_rows_done:,}{total} {what}, in {parts}{when}"]
    if run.is_held:
        return [*lines, "  state       a process is writing to it now"]
    nobody = "no process is writing to it" if run.is_held is False else "whether a process is writing is not known"
    if run.is_assembled:
        return [*lines, f"  state       {nobody}; all rows are done, and the same command puts the files in place"]
    return [*lines, f"  state       {nobody}; the same command goes on at row {run.num_rows_done:,}"]


def _failures(found: Inspection) -> list[str]:
    lines = []
    for group in found.failures:
        lines.append(f"  {group.num_rows:,} {group.code}, in {group.stage}")
        lines += [f"    row {row.row:,}  {row.id}  {row.message}" for row in group.first]
        more = group.num_rows - len(group.first)
        lines += [f"    and {more:,} more"] * (more > 0)
    return lines


def _provenance(found: Inspection) -> list[str]:
    facts = found.provenance
    fingerprint, model, backend = facts["fingerprint"], facts["model"], facts["backend"]
    normalised = "normalised" if fingerprint["normalize"] else "not normalised"
    aligned = "aligned with text" if model.get("aligned_with_text") else "not aligned with text"
    shown = [name for name in ("dtype", "emit", "pool", "resize", "dedup") if fingerprint.get(name) is not None]
    settings = ", ".join(f"{name} {fingerprint[name]}" for name in shown)
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    lines = [
        f"  model       {model['name']} ({model['revision']}), weights {model['weights_sha256'][:12]}",
        f"  settings    {settings}, {normalised}, {aligned}",
    ]
    if found.asked:
        lines.append(f"  asked for   {_settings(found.asked)}")
    if found.decided:
        lines.append(f"  decided     {_settings(found.decided)}")
    if found.shard is not None:
        index, _, count = found.shard.partition("/")
        lines.append(f"  shard       {found.shard}: piece {int(index) + 1} of {count}, for `vlmembed merge`")
    computed_by = f"layers by {backend.get('runtime', 'torch')}, attention {backend['attention']}"
    lines += [
        f"  pixels      {fingerprint['pixel_policy']}; {fingerprint['resizer']}",
        f"  computed    on {backend['device']} ({backend['processor']}), {computed_by}, {versions}",
    ]
    return lines


def _settings(values: Mapping[str, object]) -> str:
    """Settings as flags, without the dashes."""
    return ", ".join(f"{name.replace('_', '-')} {_value(value)}" for name, value in values.items())


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
