"""`vlmembed encode`."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import click

from vlmembed.cli.eventlog import event_log
from vlmembed.cli.exits import EXIT_FAILED, EXIT_TOO_MANY_ERRORS
from vlmembed.cli.options import config_options, set_up_logging
from vlmembed.config import EncodeConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vlmembed.report import RunReport


LAST_LINE_SECONDS = 5.0


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Flags of the commands that run. They change nothing in an output, so they are no settings."""
    for option in (
        click.option("-v", "--verbose", is_flag=True, help="Log more on stderr."),
        click.option("--no-progress", is_flag=True, help="No bar, also on a terminal."),
        click.option("--log-json", metavar="FILE", help="Append an event per committed part, a line of JSON each."),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.argument("output")
@config_options
@run_options
def encode(
    *,
    no_progress: bool,
    verbose: bool,
    log_json: str | None,
    **settings: Any,  # noqa: ANN401
) -> None:
    """Embed the pictures of INPUT... into the Parquet file OUTPUT (or a folder, OUTPUT/, or a Lance dataset, x.lance).

    INPUT is a folder, picture, pattern, Parquet file, tar, zip, Hugging Face or Lance dataset, a list of paths or URLs
    (.txt, .csv, .jsonl), or - for a list on standard input; on disk, or behind s3://, gs://, https://, hf://.

    Rows that fail go to OUTPUT's .errors.parquet. An interrupted run goes on when the same command is given again.
    """
    set_up_logging(verbose=verbose)
    run_to_exit(EncodeConfig(**settings), progress=not no_progress, log_json=log_json)


def run_to_exit(config: EncodeConfig, *, progress: bool, log_json: str | None) -> None:
    """Run and print the summary; exit where too many rows failed. What ends the run otherwise is raised.

    `progress` allows a bar, which only a terminal gets. `log_json` is the file for events.
    """
    is_shown = progress and sys.stderr.isatty()
    with event_log(log_json, config) as log:
        if is_shown:
            click.echo(f"listing the inputs, loading {config.model} ...", err=True)
        from vlmembed.run import encode as run_encode  # noqa: PLC0415  loads torch

        def hung() -> None:
            last_line = threading.Thread(target=log.failed, daemon=True)  # the log may be what hangs
            last_line.start()
            last_line.join(LAST_LINE_SECONDS)
            os._exit(EXIT_FAILED)

        report = run_encode(config, progress=is_shown, hung=hung, on_event=log.write)
        click.echo(describe_report(report))
    if report.exceeds(config.max_error_rate):
        click.echo(
            f"{report.failed_share:.1%} of the rows failed, more than --max-error-rate {config.max_error_rate:.1%}: "
            f"exit code {EXIT_TOO_MANY_ERRORS}",
            err=True,
        )
        sys.exit(EXIT_TOO_MANY_ERRORS)


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
