"""A finished output, as it is read back: one file, a folder of parts, or a Lance dataset."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlmembed.errors import InputError
from vlmembed.lance_output import LanceRows
from vlmembed.output import LANCE, SUCCESS, errors_beside, is_folder_output, need_lance, partial_beside
from vlmembed.partfiles import in_order
from vlmembed.schema import VECTORS, read_provenance, read_success

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self, TypeAlias

    from vlmembed.types import Int64Array

    StoredRows: TypeAlias = pq.ParquetFile | LanceRows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FinishedOutput:
    """What a run has left.

    Attributes:
        path: as it was named. files: the Parquet files with its rows, in order, or the one Lance dataset.
        errors: the file of the rows that failed, whether it exists or not.
        schema: of the files. provenance: as recorded.
    """

    path: Path
    files: tuple[Path, ...]
    errors: Path
    schema: pa.Schema
    provenance: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Look at an output.

        Raises:
            InputError: it cannot be read, is not whole, or was not written by vlmembed.
            MissingExtraError: it is a Lance dataset, and Lance is not installed.
        """
        if not path.exists():
            if partial_beside(path, is_folder=False).is_dir():
                msg = (
                    f"{path} is not finished: the command that began it goes on with it (see `vlmembed inspect {path}`)"
                )
                raise InputError(msg)
            msg = f"{path} cannot be read as Parquet: it does not exist; name the output of an earlier run"
            raise InputError(msg)
        is_folder = is_folder_output(path)
        if is_folder and not (path / SUCCESS).is_file():
            msg = f"{path} is a folder without {SUCCESS}: not finished, or no output of vlmembed"
            raise InputError(msg)
        provenance = read_success(path / SUCCESS) if is_folder else None
        files = tuple(sorted(path.glob("part-*.parquet"), key=in_order)) if is_folder else (path,)
        if not files:
            msg = f"{path} holds no rows: it has {SUCCESS}, and no part-*.parquet; name an output with embeddings"
            raise InputError(msg)
        try:
            schema = read_schema(files[0])
        except (OSError, IndexError, ValueError, pa.ArrowException) as error:
            msg = f"{path} cannot be read as {'Lance' if path.suffix == LANCE else 'Parquet'}: {error}"
            raise InputError(msg) from error
        provenance = provenance or read_provenance(schema, str(path))
        if not any(VECTORS.fullmatch(name) for name in schema.names):
            msg = f"{path} holds rows that failed, not embeddings: name the output it lies beside"
            raise InputError(msg)
        errors = errors_beside(path, is_folder=is_folder)
        return cls(path=path, files=files, errors=errors, schema=schema, provenance=provenance)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the columns of vectors."""
        return tuple(name for name in self.schema.names if VECTORS.fullmatch(name))

    @property
    def has_errors(self) -> bool:
        """Whether the file of the rows that failed is there."""
        return self.errors.exists()

    @staticmethod
    def opened(file: Path | str) -> StoredRows:
        """One of its files, to be closed; raises what `open_rows` does."""
        return open_rows(Path(file))

    def batches(self, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """All rows in order, a few columns of them."""
        for path in self.files:
            with reading(path), open_rows(path) as rows:
                # one by one: pyarrow would hold all row groups that it is asked for at once
                groups = [None] if isinstance(rows, LanceRows) else [[each] for each in range(rows.num_row_groups)]
                for some in groups:
                    yield from rows.iter_batches(columns=columns, batch_size=batch_rows, row_groups=some)

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        num_rows = 0
        for path in self.files:
            with reading(path):
                num_rows += LanceRows(path).num_rows if path.suffix == LANCE else pq.read_metadata(path).num_rows
        return num_rows

    def take(self, positions: Int64Array, columns: list[str]) -> pa.Table:
        """A few columns of the rows at `positions`, ascending; only row groups that hold one are read."""
        found, first = [self.schema.empty_table().select(columns)], 0
        for path in self.files:
            with reading(path), open_rows(path) as rows:
                if isinstance(rows, LanceRows):
                    return rows.take(positions, columns)
                for group in range(rows.num_row_groups):
                    last = first + rows.metadata.row_group(group).num_rows
                    wanted = positions[np.searchsorted(positions, first) : np.searchsorted(positions, last)] - first
                    if len(wanted):
                        found.append(rows.read_row_group(group, columns=columns).take(wanted).select(columns))
                    first = last
        return pa.concat_tables(found)

    def failed(self) -> pa.Table:
        """`id` and `row` of the rows that are in the errors file, by row.

        Raises:
            InputError: that file is not there.
        """
        try:
            return pq.read_table(self.errors, columns=["id", "row"], page_checksum_verification=True).sort_by("row")
        except (OSError, pa.ArrowException) as error:
            msg = f"{self.errors} belongs to {self.path} and cannot be read ({error}): put it beside it again"
            raise InputError(msg) from error

    def failed_rows(self) -> Int64Array:
        """The input rows, ascending, that are in the errors file.

        Raises:
            InputError: as for `failed`.
        """
        rows: Int64Array = self.failed()["row"].to_numpy()
        return rows


def open_rows(path: Path) -> StoredRows:
    """One of an output's files, to be read by row groups and closed.

    Raises:
        OSError, ValueError, pa.ArrowException: it cannot be read. MissingExtraError: see `FinishedOutput.open`.
    """
    if path.suffix == LANCE:
        need_lance()
        return LanceRows(path)
    return pq.ParquetFile(path, page_checksum_verification=True)


def read_schema(path: Path) -> pa.Schema:
    """Schema of a file of an output, with its metadata; raises what `open_rows` does."""
    with open_rows(path) as rows:
        return rows.schema_arrow


def read_tables(path: Path, schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows of an output's file in order, row group by row group, with the columns of `schema`.

    Raises:
        InputError: it is damaged, or gone.
    """
    with reading(path), open_rows(path) as rows:
        for group in range(rows.num_row_groups):
            yield rows.read_row_group(group, columns=schema.names).select(schema.names)


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Say as a person would that a finished file is not what it was.

    Raises:
        InputError: it is damaged, or gone.
    """
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        msg = f"{path} is damaged, or gone ({error}): put a sound copy in its place, or make it again with --overwrite"
        raise InputError(msg) from error


def input_rows(failed: Int64Array, positions: Int64Array) -> Int64Array:
    """The input rows of an output's rows at `positions`; it has all rows but those that `failed`, both ascending."""
    shifts = failed - np.arange(len(failed))
    rows: Int64Array = positions + np.searchsorted(shifts, positions, side="right")
    return rows
