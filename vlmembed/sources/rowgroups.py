"""An open Parquet file: its row groups in batches of bounded size, as many rows as its footer promises or an error."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from vlmembed.errors import FailureCode, ImageError
from vlmembed.sources.columns import check_dictionaries, find_field, holds_dictionary
from vlmembed.sources.files import DAMAGE, open_file
from vlmembed.sources.footer import read_places
from vlmembed.sources.pages import GroupPages, Leaf

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vlmembed.remote.remotes import Remotes
    from vlmembed.sources.files import FileStatus
    from vlmembed.sources.footer import ChunkPlace

READ_BUFFER_BYTES = 2**20
"""Column chunks are read through a buffer of this size, or one data page if that is larger; pyarrow's default takes a
whole row group into memory."""

MAX_ROWS_PER_BYTE = 100
MAX_ROWS_OF_NOTHING = 2**20
"""A footer that promises more rows than the two allow for is not believed: each row would have to fail by itself."""

logger = logging.getLogger(__name__)


class OpenParquet:
    """A Parquet file while it is read.

    Attributes:
        schema: of its columns.
        status: size and version of the very file that is open.
        group_rows: rows of each row group, by the footer.

    Raises:
        One of `DAMAGE`: its footer cannot be right.
    """

    def __init__(self, parquet: pq.ParquetFile, file: pa.NativeFile, status: FileStatus, name: str) -> None:
        self._parquet = parquet
        self._layouts: dict[tuple[str, ...], tuple[list[Leaf], list[list[ChunkPlace] | None]]] = {}
        self._file = file
        self._name = name
        self.schema: pa.Schema = parquet.schema_arrow
        self.status = status
        metadata = parquet.metadata
        self.group_rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        num_rows = sum(self.group_rows)
        if num_rows != metadata.num_rows or min(self.group_rows, default=0) < 0:
            msg = f"its footer contradicts itself: {metadata.num_rows} rows, and {num_rows} in its row groups"
            raise ValueError(msg)
        if num_rows > MAX_ROWS_OF_NOTHING + MAX_ROWS_PER_BYTE * status.num_bytes:
            msg = f"its footer promises {num_rows} rows, too many for a file of {status.num_bytes} bytes"
            raise ValueError(msg)

    def batches(self, group: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a row group.

        Raises:
            ImageError: in the place of the rows that cannot be read, or are not there.
        """
        promised, num_read = self.group_rows[group], 0
        pages = None
        try:
            pages = self._pages(group, tuple(columns))
            if pages.num_rows is not None and pages.num_rows > promised:
                logger.error(
                    "row group %d of %s holds %d rows, and the file's footer promises %d: the others are no rows",
                    *(group, self._name, pages.num_rows, promised),
                )
            batches = self._parquet.iter_batches(batch_size=pages.batch_rows, row_groups=[group], columns=list(columns))
            while num_read < promised and not pages.is_damaged_before(num_read + pages.batch_rows):
                if (batch := next(batches, None)) is None:
                    break
                if pages.keeps_dictionary:
                    check_dictionaries(batch)
                num_read += batch.num_rows
                yield batch
        except DAMAGE as error:
            raise self._broken(group, str(error)) from error
        if num_read < promised:
            missing = f"the footer promises {promised} rows, and its pages hold {num_read}"
            raise self._broken(group, pages.damage or missing)

    def _broken(self, group: int, reason: str) -> ImageError:
        return ImageError(FailureCode.UNREADABLE, f"row group {group} of {self._name}: {reason}")

    def _pages(self, group: int, columns: tuple[str, ...]) -> GroupPages:
        if columns not in self._layouts:
            leaves = self._leaves(columns)
            self._layouts[columns] = leaves, read_places(self._file, [leaf.index for leaf in leaves])
        leaves, groups = self._layouts[columns]
        if group >= len(groups) or (places := groups[group]) is None:
            msg = "the footer does not say where its pages are"
            raise ValueError(msg)
        return GroupPages.of(self._file, places, leaves, self.group_rows[group])

    def _leaves(self, columns: Sequence[str]) -> list[Leaf]:
        schema = self._parquet.schema
        return [
            Leaf(
                index=index,
                is_flat=schema.column(index).max_repetition_level == 0,
                is_variable=schema.column(index).physical_type == "BYTE_ARRAY",
                keeps_dictionary=holds_dictionary(find_field(self.schema, name, self._name)[1].type),
            )
            for name in columns
            for index in range(len(schema))
            if f"{schema.column(index).path}.".startswith(f"{name}.")
        ]


@contextmanager
def open_parquet(path: str, name: str, remotes: Remotes | None = None) -> Iterator[OpenParquet]:
    """Open a file, or what a URL names, that messages are to call `name`.

    Raises:
        FileNotFoundError: it is not there.
        One of `DAMAGE`: it cannot be read, or its footer not be right.
    """
    with (
        open_file(path, remotes) as (file, status),
        pq.ParquetFile(
            file, pre_buffer=False, buffer_size=READ_BUFFER_BYTES, page_checksum_verification=True
        ) as parquet,
    ):
        yield OpenParquet(parquet, file, status, name)
