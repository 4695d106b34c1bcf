"""The entries of the embedding cache: values by key in one file, held to its size."""

from __future__ import annotations

import sqlite3
import time
from typing import TYPE_CHECKING

from vlmembed.database import SharedDatabase

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

FILE_NAME = "embeddings-v1.sqlite"
"""With the version of its layout, so that another version has a file of its own in the same folder."""

PAGE_BYTES = 16_384
"""Vectors of 384 to 1536 float32 values fill such pages to 73 to 91 %; those of SQLite's own 4,096 to 49 to 94 %."""

WAL_BYTES = 64 * 2**20
"""What may wait in the write-ahead log, or a quarter of the cap if that is less."""

TRIM_SECONDS = 5.0
"""How long one `trim` may take where the cap was lowered; the next one goes on."""

_ENTRY_BYTES = 192
"""What an entry takes beside its value: key, index, order of use."""

# entries has rowids and an index over the keys: in a B-tree by key, each step of a search would pass large values.
# The order of use is a table of its own, so that noting a use does not write a value.
_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS entries (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS uses (used INTEGER PRIMARY KEY, id INTEGER NOT NULL UNIQUE);
SELECT used, id, key, length(value) FROM uses JOIN entries USING (id) LIMIT 1;
DELETE FROM uses WHERE 0;
COMMIT;
"""
_FIND = "SELECT entries.id, used, value FROM entries LEFT JOIN uses USING (id) WHERE key = ?"
_OLDEST = "SELECT used, id, length(value) FROM uses LEFT JOIN entries USING (id) ORDER BY used LIMIT 256"


class CacheFile:
    """Values by key in a file of `folder` that has at most about `max_bytes`, its write-ahead log included.

    `find` is for one thread, all else for another. All raise sqlite3.Error.

    Attributes:
        database: the file.
        transaction_bytes: what one transaction should write at most; a value is its size and `PAGE_BYTES` for its key.
        old_below: uses below it are in the older half of a file that is more than half full.

    Raises:
        OutputError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._wal_bytes = min(WAL_BYTES, max_bytes // 4)
        self._limit_bytes = max_bytes - self._wal_bytes
        self.transaction_bytes = self._wal_bytes // 4
        layout = (
            f"page_size = {PAGE_BYTES}",
            "auto_vacuum = INCREMENTAL",  # the file can shrink when its cap is lowered
        )
        pragmas = (
            "secure_delete = OFF",  # some builds write zeros over what is deleted
            "cache_size = -16384",  # KiB: the keys come in no order
            f"wal_autocheckpoint = {self._wal_bytes // 2 // PAGE_BYTES + 1}",
            f"journal_size_limit = {self._wal_bytes // 2}",
        )
        self.database = SharedDatabase(folder / FILE_NAME, layout=layout, pragmas=pragmas, schema=_SCHEMA)
        self._writer = self.database.writer
        self.old_below = 0

    def find(self, key: bytes) -> tuple[object, object, object] | None:
        """The id, the last use and the value of an entry; of any type where the file is damaged."""
        rows = self.database.reader.execute(_FIND, (key,)).fetchall()  # all, so that the reading ends here
        return rows[0] if rows else None

    def transaction(self) -> AbstractContextManager[None]:
        """The methods below that say so belong in one."""
        return self.database.transaction()

    def has(self, key: bytes) -> bool:
        """Whether there is an entry."""
        return bool(self._writer.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchall())

    def fits(self, num_bytes: int) -> bool:
        """Whether a value of this size can be kept at all."""
        longest = self._writer.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) - PAGE_BYTES
        return num_bytes <= longest and stored_bytes(num_bytes) <= self._limit_bytes

    def insert(self, key: bytes, value: bytes) -> None:
        """In a transaction: keep a value, unless there is an entry already."""
        cursor = self._writer.execute("INSERT OR IGNORE INTO entries (key, value) VALUES (?, ?)", (key, value))
        if cursor.rowcount:
            self._writer.execute("REPLACE INTO uses (id) VALUES (?)", (cursor.lastrowid,))

    def touch(self, number: int) -> None:
        """In a transaction: the entry of this id, if it is still there, is the last used one."""
        self._writer.execute("REPLACE INTO uses (id) SELECT id FROM entries WHERE id = ?", (number,))

    def delete(self, key: bytes) -> None:
        """In a transaction: drop an entry."""
        self._writer.execute("DELETE FROM uses WHERE id IN (SELECT id FROM entries WHERE key = ?)", (key,))
        self._writer.execute("DELETE FROM entries WHERE key = ?", (key,))

    def evict(self, room_bytes: int = 0) -> int:
        """In a transaction: drop what was not used for longest until there is room, but at most a transaction's worth
        beyond `room_bytes`; return how many were dropped."""
        over = min(self._used_bytes() + room_bytes - self._limit_bytes, room_bytes + self.transaction_bytes)
        num_dropped = 0
        while over > 0 and (oldest := self._writer.execute(_OLDEST).fetchall()):
            for used, number, num_bytes in oldest:
                self._writer.execute("DELETE FROM uses WHERE used = ?", (used,))
                self._writer.execute("DELETE FROM entries WHERE id = ?", (number,))
                num_dropped += 1
                over -= stored_bytes(num_bytes or 0)
                if over <= 0:
                    break
        return num_dropped

    def trim(self) -> None:
        """Hold file and log to their size, where the cap was lowered or values took more than was thought."""
        deadline = time.monotonic() + TRIM_SECONDS
        limit = self._limit_bytes // PAGE_BYTES
        while self._pragma("page_count") > limit and time.monotonic() < deadline:
            with self.transaction():
                num_dropped = self.evict()
                surplus = min(self._pragma("page_count") - limit, self._pragma("freelist_count"))
                surplus = min(surplus, self.transaction_bytes // PAGE_BYTES + 1)
                self._writer.execute(f"PRAGMA incremental_vacuum({surplus})").fetchall()
            if not num_dropped and not surplus:
                break
        if self.database.log_bytes > self._wal_bytes:
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def measure(self) -> None:
        """Bring `old_below` up to date."""
        first, last = self._writer.execute("SELECT min(used), max(used) FROM uses").fetchone()
        is_half_full = self._used_bytes() > self._limit_bytes // 2
        self.old_below = (first + last + 1) // 2 if is_half_full and first is not None else 0

    def _used_bytes(self) -> int:
        return (self._pragma("page_count") - self._pragma("freelist_count")) * PAGE_BYTES

    def _pragma(self, name: str) -> int:
        return int(self._writer.execute(f"PRAGMA {name}").fetchone()[0])


def stored_bytes(num_bytes: int) -> int:
    """What a value of `num_bytes` takes in the file."""
    per_page = PAGE_BYTES // (num_bytes + _ENTRY_BYTES // 2)
    return _ENTRY_BYTES + (PAGE_BYTES // per_page if per_page else num_bytes + PAGE_BYTES)
