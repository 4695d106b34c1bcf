"""A worker process: one device, fed by the process that reads and packs. `vlmembed.workers` starts it."""

from __future__ import annotations

import logging
import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from vlmembed.batch import open_batch
from vlmembed.devices import cores_per_worker
from vlmembed.errors import VlmembedError
from vlmembed.exchange import LoadOrder, PackOrder, Result, SharedBlock, Trouble
from vlmembed.towers import open_tower
from vlmembed.tuning import load_encoder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from vlmembed.encoder import Encoder
    from vlmembed.tuning import Settled
    from vlmembed.types import PackedBatch, UInt8Array

logger = logging.getLogger(__name__)


class PinnedBlock:
    """A shared block that a GPU can copy from: registered with CUDA, anew whenever it has grown."""

    def __init__(self, descriptor: int, device: torch.device) -> None:
        self._shared = SharedBlock(descriptor)
        self._device = device
        self._registered: UInt8Array | None = None

    def view(self, num_bytes: int) -> UInt8Array:
        """The first `num_bytes`."""
        whole = self._shared.whole(num_bytes)
        if self._device.type == "cuda" and (self._registered is None or len(self._registered) != len(whole)):
            self._register(whole)
        return whole[:num_bytes]

    def _register(self, whole: UInt8Array) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if self._registered is not None:
            runtime.cudaHostUnregister(_address(self._registered))
        if int(runtime.cudaHostRegister(_address(whole), len(whole), 0)):
            logger.warning("%d bytes of shared memory could not be pinned: they are copied once more", len(whole))
        self._registered = whole


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.ctypes.data)


def load(order: LoadOrder) -> tuple[Encoder, Settled]:
    """Load what the run has ordered.

    Raises:
        VlmembedError: as for `load_encoder`.
    """
    logging.basicConfig(level=order.log_level, format="%(levelname)s %(name)s: %(message)s")
    device = torch.device(order.device)
    if device.type == "cpu":
        torch.set_num_threads(cores_per_worker(order.num_workers))
    blueprint = open_tower(os.fspath(order.config.model), revision=order.config.revision)
    return load_encoder(order.config, blueprint, order.vectors, rule=order.rule, num_rows=order.num_rows, device=device)


def packs(connection: Connection, blocks: Sequence[PinnedBlock]) -> Iterator[PackedBatch | None]:
    """The packs that are ordered, in the blocks that they came in. None where no order waits: what is on its way is
    given back before the next one is waited for."""
    while True:
        if not connection.poll(0):
            yield None
        order = connection.recv()
        assert isinstance(order, PackOrder)
        yield open_batch(order.header, blocks[order.slot].view(order.header.layout.num_bytes))


def serve(connection: Connection, descriptors: Sequence[int]) -> None:
    """Load, then encode packs until the run closes its end."""
    try:
        order = connection.recv()
        encoder, settled = load(order)
        connection.send(settled)
        blocks = [PinnedBlock(descriptor, torch.device(order.device)) for descriptor in descriptors]
        for result in encoder.stream(packs(connection, blocks)):
            connection.send(Result(value=result, num_splits=encoder.num_splits))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the run is over, or has died
    except VlmembedError as error:
        connection.send(Trouble(text=str(error), error=error))
    except Exception:  # noqa: BLE001  whatever it is, the run must hear of it
        connection.send(Trouble(text=traceback.format_exc()))


def main(socket: int, descriptors: Sequence[int]) -> None:
    """Run in a process that has these files open."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the run decides what becomes of its workers
    serve(Connection(socket), descriptors)
