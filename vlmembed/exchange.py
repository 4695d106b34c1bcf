"""What a run and its worker processes hand to each other: packs through shared memory, all else as messages."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vlmembed.config import EncodeConfig
    from vlmembed.layout import ResizeRule
    from vlmembed.schema import VectorColumn
    from vlmembed.types import EmbeddingBatch, Failure, UInt8Array

PACKS_IN_FLIGHT = 3
"""Packs that a worker has at a time: one that is computed, the next, and one that is on its way there or whose result
is on its way back. With two, a worker would find nothing to do whenever it looks, and let its device run dry."""

GROWTH_BYTES = 2**20
"""Blocks grow by a quarter, and to a multiple of this."""


class SharedBlock:
    """Bytes that two processes see: a file without a name, in memory, that both have open. It grows as needed.

    Not POSIX shared memory: containers often limit that to 64 MB, and a process that writes beyond dies of it.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _open_nameless() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None

    def reserve(self, num_bytes: int) -> UInt8Array:
        """The first `num_bytes`, made to exist."""
        if self._map is None or len(self._map) < num_bytes:
            rounded = -(-(num_bytes + num_bytes // 4) // GROWTH_BYTES) * GROWTH_BYTES
            os.ftruncate(self.descriptor, rounded)
        return self.view(num_bytes)

    def view(self, num_bytes: int) -> UInt8Array:
        """The first `num_bytes`, which the other side has made to exist."""
        return self.whole(num_bytes)[:num_bytes]

    def whole(self, num_bytes: int) -> UInt8Array:
        """All bytes there are, at least `num_bytes`; the same memory until there are not enough."""
        if self._map is None or len(self._map) < num_bytes:
            self._map = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        return np.frombuffer(self._map, dtype=np.uint8)

    def close(self) -> None:
        """Close the file; the memory goes when no array of it is left."""
        self._map = None
        os.close(self.descriptor)


def _open_nameless() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("vlmembed")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOrder:
    """Load the tower on `device`. `num_workers` share the machine; on a CPU each has its share of the cores, or
    `num_threads`."""

    config: EncodeConfig
    vectors: tuple[VectorColumn, ...]
    rule: ResizeRule
    num_rows: int
    device: str
    num_workers: int
    log_level: int
    num_threads: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PackOrder:
    """Encode the pack in block number `slot`: its own bytes, then those of its pickled header, which can be long."""

    slot: int
    num_bytes: int
    num_header_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What became of some or all images of a pack. `num_splits`: packs that the worker has split so far."""

    value: EmbeddingBatch | Failure
    num_splits: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """The worker ends. `error` is one of our own exceptions, to be raised as it is; else `text` says what happened."""

    text: str
    error: Exception | None = None
