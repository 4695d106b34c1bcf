"""A run in a thread of its own, whose parts wait for who takes them."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vlmembed.decode import own_pillow_settings
from vlmembed.errors import StalledError, StoppedError
from vlmembed.known import Known
from vlmembed.output import OutputPaths
from vlmembed.parallel import POLL_SECONDS
from vlmembed.pipeline import JOIN_SECONDS, Pipeline
from vlmembed.planning import Earlier, make_plan, max_row_bytes
from vlmembed.progress import StageClock
from vlmembed.report import RunReport
from vlmembed.sources import open_source
from vlmembed.stages import decoders_of, wire
from vlmembed.streaming.recent import MemoryStore, RecentHashes, num_recent

if TYPE_CHECKING:
    from collections import Counter

    import pyarrow as pa

    from vlmembed.config import EncodeConfig
    from vlmembed.planning import Plan
    from vlmembed.streaming.recent import StreamedPart
    from vlmembed.writer import Writer

logger = logging.getLogger(__name__)

MAX_PARTS_WAITING = 1
"""Finished parts that wait to be taken, beside the one that waits for room."""

PART_DIVISOR = 4
"""Parts are so many times smaller than those that `vlmembed.encode` commits: the first comes sooner, and all lie in
memory. Packs do not cross parts, so still smaller ones would fill them worse."""


class BackgroundRun:
    """Takes the rows of a config through the stages, in threads; nothing is written.

    All of it, set-up included, is done in one thread and those that it starts: CUDA's current device is a thread's own.

    Attributes:
        schema: of the batches, and num_rows: of the input, None where it is not known; once `start` has returned.
        report: None before the end.
    """

    def __init__(self, config: EncodeConfig) -> None:
        self._config = config
        self._clock = StageClock()
        self._stop = threading.Event()
        self._is_ready = threading.Event()
        self._is_over = threading.Event()
        self._is_closed = False
        self._parts: queue.Queue[StreamedPart] = queue.Queue(MAX_PARTS_WAITING)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="stream", daemon=True)
        self.schema: pa.Schema | None = None
        self.num_rows: int | None = None
        self.report: RunReport | None = None

    def start(self) -> None:
        """Begin; returns when everything is set up.

        Raises:
            VlmembedError: what kept it from being set up.
        """
        atexit.register(self.close)  # a thread must not be inside torch while the interpreter is taken down
        self._thread.start()
        try:
            self._is_ready.wait()
        except BaseException:
            self.stop()
            raise
        if self.schema is None:
            self._raise_error()

    def take(self) -> StreamedPart | None:
        """Wait for the next part; None is the end. Called by one thread at a time.

        Raises:
            VlmembedError: what ended the run, once, behind the parts that were finished.
        """
        while True:
            is_over = self._is_over.is_set()
            with suppress(queue.Empty):
                return self._parts.get(block=not is_over, timeout=POLL_SECONDS)
            if is_over:
                self._raise_error()
                return None

    def stop(self) -> None:
        """Let it end soon; what it has not handed over is lost. Does not wait."""
        self._is_closed = True
        self._stop.set()

    def close(self) -> None:
        """Stop, and wait until the threads have ended, but for no longer than a stuck one is worth."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(JOIN_SECONDS)
        while not self._parts.empty():
            self._parts.get()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None and not self._is_closed:
            raise error

    def _work(self) -> None:
        try:
            with ExitStack() as stack:
                self._run(stack)
        except BaseException as error:  # noqa: BLE001  handed to who takes the parts
            self._error = self._error or error
        finally:
            self._is_over.set()
            self._is_ready.set()
            atexit.unregister(self.close)

    def _run(self, stack: ExitStack) -> None:
        began = time.perf_counter()
        source = stack.enter_context(closing(open_source(self._config)))
        nowhere = OutputPaths(output=Path(), is_folder=True)  # parts as a folder's, which carry the provenance each
        nothing = Earlier(output=None, partial=None)
        plan, _ = make_plan(self._config, nowhere, source, nothing, part_divisor=PART_DIVISOR)
        stack.enter_context(closing(plan.encoder))
        pipeline, writer, store = self._wire(plan, stack)
        self.num_rows, self.schema = plan.num_rows, store.schema
        ready = time.perf_counter()
        self._is_ready.set()
        pipeline.run(0, plan.end_row, None)
        if self._is_closed:
            return
        counts = writer.finish(pipeline.num_rows_read)
        self.report = replace(
            _report(plan, pipeline.num_rows_read, counts, store.codes),
            setup_seconds=ready - began,
            **pipeline.figures(time.perf_counter() - ready),
        )
        self.report.check_embedded()

    def _wire(self, plan: Plan, stack: ExitStack) -> tuple[Pipeline, Writer, MemoryStore]:
        config = plan.config
        assert config.rows_per_part is not None
        max_rows = num_recent(max_row_bytes(plan.vectors, plan.rule), config.rows_per_part)
        stack.enter_context(own_pillow_settings(config.max_source_pixels))
        known = stack.enter_context(Known(config, plan.facts["fingerprint"], plan.vectors, Path()))
        decoders = stack.enter_context(decoders_of(config, plan.rule))

        def deliver(part: StreamedPart) -> None:
            with self._clock.measure("hand over"):
                while not self._stop.is_set():
                    try:
                        self._parts.put(part, timeout=POLL_SECONDS)
                    except queue.Full:
                        pipeline.moved()  # it is the caller who takes his time
                    else:
                        return
            raise StoppedError

        index = None if config.dedup == "none" else RecentHashes(max_rows)
        store = MemoryStore(
            plan.schema,
            vectors=plan.vectors,
            max_rows=0 if index is None else max_rows,
            deliver=deliver,
        )
        pipeline, writer = wire(
            plan,
            store,
            index=index,
            known=known,
            decoders=decoders,
            clock=self._clock,
            hung=self._give_up,
            on_commit=lambda _: None,
            on_distinct=store.remember,
            stop=self._stop,
        )
        return pipeline, writer, store

    def _give_up(self) -> None:
        """A thread is stuck in foreign code: nobody shall wait for it."""
        msg = "nothing has moved for so long that the run was given up, and one of its threads could not be ended"
        self._error = StalledError(msg)
        self._is_over.set()


def _report(plan: Plan, num_rows: int, counts: Counter[str], codes: Counter[str]) -> RunReport:
    found = {"rows": num_rows, **counts, "codes": dict(codes.most_common()), "skipped": dict(plan.source.skipped)}
    report = RunReport.from_provenance(plan.paths, plan.facts | {"counts": found})
    return replace(report, output="", errors="", already_complete=False)
