"""CUDA graphs of a tower's layers: one launch in the place of hundreds.

A graph is captured over static buffers, so packs are filled up to a shape that many of them share. Nothing that a pack
tells the host alone may be captured: no lengths of segments (`Segments.runs`) but the shape's own `max_seqlen`.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vlmembed.attention.metadata import DevicePack
from vlmembed.batch import PackShape, fill_batch
from vlmembed.devices import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from vlmembed.towers.base import Tower
    from vlmembed.types import PackedBatch

logger = logging.getLogger(__name__)

MAX_GRAPHS = 16
"""Graphs kept; each holds its own input block, and they share the memory between their kernels."""

WARM_UPS = 2
"""Forwards before a capture: what compiles, tunes or allocates on a first call must have done so."""

ShapeKey = tuple[PackShape, int, str]
"""A shape, the taps of its position table, and the patches' dtype: packs of one key share a block's layout."""


class GraphApi(Protocol):
    """What captures work on a device."""

    def capture(self, work: Callable[[], list[torch.Tensor]]) -> tuple[Callable[[], None], list[torch.Tensor]]:
        """Capture `work`; returns what replays it, and the tensors that each replay fills anew."""


class CudaGraphs:
    """torch's CUDA graphs. One pool of memory serves all: no output is needed any more when the next graph runs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], list[torch.Tensor]]) -> tuple[Callable[[], None], list[torch.Tensor]]:
        """Warm up, then capture on the stream that `torch.cuda.graph` makes for it."""
        for _ in range(WARM_UPS):
            work()
        before = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = work()
        except BaseException:
            torch.cuda.set_stream(before)  # a capture that breaks leaves its own stream behind
            raise
        return graph.replay, outputs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Graph:
    block: torch.Tensor
    replay: Callable[[], None]
    features: list[torch.Tensor]


class GraphRunner:
    """Runs a tower's layers through graphs where it can, and says why where it cannot.

    Attributes:
        fallbacks: packs that ran without a graph, by reason.
        num_captured: graphs captured.
        stopped: why no graph is used any more, or empty.
    """

    def __init__(
        self,
        tower: Tower,
        api: GraphApi,
        *,
        max_patches: int,
        pool: str | None = None,
        deepstack: bool = False,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:
        self._tower = tower
        self._api = api
        self._max_patches = max_patches
        self._pool = pool
        self._deepstack = deepstack
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[ShapeKey, _Graph] = OrderedDict()  # the least recently used first
        self._seen: set[ShapeKey] = set()
        self.fallbacks: Counter[str] = Counter()
        self.num_captured = 0
        self.stopped = ""

    def claim(self, batch: PackedBatch) -> ShapeKey | None:
        """The key of the graph that `batch` is to go through; None, counted with its reason, if through none.

        A shape is captured when it comes for the second time: one that comes once would not pay for it.
        """
        if self.stopped:
            self.fallbacks[self.stopped] += 1
            return None
        shape = PackShape.holding(batch, self._tower.layout, max_patches=self._max_patches)
        if shape is None:
            self.fallbacks["more patches than the budget"] += 1
            return None
        taps = batch.metadata.interp_indices
        key = (shape, 0 if taps is None else taps.shape[1], batch.patches.dtype.name)
        if key not in self._seen:
            self._seen.add(key)
            self.fallbacks["first of its shape"] += 1
            return None
        return key

    def fill(self, batch: PackedBatch, key: ShapeKey) -> PackedBatch:
        """`batch` in the shape of its graph."""
        return fill_batch(batch, key[0], self._tower.layout)

    def features(self, block: torch.Tensor, filled: PackedBatch, key: ShapeKey) -> list[torch.Tensor]:
        """The tower's features of a filled pack. They are overwritten by the next call: use them before it, on the
        stream of this one."""
        graph = self._graphs.get(key)
        if graph is None:
            return self._capture(block, filled, key)
        self._graphs.move_to_end(key)
        graph.block.copy_(block, non_blocking=True)
        graph.replay()
        return graph.features

    def _capture(self, block: torch.Tensor, filled: PackedBatch, key: ShapeKey) -> list[torch.Tensor]:
        static = block.clone()
        pack = DevicePack.view(static, filled.header)

        def work() -> list[torch.Tensor]:
            return self._tower.features(pack.patches, pack.metadata, pool=self._pool, deepstack=self._deepstack)

        try:
            captured = self._api.capture(work)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise  # the encoder stops the graphs, gives their memory back, and splits the pack
            logger.warning("no CUDA graphs from here on: %s", error)
            captured = None
        if captured is None:  # the pool of a capture that broke is not fit for another one
            self.stop("a capture failed")
            self.fallbacks[self.stopped] += 1
            return work()
        replay, features = captured
        while len(self._graphs) >= self._max_graphs:
            self._graphs.popitem(last=False)
        self._graphs[key] = _Graph(block=static, replay=replay, features=features)
        self.num_captured += 1
        replay()  # a capture records and computes nothing
        return features

    def stop(self, reason: str) -> None:
        """Use no graph any more, and give their memory back."""
        self._graphs.clear()
        self.stopped = reason

    def describe(self) -> dict[str, Any]:
        """What was captured, and what ran without a graph, for the log."""
        return {"captured": self.num_captured, "kept": len(self._graphs), "without": dict(self.fallbacks)}
