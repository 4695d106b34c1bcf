"""A run from its config to its report: decide what is `auto`, find what exists, run the pipeline, finish the files."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from vlmembed.assembly import assemble
from vlmembed.engines import open_engine
from vlmembed.engines.local import SUSPECTS
from vlmembed.errors import ConfigError, OutputError, RowFailedError
from vlmembed.events import RunEvents
from vlmembed.known import check_reuse
from vlmembed.mirror.mirror import open_mirror
from vlmembed.mirror.remoterun import is_remote
from vlmembed.output import (
    PUBLICATION,
    OutputPaths,
    drop,
    finish_publication,
    lock,
    read_manifest,
    write_manifest,
)
from vlmembed.partfiles import storing
from vlmembed.parts import PartStore
from vlmembed.planning import Earlier, Plan, find_earlier, make_plan, max_row_bytes
from vlmembed.progress import ProgressBar
from vlmembed.provenance import encoder_fingerprint
from vlmembed.report import RunReport
from vlmembed.retry import Retry
from vlmembed.reuse import EarlierOutputs
from vlmembed.sources import open_source
from vlmembed.suspects import read_suspects

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from vlmembed.config import EncodeConfig
    from vlmembed.engines.base import Engine, Work
    from vlmembed.events import Event
    from vlmembed.mirror.mirror import Mirror
    from vlmembed.partfiles import PartRecord

logger = logging.getLogger(__name__)


def encode(
    config: EncodeConfig,
    *,
    progress: bool = False,
    hung: Callable[[], None] = lambda: None,
    on_event: Callable[[Event], None] | None = None,
) -> RunReport:
    """Embed every image of ``config.inputs`` into ``config.output``; go on where an earlier start stopped.

    `progress` draws a bar on stderr. `hung` is called when a run in which nothing moved was given up and could not be
    ended, because a thread is stuck in foreign code: a process of its own can do no better than exit. `on_event` gets a
    dict of plain values (see `vlmembed.events`) when the work begins, with every part that is committed, and at the
    end; it is called from different threads, never twice at a time, and the run waits for it.

    Raises:
        UsageError: a setting, an input or the output must be changed; nothing was written.
        RunError: the run stopped. What it had committed stays in ``OUTPUT.partial`` and is used by the next start.
    """
    if not os.fspath(config.output):
        msg = "no output given: name a file like out.parquet, a folder like out/, or a Lance dataset like out.lance"
        raise ConfigError(msg)
    events = RunEvents(on_event)
    if is_remote(config.output):
        with open_mirror(config) as mirror:
            report = _encode(config, mirror.paths, mirror, events, progress=progress, hung=hung)
            report = replace(report, **mirror.names)
    else:
        report = _encode(config, OutputPaths.of(config.output), None, events, progress=progress, hung=hung)
    events.ended(report, max_error_rate=config.max_error_rate)
    return report


def _encode(
    config: EncodeConfig,
    paths: OutputPaths,
    mirror: Mirror | None,
    events: RunEvents,
    *,
    progress: bool,
    hung: Callable[[], None],
) -> RunReport:
    """A run whose files are at `paths`; with a `mirror`, what lies at the other side counts."""
    began = time.perf_counter()
    paths.check_writable()
    check_reuse(config)
    _finish_earlier_publication(paths)
    if mirror is not None:
        mirror.finish_earlier()
    with ExitStack() as stack:
        source = stack.enter_context(closing(open_source(config, paths.all())))
        shown = "rows to be counted while they are read" if source.num_rows is None else f"{source.num_rows} rows"
        logger.info("%s, listed in %.1f s", shown, time.perf_counter() - began)
        earlier = _find_earlier(config, paths, mirror)
        if mirror is not None and config.retry_failed:
            mirror.fetch_output()
        retry = Retry(paths, earlier.output, source) if config.retry_failed else None
        engine = stack.enter_context(open_engine(config))
        if retry is None:
            plan, same = make_plan(config, paths, source, earlier, site=engine.site)
        else:  # a run of its own, which must fit the output
            before = Earlier(output=retry.facts | {"fingerprint": retry.fingerprint}, partial=None)
            plan, same = make_plan(replace(config, limit=None), paths, retry.source, before, site=engine.site)
        stack.enter_context(closing(plan.encoder))
        logger.info("%s loaded on %s, %s", config.model, plan.config.device, plan.config.dtype)
        if retry is None:
            is_complete = same and earlier.output is not None
        else:
            same, is_complete = retry.goes_on(plan.facts, earlier.partial), not retry.source.num_rows
        if is_complete:
            report = _report_complete(plan, earlier)
            if mirror is not None:
                mirror.drop_leftovers()
            return report
        stack.enter_context(lock(paths.partial))
        _begin(plan, config, earlier, mirror, is_new=not same)
        return _run(plan, retry, mirror, events, engine, began=began, progress=progress, hung=hung)


def _begin(plan: Plan, config: EncodeConfig, earlier: Earlier, mirror: Mirror | None, *, is_new: bool) -> None:
    """Now that this process holds the output: the manifest of a new run, or the parts of one that goes on.

    Raises:
        OutputError: another process has written there, or is writing.
    """
    paths = plan.paths
    if mirror is not None:
        mirror.claim()
    if _find_earlier(config, paths, mirror) != earlier:
        msg = f"another process has just written to {paths.output}: run the command again to see what it left"
        raise OutputError(msg)
    _name_suspects(paths)
    if is_new:
        with storing(paths.partial):
            write_manifest(paths.partial, plan.facts)
    if mirror is not None:
        mirror.start(is_new=is_new)


def _find_earlier(config: EncodeConfig, paths: OutputPaths, mirror: Mirror | None) -> Earlier:
    """What lies at the output; with a mirror, there before here."""
    if mirror is None:
        return find_earlier(paths, overwrite=config.overwrite)
    there = mirror.look(overwrite=config.overwrite)
    here = find_earlier(paths, overwrite=True)  # its finished output is a copy at best
    return replace(here, output=there.output, partial=there.partial or here.partial)


def _finish_earlier_publication(paths: OutputPaths) -> None:
    """What a run was killed at when all was done but moving its files into their places.

    Raises:
        OutputError: another process is at it.
    """
    if (paths.partial / PUBLICATION).exists():
        with lock(paths.partial):
            finish_publication(paths)


def _report_complete(plan: Plan, earlier: Earlier) -> RunReport:
    """Nothing is left to do, but perhaps the parts of a run that was killed after its output was finished."""
    paths, facts = plan.paths, earlier.output
    assert facts is not None
    manifest = read_manifest(paths.partial)
    if paths.partial.exists() and (manifest is None or manifest["fingerprint"] == facts["fingerprint"]):
        with lock(paths.partial):
            drop(paths.partial)
    report = RunReport.from_provenance(paths, facts)
    _check_failures(plan.config, report.num_failed)
    return report


def _check_failures(config: EncodeConfig, num_failed: int) -> None:
    """Under ``on_error="fail"`` the failures of an earlier start count too."""
    if config.on_error == "fail" and num_failed:
        msg = f"{num_failed} rows failed in an earlier start, and on_error is fail: see them with --on-error skip"
        raise RowFailedError(msg)


def _name_suspects(paths: OutputPaths) -> None:
    """An earlier start may have died of a picture that crashes its decoder, and would die of it again."""
    if suspects := read_suspects(paths.partial / SUSPECTS):
        shown = ", ".join(f"{row} ({key})" for row, key in suspects)
        logger.error(
            "an earlier start ended without a word while it decoded rows %s. Should this one end like that too, one of "
            "them crashes its decoder: with --decode processes that is a failed row (decoder_crash)",
            shown,
        )


def _run(
    plan: Plan,
    retry: Retry | None,
    mirror: Mirror | None,
    events: RunEvents,
    engine: Engine,
    *,
    began: float,
    progress: bool,
    hung: Callable[[], None],
) -> RunReport:
    assert plan.config.rows_per_part is not None
    store = PartStore(
        plan.paths.partial,
        plan.schema,
        vectors=plan.vectors,
        rows_per_part=plan.config.rows_per_part,
        max_row_bytes=max_row_bytes(plan.vectors, plan.rule),
    )
    store.check()
    start = store.next_row
    _check_failures(plan.config, sum(record.num_failed for record in store.records))
    if start:
        logger.info("going on at row %d", start)
    shown = plan.paths.output if mirror is None else mirror.names["output"]
    events.started(plan.config, plan.facts, output=str(shown), num_rows=plan.num_rows, num_resumed=start)
    ready = time.perf_counter()
    with (
        _output_to_fill(plan, retry) as earlier,
        closing(ProgressBar(plan.num_rows, initial=start, enabled=progress)) as bar,
    ):

        def on_commit(record: PartRecord, work: Work) -> None:
            bar.committed(record.num_rows)
            if mirror is not None:
                mirror.add(store.records[-1])  # with the hashes of its files
            events.committed(record, work)

        more = () if earlier is None else (earlier,)
        outcome = engine.embed(plan, store, more=more, bar=bar, on_commit=on_commit, hung=hung)
        counts, num_rows = outcome.counts, outcome.num_rows
        if mirror is not None:
            mirror.flush()
        if retry is None:
            facts = plan.facts | {"counts": _counts(plan, store, num_rows, counts)}
            assemble(store, plan.paths, facts)
        else:
            facts = retry.finish(store, plan.facts, earlier if plan.config.dedup != "none" else None)
    if mirror is not None:
        mirror.publish()
    seconds = time.perf_counter() - ready
    report = RunReport.from_provenance(plan.paths, facts)
    if retry is None:
        report.check_embedded()
    return replace(
        report,
        already_complete=False,
        num_resumed=start,
        num_retried=0 if retry is None else retry.source.num_rows,
        num_recovered=0 if retry is None else retry.source.num_rows - counts["failed"],
        setup_seconds=ready - began,
        **outcome.figures(seconds),
    )


def _counts(plan: Plan, store: PartStore, num_rows: int, counts: dict[str, int]) -> dict[str, object]:
    codes = dict(store.codes().most_common())
    return {"rows": num_rows, **counts, "codes": codes, "skipped": dict(plan.source.skipped)}


def _output_to_fill(plan: Plan, retry: Retry | None) -> AbstractContextManager[EarlierOutputs | None]:
    """What the output holds already where its failed rows are tried again: their contents may be in it."""
    if retry is None:
        return nullcontext()
    return EarlierOutputs(
        [plan.paths.output],
        fingerprint=encoder_fingerprint(plan.facts["fingerprint"]),
        vectors=plan.vectors,
        index=plan.paths.partial / "output.sqlite",
    )
