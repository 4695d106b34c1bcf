"""Which rows are being decoded right now, on disk: after a crash of the whole process the next start can name them."""

from __future__ import annotations

import errno
import os
import struct
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLOT_BYTES = 512
MAX_FILE_BYTES = 2**20
"""More is not read: it would be no file of ours."""

_SIGN = b"decoding"
_HEAD = struct.Struct("<8sqH")  # the sign, the row, how many bytes of the key follow
_CLEAR = bytes(len(_SIGN))
_MAX_KEY_BYTES = SLOT_BYTES - _HEAD.size


class SuspectRows:
    """A small file of fixed slots; a row that is marked stands in one of them.

    What is written survives the process, since the system has it then, but is not forced onto the disk: after a loss
    of power nobody asks which picture it was. It is written, not mapped: a full disk is then an error that can be
    ignored, and not a signal that ends the process.
    """

    def __init__(self, path: Path, num_slots: int) -> None:
        """Make the file; what an earlier start has left there goes, so read that first.

        Raises:
            OSError: it cannot be made.
        """
        self._path = path
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self._is_closed = False
        self._lock = threading.Lock()
        self._file = path.open("wb", buffering=0)
        try:
            self._make_room(num_slots * SLOT_BYTES)
        except OSError:
            self.close()
            raise

    @contextmanager
    def mark(self, row: int, key: str) -> Iterator[None]:
        """Mark a row while the block runs. Never fails: where no slot is free, or the disk full, it goes unmarked."""
        with self._lock:
            slot = self._free.pop() if self._free and not self._is_closed else None
        if slot is None:
            yield
            return
        encoded = key.encode("utf-8", "backslashreplace")
        if len(encoded) > _MAX_KEY_BYTES:  # a character that was cut through goes as a whole
            encoded = encoded[:_MAX_KEY_BYTES].decode("utf-8", "ignore").encode()
        self._write(slot, _HEAD.pack(_SIGN, row, len(encoded)) + encoded)
        try:
            yield
        finally:
            self._write(slot, _CLEAR)
            with self._lock:
                self._free.append(slot)
                self._close_after_last()

    def close(self) -> None:
        """Remove the file. A row may still be marked, by a thread that hangs."""
        with self._lock:
            self._is_closed = True
            self._close_after_last()
        self._path.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int) -> None:
        if self._file.write(bytes(num_bytes)) < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def _write(self, slot: int, content: bytes) -> None:
        with suppress(OSError):
            os.pwrite(self._file.fileno(), content, slot * SLOT_BYTES)

    def _close_after_last(self) -> None:
        if self._is_closed and len(self._free) == self._num_slots:
            self._file.close()


def read_suspects(path: Path) -> list[tuple[int, str]]:
    """Rows that were marked when an earlier start died, in order, and their keys as far as they fit into a slot.

    Never fails: no file, half a file or another one's content hold no rows.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES)
    except OSError:
        return []
    slots = (content[start : start + SLOT_BYTES] for start in range(0, len(content), SLOT_BYTES))
    return sorted({found for slot in slots if (found := _read_slot(slot)) is not None})


def _read_slot(slot: bytes) -> tuple[int, str] | None:
    if not slot.startswith(_SIGN) or len(slot) < _HEAD.size:
        return None
    _, row, length = _HEAD.unpack_from(slot)
    key = slot[_HEAD.size : _HEAD.size + length]
    if row < 0 or len(key) != length:
        return None
    try:
        return row, key.decode()
    except UnicodeDecodeError:
        return None
