"""A tower on a node: told how to load by the run, then fed with blocks. And the first one, which decides how."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pyarrow as pa

from vlmembed.engines.attempts import attempt
from vlmembed.engines.blocks import Kind, open_pack, results_row
from vlmembed.engines.orders import go_to
from vlmembed.errors import ModelError
from vlmembed.site import Here
from vlmembed.types import Failure
from vlmembed.worker import load

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from vlmembed.exchange import LoadOrder
    from vlmembed.tuning import Settled
    from vlmembed.types import EmbeddingBatch, PackedBatch


TOWERS = "towers died of these packs: mostly of memory (a lower --max-tokens-per-batch takes less)"


class Scout(Here):
    """Looks at the device of a node, and decides what the run's towers do."""

    def settle(self, order: LoadOrder, working_folder: str) -> Settled:
        """Load the model, and decide what is left to decide. Raises as `vlmembed.tuning.load_encoder`."""
        go_to(working_folder)
        (device,) = self.devices(order.device)[:1]
        self.check(order.config, device)
        encoder, settled = load(order)
        encoder.close()
        return settled


class Tower:
    """Encodes the packs among the rows of a block; what else there is passes through."""

    def __init__(self, order: LoadOrder, weights_sha256: str, working_folder: str, folder: Path) -> None:
        """Load what the run has ordered; `folder` has its parts.

        Raises:
            ModelError: the weights are not those that the run has begun with.
        """
        go_to(working_folder)
        self._folder = folder
        self._encoder, settled = load(order)
        if settled.model["weights_sha256"] != weights_sha256:
            msg = (
                f"the weights of {order.config.model} are others on this node than on the first: give all nodes the "
                "same model"
            )
            raise ModelError(msg)

    def __call__(self, block: pa.Table) -> pa.Table:
        """What became of the packs of a block, in their places."""
        is_pack = [kind == Kind.PACK for kind in block["kind"].to_pylist()]
        packs, others = block.filter(is_pack), block.filter([not each for each in is_pack])
        if not packs.num_rows:
            return block
        work = f"encode-{packs['part'][0].as_py()}-{packs['place'][0].as_py()}"
        with attempt(self._folder, work, TOWERS):
            return pa.concat_tables([self._results(packs), others])

    def _results(self, packs: pa.Table) -> pa.Table:
        began, splits_before = time.perf_counter(), self._encoder.num_splits
        results = self._encode(packs)
        seconds, num_splits = time.perf_counter() - began, self._encoder.num_splits - splits_before
        return pa.concat_tables(
            results_row(
                packs["part"][number].as_py(),
                packs["place"][number].as_py(),
                of_pack,
                seconds=0.0 if number else seconds,
                num_splits=0 if number else num_splits,
            )
            for number, of_pack in enumerate(results)
        )

    def _encode(self, packs: pa.Table) -> list[list[EmbeddingBatch | Failure]]:
        """What became of each pack: one result, or several where it did not fit into memory whole."""
        results: list[list[EmbeddingBatch | Failure]] = [[] for _ in range(packs.num_rows)]
        pack_of: dict[int, int] = {}  # by row

        def opened() -> Iterator[PackedBatch]:
            for number, (header, payload) in enumerate(zip(packs["header"], packs["payload"], strict=True)):
                batch = open_pack(header, payload)
                pack_of.update(dict.fromkeys(batch.rows.tolist(), number))
                yield batch

        for result in self._encoder.stream(opened()):
            row = result.row if isinstance(result, Failure) else int(result.rows[0])
            results[pack_of[row]].append(result)
        return results
