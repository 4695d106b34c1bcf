"""The ways in which an encoder can run its layers, timed on one pack."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

from vlmembed.calibration import try_out
from vlmembed.graphs import CudaGraphs, GraphRunner
from vlmembed.towers.openvino_layers import OpenVinoLayers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vlmembed.encoder import Encoder
    from vlmembed.graphs import GraphApi
    from vlmembed.types import PackedBatch

MIN_PACKS_TO_MEASURE = 256
"""A job of fewer packs is not worth a measurement."""

MIN_GAIN = 1.05
"""By how much what is to replace the plain layers must be faster: less is noise."""

ROUNDS = 5
UNMEASURED_ROUNDS = 3

Way = dict[str, bool]
"""`openvino`, `compiled` and `graphs`, each on or off."""


class Variants:
    """The ways in which an encoder can run its layers, and the pack to try them on.

    `budget` is the most tokens, hence patches, of the packs that graphs are for.
    """

    def __init__(
        self,
        encoder: Encoder,
        batch: PackedBatch,
        *,
        budget: int,
        dtype: str = "fp32",
        graph_api: Callable[[], GraphApi] = CudaGraphs,
    ) -> None:
        self.encoder = encoder
        self.batch = batch
        self._budget = budget
        self._graph_api = graph_api
        self._is_warm = False
        self._openvino = OpenVinoLayers(encoder.tower, dtype)
        self._runners: dict[bool, GraphRunner] = {}  # of plain and of compiled layers

    def use(self, *, openvino: bool = False, compiled: bool = False, graphs: bool = False) -> None:
        """Run the layers this way from now on; the first time, compiling them takes a minute or so."""
        encoder = self.encoder
        encoder.graphs = None
        encoder.tower.use_stack(self._openvino if openvino else None).use_compiled(compiled)
        if compiled and not self._is_warm:  # never inside a capture
            try_out(encoder, self.batch)
            self._is_warm = True
        if graphs and compiled not in self._runners:
            unit = encoder.layout.merge_size**2
            self._runners[compiled] = GraphRunner(
                encoder.tower,
                self._graph_api(),
                max_patches=max(1, self._budget // unit) * unit,
                pool=encoder.pool,
                deepstack=encoder.deepstack,
            )
        encoder.graphs = self._runners[compiled] if graphs else None

    def seconds(self, ways: Mapping[str, Way]) -> dict[str, float]:
        """Median seconds of the pack each way, interleaved, after unmeasured rounds: a graph is captured when its shape
        comes for the second time."""
        timings: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(UNMEASURED_ROUNDS + ROUNDS):
            for name, way in ways.items():
                self.use(**way)
                began = time.perf_counter()
                try_out(self.encoder, self.batch)
                if number >= UNMEASURED_ROUNDS:
                    timings[name].append(time.perf_counter() - began)
        return {name: statistics.median(values) for name, values in timings.items()}

    def job_seconds(self, num_packs: float) -> float:
        """About how long a run of so many packs takes by the plain layers; 0 for too few to be worth asking."""
        if num_packs < MIN_PACKS_TO_MEASURE:
            return 0.0
        self.use()
        try_out(self.encoder, self.batch)
        began = time.perf_counter()
        try_out(self.encoder, self.batch)
        return (time.perf_counter() - began) * num_packs

    def is_faster(self, way: Way, plain: Way) -> tuple[bool, str]:
        """Whether `way` is worth it, and by how much."""
        seconds = self.seconds({"plain": plain, "way": way})
        gain = seconds["plain"] / seconds["way"]
        return gain >= MIN_GAIN, f"{gain:.2f} times as fast as without on a pack of {self.batch.num_tokens} tokens"
