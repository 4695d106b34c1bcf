"""`vlmembed.encode`, `stream` and `plan`, for callers in Python: a config, or its settings as keyword arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from vlmembed.errors import ConfigError
from vlmembed.forecast.scan import DEFAULT_CALIBRATION_SECONDS
from vlmembed.forecast.scan import plan as run_plan
from vlmembed.keywords import make_config
from vlmembed.run import encode as run_encode
from vlmembed.streaming.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Unpack

    from vlmembed.config import EncodeConfig
    from vlmembed.events import Event
    from vlmembed.forecast.prediction import Forecast
    from vlmembed.keywords import Name, Settings
    from vlmembed.report import RunReport

_PLAN_FLAGS = {"hash": "hash_contents", "sample": "num_sampled", "calibrate": "calibration_seconds"}
"""Of the command, and what they are called here."""


@overload
def encode(
    config: EncodeConfig, /, *, progress: bool = ..., on_event: Callable[[Event], None] | None = ...
) -> RunReport: ...


@overload
def encode(
    inputs: Name | Sequence[Name],
    output: Name,
    *,
    progress: bool = ...,
    on_event: Callable[[Event], None] | None = ...,
    **settings: Unpack[Settings],
) -> RunReport: ...


def encode(
    inputs: EncodeConfig | Name | Sequence[Name],
    output: Name | None = None,
    *,
    progress: bool = False,
    on_event: Callable[[Event], None] | None = None,
    **settings: Any,
) -> RunReport:
    """Embed every picture of `inputs` into `output`; go on where an earlier start stopped.

        vlmembed.encode("images", "out.parquet", model="facebook/dinov2-base", max_pixels=224 * 224)

    `inputs` is one folder, picture, pattern, Parquet file, archive, dataset or list, or several; `output` a file like
    ``out.parquet``, a folder like ``out/``, or a Lance dataset like ``out.lance``. `settings` are the other fields of
    `EncodeConfig`, which documents them with their units. An `EncodeConfig` alone stands for all of these.

    `progress` draws a bar on stderr. `on_event` gets a dict of plain values (see `vlmembed.events`) when the work
    begins, with every part that is committed, and at the end; it is called from different threads, never twice at a
    time, and the run waits for it.

    Returns:
        What the run did. The vectors are in the output: one row per picture that has an embedding, in input order, D
        values each.

    Raises:
        ConfigError: an unknown setting, or a value that cannot be. InputError, OutputError: an input or the output must
            be changed. All are UsageErrors, and nothing was written.
        RunError: the run stopped (ModelError, StorageError, NothingEmbeddedError, …). What it had committed stays in
            ``OUTPUT.partial`` and is used by the next start.
    """
    return run_encode(make_config(inputs, output, settings), progress=progress, on_event=on_event)


@overload
def stream(config: EncodeConfig, /) -> Stream: ...


@overload
def stream(inputs: Name | Sequence[Name], **settings: Unpack[Settings]) -> Stream: ...


def stream(inputs: EncodeConfig | Name | Sequence[Name], **settings: Any) -> Stream:
    """Embed every picture of `inputs`, and yield the rows as Arrow record batches, in input order; no file is written.

        with vlmembed.stream("images") as stream:
            for batch in stream:
                vectors = batch["embedding"].flatten().to_numpy().reshape(len(batch), -1)  # (rows, D)

    A batch has the columns of an output file, and the rows of `rows_per_part` input rows that have vectors; by default
    256 on the CPU and 2048 on a GPU (fewer of tokens). With the same `rows_per_part` the vectors are those that
    `encode` writes, byte for byte. Rows that failed are in `Stream.errors`.

    The run works ahead in threads by about two batches and then waits for its caller. It is over when the stream is
    read to its end, closed, left as a context, or let go of.

    Duplicates are found as in `encode`, but among the last contents alone: as many as 256 MiB of vectors hold, and a
    part's at least. A picture that comes again after that is encoded again, as a first row.

    While a stream is open, Pillow's global limits are the run's: truncated files fail, `max_source_pixels` counts.

    Nothing is written but to `cache`, where one is asked for, and the list of the inputs that some sources keep in the
    temporary folder. Settings about files (`format`, `overwrite`, `work_dir`, `retry_failed`, `reuse`) and
    a cluster (`engine`) are refused.

    Raises:
        ConfigError: an unknown setting, a value that cannot be, or a setting about files. InputError: an input must be
            changed. ModelError, …: the model could not be loaded.
        RunError: from the iteration, not from this call: the run stopped, or (NothingEmbeddedError) has ended without a
            single embedding.
    """
    return Stream.open(make_config(inputs, None, settings))


@overload
def plan(
    config: EncodeConfig,
    /,
    *,
    hash_contents: bool = ...,
    num_sampled: int | None = ...,
    seed: int = ...,
    calibration_seconds: float = ...,
) -> Forecast: ...


@overload
def plan(
    inputs: Name | Sequence[Name],
    *,
    hash_contents: bool = ...,
    num_sampled: int | None = ...,
    seed: int = ...,
    calibration_seconds: float = ...,
    **settings: Unpack[Settings],
) -> Forecast: ...


def plan(
    inputs: EncodeConfig | Name | Sequence[Name],
    *,
    hash_contents: bool = False,
    num_sampled: int | None = None,
    seed: int = 0,
    calibration_seconds: float = DEFAULT_CALIBRATION_SECONDS,
    **settings: Any,
) -> Forecast:
    """Tell what `encode` would do with `inputs`, and about what it would take; nothing is written.

    Of files and URLs only the headers are read, of all rows or of `num_sampled` random ones (by `seed`); rows of tables
    and members of archives come whole. `hash_contents` reads everything whole, and finds duplicates by bytes (those by
    pixels alone only a run can find). For `calibration_seconds` rows from all over the input (of tars, from its front)
    are read, decoded and encoded, all at the same time, as in a run; 0 leaves it out, and the time is then not told,
    and the output's size without compression.

    Returns:
        Counts, sizes in pixels and bytes, tokens, seconds; what is not foreseen stands in `Forecast.not_foreseen`.

    Raises:
        UsageError: a setting or an input must be changed. ModelError: the model is not there.
    """
    for flag, name in _PLAN_FLAGS.items():
        if flag in settings:
            msg = f"unknown setting {flag!r}: it is {name} in Python"
            raise ConfigError(msg)
    return run_plan(
        make_config(inputs, None, settings),
        hash_contents=hash_contents,
        num_sampled=num_sampled,
        seed=seed,
        calibration_seconds=calibration_seconds,
    )
