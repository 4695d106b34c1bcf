"""Duplicates across outputs: rows whose content an earlier one of them has.

Which rows these are is found first, by an index of content hashes in a scratch file; then the rows are passed through
once more, and those get the vectors of the first row with their content, read by row group where it lies.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from vlmembed.database import open_scratch
from vlmembed.finished import open_rows, reading
from vlmembed.lance_output import LanceRows
from vlmembed.partfiles import FOUND_BYTES, storing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Self

    from vlmembed.types import Int64Array

_FIRSTS = "CREATE TABLE firsts (hash BLOB PRIMARY KEY, position INTEGER) WITHOUT ROWID"
_AGAIN = "CREATE TABLE again (position INTEGER PRIMARY KEY, first INTEGER)"
_SIZES = ("width", "height", "grid_h", "grid_w")
_INDEX_ROWS = 2**16
"""Rows whose hashes are read at a time."""


class Overlap:
    """The rows of later outputs whose content an earlier one has. Rows are counted through all outputs: positions.

    `outputs` are the files of each, `vectors` the names of their columns of vectors; `index` is a scratch file. Used by
    one thread at a time.

    Attributes:
        num_distinct: rows that are nobody's duplicate, in their own output or across.

    Raises:
        InputError: a file is damaged, or gone. StorageError: the index cannot be written.
    """

    def __init__(self, outputs: Sequence[Sequence[Path]], *, vectors: Sequence[str], index: Path) -> None:
        self._columns = ["id", *vectors, *_SIZES]
        self._places: list[tuple[Path, int]] = []  # files and row groups
        self._ends: list[int] = [0]  # positions at which a row group ends, a 0 before
        self._groups: OrderedDict[int, pa.Table] = OrderedDict()
        self.num_distinct = 0
        with ExitStack() as stack, storing(index):
            stack.callback(index.unlink, missing_ok=True)
            self._database = stack.enter_context(closing(open_scratch(index, _FIRSTS)))
            self._database.execute(_AGAIN)
            for files in outputs:
                self._add(files)
            self._bounds = np.array(self._ends, np.int64)
            self._exit = stack.pop_all()

    def _add(self, files: Sequence[Path]) -> None:
        """Find the rows of the next output that are in an earlier one."""
        first_position, num_again, execute = self._ends[-1], 0, self._database.execute
        for path in files:
            for group, num_rows in enumerate(_group_sizes(path)):
                self._places.append((path, group))
                self._ends.append(self._ends[-1] + num_rows)
        for position, content_hash in _hashes(files, first_position, distinct=True):
            is_new = execute("INSERT OR IGNORE INTO firsts VALUES (?, ?)", (content_hash, position)).rowcount
            num_again += not is_new and self._note_again(content_hash, position, first_position)
            self.num_distinct += 1
        self.num_distinct -= num_again
        if num_again:  # rows that point at one of them point further from now on
            for position, content_hash in _hashes(files, first_position, distinct=False):
                self._note_again(content_hash, position, first_position)

    def _note_again(self, content_hash: bytes, position: int, first_position: int) -> bool:
        """Note a row if its content comes before `first_position`."""
        execute = self._database.execute
        found = execute("SELECT position FROM firsts WHERE hash = ?", (content_hash,)).fetchone()
        if found is None or found[0] >= first_position:
            return False
        execute("INSERT INTO again VALUES (?, ?)", (position, found[0]))
        return True

    def resolve(self, table: pa.Table, position: int) -> pa.Table:
        """The rows from `position` on, those of an earlier output's content as duplicates of its row, with its vectors.

        Raises:
            InputError: a file is damaged, or gone. StorageError: the index cannot be read any more.
        """
        again, firsts = self._again(position, position + len(table))
        if not len(again):
            return table
        order = np.argsort(firsts, kind="stable")
        taken = np.arange(len(table))
        taken[again[order] - position] = len(table) + np.arange(len(order))
        found = self._take(firsts[order]).rename_columns(["duplicate_of", *self._columns[1:]])
        names = found.column_names
        own = table.select(names)
        found = found.select(names).cast(own.schema)
        both = pa.concat_tables([own, found]).take(taken)
        for name in names:
            place = table.schema.get_field_index(name)
            table = table.set_column(place, table.schema.field(place), both[name])
        return table

    def _again(self, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Positions from `start` to `stop` whose content came before, and where."""
        query = "SELECT position, first FROM again WHERE position >= ? AND position < ? ORDER BY position"
        pairs = self._database.execute(query, (start, stop)).fetchall()
        both = np.array(pairs, np.int64).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    def _take(self, positions: Int64Array) -> pa.Table:
        """The rows at `positions`, ascending, with ids, vectors and sizes."""
        numbers = np.searchsorted(self._bounds, positions, side="right") - 1
        pieces = []
        for number in np.unique(numbers).tolist():
            places = positions[numbers == number] - self._bounds[number]
            pieces.append(self._group(number).take(places))
        return pa.concat_tables(pieces)

    def _group(self, number: int) -> pa.Table:
        if number in self._groups:
            self._groups.move_to_end(number)
            return self._groups[number]
        path, group = self._places[number]
        with reading(path), open_rows(path) as rows:
            self._groups[number] = rows.read_row_group(group, columns=self._columns).select(self._columns)
        while len(self._groups) > 1 and sum(each.nbytes for each in self._groups.values()) > FOUND_BYTES:
            self._groups.popitem(last=False)
        return self._groups[number]

    def close(self) -> None:
        """Drop the index."""
        self._groups.clear()
        self._exit.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _group_sizes(path: Path) -> list[int]:
    """Rows of each row group of a file, or run of rows of a Lance dataset."""
    with reading(path), open_rows(path) as rows:
        if isinstance(rows, LanceRows):
            starts = range(0, rows.num_rows, rows.group_rows)
            return [min(rows.group_rows, rows.num_rows - start) for start in starts]
        return [rows.metadata.row_group(group).num_rows for group in range(rows.num_row_groups)]


def _hashes(files: Sequence[Path], position: int, *, distinct: bool) -> Iterator[tuple[int, bytes]]:
    """(position, content hash) of an output's rows that are no duplicates in it, or of those that are."""
    for path in files:
        with reading(path), open_rows(path) as rows:
            for batch in rows.iter_batches(_INDEX_ROWS, columns=["content_hash", "duplicate_of"]):
                is_distinct = batch["duplicate_of"].is_null().to_numpy(zero_copy_only=False)
                wanted = np.flatnonzero(is_distinct == distinct)
                hashes = batch["content_hash"].take(pa.array(wanted)).to_pylist()
                yield from zip((wanted + position).tolist(), hashes, strict=True)
                position += batch.num_rows
