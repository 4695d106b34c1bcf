"""What child processes of tests run: decoders that crash, hang or have bugs, and device workers without a device.

Children import this by its name, so it imports no torch and nothing of pytest.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from PIL import Image

from vlmembed.batch import open_batch
from vlmembed.errors import FailureCode, ImageError
from vlmembed.exchange import Result, SharedBlock
from vlmembed.patcher import Patched
from vlmembed.types import EmbeddingBatch, Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vlmembed.exchange import PackOrder
    from vlmembed.types import PackedBatch


class TwoReasonsError(Exception):
    """Cannot be unpickled: that gives one reason only."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def spin(_: str) -> NoReturn:
    """Hang in C code with the interpreter's lock held."""
    while True:
        re.match(r"(a+)+$", "a" * 40 + "b")


@dataclass(frozen=True, kw_only=True)
class OddPatcher:
    """Does what the content says; then tells of itself in a failure's message."""

    max_source_pixels: int = 10**8

    def __call__(self, row: int, content: bytes | ImageError) -> Patched:
        """As told."""
        if isinstance(content, ImageError):
            return Patched(result=Failure.from_error(row, "read", content))
        verb, _, argument = content.partition(b" ")
        if verb in DEEDS:
            DEEDS[verb](argument.decode())
        message = f"{len(content)} bytes in process {os.getpid()}, torch {'torch' in sys.modules}, "
        message += f"Pillow's limit {Image.MAX_IMAGE_PIXELS}"
        return Patched(result=Failure(row=row, stage="decode", code=FailureCode.CORRUPT, message=message), seconds=0.25)


def die(number: str) -> None:
    """By a signal."""
    os.kill(os.getpid(), signal.Signals[number])


def divide(number: str) -> None:
    """A bug where the number is 0."""
    assert 1 // int(number)


def refuse(first: str) -> None:
    """Raise what cannot travel."""
    raise TwoReasonsError(first, "another")


def leave(code: str) -> NoReturn:
    """Without a word."""
    os._exit(int(code))


def sleep(seconds: str) -> None:
    """Hang, with the interpreter's lock free."""
    time.sleep(float(seconds))


def allocate(size: str) -> None:
    """More than there is."""
    bytearray(int(size))


DEEDS: dict[bytes, Callable[[str], object]] = {
    b"die": die,
    b"exit": leave,
    b"sleep": sleep,
    b"spin": spin,
    b"divide": divide,
    b"refuse": refuse,
    b"allocate": allocate,
}


@dataclass(frozen=True, kw_only=True)
class NeverReady(OddPatcher):
    """Ends or hangs its process while that unpickles it."""

    deed: bytes
    argument: str

    def __reduce__(self) -> tuple[object, ...]:
        """What the child calls."""
        return DEEDS[self.deed], (self.argument,)


def opened(order: PackOrder, blocks: Sequence[SharedBlock]) -> PackedBatch:
    """The pack of an order, as a worker reads it."""
    block = blocks[order.slot].view(order.num_bytes + order.num_header_bytes)
    return open_batch(pickle.loads(block[order.num_bytes :].tobytes()), block[: order.num_bytes])  # noqa: S301  our own


def echoed(batch: PackedBatch) -> Iterator[EmbeddingBatch | Failure]:
    """The sum of each image's patches, one image at a time."""
    starts = np.concatenate([[0], np.cumsum(batch.grid_hw.prod(axis=1))])
    for index in range(len(batch.rows)):
        total = batch.patches[starts[index] : starts[index + 1]].sum(dtype=np.float64)
        yield EmbeddingBatch(
            rows=batch.rows[index : index + 1].copy(),
            grid_hw=batch.grid_hw[index : index + 1].copy(),
            size_hw=batch.size_hw[index : index + 1].copy(),
            vectors={"sum": np.array([[total]], np.float32)},
        )


def main(socket: int, descriptors: Sequence[int], silent_row: int = -1) -> None:
    """A device worker that echoes, as a process. With `silent_row` in hand it stops, in the middle of an answer where
    the row is odd."""
    connection, blocks = Connection(socket), [SharedBlock(descriptor) for descriptor in descriptors]
    with suppress(EOFError, OSError):
        while True:
            batch = opened(connection.recv(), blocks)
            if silent_row in batch.rows:
                if silent_row % 2:
                    os.write(socket, struct.pack("!i", 1000) + b"the first few of 1000 bytes")
                die("SIGSTOP")
            for value in echoed(batch):
                connection.send(Result(value=value, num_splits=0))
