"""Embeddings that runs share: found by what the image holds and by the encoder that made them.

The cache speeds a run up and never ends one. An entry that is not what was stored is computed again, a damaged file is
set aside, and what goes wrong otherwise switches the cache off.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import struct
from dataclasses import asdict
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmembed.cachefile import PAGE_BYTES, CacheFile, stored_bytes
from vlmembed.database import is_damage, remedy_for
from vlmembed.types import Embedded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path
    from typing import Self

    from vlmembed.schema import VectorColumn
    from vlmembed.types import FloatArray

logger = logging.getLogger(__name__)

MAX_NOTED = 2**16
"""Uses that are remembered until the next `put`."""

_VERSION = 1
_HEADER = struct.Struct("<B4I")  # version; pixels, then patches: height, width
_COUNT = struct.Struct("<I")  # a column's vectors
_CHECKSUM_BYTES = 32
_TROUBLE = (sqlite3.Error, OSError, MemoryError)  # a damaged record can claim any size


class EmbeddingCache:
    """Keeps embeddings in `folder`, which may grow to about `max_bytes`.

    `find` is for one thread and `put` for another. `fingerprint` is the run's `encoder_fingerprint`, and `vectors` are
    its columns.

    Attributes:
        num_found: embeddings that `find` returned.
        num_damaged: entries that were not what had been stored.

    Raises:
        OutputError: the folder cannot be made or written to.
    """

    def __init__(
        self, folder: Path, *, fingerprint: Mapping[str, Any], vectors: tuple[VectorColumn, ...], max_bytes: int
    ) -> None:
        encoder = [dict(fingerprint), [asdict(column) for column in vectors]]
        plain = json.dumps(encoder, sort_keys=True, separators=(",", ":"))
        self._encoder = hashlib.sha256(plain.encode()).digest()
        self._vectors = vectors
        self._folder = folder
        self._used: set[int] = set()  # noted by `find`, written by `put`: ids
        self._damaged: set[bytes] = set()  # likewise: keys
        self._notes = Lock()
        self.num_found = self.num_damaged = 0
        self._file: CacheFile | None = None
        self._reads = self._writes = True
        try:
            self._file = CacheFile(folder, max_bytes=max_bytes)
        except _TROUBLE as error:
            self._warn("not used", error)
        self.put(())

    def _warn(self, state: str, error: BaseException) -> None:
        reason = str(error) or type(error).__name__
        logger.error("the cache in %s is %s (%s): %s", self._folder, state, reason, remedy_for(error))

    def find(self, content_hash: bytes, row: int) -> Embedded | None:
        """What was put in for this content by the same encoder, as the result of `row`; else None."""
        if self._file is None or not self._reads:
            return None
        key = content_hash + self._encoder
        try:
            found = self._file.find(key)
        except _TROUBLE as error:
            self._after_trouble(error, reading=True)
            return None
        if found is None:
            return None
        number, used, value = found
        image = unpack(key, value, self._vectors, row)
        with self._notes:
            if image is None:
                self._damaged.add(key)
            elif not isinstance(used, int) or used < self._file.old_below:
                self._note(number)
        self.num_damaged += image is None
        self.num_found += image is not None
        return image

    def _note(self, number: object) -> None:
        """Only entries that may soon be evicted are noted: a run of hits writes little or nothing."""
        if isinstance(number, int) and len(self._used) < MAX_NOTED:
            self._used.add(number)

    def _after_trouble(self, error: BaseException, *, reading: bool) -> None:
        """A damaged page takes its own entries along, so reading goes on; writing there could spoil others."""
        assert self._file is not None
        database = self._file.database
        if is_damage(error):
            self.num_damaged += reading
            if not database.is_malformed:
                logger.error("the cache in %s is damaged (%s), and no longer written to", self._folder, error)
            database.is_malformed, self._writes = True, False
        elif reading and self._reads:
            self._reads = False
            self._warn("no longer read", error)
        elif not reading and self._writes:
            self._writes = False
            self._warn("no longer written to", error)

    def put(self, images: Iterable[tuple[bytes, Embedded]]) -> None:
        """Keep these by their content's hash, and what `find` has noted. What was not used for longest goes for them.

        An entry that is there is left as it is. Transactions are short: others get their turn, and the log stays small.
        """
        if self._file is None or not self._writes:
            return
        try:
            self._write_notes(self._file)
            for entries in self._new_entries(self._file, images):
                with self._file.transaction():
                    self._file.evict(sum(stored_bytes(len(value)) for _, value in entries))
                    for key, value in entries:
                        self._file.insert(key, value)
            self._file.trim()
            self._file.measure()
        except _TROUBLE as error:
            self._after_trouble(error, reading=False)

    def _write_notes(self, file: CacheFile) -> None:
        with self._notes:
            used, self._used = self._used, set()
            damaged, self._damaged = self._damaged, set()
        if used or damaged:
            with file.transaction():
                for key in damaged:
                    file.delete(key)
                for number in used:
                    file.touch(number)

    def _new_entries(
        self, file: CacheFile, images: Iterable[tuple[bytes, Embedded]]
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        """Keys and values, a transaction's worth at a time."""
        entries: list[tuple[bytes, bytes]] = []
        num_bytes = 0
        for content_hash, image in images:
            key = content_hash + self._encoder
            if file.has(key):
                continue
            value = pack(key, image, self._vectors)
            if not file.fits(len(value)):
                continue
            written_bytes = len(value) + PAGE_BYTES
            if entries and num_bytes + written_bytes > file.transaction_bytes:
                yield entries
                entries, num_bytes = [], 0
            entries.append((key, value))
            num_bytes += written_bytes
        if entries:
            yield entries

    def close(self) -> None:
        """Write what is noted and let go of the file."""
        self.put(())
        self._reads = self._writes = False
        if self._file is not None:
            self._file.database.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pack(key: bytes, image: Embedded, columns: tuple[VectorColumn, ...]) -> bytes:
    """An entry's value: checksum over key and rest; version and sizes; per column the number of vectors, and these."""
    pieces: list[Any] = [_HEADER.pack(_VERSION, *image.size_hw, *image.grid_hw)]
    for column in columns:
        values = np.ascontiguousarray(image.vectors[column.name], _stored_dtype(column))
        pieces += [_COUNT.pack(values.size // column.width), values.data]
    checksum = hashlib.sha256(key)
    for piece in pieces:
        checksum.update(piece)
    return b"".join([checksum.digest(), *pieces])


def unpack(key: bytes, value: object, columns: tuple[VectorColumn, ...], row: int) -> Embedded | None:
    """The image that `pack` was given, or None where key or value are not what they were."""
    if not isinstance(value, bytes):
        return None
    body = memoryview(value)[_CHECKSUM_BYTES:]
    checksum = hashlib.sha256(key)
    checksum.update(body)
    if checksum.digest() != value[:_CHECKSUM_BYTES]:
        return None
    version, height, width, grid_h, grid_w = _HEADER.unpack_from(body)
    if version != _VERSION:
        return None
    start = _HEADER.size
    vectors: dict[str, FloatArray] = {}
    for column in columns:
        (count,) = _COUNT.unpack_from(body, start)
        start += _COUNT.size
        values = np.frombuffer(body, _stored_dtype(column), count * column.width, start).astype(column.dtype)
        start += count * column.bytes_per_vector
        vectors[column.name] = values.reshape(-1, column.width) if column.per_token else values
    assert start == len(body), "the key tells the columns"
    return Embedded(row=row, vectors=vectors, size_hw=(height, width), grid_hw=(grid_h, grid_w))


def _stored_dtype(column: VectorColumn) -> np.dtype[Any]:
    return np.dtype(column.dtype).newbyteorder("<")
