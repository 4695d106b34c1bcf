"""Rows of two outputs brought together by id, in bounded memory, whatever their orders are.

Both are read through windows side by side. Rows that have no partner in the other's window wait in an SQLite database
until it comes by. So two outputs of one order cost a look at their ids, and others what it takes to write the rows that
are out of step to disk, once.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import pyarrow as pa

from vlmembed.database import open_scratch
from vlmembed.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import Self, TypeAlias

    Pairs: TypeAlias = tuple[pa.Table, pa.Table]

WINDOW_ROWS = 512
WINDOW_BYTES = 16 * 2**20
"""A window is filled up to one of them."""

PLAIN_ROWS = 32
"""Rows whose dictionaries are resolved at a time: then each has its own copy of a value, which may be large."""

_TABLE = "CREATE TABLE waiting (number INTEGER PRIMARY KEY, kind TEXT, side INTEGER, id BLOB, row BLOB)"


class _Window:
    """The next rows of one side."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._batches = iter(batches)
        self.rows: pa.Table | None = None
        self.ids: list[str] = []

    def fill(self) -> None:
        while len(self.ids) < WINDOW_ROWS and (self.rows is None or self.rows.nbytes < WINDOW_BYTES):
            batch = next(self._batches, None)
            if batch is None:
                break
            if batch["id"].null_count:
                msg = "one of the outputs has rows without an id: name outputs as they were written"
                raise InputError(msg)
            more = pa.Table.from_batches([batch])
            self.rows = more if self.rows is None else pa.concat_tables([self.rows, more])
            self.ids += batch["id"].to_pylist()

    def take(self, places: list[int]) -> pa.Table:
        assert self.rows is not None
        is_run = places == list(range(places[0], places[0] + len(places)))
        return self.rows.slice(places[0], len(places)) if is_run else self.rows.take(places)

    def drop(self, count: int) -> None:
        self.ids = self.ids[count:]
        self.rows = None if self.rows is None or not self.ids else self.rows.slice(count)


class Alignment:
    """Finds partners, and keeps those that have none, in a new database at `path`. Sides are 0 and 1.

    An id that one side has twice needs two of the other.
    """

    def __init__(self, path: Path) -> None:
        self._database = open_scratch(path, _TABLE)
        self._database.execute("CREATE INDEX by_id ON waiting (kind, side, id)")

    def pairs(self, kind: str, first: Iterable[pa.RecordBatch], second: Iterable[pa.RecordBatch]) -> Iterator[Pairs]:
        """Tables of rows with equal ids, row by row. In the end the rows without a partner wait under `kind`."""
        windows = (_Window(first), _Window(second))
        while True:
            for window in windows:
                window.fill()
            if not any(window.ids for window in windows):
                return
            places = _match(windows[0].ids, windows[1].ids)
            sides = [0, 1]
            if places[0]:
                yield windows[0].take(places[0]), windows[1].take(places[1])
            else:
                sides = self._behind(kind, windows) or sides
            for side in sides:
                # What stands behind the last match may have its partner in the other's next window.
                end = max(places[side]) + 1 if places[side] else len(windows[side].ids)
                left = sorted(set(range(end)) - set(places[side]))
                yield from self._settle(kind, side, windows[side], left)
                windows[side].drop(end)

    def _behind(self, kind: str, windows: tuple[_Window, _Window]) -> list[int]:
        """The sides whose rows come where the other has been: one of them alone can catch up."""
        query = "SELECT 1 FROM waiting WHERE kind = ? AND side = ? AND id = ? LIMIT 1"
        return [
            side
            for side, window in enumerate(windows)
            if any(self._database.execute(query, (kind, 1 - side, key.encode())).fetchone() for key in window.ids)
        ]

    def _settle(self, kind: str, side: int, window: _Window, places: list[int]) -> Iterator[Pairs]:
        """Pair rows of a window with those that wait on the other side; let the others wait."""
        mine, others = [], []
        query = "SELECT number, row FROM waiting WHERE kind = ? AND side = ? AND id = ? ORDER BY number LIMIT 1"
        for start in range(0, len(places), PLAIN_ROWS):
            some = places[start : start + PLAIN_ROWS]
            rows = _plain(window.take(some))
            for number, place in enumerate(some):
                key, row = window.ids[place].encode(), rows.slice(number, 1)
                found = self._database.execute(query, (kind, 1 - side, key)).fetchone()
                if found is None:
                    values = (kind, side, key, _to_bytes(row))
                    self._database.execute("INSERT INTO waiting (kind, side, id, row) VALUES (?, ?, ?, ?)", values)
                    continue
                self._database.execute("DELETE FROM waiting WHERE number = ?", found[:1])
                mine.append(row)
                others.append(pa.ipc.open_stream(found[1]).read_all())
        if mine:
            tables = pa.concat_tables(mine), pa.concat_tables(others)
            yield tables if side == 0 else tables[::-1]

    def alone(self, kind: str, side: int, *, other_kind: str, has_other: bool, limit: int) -> tuple[int, list[str]]:
        """How many rows of a kind and side found no partner, and the ids of the first `limit`: of those that wait on
        the other side as `other_kind`, or of those that do not."""
        exists = (
            "EXISTS (SELECT 1 FROM waiting AS other WHERE other.kind = ? AND other.side = ? AND other.id = mine.id)"
        )
        of = f"FROM waiting AS mine WHERE kind = ? AND side = ? AND {'' if has_other else 'NOT '}{exists}"
        values = (kind, side, other_kind, 1 - side)
        (count,) = self._database.execute(f"SELECT COUNT(*) {of}", values).fetchone()
        ids = self._database.execute(f"SELECT id {of} ORDER BY number LIMIT ?", (*values, limit)).fetchall()
        return count, [key.decode() for (key,) in ids]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()


def _match(first: list[str], second: list[str]) -> tuple[list[int], list[int]]:
    """Places of equal ids in two lists, pair by pair, in the order of the second."""
    count = min(len(first), len(second))
    if first[:count] == second[:count]:
        return list(range(count)), list(range(count))
    there = defaultdict(list)
    for place in range(len(first) - 1, -1, -1):  # so that the first of equal ids is taken first
        there[first[place]].append(place)
    pairs = [(there[key].pop(), place) for place, key in enumerate(second) if there.get(key)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _plain(rows: pa.Table) -> pa.Table:
    """Rows without dictionaries: a column's whole dictionary would be written with each of them."""
    for place, field in enumerate(rows.schema):
        if pa.types.is_dictionary(field.type):
            plain = field.with_type(field.type.value_type)
            rows = rows.set_column(place, plain, rows.column(place).cast(plain.type))
    return rows


def _to_bytes(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    content: bytes = sink.getvalue().to_pybytes()
    return content
