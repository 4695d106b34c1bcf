"""Ids that are unique: those that a column of the input gives its rows, and those made of names."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import tempfile
from collections import Counter
from typing import TYPE_CHECKING, Any

from vlmembed.errors import InputError, StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self


def escape_name(name: str) -> str:
    r"""A path as valid Unicode, different for different paths.

    Bytes that do not decode become ``\xNN``. So that this cannot collide with a name that holds a backslash itself,
    backslashes are doubled; names without either stay as they are.
    """
    if name.isascii() and "\\" not in name:
        return name
    escaped = name.replace("\\", "\\\\")
    return "".join(f"\\x{ord(char) - 0xDC00:02x}" if "\udc80" <= char <= "\udcff" else char for char in escaped)


class IdIndex:
    """All ids of a run, which must be present and unique: told before the run, not after it."""

    def __init__(self, column: str, *, otherwise: str = "FILE#ROW") -> None:
        """`otherwise`: what ids are without the column."""
        self._column = column
        self._otherwise = otherwise
        self._hash = hashlib.sha256()
        self._database = sqlite3.connect("")  # a scratch database, on disk once it grows
        self._database.execute("CREATE TABLE ids (id TEXT PRIMARY KEY) WITHOUT ROWID")

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over the ids so far, in order."""
        return self._hash.hexdigest()

    def add(self, values: Sequence[Any], name: str) -> None:
        """Note the next ids, of a file called `name`.

        Raises:
            InputError: one is null, or not the first of its kind.
        """
        if None in values:
            msg = f"--id-column {self._column!r} of {name} holds nulls: every row needs an id of its own"
            raise InputError(msg)
        ids = [str(value) for value in values]
        for value in ids:
            self._hash.update(json.dumps(value).encode() + b"\n")
        try:
            with self._database:
                self._database.executemany("INSERT INTO ids VALUES (?)", ((value,) for value in ids))
        except sqlite3.IntegrityError as error:
            msg = f"--id-column {self._column!r} repeats an id, in {name}; {self._first_repeat(ids)}"
            raise InputError(msg) from error

    def _first_repeat(self, ids: Sequence[str]) -> str:
        counts = Counter(ids)
        known = "SELECT 1 FROM ids WHERE id = ?"
        value = next(value for value in ids if counts[value] > 1 or self._database.execute(known, (value,)).fetchone())
        return f"the first is {value!r}: name another column, or leave --id-column out (ids are then {self._otherwise})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()


CACHE_KIB = 32 * 1024
"""Memory that the scratch database of `UniqueNames` holds; more of it lies on disk."""


class UniqueNames:
    """Makes ids of names that may repeat: the second ``a.jpg`` becomes ``a.jpg#2``, the third ``a.jpg#3``.

    An id is never given twice, also where a name looks like one that was made here. The same names in the same order
    have the same ids. Memory stays flat.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect(
            "", isolation_level=None, check_same_thread=False
        )  # a scratch database, on disk once it grows
        for pragma in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{CACHE_KIB}"):
            self._database.execute(f"PRAGMA {pragma}")
        self._database.execute("CREATE TABLE names (name TEXT PRIMARY KEY, copies INTEGER) WITHOUT ROWID")
        self._database.execute("BEGIN")  # one transaction: nothing here is to outlive the process

    def key(self, name: str) -> str:
        """The id of the next thing called `name`, which is valid Unicode (`escape_name`).

        Raises:
            StorageError: the scratch database cannot grow.
        """
        try:
            if self._is_new(name):
                return name
            known = "SELECT copies FROM names WHERE name = ?"
            number = int(self._database.execute(known, (name,)).fetchone()[0]) + 1
            while not self._is_new(key := f"{name}#{number}"):
                number += 1
            self._database.execute("UPDATE names SET copies = ? WHERE name = ?", (number, name))
        except sqlite3.Error as error:
            msg = f"cannot write the list of ids into {tempfile.gettempdir()} ({error}): make room, or set TMPDIR"
            raise StorageError(msg) from error
        return key

    def _is_new(self, name: str) -> bool:
        """Take a name, if it is still free."""
        inserted = self._database.execute("INSERT OR IGNORE INTO names VALUES (?, 1)", (name,)).rowcount
        return bool(inserted)

    def close(self) -> None:
        """Drop the scratch database."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
