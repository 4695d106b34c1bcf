"""What a run that writes nothing remembers of its rows, within a bound: first rows by content, and their results.

Both forget the oldest first, and hold the same number. So what the index, which runs ahead, still refers to is still
in the store: between a row and its duplicate lie fewer new contents than the index holds.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vlmembed.schema import ERRORS_SCHEMA
from vlmembed.types import Embedded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vlmembed.partfiles import PartRecord
    from vlmembed.schema import VectorColumn
    from vlmembed.types import Failure, ImageRef

MAX_RECENT_BYTES = 256 * 2**20
"""What may be kept for duplicates to come: as much as a run on disk keeps of the parts that it reads for them."""

ROW_BYTES = 1024
"""What a remembered row takes beside its vectors: two dictionary entries, its hash, its id, arrays, sizes."""


def num_recent(row_bytes: int, rows_per_part: int) -> int:
    """How many contents are remembered where the vectors of one take at most `row_bytes`; a part's at least, so that
    neighbours that are equal find each other."""
    return max(rows_per_part, MAX_RECENT_BYTES // (row_bytes + ROW_BYTES))


class RecentHashes:
    """`vlmembed.dedup.HashIndex` in memory, of the last `max_rows` contents. Used by one thread at a time."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._first_rows: OrderedDict[bytes, int] = OrderedDict()

    def first_row(self, content_hash: bytes, row: int) -> int:
        """The first row with this hash that is remembered; `row` itself, which is then remembered, where there is
        none."""
        first_row = self._first_rows.setdefault(content_hash, row)
        if len(self._first_rows) > self._max_rows:
            self._first_rows.popitem(last=False)
        return first_row


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StreamedPart:
    """Some rows on their way to the caller: `batches` of the rows that have vectors, mostly one, and `errors`, a table
    of those that failed."""

    batches: Sequence[pa.RecordBatch]
    errors: pa.Table


class MemoryStore:
    """The writer's store in a run that writes nothing: parts are handed to `deliver`, which may wait.

    Attributes:
        schema: of the batches. records: none; there are no parts of an earlier start.
        codes: failed rows by code, so far.
    """

    def __init__(
        self,
        schema: pa.Schema,
        *,
        vectors: tuple[VectorColumn, ...],
        max_rows: int,
        deliver: Callable[[StreamedPart], None],
    ) -> None:
        self.vectors = vectors
        self.records: Sequence[PartRecord] = ()
        self.codes: Counter[str] = Counter()
        self.schema = schema
        self._max_rows = max_rows
        self._deliver = deliver
        self._results: OrderedDict[int, tuple[str, Embedded | Failure]] = OrderedDict()

    def commit(self, record: PartRecord, columns: Mapping[str, Any], errors: Mapping[str, Any]) -> None:
        """Hand a part over. `columns` and `errors` are by name; the batches have as many rows as `record` says."""
        table = pa.table(dict(columns), schema=self.schema)
        assert table.num_rows == record.num_embedded + record.num_duplicates
        self.codes.update(errors["code"])
        failed = pa.table({name: errors[name] for name in ERRORS_SCHEMA.names}, schema=ERRORS_SCHEMA)
        self._deliver(StreamedPart(batches=table.combine_chunks().to_batches(), errors=failed))

    def remember(self, results: Sequence[tuple[ImageRef, Embedded | Failure]]) -> None:
        """Keep what became of the rows of a part that are no duplicates, in their order."""
        for ref, result in results:
            if ref.content_hash is None or not self._max_rows:
                continue
            if isinstance(result, Embedded):  # copies: a view would keep its whole pack
                result = replace(result, vectors={name: values.copy() for name, values in result.vectors.items()})  # noqa: PLW2901  the same, on its own
            self._results[ref.row] = ref.key, result
            if len(self._results) > self._max_rows:
                self._results.popitem(last=False)

    def find(self, row: int) -> tuple[str, Embedded | Failure]:
        """The id and the result of a row of an earlier part that its index still refers to."""
        return self._results[row]
