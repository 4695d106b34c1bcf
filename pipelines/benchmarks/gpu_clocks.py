"""The clocks of the GPU benchmark, and the counter of syncs. Each does on a CPU what can be done there."""

from __future__ import annotations

import statistics
import time
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vlmembed.lanes import CudaLanes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vlmembed.encoder import Encoder
    from vlmembed.types import PackedBatch


def forward_seconds(work: Callable[[], object], device: torch.device, *, warm_ups: int, repeats: int) -> float:
    """Median seconds of `work` on the device, after warming up."""
    for _ in range(warm_ups):
        work()
    if device.type == "cpu":
        return statistics.median(_seconds(work) for _ in range(repeats))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in events:
        start.record()
        work()
        stop.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(stop) / 1e3 for start, stop in events)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def round_seconds(encoder: Encoder, batches: Sequence[PackedBatch], *, warm_ups: int, repeats: int) -> float:
    """Median seconds in which an encoder that is kept busy encodes all of `batches`, after a round of warming up or
    more."""
    rounds = (batch for _ in range(warm_ups + repeats) for batch in batches)
    ends = [time.perf_counter() for number, _ in enumerate(encoder.stream(rounds), 1) if number % len(batches) == 0]
    assert not encoder.num_splits  # one result for each pack
    return statistics.median(np.diff(ends[-repeats - 1 :]).tolist())


class LaneClock:
    """How long the compute lanes of a process are at work, by CUDA events around every forward.

    From the first kernel of a forward to its last, gaps between them included.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[float, Any, Any]] = []  # when it was queued; two events

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure what is queued in this block."""
        original = CudaLanes.run

        def run(lanes: CudaLanes, lane: str, work: Callable[[], None], after: Sequence[Any] = ()) -> Any:  # noqa: ANN401  an event
            if lane != "compute":
                return original(lanes, lane, work, after)
            queued = time.perf_counter()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

            def timed() -> None:
                start.record()
                work()
                stop.record()
                self._spans.append((queued, start, stop))

            return original(lanes, lane, timed, after)

        with patch.object(CudaLanes, "run", run):
            yield

    def busy_seconds(self, since: float) -> float:
        """Of the forwards that were queued after `since`, by `time.perf_counter`."""
        torch.cuda.synchronize()
        return sum(start.elapsed_time(stop) / 1e3 for queued, start, stop in self._spans if queued >= since)


class SyncCounter(TorchDispatchMode):
    """Counts operations that would make the host wait for a device, where there is none that could say so."""

    NAMES = ("_local_scalar_dense", "item", "nonzero", "unique", "masked_select", "repeat_interleave.Tensor")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  torch's own signature
        """Count, then compute."""
        self.count += str(func).removeprefix("aten.").startswith(self.NAMES)
        return func(*args, **(kwargs or {}))


def count_syncs(work: Callable[[], object], device: torch.device) -> int:
    """How often `work` makes the host wait for the device; the end of a pack, which it waits for, is none."""
    if device.type == "cpu":
        with SyncCounter() as counter:
            work()
        return counter.count
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(each.message) for each in caught)
