"""Rows of Lance datasets that were listed: by dataset, version and fragment."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlmembed.errors import FailureCode, ImageError, MissingExtraError
from vlmembed.remote.store_options import s3_endpoint
from vlmembed.sources.base import rows_between
from vlmembed.sources.files import DAMAGE
from vlmembed.sources.locations import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

    import pyarrow as pa

    from vlmembed.sources.readahead import ReadAhead, Row
    from vlmembed.sources.tables import RowNames, TableColumns
    from vlmembed.types import EncodedImage

BATCH_ROWS = 8
"""Lance bounds a batch by rows alone: its `batch_size_bytes` cuts batches that are in memory already."""

READ_BYTES = 32 * 2**20
"""What Lance may have read ahead; its default takes gigabytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """A part of a dataset by its number in it, with what is left of it after rows were deleted: `first_row` in the run,
    and how many."""

    number: int
    first_row: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LanceTable:
    """A version of a dataset, which stays what it is whatever is written meanwhile."""

    version: int
    names: RowNames
    fragments: list[Fragment]


class LanceRows:
    """Rows of datasets that were listed. `datasets` are those that are open, by location; others are opened when they
    are needed."""

    def __init__(
        self,
        reader: ReadAhead,
        *,
        tables: Sequence[LanceTable],
        columns: TableColumns,
        datasets: Mapping[str, Any] | None = None,
    ) -> None:
        self._reader = reader
        self._tables = tables
        self._columns = columns
        self._datasets = dict(datasets or {})

    def read_rows(self, rows: Sequence[int]) -> Iterator[EncodedImage]:
        """See `LanceSource`."""
        return self._reader.read(self._rows(rows))

    def _dataset(self, table: LanceTable) -> Any:  # noqa: ANN401  Lance's
        location = table.names.location
        if location not in self._datasets:
            self._datasets[location] = open_dataset(location, table.version)
        return self._datasets[location]

    def _rows(self, rows: Sequence[int]) -> Iterator[Row]:
        for table in self._tables:
            for fragment in table.fragments:
                wanted = rows_between(rows, fragment.first_row, fragment.num_rows)
                while wanted:
                    run = rows_between(wanted, wanted[0], _run_length(wanted))
                    yield from self._read_run(table, fragment, run)
                    wanted = wanted[len(run) :]

    def _read_run(self, table: LanceTable, fragment: Fragment, rows: Sequence[int]) -> Iterator[Row]:
        """Yield rows that follow each other."""
        num_read = 0
        names, columns = table.names, list(self._columns.ways)
        try:
            for batch in read_batches(self._dataset(table), fragment, columns, rows[0] - fragment.first_row, len(rows)):
                wanted = rows_between(rows, rows[0] + num_read, batch.num_rows)
                yield from self._columns.rows(batch, rows[0] + num_read, wanted, names)
                num_read += len(wanted)
            broken = ImageError(FailureCode.UNREADABLE, f"{names.key} holds fewer rows than it promises")
        except DAMAGE as error:
            part = f"{names.key}, fragment {fragment.number}"
            broken = ImageError(FailureCode.UNREADABLE, f"{part}: {first_line(error)}")
        yield from self._columns.lost(rows[num_read:], names, broken)


def import_lance(location: str) -> ModuleType:
    """The package.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module("lance")
    except ImportError as error:
        msg = f"{shown(location)} is a Lance dataset: pip install 'vlmembed[lance]' (it is the package pylance)"
        raise MissingExtraError(msg) from error


def open_dataset(location: str, version: int | None = None) -> Any:  # noqa: ANN401  Lance's
    """A dataset in a version, or in the newest. Raises as `import_lance`, and one of `DAMAGE`."""
    options = storage_options(location)
    return import_lance(location).dataset(location.rstrip("/"), version=version, storage_options=options)


def storage_options(location: str) -> dict[str, str] | None:
    """What Lance does not take from the environment by itself: another server for ``s3://``, without TLS too."""
    endpoint = s3_endpoint()
    if not (endpoint and location.lower().startswith("s3://")):
        return None
    return {"aws_endpoint": endpoint, "allow_http": str(endpoint.startswith("http://")).lower()}


def read_batches(
    dataset: Any,  # noqa: ANN401  Lance's
    fragment: Fragment,
    columns: Sequence[str],
    offset: int,
    num_rows: int,
) -> Iterator[pa.RecordBatch]:
    """Yield so many rows of a fragment."""
    scanner = dataset.scanner(
        columns=list(columns),
        fragments=[dataset.get_fragment(fragment.number)],
        offset=offset,
        limit=num_rows,
        batch_size=BATCH_ROWS,
        batch_readahead=1,
        fragment_readahead=1,
        io_buffer_size=READ_BYTES,
        scan_in_order=True,
        blob_handling="all_binary",
    )
    yield from scanner.to_batches()


def _run_length(rows: Sequence[int]) -> int:
    """How many rows follow each other from the first on."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return len(rows)
    return next(number for number, row in enumerate(rows) if row != rows[0] + number)


def first_line(error: BaseException) -> str:
    """Lance's messages end in places of its own source code."""
    return str(error).split("\n", 1)[0].split(", /", 1)[0]
