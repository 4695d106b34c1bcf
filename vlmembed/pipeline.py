"""One machine: the stages on three threads and a decoding pool, joined by bounded channels.

    reader thread: source -> dedup -> (pool: decode, preprocess) -> pack      main thread: encode     writer thread

No channel is waited for without a look at the stop event, so an error or Ctrl-C anywhere ends the run; threads
that do not end are waited for, for a minute at most. A watchdog says which stage waits for which when nothing moves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from vlmembed.config import STALL_TIMEOUTS
from vlmembed.errors import StoppedError
from vlmembed.feed import Feed
from vlmembed.parallel import Channel
from vlmembed.sources.base import read_after
from vlmembed.types import EndOfInput, Failure, PackedBatch
from vlmembed.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vlmembed.config import EncodeConfig
    from vlmembed.decoders import DecodePool
    from vlmembed.dedup import Index
    from vlmembed.encoder import Encoder
    from vlmembed.feed import Event, Finder
    from vlmembed.layout import TowerLayout
    from vlmembed.packer import PackingStats
    from vlmembed.progress import ProgressBar, StageClock
    from vlmembed.sources.base import Source
    from vlmembed.types import EncodedImage
    from vlmembed.workers import WorkerPool
    from vlmembed.writer import Writer

logger = logging.getLogger(__name__)

MAX_PACKS_WAITING = 4
MAX_CHUNKS_WAITING = 128
"""For the encoder, and for the writer."""

JOIN_SECONDS = 60.0
"""How long the end of a stopped run waits for its threads."""

REPORT_SECONDS = 60.0
"""After how long without a move it is said which stage waits for which."""

DOING = {
    "read": "reads the source",
    "dedup": "looks for duplicates",
    "find": "looks for known embeddings",
    "wait": "waits for decoding",
    "pack": "packs",
    "give to encoder": "waits for room among the packs, so for the encoder",
    "give to writer": "waits for room among the results, so for the writer",
    "idle": "the encoder waits for packs",
    "encode": "encodes a pack",
    "await": "waits for results",
    "write": "writes",
    "hand over": "waits until the batches before are taken",
}
"""The clock's stages and waits, for people."""


class Pipeline:
    """The stages of one run, wired together.

    `known` gives the embeddings that need not be computed. `hung` is called where a run that was given up does not end.
    Who sets `stop` ends the run: `run` then returns, and rows are missing.

    Attributes:
        num_encoded, num_tokens: images and tokens encoded by this process.
        num_rows_read: rows read, those of an earlier start included.
        clock: where the time went.
    """

    def __init__(
        self,
        config: EncodeConfig,
        *,
        source: Source,
        index: Index | None,
        known: Finder,
        decoders: DecodePool,
        layout: TowerLayout,
        encoder: Encoder | WorkerPool,
        writer: Writer,
        clock: StageClock,
        hung: Callable[[], None],
        stop: threading.Event | None = None,
    ) -> None:
        assert config.workers is not None
        self._num_workers = config.workers
        self._source = source
        self._decoders = decoders
        self._layout = layout
        self._encoder = encoder
        self._writer = writer
        self.clock = clock
        self._stop = stop or threading.Event()
        self._packs: Channel[PackedBatch] = Channel(MAX_PACKS_WAITING, self._stop)
        self._events: Channel[Sequence[Event]] = Channel(MAX_CHUNKS_WAITING, self._stop)
        self._errors: list[BaseException] = []
        self._watchdog = Watchdog(
            self._describe,
            self._give_up,
            report_seconds=REPORT_SECONDS,
            limit_seconds=STALL_TIMEOUTS * config.timeout,
            grace_seconds=2 * JOIN_SECONDS,
            hung=hung,
        )
        self._feed = Feed(
            config,
            index=index,
            known=known,
            decoders=decoders,
            layout=layout,
            clock=clock,
            tell=self._put,
            moved=self._watchdog.moved,
        )
        self.num_encoded = 0
        self.num_tokens = 0
        self.num_rows_read = 0

    @property
    def packing(self) -> PackingStats:
        """What the packer did."""
        return self._feed.packing

    @property
    def num_found(self) -> int:
        """Embeddings that were there already."""
        return self._feed.num_found

    @property
    def num_replaced_decoders(self) -> int:
        """Decoding threads or processes that hung or crashed."""
        return self._decoders.num_replaced

    @property
    def stage_threads(self) -> dict[str, int]:
        """How many threads work in each stage."""
        return {"read": 1, "dedup": 1, "decode": self._num_workers, "pack": 1, "encode": 1, "write": 1}

    def moved(self) -> None:
        """Tell the watchdog that a stage waits for what is outside of the run, so that nothing is wrong."""
        self._watchdog.moved()

    def figures(self, seconds: float) -> dict[str, Any]:
        """What a `RunReport` tells of the work of this process, which took so many seconds."""
        stage, share = self.clock.busiest(self.stage_threads, seconds)
        return {
            "num_found": self.num_found,
            "num_encoded": self.num_encoded,
            "num_tokens": self.num_tokens,
            "num_splits": self._encoder.num_splits,
            "num_replaced_decoders": self.num_replaced_decoders,
            "num_lost_workers": self._encoder.num_lost,
            "num_packs": self.packing.num_packs,
            "packing_efficiency": self.packing.efficiency,
            "num_malformed_exif": self._feed.num_malformed_exif,
            "seconds": seconds,
            "slowest_stage": stage,
            "slowest_share": share,
        }

    def run(self, start: int, limit: int | None, bar: ProgressBar | None, *, after: str | None = None) -> None:
        """Take the rows from `start` on through all stages; returns when the last one is committed.

        `limit` is the number of the row before which it ends; None is the source's end. `after` is the id that the row
        before `start` must have, where the source counts its rows by reading them.

        Raises:
            VlmembedError: whatever ended the run. KeyboardInterrupt passes through, after the threads have ended.
        """
        self.num_rows_read = start
        threads = [
            threading.Thread(target=self._guard, args=(self._read, start, limit, after), name="reader", daemon=True),
            threading.Thread(target=self._guard, args=(self._write,), name="writer", daemon=True),
        ]
        with self._watchdog.watching(), self._joined(threads):
            self._encode(bar)
            self._events.close()

    @contextmanager
    def _joined(self, threads: list[threading.Thread]) -> Iterator[None]:
        """Start the threads; end them with the block, at once if it fails; then raise what went wrong first."""
        try:
            for thread in threads:
                thread.start()
            yield
            for thread in threads:
                while thread.is_alive() and not self._stop.is_set():  # short waits, so that Ctrl-C gets through
                    thread.join(1.0)
        except StoppedError:
            pass  # another thread failed and is in `_errors`
        finally:
            self._stop.set()
            self._decoders.close()  # nobody waits for a decode that hangs
            deadline = time.monotonic() + JOIN_SECONDS
            for thread in threads:
                if thread.ident is not None:
                    thread.join(max(0.0, deadline - time.monotonic()))
        if self._errors:
            raise self._errors[0]

    def _guard(self, stage: Callable[..., None], *arguments: int | str | None) -> None:
        try:
            stage(*arguments)
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001  handed to the main thread, which raises it
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        self._errors.append(error)
        self._stop.set()

    def _describe(self) -> str:
        """What each thread is at, for a person who wonders why nothing moves."""
        doing = [f"{thread}: {DOING.get(stage, stage)}" for thread, stage in sorted(self.clock.doing().items())]
        if (oldest := self._decoders.oldest()) is not None:
            image, seconds = oldest
            doing.append(f"longest in decoding: row {image.row} ({image.key}), {seconds:.0f} s")
        return "; ".join(doing) or "no thread is in a stage"

    def _put(self, events: Sequence[Event]) -> None:
        with self.clock.measure("give to writer"):
            self._events.put(events)

    def _read(self, start: int, limit: int | None, after: str | None) -> None:
        left = None if limit is None else limit - start
        source_rows = self._source.read(start) if after is None else read_after(self._source, start, after)
        try:
            for batch in self._feed.packs(self._counted(islice(source_rows, left))):
                with self.clock.measure("give to encoder"):
                    self._packs.put(batch)
                self._watchdog.moved()
        finally:
            if isinstance(source_rows, Generator):
                source_rows.close()  # its threads end now, and not whenever it is collected
        self._put([EndOfInput(num_rows=self.num_rows_read)])
        self._packs.close()

    def _counted(self, rows: Iterator[EncodedImage]) -> Iterator[EncodedImage]:
        for image in rows:
            self.num_rows_read += 1
            self._watchdog.moved()
            yield image

    def _encode(self, bar: ProgressBar | None) -> None:
        began = time.perf_counter()
        results = self._encoder.stream(self.clock.iterate("idle", self._packs.polled()))
        for result in self.clock.iterate("encode", results):
            if result is None:  # nothing came for a while
                self._packs.check()
                continue
            self._put([result])
            self._watchdog.moved()
            if isinstance(result, Failure):
                continue
            self.num_encoded += len(result.rows)
            self.num_tokens += sum(self._layout.num_tokens((h, w)) for h, w in result.grid_hw.tolist())
            if bar is None:
                continue
            seconds = time.perf_counter() - began
            bar.note(
                num_encoded=self.num_encoded,
                num_tokens=self.num_tokens,
                seconds=seconds,
                slowest=self.clock.busiest(self.stage_threads, seconds)[0],
            )

    def _write(self) -> None:
        for events in self.clock.iterate("await", self._events):
            with self.clock.measure("write"):
                for event in events:
                    self._writer.add(event)
            self._watchdog.moved()
