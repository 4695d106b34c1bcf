"""What a cluster has done so far, added up from what its tasks say."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from vlmembed.engines.blocks import Kind
from vlmembed.progress import StageClock

if TYPE_CHECKING:
    import pyarrow as pa

    from vlmembed.engines.blocks import PartEnd
    from vlmembed.partfiles import PartRecord
    from vlmembed.progress import ProgressBar


class ClusterWork:
    """The `vlmembed.engines.base.Work` of a cluster. Stages are compared as if each had the tasks that it may have.

    Attributes:
        clock: busy seconds of all tasks, by stage.
        num_encoded, num_tokens: encoded by this start.
        counts: rows by what became of them, those of earlier starts included.
    """

    def __init__(self, *, num_feeds: int, num_towers: int, max_tokens_per_batch: int) -> None:
        self.clock = StageClock()
        self.num_encoded = 0
        self.num_tokens = 0
        self.counts: Counter[str] = Counter(embedded=0, duplicates=0, failed=0)
        self._num_feeds = num_feeds
        self._num_towers = num_towers
        self._max_tokens_per_batch = max_tokens_per_batch
        self._others: Counter[str] = Counter()
        self._began = time.perf_counter()

    @property
    def stage_threads(self) -> dict[str, int]:
        """As in `vlmembed.engines.base.Work`."""
        feeds = dict.fromkeys(("read", "dedup", "decode", "pack"), self._num_feeds)
        return feeds | {"encode": self._num_towers, "write": 1}

    def take_block(self, block: pa.Table) -> None:
        """A block of results has come."""
        for kind, seconds, num_splits in zip(
            *(block[name].to_pylist() for name in ("kind", "seconds", "num_splits")), strict=True
        ):
            if kind == Kind.RESULTS:
                self.clock.add("encode", seconds)
                self._others["splits"] += num_splits

    def take_end(self, end: PartEnd) -> None:
        """All of a part has come."""
        for stage, seconds in end.seconds.items():
            self.clock.add(stage, seconds)
        self.num_encoded += end.num_images
        self.num_tokens += end.num_tokens
        for name in ("num_packs", "num_found", "num_malformed_exif", "num_replaced"):
            self._others[name] += getattr(end, name)

    def take_record(self, record: PartRecord) -> None:
        """A part is committed, by this start or an earlier one."""
        self.counts["embedded"] += record.num_embedded
        self.counts["duplicates"] += record.num_duplicates
        self.counts["failed"] += record.num_failed

    def show(self, bar: ProgressBar) -> None:
        """Bring the bar's figures up to date."""
        seconds = time.perf_counter() - self._began
        bar.note(
            num_encoded=self.num_encoded,
            num_tokens=self.num_tokens,
            seconds=seconds,
            slowest=self.clock.busiest(self.stage_threads, seconds)[0],
        )

    def figures(self, seconds: float) -> dict[str, Any]:
        """As `vlmembed.pipeline.Pipeline.figures`."""
        stage, share = self.clock.busiest(self.stage_threads, seconds)
        num_packs = self._others["num_packs"]
        return {
            "num_found": self._others["num_found"],
            "num_encoded": self.num_encoded,
            "num_tokens": self.num_tokens,
            "num_splits": self._others["splits"],
            "num_replaced_decoders": self._others["num_replaced"],
            "num_packs": num_packs,
            "packing_efficiency": self.num_tokens / (num_packs * self._max_tokens_per_batch) if num_packs else 0.0,
            "num_malformed_exif": self._others["num_malformed_exif"],
            "seconds": seconds,
            "slowest_stage": stage,
            "slowest_share": share,
        }
