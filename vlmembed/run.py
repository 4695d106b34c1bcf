"""A run from its config to its report: decide what is `auto`, find what exists, run the pipeline, finish the files."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlmembed.config import EncodeConfig
from vlmembed.decode import PIXEL_POLICY, own_pillow_settings
from vlmembed.dedup import HashIndex
from vlmembed.encoder import Encoder, pick_device, pick_dtype
from vlmembed.errors import ConfigError, InputError, ModelError, NothingEmbeddedError, OutputError, RowFailedError
from vlmembed.layout import ResizeRule
from vlmembed.output import OutputPaths, lock, read_manifest, write_manifest
from vlmembed.parts import PartStore, read_records
from vlmembed.pipeline import Pipeline
from vlmembed.preprocess import RESIZER
from vlmembed.progress import ProgressBar, StageClock
from vlmembed.provenance import difference, make_fingerprint, make_provenance
from vlmembed.report import RunReport
from vlmembed.schema import output_schema, read_provenance
from vlmembed.sources import open_source
from vlmembed.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from vlmembed.layout import TowerLayout
    from vlmembed.sources.base import Source

logger = logging.getLogger(__name__)

PACK_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Aim of the token budget by device type; rounded up to whole images. On a CPU larger packs fall out of the cache."""

ROWS_PER_PART = {"cpu": 1024, "cuda": 8192}
"""Input rows committed together by device type: about a minute or two of work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Earlier:
    """The provenance of what lies at the output: a finished file, the parts of an unfinished run, either or neither."""

    output: dict[str, Any] | None
    partial: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Plan:
    """A run with everything decided. `config` has no ``auto`` left."""

    config: EncodeConfig
    paths: OutputPaths
    source: Source
    encoder: Encoder
    rule: ResizeRule
    num_rows: int
    schema: pa.Schema
    facts: dict[str, Any]


def encode(config: EncodeConfig, *, progress: bool = False) -> RunReport:
    """Embed every image of ``config.inputs`` into ``config.output``; go on where an earlier start stopped.

    `progress` draws a bar on stderr.

    Raises:
        UsageError: a setting, an input or the output must be changed; nothing was written.
        RunError: the run stopped. What it had committed stays in ``OUTPUT.partial`` and is used by the next start.
    """
    began = time.perf_counter()
    paths = OutputPaths.of(config.output)
    with ExitStack() as stack:
        source = stack.enter_context(closing(open_source(config, paths.all())))
        logger.info("%d rows listed in %.1f s", source.num_rows, time.perf_counter() - began)
        earlier = _find_earlier(paths, overwrite=config.overwrite)
        plan, same = _make_plan(config, paths, source, earlier)
        logger.info("%s loaded on %s, %s", config.model, plan.config.device, plan.config.dtype)
        if same and earlier.output is not None:
            _drop_leftovers(paths, earlier)
            report = RunReport.from_provenance(paths, earlier.output)
            _check_failures(plan.config, report.num_failed)
            return report
        stack.enter_context(lock(paths.partial))
        if _find_earlier(paths, overwrite=config.overwrite) != earlier:
            msg = f"another process has just written to {paths.output}: run the command again to see what it left"
            raise OutputError(msg)
        if not same:
            write_manifest(paths.partial, plan.facts)
        return _run(plan, began=began, progress=progress)


def _find_earlier(paths: OutputPaths, *, overwrite: bool) -> _Earlier:
    """What lies at the output. Under `overwrite` a finished file does not matter, whoever wrote it.

    Raises:
        OutputError: a file of another kind is in the way.
    """
    manifest = read_manifest(paths.partial, ignore_damage=overwrite)
    partial = manifest if read_records(paths.partial) else None  # a run that committed nothing binds nobody
    output = None
    if not overwrite:
        for path in (paths.errors, paths.output):
            if path.exists():
                output = _provenance_of(path)
        if not paths.output.exists():
            output = None  # errors alone: a run in which nothing was embedded, to be tried again
    return _Earlier(output=output, partial=partial)


def _provenance_of(path: Path) -> dict[str, Any]:
    try:
        return read_provenance(pq.read_schema(path), str(path))
    except (OSError, pa.ArrowException, InputError) as error:
        msg = f"{path} exists and is no output of vlmembed ({error}): choose another name, or --overwrite"
        raise OutputError(msg) from error


def _drop_leftovers(paths: OutputPaths, earlier: _Earlier) -> None:
    """Remove the parts of a run that was killed after its output was finished."""
    assert earlier.output is not None
    manifest = read_manifest(paths.partial)
    if manifest is not None and manifest["fingerprint"] == earlier.output["fingerprint"]:
        with lock(paths.partial):
            PartStore.drop(paths.partial)


def _make_plan(config: EncodeConfig, paths: OutputPaths, source: Source, earlier: _Earlier) -> tuple[_Plan, bool]:
    """Decide every ``auto``; tell whether what lies at the output is of this very run.

    What an earlier start of the same run decided is kept, except device and workers.

    Raises:
        OutputError: it is of another run, and may not be replaced.
    """
    device = pick_device(config.device)
    before = earlier.output or earlier.partial
    inherited = EncodeConfig.from_toml(before["recipe"]) if before else None
    keep = before is not None and config.dtype == "auto" and "dtype" in before["decided"]
    dtype = inherited.dtype if inherited and keep else pick_dtype(config.dtype, device)
    decided = replace(config, device=str(device), dtype=dtype)
    encoder = Encoder.load(decided)
    mode = "native" if config.resize == "auto" else config.resize
    rule = _resize_rule(config, mode, encoder.layout)
    schema = output_schema(encoder.width, source.kept_schema)
    num_rows = min(source.num_rows, config.limit or source.num_rows)
    fingerprint = _fingerprint(decided, encoder, rule, source, num_rows)
    lines = difference(before["fingerprint"], fingerprint) if before else []
    if lines and config.overwrite:
        return _make_plan(config, paths, source, _Earlier(output=None, partial=None))
    if lines:
        _refuse(paths.output if earlier.output else paths.partial, lines)
    if inherited is not None:  # the parts on disk fix their own shape
        decided = replace(
            decided,
            max_tokens_per_batch=config.max_tokens_per_batch or inherited.max_tokens_per_batch,
            rows_per_part=config.rows_per_part or inherited.rows_per_part,
        )
        shapes = [{key: getattr(each, key) for key in _SHAPE} for each in (inherited, decided)]
        if earlier.output is None and (lines := difference(*shapes)):
            if config.overwrite:
                return _make_plan(config, paths, source, _Earlier(output=None, partial=None))
            _refuse(paths.partial, lines)
    decided = _decide_sizes(decided, encoder, rule, device.type)
    facts = make_provenance(config, decided, fingerprint, model=encoder.identity, backend=encoder.backend)
    plan = _Plan(
        config=decided,
        paths=paths,
        source=source,
        encoder=encoder,
        rule=rule,
        num_rows=num_rows,
        schema=schema,
        facts=facts,
    )
    return plan, before is not None


_SHAPE = ("rows_per_part", "max_tokens_per_batch")


def _refuse(where: Path, lines: list[str]) -> None:
    shown = "\n  ".join(lines)
    msg = f"{where} belongs to another run:\n  {shown}\nchoose another output, or start anew with --overwrite"
    raise OutputError(msg)


def _fingerprint(
    config: EncodeConfig, encoder: Encoder, rule: ResizeRule, source: Source, num_rows: int
) -> dict[str, Any]:
    return make_fingerprint(
        config,
        model={"weights_sha256": encoder.weights_sha256, "config_sha256": encoder.config_sha256},
        preprocessing={**rule.describe(), "pixel_policy": PIXEL_POLICY, "resizer": RESIZER},
        pool=encoder.pool,
        source_sha256=source.digest,
        num_rows=num_rows,
    )


def _decide_sizes(config: EncodeConfig, encoder: Encoder, rule: ResizeRule, device_type: str) -> EncodeConfig:
    """Token budget, part size and threads.

    Raises:
        ConfigError: a budget that one image could exceed.
    """
    tokens = rule.max_tokens_per_image
    budget = config.max_tokens_per_batch or tokens * -(-PACK_TOKENS[device_type] // tokens)
    if budget < tokens:
        msg = (
            f"max_tokens_per_batch is {budget}, and one image can have {tokens} tokens: "
            f"raise --max-tokens-per-batch to {tokens} or more, or lower --max-pixels"
        )
        raise ConfigError(msg)
    native = rule.mode == "native"
    return replace(
        config,
        pool=encoder.pool,
        resize=rule.mode,
        min_pixels=rule.min_pixels if native else None,
        max_pixels=rule.max_pixels if native else None,
        max_tokens_per_batch=budget,
        rows_per_part=config.rows_per_part or ROWS_PER_PART[device_type],
        workers=config.workers or _auto_workers(device_type),
    )


def _resize_rule(config: EncodeConfig, mode: str, layout: TowerLayout) -> ResizeRule:
    """A limit that is given moves the other one with it; none given means the area that the tower was made for."""
    if mode == "official" and (config.min_pixels or config.max_pixels):
        msg = "--min-pixels and --max-pixels belong to --resize native; --resize official has the model's own size"
        raise ConfigError(msg)
    if mode == "official" and layout.official is None:
        msg = f"--resize official is not possible with this model: {layout.official_problem}; use --resize native"
        raise ModelError(msg)
    max_pixels = config.max_pixels or max(layout.native_pixels, config.min_pixels or 0)
    return ResizeRule(
        mode=mode,
        layout=layout,
        min_pixels=config.min_pixels or max_pixels,
        max_pixels=max_pixels,
        max_source_pixels=config.max_source_pixels,
    )


def _auto_workers(device_type: str) -> int:
    """Decoding threads: on a CPU the model needs the cores, beside a GPU the decoders do."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, cores // 4) if device_type == "cpu" else max(1, cores - 1)


def _check_failures(config: EncodeConfig, num_failed: int) -> None:
    """Under ``on_error="fail"`` the failures of an earlier start count too."""
    if config.on_error == "fail" and num_failed:
        msg = f"{num_failed} rows failed in an earlier start, and on_error is fail: see them with --on-error skip"
        raise RowFailedError(msg)


def _run(plan: _Plan, *, began: float, progress: bool) -> RunReport:
    assert plan.config.rows_per_part is not None
    store = PartStore(plan.paths, plan.schema, rows_per_part=plan.config.rows_per_part)
    start = store.next_row
    _check_failures(plan.config, sum(record.num_failed for record in store.records))
    if start:
        logger.info("going on at row %d", start)
    ready = time.perf_counter()
    pipeline, writer = _run_pipeline(plan, store, progress=progress)
    counts = writer.finish(pipeline.num_rows_read)
    codes = store.codes()
    plan.facts["counts"] = {
        "rows": plan.num_rows,
        **counts,
        "codes": dict(codes),
        "skipped": dict(plan.source.skipped),
    }
    store.assemble(plan.facts)
    if not counts["embedded"]:
        shown = ", ".join(f"{count} {code}" for code, count in codes.most_common())
        msg = f"not one of {plan.num_rows} rows has an embedding ({shown}); the reasons are in {plan.paths.errors}"
        raise NothingEmbeddedError(msg)
    seconds = time.perf_counter() - ready
    stage, share = pipeline.clock.busiest(pipeline.stage_threads, seconds)
    return replace(
        RunReport.from_provenance(plan.paths, plan.facts),
        already_complete=False,
        num_resumed=start,
        num_encoded=pipeline.num_encoded,
        num_tokens=pipeline.num_tokens,
        num_packs=pipeline.packing.num_packs,
        packing_efficiency=pipeline.packing.efficiency,
        num_malformed_exif=pipeline.num_malformed_exif,
        setup_seconds=ready - began,
        seconds=seconds,
        slowest_stage=stage,
        slowest_share=share,
    )


def _run_pipeline(plan: _Plan, store: PartStore, *, progress: bool) -> tuple[Pipeline, Writer]:
    """Take the rows that are not committed yet through the stages."""
    config, start = plan.config, store.next_row
    with ExitStack() as stack:
        stack.enter_context(own_pillow_settings(config.max_source_pixels))
        index = stack.enter_context(_index(config, store, plan.paths))
        bar = stack.enter_context(closing(ProgressBar(plan.num_rows, initial=start, enabled=progress)))
        assert config.rows_per_part is not None
        writer = Writer(
            store,
            num_rows=plan.num_rows,
            rows_per_part=config.rows_per_part,
            kept=plan.source.kept_schema,
            on_error=config.on_error,
            on_commit=lambda record: bar.committed(record.num_rows),
        )
        pipeline = Pipeline(
            config,
            source=plan.source,
            index=index,
            rule=plan.rule,
            encoder=plan.encoder,
            writer=writer,
            clock=StageClock(),
        )
        pipeline.run(start, plan.num_rows, bar)
    return pipeline, writer


@contextmanager
def _index(config: EncodeConfig, store: PartStore, paths: OutputPaths) -> Iterator[HashIndex | None]:
    """The dedup index, filled from the committed parts; None where nothing is deduplicated."""
    if config.dedup == "none":
        yield None
        return
    with HashIndex(paths.partial / "index.sqlite") as index:
        for row, content_hash in store.hashes():
            index.first_row(content_hash, row)
        yield index
