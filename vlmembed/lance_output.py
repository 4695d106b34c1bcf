"""Outputs as Lance datasets: streamed in, and read back the way a `pq.ParquetFile` is.

Lance is imported where it is needed and nowhere else: it starts threads, and takes a second and a half.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vlmembed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from types import ModuleType
    from typing import Self

    import numpy as np
    import numpy.typing as npt

MAX_FILE_ROWS = 2**20
MAX_FILE_BYTES = 4 * 2**30
"""Bounds of a dataset's files (fragments): Lance's own, and the size that a million vectors of 1,024 floats have."""

READ_GROUP_BYTES = 16 * 2**20
READ_GROUP_ROWS = 10_000
"""Bounds of the runs of rows that are read at a time. Lance has no row groups; left to itself it reads ahead by the
gigabyte where rows are large."""

_SCAN = {
    "batch_size_bytes": READ_GROUP_BYTES,
    "batch_readahead": 1,
    "fragment_readahead": 1,
    "io_buffer_size": READ_GROUP_BYTES,
    "scan_in_order": True,
}


def check_lance_schema(schema: pa.Schema) -> None:
    """Tell before any work whether Lance can store these columns.

    Raises:
        ConfigError: it cannot store one.
    """
    lance = _lance()
    for number, field in enumerate(schema):
        alone = pa.schema([field])
        try:
            reader = pa.RecordBatchReader.from_batches(alone, [])
            dataset = lance.write_dataset(reader, f"memory://schema-{number}", schema=alone)
            dataset.to_table(columns=[field.name])
        except (OSError, ValueError, RuntimeError) as error:
            msg = (
                f"Lance cannot store column {field.name!r} of type {field.type} ({_reason(error)}): leave it out of "
                "--keep-columns, or name an output that ends in .parquet"
            )
            raise ConfigError(msg) from error


def write_lance(folder: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> int:
    """Stream tables into a new dataset, with the schema's metadata; returns how many rows it has.

    Raises:
        OSError: it could not be written. Whatever `tables` raises.
    """
    lance = _lance()
    failures: list[BaseException] = []

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            for table in tables:
                yield from table.cast(schema).to_batches()
        except BaseException as error:
            failures.append(error)  # of which Lance would keep the text alone
            raise

    reader = pa.RecordBatchReader.from_batches(schema, batches())
    try:
        with _lance_errors():
            dataset = lance.write_dataset(
                reader, folder, schema=schema, max_rows_per_file=MAX_FILE_ROWS, max_bytes_per_file=MAX_FILE_BYTES
            )
            return int(dataset.count_rows())
    except OSError:
        if failures:
            raise failures[0] from None
        raise


class LanceRows:
    """A dataset, read as a `pq.ParquetFile` is: what are row groups there are runs of rows here.

    Attributes:
        schema_arrow: with the metadata.
        num_rows, num_row_groups: how many there are.
        group_rows: rows of each run but the last, which may be shorter.
    """

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            OSError: it cannot be read.
        """
        if not (path / "_versions").is_dir():
            msg = "it is no Lance dataset"  # of a file Lance would find that out in three seconds
            raise OSError(msg)
        with _lance_errors():
            self._dataset = _lance().dataset(path)
            self.schema_arrow: pa.Schema = self._dataset.schema
            self.num_rows = int(self._dataset.count_rows())
        num_bytes = sum(each.stat().st_size for each in (path / "data").iterdir()) if self.num_rows else 0
        row_bytes = max(1, num_bytes // max(1, self.num_rows))
        self.group_rows = max(1, min(READ_GROUP_ROWS, READ_GROUP_BYTES // row_bytes))
        self.num_row_groups = -(-self.num_rows // self.group_rows)

    def read_row_group(self, number: int, columns: list[str] | None = None) -> pa.Table:
        """A run of rows."""
        with _lance_errors():
            return self._scanner(columns, self._run(number)).to_table()

    def iter_batches(
        self, batch_size: int, *, columns: list[str], row_groups: Sequence[int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of these runs, or all, in order, `batch_size` at most at a time."""
        runs = [{}] if row_groups is None else [self._run(number) for number in row_groups]
        with _lance_errors():
            for run in runs:
                yield from self._scanner(columns, run | {"batch_size": batch_size}).to_batches()

    def take(self, positions: npt.NDArray[np.int64], columns: list[str]) -> pa.Table:
        """The rows at `positions`, in that order."""
        with _lance_errors():
            return self._dataset.take(positions.tolist(), columns=columns)

    def _run(self, number: int) -> dict[str, int]:
        return {"offset": number * self.group_rows, "limit": self.group_rows}

    def _scanner(self, columns: list[str] | None, options: dict[str, int]) -> Any:  # noqa: ANN401  Lance is untyped here
        return self._dataset.scanner(columns=columns, **_SCAN, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held open."""


@contextmanager
def _lance_errors() -> Iterator[None]:
    """Lance's errors as those of any file.

    Raises:
        OSError: whatever went wrong.
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise OSError(_reason(error)) from error


def _reason(error: Exception) -> str:
    """What Lance says, without the places in its own source."""
    return str(error).split(", /")[0]


def _lance() -> ModuleType:
    return import_module("lance")
