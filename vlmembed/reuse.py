"""Embeddings in the outputs of earlier runs, found by what the image holds.

The outputs are read as they are: an index of their content hashes is a scratch file, row groups are read when one of
their rows is asked for. A run in the order of the earlier one reads each once; one in another order reads them over and
over, where they are more than `FOUND_BYTES`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from vlmembed.database import open_scratch
from vlmembed.errors import InputError
from vlmembed.finished import FinishedOutput, open_rows
from vlmembed.partfiles import FOUND_BYTES, storing
from vlmembed.provenance import difference, encoder_fingerprint
from vlmembed.schema import output_schema
from vlmembed.types import Embedded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Self

    from vlmembed.finished import StoredRows
    from vlmembed.schema import VectorColumn
    from vlmembed.types import FloatArray

logger = logging.getLogger(__name__)

_INDEX_ROWS = 2**16
"""Rows whose hashes are read at a time."""

_TABLE = "CREATE TABLE places (hash BLOB PRIMARY KEY, file INT, row_group INT, place INT) WITHOUT ROWID"
_SIZES = ("height", "width", "grid_h", "grid_w")
_DAMAGE = (OSError, pa.ArrowException, ValueError, IndexError)


class EarlierOutputs:
    """The distinct rows of outputs with the columns `vectors`; of two with the same content the first one counts.

    Used by one thread at a time. `fingerprint` is the run's `encoder_fingerprint`; `index` is a scratch file.

    Attributes:
        num_found: embeddings that `find` returned.

    Raises:
        InputError: an output cannot be read, or was made by another encoder.
        StorageError: the index cannot be written.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        fingerprint: Mapping[str, Any],
        vectors: tuple[VectorColumn, ...],
        index: Path,
    ) -> None:
        self._vectors = vectors
        self._files: list[Path] = []
        for path in paths:
            output = FinishedOutput.open(path)
            _check_encoder(output, fingerprint)
            self._files += output.files
        self._groups: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()
        self._unreadable: set[tuple[int, int]] = set()  # files and row groups
        self._warned: set[int] = set()  # files
        self.num_found = 0
        with ExitStack() as stack, storing(index):
            stack.callback(index.unlink, missing_ok=True)
            self._database = stack.enter_context(closing(open_scratch(index, _TABLE)))
            self._build()
            self._exit = stack.pop_all()

    def _build(self) -> None:
        for number in range(len(self._files)):
            self._database.executemany("INSERT OR IGNORE INTO places VALUES (?, ?, ?, ?)", self._places(number))
        self._database.execute("COMMIT")

    def _places(self, number: int) -> Iterator[tuple[bytes, int, int, int]]:
        """(content hash, file, row group, row in it) of a file's rows that are no duplicates.

        Raises:
            InputError: it cannot be read as Parquet, or not as an output.
        """
        path = self._files[number]
        try:
            file = open_rows(path)
        except _DAMAGE as error:
            msg = f"{path} cannot be read as Parquet ({error}): leave it out of --reuse"
            raise InputError(msg) from error
        with file:
            _check_columns(path, file.schema_arrow, self._vectors)
            for group in range(file.num_row_groups):
                try:
                    yield from _hashes(file, number, group)
                except _DAMAGE as error:
                    self._warn(number, error)

    def _warn(self, number: int, error: object) -> None:
        if number not in self._warned:
            self._warned.add(number)
            logger.error("%s is damaged (%s): what cannot be read is computed again", self._files[number], error)

    def find(self, content_hash: bytes, row: int) -> Embedded | None:
        """The embedding of this content in the outputs, as the result of `row`; None where they have none."""
        if (place := self._place_of(content_hash)) is None:
            return None
        number, group, index = place
        try:
            if (table := self._group(number, group, content_hash, index)) is None:
                return None
            height, width, grid_h, grid_w = (table[name][index].as_py() for name in _SIZES)
            vectors = {column.name: _copied(column, table[column.name][index]) for column in self._vectors}
        except _DAMAGE as error:
            self._warn(number, error)
            return None
        self.num_found += 1
        return Embedded(row=row, vectors=vectors, size_hw=(height, width), grid_hw=(grid_h, grid_w))

    def find_key(self, content_hash: bytes) -> str | None:
        """The id of the row that `find` takes the embedding of this content from."""
        if (place := self._place_of(content_hash)) is None:
            return None
        number, group, index = place
        try:
            table = self._group(number, group, content_hash, index)
            return None if table is None else str(table["id"][index].as_py())
        except _DAMAGE as error:
            self._warn(number, error)
            return None

    def _place_of(self, content_hash: bytes) -> tuple[int, int, int] | None:
        query = "SELECT file, row_group, place FROM places WHERE hash = ?"
        rows: list[tuple[int, int, int]] = self._database.execute(query, (content_hash,)).fetchall()
        return rows[0] if rows else None

    def _group(self, number: int, group: int, content_hash: bytes, index: int) -> pa.Table | None:
        """A row group that has this content at `index`; None for one that could not be read before."""
        if (number, group) in self._unreadable:
            return None
        if (number, group) in self._groups:
            self._groups.move_to_end((number, group))
        else:
            try:
                self._groups[number, group] = self._read_group(number, group)
            except _DAMAGE:
                self._unreadable.add((number, group))
                raise
            while len(self._groups) > 1 and sum(each.nbytes for each in self._groups.values()) > FOUND_BYTES:
                self._groups.popitem(last=False)
        table = self._groups[number, group]
        if table["content_hash"][index].as_py() != content_hash:
            msg = "another file has taken its place"
            raise ValueError(msg)
        return table

    def _read_group(self, number: int, group: int) -> pa.Table:
        columns = ["id", "content_hash", *_SIZES, *(column.name for column in self._vectors)]
        with open_rows(self._files[number]) as file:
            table = file.read_row_group(group, columns=columns)
        table.validate(full=True)
        if empty := [name for name in columns if table[name].null_count]:
            msg = f"nulls in its column {empty[0]}"
            raise ValueError(msg)
        return table

    def close(self) -> None:
        """Drop the index."""
        self._groups.clear()
        self._exit.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_encoder(output: FinishedOutput, fingerprint: Mapping[str, Any]) -> None:
    """Compare what made an output with what this run has.

    Raises:
        InputError: its embeddings are not those that this run would compute.
    """
    if lines := difference(encoder_fingerprint(output.provenance.get("fingerprint", {})), fingerprint):
        shown = "\n  ".join(lines)
        msg = f"{output.path} holds embeddings of another encoder:\n  {shown}\nleave it out of --reuse"
        raise InputError(msg)


def _check_columns(path: Path, schema: pa.Schema, vectors: tuple[VectorColumn, ...]) -> None:
    """Compare a file's columns with those that a run writes.

    Raises:
        InputError: one is absent, or of another type.
    """
    for field in output_schema(vectors, pa.schema([])):
        place = schema.get_field_index(field.name)
        if place < 0 or schema.field(place).type != field.type:
            found = "none" if place < 0 else schema.field(place).type
            msg = f"{path} was changed: its column {field.name} is {found}, not {field.type}; leave it out of --reuse"
            raise InputError(msg)


def _hashes(file: StoredRows, number: int, group: int) -> Iterator[tuple[bytes, int, int, int]]:
    first = 0
    columns = ["content_hash", "duplicate_of"]
    for batch in file.iter_batches(_INDEX_ROWS, row_groups=[group], columns=columns):
        distinct = np.flatnonzero(batch["duplicate_of"].is_null().to_numpy(zero_copy_only=False))
        hashes = batch["content_hash"].take(pa.array(distinct)).to_pylist()
        for place, content_hash in zip((distinct + first).tolist(), hashes, strict=True):
            yield content_hash, number, group, place
        first += batch.num_rows


def _copied(column: VectorColumn, value: pa.Scalar) -> FloatArray:
    """One image's vectors, which hold no memory of their row group.

    Raises:
        ValueError: no output has such values.
    """
    values = column.from_arrow(value)
    if values.dtype != column.dtype or values.shape[-1] != column.width or not np.isfinite(values).all():
        msg = f"its column {column.name} holds values that no output has"
        raise ValueError(msg)
    return values.copy()
