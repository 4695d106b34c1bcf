"""The engine that everybody has: one machine, threads, and a process per further device."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from vlmembed.decode import own_pillow_settings
from vlmembed.dedup import HashIndex
from vlmembed.engines.base import Outcome
from vlmembed.known import Known
from vlmembed.progress import StageClock
from vlmembed.site import Here
from vlmembed.stages import decoders_of, wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from vlmembed.engines.base import Work
    from vlmembed.partfiles import PartRecord
    from vlmembed.parts import PartStore
    from vlmembed.planning import Plan
    from vlmembed.progress import ProgressBar
    from vlmembed.reuse import EarlierOutputs

SUSPECTS = "decoding.slots"
"""The file in the partial folder that says which rows are being decoded."""


class LocalEngine:
    """The machine that the command runs on."""

    site = Here()

    def embed(
        self,
        plan: Plan,
        store: PartStore,
        *,
        more: tuple[EarlierOutputs, ...],
        bar: ProgressBar,
        on_commit: Callable[[PartRecord, Work], None],
        hung: Callable[[], None],
    ) -> Outcome:
        """As in `vlmembed.engines.base.Engine`."""
        config, folder = plan.config, plan.paths.partial
        with ExitStack() as stack:
            stack.enter_context(own_pillow_settings(config.max_source_pixels))
            index = stack.enter_context(_index(config.dedup, store, folder))
            known = stack.enter_context(Known(config, plan.facts["fingerprint"], plan.vectors, folder, more=more))
            decoders = stack.enter_context(decoders_of(config, plan.rule, folder / SUSPECTS))
            pipeline, writer = wire(
                plan,
                store,
                index=index,
                known=known,
                decoders=decoders,
                clock=StageClock(),
                hung=hung,
                on_commit=lambda record: on_commit(record, pipeline),
            )
            after = store.last_key() if plan.num_rows is None else None
            pipeline.run(store.next_row, plan.end_row, bar, after=after)
        counts = writer.finish(pipeline.num_rows_read)
        return Outcome(num_rows=pipeline.num_rows_read, counts=counts, figures=pipeline.figures)


@contextmanager
def _index(dedup: str, store: PartStore, folder: Path) -> Iterator[HashIndex | None]:
    """The dedup index, filled from the committed parts; None where nothing is deduplicated."""
    if dedup == "none":
        yield None
        return
    with HashIndex(folder / "index.sqlite") as index:
        for row, content_hash in store.hashes():
            index.first_row(content_hash, row)
        yield index
