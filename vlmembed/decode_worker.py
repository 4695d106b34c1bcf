"""A decoding process: pictures in, patches out, one at a time. `vlmembed.decode_processes` starts it.

It never imports torch, so it starts in a fraction of a second.
"""

from __future__ import annotations

import pickle
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from vlmembed.decode import own_pillow_settings
from vlmembed.formats import readable_formats
from vlmembed.patcher import PROTOCOL, Patched, out_of_memory

if TYPE_CHECKING:
    from vlmembed.patcher import Patch


def main(socket: int) -> None:
    """Run in a process that has this socket open, until its other end is closed."""
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(Connection(socket))


def serve(connection: Connection) -> None:
    """Take a pickled `Patch`; say None when ready; then answer each row number and content with a pickled `Patched`,
    or with the exception that was raised.

    Raises:
        EOFError, OSError: the other end is closed.
    """
    order = connection.recv_bytes()
    try:
        patch = pickle.loads(order)  # noqa: S301  our own parent's
        readable_formats()  # imports Pillow's plugins: before the first picture's time begins
    except Exception as error:  # noqa: BLE001  raised by the parent
        connection.send_bytes(packed_error(error))
        return
    with own_pillow_settings(patch.max_source_pixels):
        connection.send_bytes(pickle.dumps(None))
        while True:
            row = connection.recv()
            connection.send_bytes(answer(patch, row, connection.recv_bytes()))


def answer(patch: Patch, row: int, content: bytes) -> bytes:
    """The pickled result for one picture."""
    try:
        return pickle.dumps(patch(row, content), protocol=PROTOCOL)
    except MemoryError:  # for the pickle
        return pickle.dumps(Patched(result=out_of_memory(row, "decode")), protocol=PROTOCOL)
    except Exception as error:  # noqa: BLE001  raised by the parent
        return packed_error(error)


def packed_error(error: Exception) -> bytes:
    """An exception that the parent can raise: itself with its traceback as a note or, where it cannot be pickled, that
    in words."""
    words = "in a decoding process:\n" + "".join(traceback.format_exception(error))
    try:
        error.add_note(words)
        packed = pickle.dumps(error, protocol=PROTOCOL)
        pickle.loads(packed)  # noqa: S301  made here
    except Exception:  # noqa: BLE001  whatever its class does when it is pickled
        return pickle.dumps(RuntimeError(words), protocol=PROTOCOL)
    return packed
