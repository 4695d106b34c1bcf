"""What a run would do and what it would take, told from the headers of its inputs and a short trial."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from vlmembed.batch import PackCost
from vlmembed.decode import own_pillow_settings
from vlmembed.dedup import HashIndex
from vlmembed.encoder import Encoder
from vlmembed.errors import ConfigError
from vlmembed.forecast.estimate import alone_shares, run_seconds, stage_seconds
from vlmembed.forecast.output_size import measure_output
from vlmembed.forecast.prediction import NOT_FORESEEN, Calibration, ExpectedFailure, Forecast
from vlmembed.forecast.sampling import random_rows, spread_rows
from vlmembed.forecast.survey import Survey, look
from vlmembed.forecast.trial import Trial
from vlmembed.mirror.remoterun import is_remote
from vlmembed.output import OutputPaths
from vlmembed.packer import LOOKAHEAD_PACKS
from vlmembed.planning import Earlier, make_plan
from vlmembed.sources import open_source
from vlmembed.sources.glance import Glance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from vlmembed.config import EncodeConfig
    from vlmembed.forecast.output_size import OutputSize
    from vlmembed.forecast.trial import Timings
    from vlmembed.planning import Plan
    from vlmembed.types import EncodedImage

__all__ = ["DEFAULT_CALIBRATION_SECONDS", "Forecast", "plan"]

DEFAULT_CALIBRATION_SECONDS = 10.0


def plan(
    config: EncodeConfig,
    *,
    hash_contents: bool = False,
    num_sampled: int | None = None,
    seed: int = 0,
    calibration_seconds: float = DEFAULT_CALIBRATION_SECONDS,
) -> Forecast:
    """Look at the headers of all rows, or of `num_sampled` random ones, and calibrate for about so many seconds.

    Nothing is written; ``config.output`` may be empty. Files and URLs are read no further than their headers; rows of
    tables and members of archives come whole. `hash_contents` reads everything whole, and finds duplicates by bytes
    (those by pixels alone only a run can find). What is not foreseen stands in `Forecast.not_foreseen`.

    The calibration reads, decodes and encodes rows from all over the input (of tars, from its front), all at the same
    time, as in a run. 0 seconds leave it out: the time is then not told, and the output's size without compression.

    Raises:
        UsageError: a setting or an input must be changed. ModelError: the model is not there.
    """
    if hash_contents and config.dedup == "none":
        msg = "duplicates are asked for, and --dedup none embeds each of them: leave --hash or --dedup none out"
        raise ConfigError(msg)
    _check(hash_contents=hash_contents, num_sampled=num_sampled, calibration_seconds=calibration_seconds)
    began = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(own_pillow_settings(config.max_source_pixels))
        glance = Glance(look=partial(look, max_source_pixels=config.max_source_pixels), is_on=not hash_contents)
        paths = _paths(config)
        own_output = paths.all() if config.output else ()
        source = stack.enter_context(closing(open_source(config, own_output, glance=glance)))
        decided, _ = make_plan(replace(config, retry_failed=False), paths, source, Earlier(output=None, partial=None))
        stack.enter_context(closing(decided.encoder))
        setup_seconds = time.perf_counter() - began
        index = None
        if hash_contents:
            folder = stack.enter_context(TemporaryDirectory())
            index = stack.enter_context(HashIndex(Path(folder) / "index.sqlite"))
        scan = _Scan.of(decided, index, num_sampled=num_sampled, seed=seed)
        glance.is_on = False
        trial = None
        if calibration_seconds and scan.survey.packing.num_images:
            trial = Trial(decided, scan.cost, calibration_seconds)
            trial.run(scan.trial_rows())
        size = measure_output(decided, trial.kept if trial is not None else ())
        forecast = scan.forecast(size, setup_seconds=setup_seconds, is_hashed=hash_contents)
        return forecast if trial is None else scan.timed(forecast, trial.timings, size)


def _check(*, hash_contents: bool, num_sampled: int | None, calibration_seconds: float) -> None:
    if num_sampled is not None and num_sampled < 1:
        msg = f"the sample has {num_sampled} rows; it must be 1 or more"
        raise ConfigError(msg)
    if num_sampled is not None and hash_contents:
        msg = "duplicates are found among all rows, and a sample leaves most of them out: give --hash or --sample"
        raise ConfigError(msg)
    if not 0 <= calibration_seconds < float("inf"):
        msg = f"the calibration is to take {calibration_seconds} seconds; it must be 0 (none) or more"
        raise ConfigError(msg)


def _paths(config: EncodeConfig) -> OutputPaths:
    """Where the run would write, as far as that matters: what is there is not looked at."""
    if config.output and not is_remote(config.output):
        return OutputPaths.of(config.output)
    return OutputPaths(output=Path("out.parquet"), is_folder=str(config.output).endswith("/"))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Scan:
    """A survey of a source, and what it took.

    Attributes:
        num_rows: of the source. read_seconds: waiting for the rows that were looked at.
        is_counted: the rows are counted only by reading them.
    """

    plan: Plan
    cost: PackCost
    survey: Survey
    num_rows: int
    read_seconds: float
    is_counted: bool

    @classmethod
    def of(cls, plan: Plan, index: HashIndex | None, *, num_sampled: int | None, seed: int) -> Self:
        """Look at the rows.

        Raises:
            ConfigError: there can be no sample of what is read from front to back.
        """
        encoder = plan.encoder
        cost = encoder.tower.cost if isinstance(encoder, Encoder) else PackCost(per_token=1.0, per_pair=0.0)
        survey, num_rows = Survey(plan, cost, index), plan.num_rows
        if num_sampled is None:
            images = _from_the_front(plan)
        elif num_rows is None:
            msg = "--sample needs rows that can be read in any order, and a tar is read from its front: leave it out"
            raise ConfigError(msg)
        else:
            images = plan.source.read_rows(random_rows(num_rows, num_sampled, seed))
        seconds = 0.0

        def waited_for() -> Iterator[EncodedImage]:
            nonlocal seconds
            while True:
                began = time.perf_counter()
                image = next(images, None)
                seconds += time.perf_counter() - began
                if image is None:
                    return
                yield image

        if num_sampled is None or num_rows is None or num_sampled >= num_rows:
            survey.take(waited_for())
        else:
            survey.take_sample(waited_for(), num_rows)
        return cls(
            plan=plan,
            cost=cost,
            survey=survey,
            num_rows=survey.num_rows if num_rows is None else num_rows,
            read_seconds=seconds,
            is_counted=num_rows is None,
        )

    @property
    def scale(self) -> float:
        """Rows of the source for each that was looked at."""
        return self.num_rows / self.survey.num_rows if self.survey.num_rows else 1.0

    def scaled(self, number: float) -> int:
        """A number of the rows that were looked at, for all."""
        return round(number * self.scale)

    def trial_rows(self) -> Iterator[EncodedImage]:
        """Rows from all over the input, where they can be had."""
        if self.is_counted:
            return _from_the_front(self.plan)
        return chain.from_iterable(self.plan.source.read_rows(rows) for rows in spread_rows(self.num_rows))

    def forecast(self, size: OutputSize, *, setup_seconds: float, is_hashed: bool) -> Forecast:
        """All but the time."""
        survey, plan = self.survey, self.plan
        troubles = sorted(survey.troubles.items(), key=lambda pair: -pair[1].num_rows)
        failures = tuple(
            ExpectedFailure(code=code, num_rows=self.scaled(trouble.num_rows), examples=tuple(trouble.examples))
            for code, trouble in troubles
        )
        num_failed = sum(failure.num_rows for failure in failures)
        num_duplicates = survey.num_duplicates if is_hashed else None
        is_tokens = plan.vectors[0].per_token
        assert plan.config.max_tokens_per_batch is not None
        return Forecast(
            model=str(plan.config.model),
            device=plan.config.device,
            dtype=plan.config.dtype,
            num_rows=self.num_rows,
            num_looked_at=survey.num_rows,
            num_embedded=self.num_rows - num_failed - (num_duplicates or 0),
            num_duplicates=num_duplicates,
            num_failed=num_failed,
            num_bytes=self.scaled(survey.num_bytes),
            formats={name: self.scaled(number) for name, number in survey.formats.most_common()},
            skipped=dict(plan.source.skipped),
            failures=failures,
            widths=survey.widths.summary(self.scale),
            heights=survey.heights.summary(self.scale),
            pixels=survey.pixels.summary(self.scale),
            tokens=survey.tokens.summary(self.scale),
            token_bins=survey.tokens.bins(self.scale),
            num_stored_tokens=self.scaled(survey.volume.num_merged) if is_tokens else None,
            num_packs=self.scaled(survey.num_packs),
            max_tokens_per_batch=plan.config.max_tokens_per_batch,
            packing_efficiency=survey.packing.efficiency,
            output_bytes=self._output_bytes(size),
            setup_seconds=setup_seconds,
            not_foreseen=(*self._not_foreseen(is_hashed=is_hashed), *NOT_FORESEEN),
        )

    def _output_bytes(self, size: OutputSize) -> int:
        plan = self.plan
        if not self.survey.volume.num_rows:
            return 0
        assert plan.config.rows_per_part is not None
        num_files = -(-self.num_rows // plan.config.rows_per_part) if plan.paths.is_folder else 1
        return size.of(self.survey.volume.num_bytes(plan.vectors) * self.scale, num_files)

    def _not_foreseen(self, *, is_hashed: bool) -> Iterator[str]:
        if not is_hashed and self.plan.config.dedup != "none":
            yield "duplicates: every row counts as a picture of its own (--hash finds those with the same bytes)"
        elif is_hashed and self.plan.config.dedup == "pixels":
            yield "duplicates that have the same pixels in other bytes, which only decoding finds"
        if self.plan.config.on_ray:
            yield "a cluster: the time is this machine's, alone"

    def timed(self, forecast: Forecast, timings: Timings, size: OutputSize) -> Forecast:
        """With the time, as it follows from a trial; without, where the trial has encoded nothing."""
        if not timings.num_images:
            return forecast
        config = self.plan.config
        assert config.workers is not None
        stages = stage_seconds(self.survey, timings, num_workers=config.workers, scan_seconds=self.read_seconds)
        stages = {name: seconds * self.scale for name, seconds in stages.items()}
        held_tokens = (1 if config.deterministic else LOOKAHEAD_PACKS + 1) * forecast.max_tokens_per_batch
        held_share = min(1.0, held_tokens / max(1, forecast.tokens.total))
        seconds = run_seconds(stages, alone_shares(timings), held_share=held_share)
        if not self.plan.paths.is_folder:  # the parts are put together at the end
            seconds += size.seconds_per_byte * forecast.output_bytes
        slowest = max(stages, key=lambda name: stages[name])
        calibration = Calibration(num_images=timings.num_images, seconds=timings.seconds, stage_seconds=stages)
        return replace(forecast, seconds=seconds, slowest_stage=slowest, calibration=calibration)


def _from_the_front(plan: Plan) -> Iterator[EncodedImage]:
    return islice(plan.source.read(0), plan.end_row)
