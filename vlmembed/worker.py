"""A worker process: one device, fed by the process that reads and packs. `vlmembed.workers` starts it."""

from __future__ import annotations

import logging
import os
import pickle
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from vlmembed.batch import open_batch
from vlmembed.devices import cores_per_worker
from vlmembed.errors import DeviceError, VlmembedError
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
    """A shared block that a GPU can copy from: registered with CUDA, anew whenever it has grown.

    It grows when its worker is given a pack in it, so after the pack before in it has been copied.
    """

    def __init__(self, descriptor: int, device: torch.device) -> None:
        self._shared = SharedBlock(descriptor)
        self._device = device
        self._registered: UInt8Array | None = None
        self._num_bytes_tried = 0

    def view(self, num_bytes: int) -> UInt8Array:
        """The first `num_bytes`."""
        whole = self._shared.whole(num_bytes)
        if self._device.type == "cuda" and len(whole) != self._num_bytes_tried:
            self._register(whole)
        return whole[:num_bytes]

    def _register(self, whole: UInt8Array) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if self._registered is not None:
            runtime.cudaHostUnregister(_address(self._registered))
        failed = bool(int(runtime.cudaHostRegister(_address(whole), len(whole), 0)))
        self._registered, self._num_bytes_tried = None if failed else whole, len(whole)
        if failed:
            logger.warning("%d bytes of shared memory could not be pinned: they are copied once more", len(whole))
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device)  # CUDA reports its last error once more, to whoever comes next


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
        torch.set_num_threads(order.num_threads or cores_per_worker(order.num_workers))
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
        block = blocks[order.slot].view(order.num_bytes + order.num_header_bytes)
        yield open_batch(pickle.loads(block[order.num_bytes :].tobytes()), block[: order.num_bytes])  # noqa: S301  our own run's


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
    except DeviceError as error:  # another device may do better
        _tell(connection, Trouble(text=str(error)))
    except VlmembedError as error:
        _tell(connection, Trouble(text=str(error), error=error))
    except Exception:  # noqa: BLE001  whatever it is, the run must hear of it
        _tell(connection, Trouble(text=traceback.format_exc()))


def _tell(connection: Connection, trouble: Trouble) -> None:
    with suppress(OSError):  # the run may be over
        connection.send(trouble)


def main(socket: int, descriptors: Sequence[int]) -> None:
    """Run in a process that has these files open."""
    serve(Connection(socket), descriptors)
