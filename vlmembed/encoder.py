"""The device worker: packs in, embeddings out, one forward per pack."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it

from vlmembed.attention.metadata import DevicePack
from vlmembed.batch import split_batch
from vlmembed.devices import is_out_of_memory
from vlmembed.errors import ConfigError, DeviceError, FailureCode
from vlmembed.lanes import CudaLanes, DeviceLink, HostLink
from vlmembed.schema import VectorColumn
from vlmembed.types import EmbeddingBatch, Failure

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vlmembed.config import EncodeConfig
    from vlmembed.graphs import GraphRunner, ShapeKey
    from vlmembed.lanes import Link, Ticket
    from vlmembed.layout import TowerLayout
    from vlmembed.towers.base import Tower
    from vlmembed.towers.blueprint import Blueprint
    from vlmembed.types import PackedBatch

logger = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STORED_DTYPES = {"float16": torch.float16, "float32": torch.float32}


class Encoder:
    """A tower on a device, with the output of one run.

    Attributes:
        layout: the tower's, for preprocessing and packing.
        vectors: the output columns that it fills.
        pool: how an image's tokens become one vector; None where they are stored themselves.
        normalize: vectors are scaled to length 1; tokens never are.
        graphs: what runs the layers through CUDA graphs, or None.
        num_splits: packs that were split because they did not fit into memory.
        num_lost: 0; see `vlmembed.workers.WorkerPool`.
    """

    num_lost = 0

    def __init__(
        self,
        tower: Tower,
        *,
        vectors: tuple[VectorColumn, ...],
        pool: str | None,
        normalize: bool,
        link: Link | None = None,
    ) -> None:
        self.tower = tower
        self.device: torch.device = tower.patch_mean.device
        self._link = link or (DeviceLink(CudaLanes(self.device)) if self.device.type == "cuda" else HostLink())
        self.layout: TowerLayout = tower.layout
        self.vectors = vectors
        self.pool = pool
        self.normalize = normalize
        self.graphs: GraphRunner | None = None
        self.num_splits = 0

    @classmethod
    def load(
        cls, config: EncodeConfig, blueprint: Blueprint, vectors: tuple[VectorColumn, ...], device: torch.device
    ) -> Encoder:
        """Load the tower for a config whose dtype is decided.

        Raises:
            ModelError: from `Blueprint.load`.
        """
        pool = pick_pool(config, blueprint)
        tower = blueprint.load(dtype=DTYPES[config.dtype], device=device)
        return cls(tower, vectors=vectors, pool=pool, normalize=config.normalize and pool is not None)

    @property
    def deepstack(self) -> bool:
        """The inner layers' features are stored too."""
        return self.pool is None and len(self.vectors) > 1

    def stream(self, batches: Iterable[PackedBatch | None]) -> Iterator[EmbeddingBatch | Failure]:
        """Encode packs; each result comes one pack later where a device works beside the host.

        None among the packs asks for what is still on its way. A pack that does not fit into memory is split until it
        does; a single image that does not fit is a `Failure`.
        """
        waiting: deque[Ticket] = deque()
        for batch in batches:
            if batch is None:
                yield from self._collect(waiting, leave=0)
            else:
                yield from self._start(batch, waiting)
        yield from self._collect(waiting, leave=0)

    def encode(self, batch: PackedBatch) -> EmbeddingBatch:
        """One pack that fits into memory, alone."""
        (result,) = self.stream([batch])
        assert isinstance(result, EmbeddingBatch)
        return result

    def close(self) -> None:
        """Wait for what is still under way, and give cached memory back."""
        if self.graphs is not None:
            logger.info("CUDA graphs: %s", self.graphs.describe())
        with suppress(RuntimeError):  # a device that has failed says so once more, and has been heard
            self._link.make_room()

    def _start(self, batch: PackedBatch, waiting: deque[Ticket]) -> Iterator[EmbeddingBatch | Failure]:
        ticket = self._submit(batch)
        if ticket is not None:
            waiting.append(ticket)
            yield from self._collect(waiting, leave=self._link.lag)
            return
        yield from self._collect(waiting, leave=0)
        self._make_room()
        if len(batch.rows) > 1:
            self.num_splits += 1
            logger.warning(
                "a pack of %d images and %d tokens does not fit into the memory of %s and is split in two: a lower "
                "--max-tokens-per-batch would spare that",
                len(batch.rows),
                batch.num_tokens,
                self.device,
            )
            for half in split_batch(batch, self.layout):
                yield from self._start(half, waiting)
            return
        height, width = batch.size_hw[0].tolist()
        message = (
            f"{width}x{height} pixels are {batch.num_tokens} tokens, which do not fit into the memory of {self.device} "
            "even alone: lower --max-pixels (it goes with --resize native)"
        )
        yield Failure(row=int(batch.rows[0]), stage="encode", code=FailureCode.OUT_OF_MEMORY, message=message)

    def _submit(self, batch: PackedBatch) -> Ticket | None:
        """Hand a pack over; None where it does not fit. The exception goes, and what its frames hold of the pack with
        it, before anything is tried again."""
        try:
            key = self.graphs.claim(batch) if self.graphs is not None else None
            if self.graphs is None or key is None:
                return self._link.submit(batch, torch.from_numpy(batch.block), lambda block: self._eager(block, batch))
            filled, graphs = self.graphs.fill(batch, key), self.graphs
            return self._link.submit(
                batch,
                torch.from_numpy(filled.block),
                lambda block: self._by_graph(block, filled, batch, graphs=graphs, key=key),
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                self._raise_device_error(error)
                raise
        return None

    def _raise_device_error(self, error: BaseException) -> None:
        """Say as a person would what CUDA has reported, perhaps of an earlier pack.

        Raises:
            DeviceError: it was CUDA.
        """
        if isinstance(error, torch.AcceleratorError):
            msg = f"{self.device} failed: {error}. What was committed is kept, and the same command goes on from there"
            raise DeviceError(msg) from error

    def _make_room(self) -> None:
        if self.graphs is not None:
            self.graphs.stop("out of memory")
        self._link.make_room()

    @torch.inference_mode()
    def _eager(self, block: torch.Tensor, batch: PackedBatch) -> list[torch.Tensor]:
        pack = DevicePack.view(block, batch.header)
        features = self.tower.features(pack.patches, pack.metadata, pool=self.pool, deepstack=self.deepstack)
        return [output.contiguous() for output in self._outputs(features, pack)]

    @torch.inference_mode()
    def _by_graph(
        self, block: torch.Tensor, filled: PackedBatch, batch: PackedBatch, *, graphs: GraphRunner, key: ShapeKey
    ) -> list[torch.Tensor]:
        pack = DevicePack.view(block, filled.header)
        features = graphs.features(block, filled, key)
        images = DevicePack(patches=pack.patches, metadata=pack.metadata.of_images(batch.metadata))
        return [output.clone() for output in self._outputs(features, images)]  # the next replay writes over them

    def _outputs(self, features: list[torch.Tensor], pack: DevicePack) -> list[torch.Tensor]:
        """What is stored of the features, in the output's own dtypes."""
        if self.pool is None:
            outputs = self.tower.tokens_of(features, pack.metadata)
        else:
            pooled = self.tower.pooled_of(features, pack.metadata, self.pool)
            outputs = [F.normalize(pooled, dim=-1) if self.normalize else pooled]
        return [output.to(STORED_DTYPES[column.dtype]) for column, output in zip(self.vectors, outputs, strict=True)]

    def _collect(self, waiting: deque[Ticket], *, leave: int) -> Iterator[EmbeddingBatch]:
        while len(waiting) > leave:
            ticket = waiting.popleft()
            batch = ticket.batch
            try:
                results = self._link.collect(ticket)
            except RuntimeError as error:
                self._raise_device_error(error)
                raise
            offsets = None
            if self.pool is None:
                lengths = [self.layout.num_merged((h, w)) for h, w in batch.grid_hw.tolist()]
                offsets = np.concatenate([[0], np.cumsum(lengths)])
            yield EmbeddingBatch(  # copies, or the whole block would stay until they are written
                rows=batch.rows.copy(),
                grid_hw=batch.grid_hw.copy(),
                size_hw=batch.size_hw.copy(),
                vectors={column.name: result.numpy() for column, result in zip(self.vectors, results, strict=True)},
                offsets=offsets,
            )


def pick_pool(config: EncodeConfig, blueprint: Blueprint) -> str | None:
    """What ``--pool auto`` means for a tower; None where tokens are stored.

    Raises:
        ConfigError: the tower has no such vector, or ``--pool`` comes with tokens.
    """
    choices = tuple(blueprint.pool_widths)
    if config.emit == "tokens":
        if config.pool != "auto":
            msg = f"--pool {config.pool} makes one vector of an image, and --emit tokens stores all: leave one out"
            raise ConfigError(msg)
        return None
    if config.pool == "auto":
        return choices[0]
    if config.pool not in choices:
        msg = f"--pool {config.pool} is not possible with {blueprint.family.title}: use {' or '.join(choices)}"
        raise ConfigError(msg)
    return config.pool


def vector_columns(config: EncodeConfig, blueprint: Blueprint) -> tuple[VectorColumn, ...]:
    """The output columns of a run: one embedding, or tokens and what ``--deepstack`` adds.

    Raises:
        ConfigError: from `pick_pool`; or ``--deepstack`` for a tower without such features, or without tokens.
    """
    pool = pick_pool(config, blueprint)
    if config.deepstack and (pool is not None or not blueprint.num_deepstack):
        reason = "goes with --emit tokens" if pool is not None else f"is not possible with {blueprint.family.title}"
        msg = f"--deepstack {reason}: it stores the inner layers' tokens, which Qwen3-VL has"
        raise ConfigError(msg)
    if pool is not None:
        dtype = "float32" if config.embedding_dtype == "auto" else config.embedding_dtype
        return (VectorColumn(name="embedding", width=blueprint.pool_widths[pool], dtype=dtype),)
    dtype = "float16" if config.embedding_dtype == "auto" else config.embedding_dtype
    names = ["tokens", *(f"deepstack_{level}" for level in range(blueprint.num_deepstack * config.deepstack))]
    return tuple(VectorColumn(name=name, width=blueprint.token_width, dtype=dtype, per_token=True) for name in names)
