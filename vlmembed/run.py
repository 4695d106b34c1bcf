"""A run from its config to its report: decide what is `auto`, find what exists, run the pipeline, finish the files."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from vlmembed.decode import own_pillow_settings
from vlmembed.dedup import HashIndex
from vlmembed.errors import NothingEmbeddedError, OutputError, RowFailedError
from vlmembed.output import OutputPaths, lock, read_manifest, write_manifest
from vlmembed.parts import PartStore
from vlmembed.pipeline import Pipeline
from vlmembed.plan import Earlier, Plan, find_earlier, make_plan, max_row_bytes
from vlmembed.progress import ProgressBar, StageClock
from vlmembed.report import RunReport
from vlmembed.sources import open_source
from vlmembed.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlmembed.config import EncodeConfig

logger = logging.getLogger(__name__)


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
        earlier = find_earlier(paths, overwrite=config.overwrite)
        plan, same = make_plan(config, paths, source, earlier)
        stack.enter_context(closing(plan.encoder))
        logger.info("%s loaded on %s, %s", config.model, plan.config.device, plan.config.dtype)
        if same and earlier.output is not None:
            _drop_leftovers(paths, earlier)
            report = RunReport.from_provenance(paths, earlier.output)
            _check_failures(plan.config, report.num_failed)
            return report
        stack.enter_context(lock(paths.partial))
        if find_earlier(paths, overwrite=config.overwrite) != earlier:
            msg = f"another process has just written to {paths.output}: run the command again to see what it left"
            raise OutputError(msg)
        if not same:
            write_manifest(paths.partial, plan.facts)
        return _run(plan, began=began, progress=progress)


def _drop_leftovers(paths: OutputPaths, earlier: Earlier) -> None:
    """Remove the parts of a run that was killed after its output was finished."""
    assert earlier.output is not None
    manifest = read_manifest(paths.partial)
    if manifest is not None and manifest["fingerprint"] == earlier.output["fingerprint"]:
        with lock(paths.partial):
            PartStore.drop(paths.partial)


def _check_failures(config: EncodeConfig, num_failed: int) -> None:
    """Under ``on_error="fail"`` the failures of an earlier start count too."""
    if config.on_error == "fail" and num_failed:
        msg = f"{num_failed} rows failed in an earlier start, and on_error is fail: see them with --on-error skip"
        raise RowFailedError(msg)


def _run(plan: Plan, *, began: float, progress: bool) -> RunReport:
    assert plan.config.rows_per_part is not None
    store = PartStore(
        plan.paths,
        plan.schema,
        vectors=plan.vectors,
        rows_per_part=plan.config.rows_per_part,
        max_row_bytes=max_row_bytes(plan.vectors, plan.rule),
    )
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
        num_splits=plan.encoder.num_splits,
        num_lost_workers=plan.encoder.num_lost,
        num_packs=pipeline.packing.num_packs,
        packing_efficiency=pipeline.packing.efficiency,
        num_malformed_exif=pipeline.num_malformed_exif,
        setup_seconds=ready - began,
        seconds=seconds,
        slowest_stage=stage,
        slowest_share=share,
    )


def _run_pipeline(plan: Plan, store: PartStore, *, progress: bool) -> tuple[Pipeline, Writer]:
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
