"""`vlmembed plan`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vlmembed.cli.exits import EXIT_FAILED
from vlmembed.cli.options import config_options, set_up_logging
from vlmembed.config import EncodeConfig
from vlmembed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlmembed.forecast.histogram import Bin, Summary
    from vlmembed.forecast.prediction import Forecast

WIDEST_BAR = 60


@click.command()
@click.argument("inputs", nargs=-1, metavar="[INPUT...]")
@click.option("--recipe", help="Plan the run of this recipe, in place of INPUT... and flags.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="With --recipe: a setting over the recipe's.")
@click.option("--hash", "hash_contents", is_flag=True, help="Read files whole, and find duplicates by their bytes.")
@click.option("--sample", "num_sampled", type=int, help="Look at so many random rows, and scale up from them.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sample.")
@click.option(
    "--calibrate",
    "calibration_seconds",
    type=float,
    default=10.0,
    show_default=True,
    help="Seconds of a trial run, for the time and the size; 0 leaves it out.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@config_options
@click.option("-v", "--verbose", is_flag=True, help="Log more on stderr.")
@click.pass_context
def plan(
    context: click.Context,
    /,
    *,
    inputs: tuple[str, ...],
    recipe: str | None,
    sets: tuple[str, ...],
    verbose: bool,
    as_json: bool,
    **settings: Any,  # noqa: ANN401
) -> None:
    """Tell what `encode` would do with INPUT..., by their headers: counts, sizes, tokens, failures, time and output.

    Takes the flags of encode. Nothing is written. Only headers are read, so damage behind them is not foreseen.
    """
    set_up_logging(verbose=verbose)
    own = {name: settings.pop(name) for name in ("hash_contents", "num_sampled", "seed", "calibration_seconds")}
    config = _config(context, inputs, recipe, sets, settings)
    if sys.stderr.isatty():
        click.echo(f"loading {config.model}, looking at the inputs ...", err=True)
    from vlmembed.forecast.scan import plan as run_plan  # noqa: PLC0415  loads torch

    forecast = run_plan(config, **own)
    click.echo(json.dumps(forecast.to_dict()) if as_json else describe_forecast(forecast))
    if not forecast.num_embedded:
        click.echo("vlmembed: not one row could be embedded", err=True)
        sys.exit(EXIT_FAILED)


def _config(
    context: click.Context, inputs: tuple[str, ...], recipe: str | None, sets: tuple[str, ...], settings: dict[str, Any]
) -> EncodeConfig:
    """Of the flags, or of a recipe.

    Raises:
        ConfigError: neither is there, or both.
    """
    if recipe is None:
        if sets:
            msg = "--set changes a recipe's settings: give --recipe FILE, or the setting's own flag"
            raise ConfigError(msg)
        if recipes := [name for name in inputs if name.endswith(".toml") and Path(name).is_file()]:
            msg = f"{recipes[0]} is a recipe, and no picture: give --recipe {recipes[0]}"
            raise ConfigError(msg)
        return EncodeConfig(inputs=inputs, **settings)
    from vlmembed.recipes import load_recipe  # noqa: PLC0415  keeps `--help` light

    given = [name for name in settings if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    if inputs or given:
        what = "INPUT..." if inputs else f"--{given[0].replace('_', '-')}"
        msg = f"--recipe has inputs and settings of its own: leave {what} out, or give it as --set KEY=VALUE"
        raise ConfigError(msg)
    return load_recipe(recipe, sets)


def describe_forecast(forecast: Forecast) -> str:
    """What is foreseen, for a person."""
    about = "about " if forecast.is_sampled else ""
    lines = [f"{about}{line}" if label in _COUNTED else line for label, line in _facts(forecast)]
    labels = [label for label, _ in _facts(forecast)]
    shown = [f"{label:<12}{line}".rstrip() for label, line in zip(labels, lines, strict=True)]
    return "\n".join([*shown, *_histogram(forecast.token_bins)])


_COUNTED = ("formats", "tokens", "failing", "packs", "stored")
"""What a sample can only estimate."""


def _facts(forecast: Forecast) -> Iterator[tuple[str, str]]:
    """Labels and what stands behind them."""
    yield "rows", _rows(forecast)
    if forecast.is_sampled:
        yield "looked at", f"{forecast.num_looked_at:,} of them, at random: what follows is scaled up"
    formats = ", ".join(f"{count:,} {name}" for name, count in forecast.formats.items()) or "none that can be told"
    yield "formats", f"{formats}; {_bytes(forecast.num_bytes)} in all"
    if forecast.skipped:
        yield "skipped", ", ".join(f"{count:,} {kind}" for kind, count in forecast.skipped.items())
    if forecast.tokens.total:
        yield "width", f"{_spread(forecast.widths)} pixels"
        yield "height", f"{_spread(forecast.heights)} pixels"
        yield "area", f"{_spread(forecast.pixels)} pixels"
        tokens = forecast.tokens
        yield "tokens", f"{tokens.total:,} in all; {_spread(tokens)}, mean {tokens.mean:,.1f} a picture"
    if forecast.num_stored_tokens is not None:
        yield "stored", f"{forecast.num_stored_tokens:,} tokens"
    for failure in forecast.failures:
        yield "failing", f"{failure.num_rows:,} {failure.code}"
        for key, message in failure.examples:
            yield "", f"  {key}: {message}"
    if forecast.num_embedded:
        efficiency = f"packing efficiency {forecast.packing_efficiency:.1%}"
        yield "packs", f"{forecast.num_packs:,} of up to {forecast.max_tokens_per_batch:,} tokens, {efficiency}"
        without = "" if forecast.calibration is not None else ", before compression"
        yield "output", f"about {_bytes(forecast.output_bytes)}{without}"
        yield from _time(forecast)
    for position, what in enumerate(forecast.not_foreseen):
        yield ("" if position else "unforeseen"), what


def _rows(forecast: Forecast) -> str:
    about = "about " if forecast.is_sampled else ""
    parts = [f"{about}{forecast.num_embedded:,} to embed"]
    if forecast.num_duplicates is not None:
        parts.append(f"{forecast.num_duplicates:,} duplicates")
    return f"{forecast.num_rows:,} = {' + '.join(parts)} + {forecast.num_failed:,} that will fail"


def _time(forecast: Forecast) -> Iterator[tuple[str, str]]:
    rate, calibration = forecast.images_per_second, forecast.calibration
    if forecast.seconds is None or rate is None or calibration is None:
        yield "time", "not estimated without a calibration"
        return
    set_up = f"{_duration(forecast.setup_seconds)} set-up"
    yield "time", f"about {_duration(forecast.seconds)} + {set_up} on {forecast.device}: {rate:,.1f} images/s"
    stages = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in calibration.stage_seconds.items())
    yield "slowest", f"{forecast.slowest_stage}; each stage by itself: {stages}"
    yield "calibrated", f"with {calibration.num_images:,} pictures in {calibration.seconds:.1f} s"


def _spread(numbers: Summary) -> str:
    if numbers.min == numbers.max:
        return f"{numbers.min:,}"
    return f"{numbers.min:,} to {numbers.max:,}, median {numbers.median:,}"


def _bytes(number: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if number < 1000 or unit == "TB":  # noqa: PLR2004  the units' own step
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.3g} {unit}"
        number /= 1000
    raise AssertionError


def _duration(seconds: float) -> str:
    """As people say it: two units at most."""
    if seconds < 60:  # noqa: PLR2004  a minute
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 60:  # noqa: PLR2004  an hour
        return f"{int(seconds // 60)} min {int(seconds % 60)} s" if seconds < 600 else f"{minutes} min"  # noqa: PLR2004
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"  # noqa: PLR2004  a day


def _histogram(bins: tuple[Bin, ...]) -> Iterator[str]:
    """One bar a line, as wide as the terminal allows."""
    if not bins:
        return
    block = "█" if "utf" in (getattr(sys.stdout, "encoding", None) or "").lower() else "#"
    labels = [f"{each.first:,}-{each.last:,}" if each.last > each.first else f"{each.first:,}" for each in bins]
    counts = [f"{each.count:,}" for each in bins]
    label_width, most = max(map(len, labels)), max(each.count for each in bins)
    room = shutil.get_terminal_size().columns - label_width - max(map(len, counts)) - 4
    widest = max(1, min(WIDEST_BAR, room))
    yield "tokens a picture"
    for label, each, count in zip(labels, bins, counts, strict=True):
        length = max(1, round(widest * each.count / most)) if each.count else 0
        bar = block * length
        yield f"  {label:>{label_width}} {bar}{' ' if bar else ''}{count}"
