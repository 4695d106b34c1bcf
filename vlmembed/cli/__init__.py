"""The command line: flags to `EncodeConfig`, errors to exit codes. The library raises, what is here translates.

One module per command.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading

import click

from vlmembed.cli.encode import encode
from vlmembed.cli.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_USAGE
from vlmembed.cli.export import export
from vlmembed.cli.inspect import inspect
from vlmembed.cli.merge import merge
from vlmembed.cli.models import models
from vlmembed.cli.plan import plan
from vlmembed.cli.run import run
from vlmembed.cli.verify import verify
from vlmembed.errors import UsageError, VlmembedError

__all__ = ["cli", "main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="vlmembed")
def cli() -> None:
    """Turn piles of images into Parquet files of vision-transformer embeddings."""


for command in (encode, run, plan, inspect, verify, merge, export, models):
    cli.add_command(command)


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
