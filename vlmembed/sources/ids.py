"""The ids that a column of a Parquet file gives its rows."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import Counter
from typing import TYPE_CHECKING, Any

from vlmembed.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self


class IdIndex:
    """All ids of a run, which must be present and unique: told before the run, not after it."""

    def __init__(self, column: str) -> None:
        self._column = column
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
        return f"the first is {value!r}: name another column, or leave --id-column out (ids are then FILE#ROW)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()
