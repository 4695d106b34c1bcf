"""Puts the rows back in input order, gives duplicates their embedding, commits parts, and accounts for every row."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from vlmembed.errors import AccountingError, FailureCode, RowFailedError
from vlmembed.partfiles import PartRecord
from vlmembed.types import Embedded, EmbeddingBatch, EndOfInput, Failure, ImageRef

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vlmembed.schema import VectorColumn
    from vlmembed.types import FloatArray


class Store(Protocol):
    """Where parts go: `vlmembed.parts.PartStore` on disk, `vlmembed.streaming.recent.MemoryStore` to who asked.

    Attributes:
        records: the parts that were committed before the writer began. vectors: the columns of vectors.
    """

    @property
    def records(self) -> Sequence[PartRecord]: ...  # noqa: D102  see above

    @property
    def vectors(self) -> tuple[VectorColumn, ...]: ...  # noqa: D102  see above

    def commit(self, record: PartRecord, columns: Mapping[str, Any], errors: Mapping[str, Any]) -> None:
        """Take a part, whole. `columns` and `errors` are by name."""

    def find(self, row: int) -> tuple[str, Embedded | Failure]:
        """The id and the result that were committed for a row that is not a duplicate itself."""


@dataclass(slots=True)
class _OpenPart:
    """Rows [`first_row`, `first_row` + `num_rows`) on their way."""

    first_row: int
    num_rows: int
    refs: list[ImageRef] = field(default_factory=list)
    outcomes: dict[int, Failure | Embedded] = field(default_factory=dict)  # by row; none for a duplicate
    computed: set[int] = field(default_factory=set)  # rows that were encoded now, not found
    num_duplicates: int = 0

    @property
    def is_complete(self) -> bool:
        return len(self.refs) == self.num_rows == len(self.outcomes) + self.num_duplicates


class Writer:
    """Takes `ImageRef`s in row order and outcomes in any order; commits each part when it is complete.

    `num_rows` is None where the source counts its rows by reading them: `EndOfInput` then tells.
    `on_computed` then gets what was encoded for it, with content hashes: what is committed, and nothing else, so that
    the parts that a stopped run has still to make are not made another way because of it. `on_distinct` gets the rows
    of a committed part that are no duplicates, in order, with what became of them. `first_part` is the number of the
    first part to come, where that is not the one behind the store's.
    """

    def __init__(
        self,
        store: Store,
        *,
        num_rows: int | None,
        rows_per_part: int,
        kept: pa.Schema,
        on_error: str,
        on_commit: Callable[[PartRecord], None],
        on_computed: Callable[[list[tuple[bytes, Embedded]]], None],
        on_distinct: Callable[[list[tuple[ImageRef, Embedded | Failure]]], None] | None = None,
        first_part: int | None = None,
    ) -> None:
        self._store = store
        self._num_rows = num_rows
        self._rows_per_part = rows_per_part
        self._kept = kept
        self._on_error = on_error
        self._on_commit = on_commit
        self._on_computed = on_computed
        self._on_distinct = on_distinct
        self._open: dict[int, _OpenPart] = {}
        self._next_part = len(store.records) if first_part is None else first_part
        self._counts: Counter[str] = Counter(embedded=0, duplicates=0, failed=0)
        for record in store.records:
            self._count(record)

    def add(self, item: ImageRef | Failure | Embedded | EmbeddingBatch | EndOfInput) -> None:
        """Take one value from upstream.

        Raises:
            RowFailedError: a row failed and ``on_error`` is ``"fail"``.
        """
        if isinstance(item, ImageRef):
            part = self._part_of(item.row)
            part.refs.append(item)
            part.num_duplicates += item.first_row != item.row
        elif isinstance(item, Failure):
            self._fail(item)
        elif isinstance(item, Embedded):
            self._add_embedded(item, is_finite=_is_finite(item.vectors))
        elif isinstance(item, EndOfInput):
            self._end(item.num_rows)
        else:
            self._add_embeddings(item)
        while (ready := self._open.get(self._next_part)) is not None and ready.is_complete:
            self._commit(self._next_part, ready)
            del self._open[self._next_part]
            self._next_part += 1

    def _part_of(self, row: int) -> _OpenPart:
        number = row // self._rows_per_part
        if number not in self._open:
            first_row = number * self._rows_per_part
            self._open[number] = _OpenPart(first_row=first_row, num_rows=self._size_of(first_row))
        return self._open[number]

    def _size_of(self, first_row: int) -> int:
        """Rows of the part that begins at `first_row`."""
        left = self._rows_per_part if self._num_rows is None else self._num_rows - first_row
        return min(self._rows_per_part, left)

    def _end(self, num_rows: int) -> None:
        """What was not known before is known now: where the last part ends."""
        if self._num_rows is None:
            self._num_rows = num_rows
            for part in self._open.values():
                part.num_rows = self._size_of(part.first_row)

    def _fail(self, failure: Failure) -> None:
        part = self._part_of(failure.row)
        if self._on_error == "fail":
            key = next(ref.key for ref in part.refs if ref.row == failure.row)
            msg = f"{key}: {failure.code} ({failure.message}); --on-error skip would record the row and go on"
            raise RowFailedError(msg)
        part.outcomes[failure.row] = failure

    def _add_embeddings(self, batch: EmbeddingBatch) -> None:
        all_finite = _is_finite(batch.vectors)  # at once: most are
        for index in range(len(batch.rows)):
            image = batch.of_image(index)
            self._add_embedded(image, is_finite=all_finite or _is_finite(image.vectors))
            self._part_of(image.row).computed.add(image.row)

    def _add_embedded(self, image: Embedded, *, is_finite: bool) -> None:
        if not is_finite:
            message = "the tower's output holds NaN, infinity, or a value beyond --embedding-dtype for this image"
            self._fail(Failure(row=image.row, stage="encode", code=FailureCode.NON_FINITE, message=message))
            return
        self._part_of(image.row).outcomes[image.row] = image

    def _commit(self, number: int, part: _OpenPart) -> None:
        images: list[tuple[ImageRef, Embedded, str | None]] = []
        failures: list[tuple[ImageRef, Failure]] = []
        results = self._results(part)
        for ref in part.refs:
            first_key, outcome = results[ref.first_row]
            if isinstance(outcome, Embedded):
                images.append((ref, outcome, first_key if ref.first_row != ref.row else None))
            elif ref.first_row == ref.row:
                failures.append((ref, outcome))
            else:
                message = f"same content as {first_key!r}: {outcome.message}"
                failures.append((ref, Failure(row=ref.row, stage=outcome.stage, code=outcome.code, message=message)))
        num_duplicates = sum(first_key is not None for _, _, first_key in images)
        record = PartRecord(
            number=number,
            first_row=part.first_row,
            num_rows=part.num_rows,
            num_embedded=len(images) - num_duplicates,
            num_duplicates=num_duplicates,
            num_failed=len(failures),
        )
        assert record.num_embedded + record.num_duplicates + record.num_failed == record.num_rows
        self._store.commit(record, self._columns(images), _error_columns(failures))
        computed = [(ref.content_hash, image) for ref, image, _ in images if ref.row in part.computed]
        self._on_computed([(content_hash, image) for content_hash, image in computed if content_hash is not None])
        if self._on_distinct is not None:
            self._on_distinct([(ref, part.outcomes[ref.row]) for ref in part.refs if ref.first_row == ref.row])
        self._count(record)
        self._on_commit(record)

    def _count(self, record: PartRecord) -> None:
        self._counts["embedded"] += record.num_embedded
        self._counts["duplicates"] += record.num_duplicates
        self._counts["failed"] += record.num_failed

    def _results(self, part: _OpenPart) -> dict[int, tuple[str, Embedded | Failure]]:
        """By row, the id and the outcome of every content of a part. Those of earlier parts are looked up once each, in
        order, since neighbours lie in one row group."""
        results = {ref.row: (ref.key, part.outcomes[ref.row]) for ref in part.refs if ref.row == ref.first_row}
        for row in sorted({ref.first_row for ref in part.refs if ref.first_row < part.first_row}):
            key, outcome = self._store.find(row)
            if isinstance(outcome, Embedded):  # a view would keep its row group
                vectors = {name: values.copy() for name, values in outcome.vectors.items()}
                outcome = replace(outcome, vectors=vectors)
            results[row] = key, outcome
        return results

    def _columns(self, images: list[tuple[ImageRef, Embedded, str | None]]) -> dict[str, Any]:
        return {
            "id": [ref.key for ref, _, _ in images],
            **{
                column.name: column.to_arrow([image.vectors[column.name] for _, image, _ in images])
                for column in self._store.vectors
            },
            "content_hash": [ref.content_hash for ref, _, _ in images],
            "duplicate_of": [first_key for _, _, first_key in images],
            "width": [image.size_hw[1] for _, image, _ in images],
            "height": [image.size_hw[0] for _, image, _ in images],
            "grid_h": [image.grid_hw[0] for _, image, _ in images],
            "grid_w": [image.grid_hw[1] for _, image, _ in images],
            **self._kept_columns([ref for ref, _, _ in images]),
        }

    def _kept_columns(self, refs: list[ImageRef]) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        for kept in self._kept:
            chunks = [ref.columns.column(kept.name) for ref in refs if ref.columns is not None]
            columns[kept.name] = pa.chunked_array(chunks, type=kept.type)
        return columns

    def finish(self, num_rows_read: int) -> Counter[str]:
        """Check the law of the pipeline and return embedded, duplicate and failed rows.

        Raises:
            AccountingError: rows read != embedded + duplicates + failed.
        """
        counts = self._counts.copy()
        if self._open or counts.total() != num_rows_read or num_rows_read != self._num_rows:
            unfinished = [
                f"part {number}: {len(part.refs)} of {part.num_rows} rows seen, {len(part.outcomes)} outcomes and "
                f"{part.num_duplicates} duplicates"
                for number, part in sorted(self._open.items())
            ]
            msg = (
                f"rows do not add up: {num_rows_read} read of {self._num_rows} listed, {counts['embedded']} embedded "
                f"+ {counts['duplicates']} duplicates + {counts['failed']} failed; open: "
                f"{'; '.join(unfinished) or 'nothing'}. The committed parts are kept; please report this"
            )
            raise AccountingError(msg)
        return counts


def _is_finite(vectors: Mapping[str, FloatArray]) -> bool:
    return all(np.isfinite(values).all() for values in vectors.values())


def _error_columns(failures: list[tuple[ImageRef, Failure]]) -> dict[str, Any]:
    return {
        "row": [ref.row for ref, _ in failures],
        "content_hash": [ref.content_hash for ref, _ in failures],
        "id": [ref.key for ref, _ in failures],
        "stage": [failure.stage for _, failure in failures],
        "code": [str(failure.code) for _, failure in failures],
        "message": [failure.message for _, failure in failures],
    }
