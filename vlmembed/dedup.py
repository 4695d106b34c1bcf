"""Finds, for every row, the first row with the same content.

The hash is SHA-256, whole: 256 bits, never cut. What an index remembers of each lies on disk, but for a few bytes.
"""

from __future__ import annotations

import hashlib
import os
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vlmembed.errors import ImageError, StorageError
from vlmembed.partfiles import storing
from vlmembed.types import Failure, ImageRef, UniqueImage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import Self

    import numpy.typing as npt

    from vlmembed.types import EncodedImage

MAX_LOAD = 2 / 3
"""Share of the index's places that are taken at most: 5 slots are looked at on average where a hash is new."""

_FIRST_PLACES = 2**12
_SPARE_SLOTS = 2**10
"""Behind the last place, for entries that find theirs taken: with hashes that are any good, some dozens at most."""

_STRETCH_SLOTS = 2**18
"""What is moved at a time when the table grows."""

_MAX_NUMBER = 2**32 - 1
_MAX_CONTENTS = int(2**32 * MAX_LOAD)
"""A larger table would have more places than 32 bits of a hash can tell apart."""

_ENTRY = struct.Struct("<32sq")
_WRITE_BYTES = 1024 * _ENTRY.size


class Index(Protocol):
    """Remembers which row showed a content first."""

    def first_row(self, content_hash: bytes, row: int) -> int:
        """The first row with this hash; `row` itself, which is then remembered, where there was none."""
        ...


class HashIndex:
    """Map from a content hash to the first row that showed it.

    Hashes and rows lie in a scratch file at `path`, 40 bytes each, in the order in which they came. In memory is a hash
    table of their numbers: 12 to 24 bytes each, and 36 while it grows. It holds 32 bits of the hash too; where these
    agree, the whole hash is read from the file and compared. (In a B-tree every hash belongs to another page, so one
    that is larger than its cache takes longer with every row.)

    A resumed run builds it again from the committed parts. Used by one thread at a time.
    """

    def __init__(self, path: Path) -> None:
        """Make the file. Raises `StorageError`."""
        self._path = path
        self._num_known = 0
        self._num_written = 0
        self._unwritten = bytearray()
        self._use(np.zeros(_FIRST_PLACES + _SPARE_SLOTS, np.uint64))
        with storing(path):
            self._file = path.open("w+b")

    def first_row(self, content_hash: bytes, row: int) -> int:
        """The first row with this hash; `row` itself, which is then remembered, where there was none.

        Raises:
            StorageError: the disk is full, say.
        """
        slots, tag = self._slots, int.from_bytes(content_hash[:4])
        position = tag * self._num_places >> 32
        while slot := slots[position]:
            if slot >> 32 == tag and (first_row := self._row_of((slot & _MAX_NUMBER) - 1, content_hash)) is not None:
                return first_row
            position += 1
        self._remember(content_hash, row)
        slots[position] = tag << 32 | self._num_known
        if self._num_known > self._num_places * MAX_LOAD:
            self._grow()
        return row

    def _row_of(self, number: int, content_hash: bytes) -> int | None:
        """The row of an entry, if it has this hash."""
        begin = (number - self._num_written) * _ENTRY.size
        if begin >= 0:
            entry = bytes(self._unwritten[begin : begin + _ENTRY.size])
        else:
            with storing(self._path):
                entry = os.pread(self._file.fileno(), _ENTRY.size, number * _ENTRY.size)
        if len(entry) < _ENTRY.size:
            msg = f"{self._path} was cut short by somebody else: give the same command again, which makes it anew"
            raise StorageError(msg)
        known, row = _ENTRY.unpack(entry)
        return row if known == content_hash else None

    def _remember(self, content_hash: bytes, row: int) -> None:
        if self._num_known == _MAX_CONTENTS:
            msg = f"there are more than {_MAX_CONTENTS} different pictures: cut the input with --shard, or --dedup none"
            raise StorageError(msg)
        self._unwritten += _ENTRY.pack(content_hash, row)
        self._num_known += 1
        if len(self._unwritten) >= _WRITE_BYTES:
            with storing(self._path):
                self._file.write(self._unwritten)
                self._file.flush()
            self._num_written = self._num_known
            self._unwritten.clear()

    def _use(self, slots: npt.NDArray[np.uint64]) -> None:
        """A slot is 0, or an entry: 32 bits of its hash (the tag), and its number, counted from 1. It stands where the
        tag lies on a ruler from 0 to 2**32 that is as long as the table, or in the next free slot behind."""
        self._num_places = len(slots) - _SPARE_SLOTS
        self._slots = slots.data  # faster than the array, element by element

    def _grow(self) -> None:
        """Twice as many places. What stands between two empty slots goes into a stretch of its own, by tags."""
        old, num_places = np.asarray(self._slots), 2 * self._num_places
        new = np.zeros(num_places + _SPARE_SLOTS, np.uint64)
        begin = next_free = 0
        while begin < len(old):
            stop = begin + _STRETCH_SLOTS
            while stop < len(old) and old[stop]:
                stop += 1
            stretch = old[begin:stop]
            entries = np.sort(stretch[stretch != 0])
            if len(entries):
                places = ((entries >> np.uint64(32)) * np.uint64(num_places) >> np.uint64(32)).astype(np.int64)
                steps = np.arange(len(entries))
                places = np.maximum.accumulate(np.maximum(places, next_free) - steps) + steps
                new[places] = entries
                next_free = int(places[-1]) + 1
            begin = stop
        self._use(new)

    def close(self) -> None:
        """Drop the scratch file."""
        with suppress(OSError):  # what could not be written, where the disk is full
            self._file.close()
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ref_of(image: EncodedImage, content_hash: bytes | None, index: Index | None) -> ImageRef:
    """The writer's view of a row. Without a hash or an index the row stands for itself."""
    first_row = image.row
    if content_hash is not None and index is not None:
        first_row = index.first_row(content_hash, image.row)
    return ImageRef(
        row=image.row,
        key=image.key,
        content_hash=content_hash,
        first_row=first_row,
        columns=image.columns,
    )


def dedup(
    images: Iterable[EncodedImage], index: Index | None
) -> Iterator[tuple[ImageRef, UniqueImage | Failure | None]]:
    """Pair every row's `ImageRef` with what is left to do for it.

    That is a `UniqueImage` to decode, a `Failure` where its bytes could not be read, or None for a duplicate. Without
    an index every readable row is unique; its hash is taken all the same.
    """
    for image in images:
        if isinstance(image.content, ImageError):
            yield ref_of(image, None, None), Failure.from_error(image.row, "read", image.content)
            continue
        content_hash = hashlib.sha256(image.content).digest()
        ref = ref_of(image, content_hash, index)
        if ref.first_row != ref.row:
            yield ref, None
            continue
        yield ref, UniqueImage(row=image.row, key=image.key, content_hash=content_hash, content=image.content)
