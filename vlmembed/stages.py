"""Stages of a run that are set up in the same way wherever its rows go."""

from __future__ import annotations

from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING

from vlmembed.decode_processes import ProcessDecoders
from vlmembed.decoders import ThreadDecoders
from vlmembed.elsewhere import Elsewhere
from vlmembed.partfiles import storing
from vlmembed.patcher import Patcher
from vlmembed.pipeline import Pipeline
from vlmembed.suspects import SuspectRows
from vlmembed.writer import Writer

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from vlmembed.config import EncodeConfig
    from vlmembed.decoders import DecodePool
    from vlmembed.dedup import Index
    from vlmembed.known import Known
    from vlmembed.layout import ResizeRule
    from vlmembed.partfiles import PartRecord
    from vlmembed.planning import Plan
    from vlmembed.progress import StageClock
    from vlmembed.types import Embedded, Failure, ImageRef
    from vlmembed.writer import Store


@contextmanager
def decoders_of(config: EncodeConfig, rule: ResizeRule, suspects: Path | None = None) -> Iterator[DecodePool]:
    """The decoding threads or processes of a run. Threads note the rows that they are at in the file `suspects`, where
    one is given.

    Raises:
        StorageError: that file cannot be made.
    """
    assert config.workers is not None
    patcher = Patcher(
        rule=rule,
        max_source_pixels=config.max_source_pixels,
        hash_pixels=config.dedup == "pixels",
        fast_decode=config.fast_decode,
    )
    if config.decode == "processes":
        with ProcessDecoders(patcher, num_processes=config.workers, timeout_seconds=config.timeout) as processes:
            yield processes
        return
    rows = None
    if suspects is not None:
        with storing(suspects):
            rows = SuspectRows(suspects, 4 * config.workers)
    with (
        closing(rows) if rows is not None else nullcontext(),
        ThreadDecoders(patcher, num_threads=config.workers, timeout_seconds=config.timeout, suspects=rows) as threads,
    ):
        yield threads


def wire(
    plan: Plan,
    store: Store,
    *,
    index: Index | None,
    known: Known,
    decoders: DecodePool,
    clock: StageClock,
    hung: Callable[[], None],
    on_commit: Callable[[PartRecord], None],
    on_distinct: Callable[[Sequence[tuple[ImageRef, Embedded | Failure]]], None] | None = None,
    stop: threading.Event | None = None,
) -> tuple[Pipeline, Writer]:
    """The stages of a planned run, and the writer that gives its parts to `store`."""
    assert plan.config.rows_per_part is not None
    assert not isinstance(plan.encoder, Elsewhere)
    writer = Writer(
        store,
        num_rows=plan.num_rows,
        rows_per_part=plan.config.rows_per_part,
        kept=plan.source.kept_schema,
        on_error=plan.config.on_error,
        on_commit=on_commit,
        on_computed=known.keep,
        on_distinct=on_distinct,
    )
    pipeline = Pipeline(
        plan.config,
        source=plan.source,
        index=index,
        known=known,
        decoders=decoders,
        layout=plan.rule.layout,
        encoder=plan.encoder,
        writer=writer,
        clock=clock,
        hung=hung,
        stop=stop,
    )
    return pipeline, writer
