"""Finished outputs of any kind, made without a model: rows of known content, committed in parts and assembled."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from test_cache import POOLED, embedded, hash_of
from test_reuse import fingerprint_of

from vlmembed.assembly import assemble
from vlmembed.output import OutputPaths
from vlmembed.partfiles import PartRecord
from vlmembed.parts import PartStore
from vlmembed.schema import ERRORS_SCHEMA, output_schema, with_provenance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from vlmembed.schema import VectorColumn

KINDS = ["out.parquet", "out/", "out.lance"]
NO_COLUMNS = pa.schema([])


def key_of(row: int) -> str:
    """Ids in order, one in ten of them with a line break and an accent."""
    return f"{row:05}.jpg" if row % 10 != 3 else f"{row:05}\né\u2028.jpg"


class Rows:
    """Rows 0 to `num_rows` on their way into an output; those of `failed` fail with a code, those of `duplicates`
    repeat another row's content.

    Attributes:
        paths, store, facts: what `assemble` needs.
        kept_rows: the rows that get vectors.
    """

    def __init__(
        self,
        name: str,
        num_rows: int,
        columns: tuple[VectorColumn, ...] = POOLED,
        *,
        failed: Sequence[int] = (),
        duplicates: Mapping[int, int] | None = None,
        kept: pa.Schema = NO_COLUMNS,
        rows_per_part: int = 20,
    ) -> None:
        self.columns = columns
        self.duplicates = duplicates or {}
        self.paths = OutputPaths.of(name)
        self.paths.partial.mkdir(parents=True, exist_ok=True)
        num_failed, num_duplicates = len(failed), len(self.duplicates)
        self.kept_rows = [row for row in range(num_rows) if row not in failed]
        self.facts: dict[str, Any] = {
            "fingerprint": fingerprint_of(columns),
            "counts": {
                "rows": num_rows,
                "embedded": num_rows - num_failed - num_duplicates,
                "duplicates": num_duplicates,
                "failed": num_failed,
            },
            "model": {"width": columns[0].width},
        }
        schema = output_schema(columns, kept)
        schema = with_provenance(schema, self.facts) if self.paths.is_folder else schema
        self.store = PartStore(self.paths.partial, schema, vectors=columns, rows_per_part=rows_per_part)
        for first_row in range(0, num_rows, rows_per_part):
            rows = range(first_row, min(first_row + rows_per_part, num_rows))
            self._commit([row for row in rows if row not in failed], [row for row in rows if row in failed], kept)

    def content_of(self, row: int) -> int:
        """The number of a row's content."""
        return self.duplicates.get(row, row)

    def vectors(self, name: str) -> list[np.ndarray]:
        """A column, row by row."""
        return [np.asarray(embedded(self.content_of(row), self.columns).vectors[name]) for row in self.kept_rows]

    def _commit(self, rows: list[int], failed: list[int], kept: pa.Schema) -> None:
        images = [embedded(self.content_of(row), self.columns) for row in rows]
        num_duplicates = len(self.duplicates.keys() & set(rows))
        record = PartRecord(
            number=len(self.store.records),
            first_row=min(rows + failed),
            num_rows=len(rows) + len(failed),
            num_embedded=len(rows) - num_duplicates,
            num_duplicates=num_duplicates,
            num_failed=len(failed),
        )
        columns = {
            "id": [key_of(row) for row in rows],
            **{each.name: each.to_arrow([image.vectors[each.name] for image in images]) for each in self.columns},
            "content_hash": [hash_of(self.content_of(row)) for row in rows],
            "duplicate_of": [key_of(self.duplicates[row]) if row in self.duplicates else None for row in rows],
            "width": [image.size_hw[1] for image in images],
            "height": [image.size_hw[0] for image in images],
            "grid_h": [image.grid_hw[0] for image in images],
            "grid_w": [image.grid_hw[1] for image in images],
            **{field.name: kept_values(field.type, rows) for field in kept},
        }
        errors = {
            "id": [key_of(row) for row in failed],
            "row": failed,
            "stage": ["decode"] * len(failed),
            "code": ["corrupt"] * len(failed),
            "message": ["bad"] * len(failed),
            "content_hash": [None] * len(failed),
        }
        assert {*ERRORS_SCHEMA.names, "content_hash"} == set(errors)
        self.store.commit(record, columns, errors)

    def moved(self, output: Path) -> Rows:
        """The same rows on their way into another output, at which their parts lie already."""
        moved = copy(self)
        moved.paths = OutputPaths.of(output)
        rows_per_part = self.store.records[0].num_rows
        moved.store = PartStore(
            moved.paths.partial, self.store.schema, vectors=self.columns, rows_per_part=rows_per_part
        )
        return moved

    def assemble(self) -> Path:
        """Make the output."""
        assemble(self.store, self.paths, self.facts)
        return self.paths.output


def kept_values(type_: pa.DataType, rows: Sequence[int]) -> pa.Array:
    """Values of a source's column; one in five is null."""
    values: list[Any] = [None if row % 5 == 4 else row for row in rows]
    if pa.types.is_dictionary(type_):
        return pa.array([None if value is None else f"word {value % 7}" for value in values]).dictionary_encode()
    if pa.types.is_struct(type_):
        return pa.array([None if value is None else {"label": value, "names": [str(value)]} for value in values], type_)
    return pa.array(values, pa.int64()).cast(type_)
