"""What the rows of a run take in its output: some are written, and the others are told from them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from vlmembed.assembly import concatenate, read_groups
from vlmembed.forecast.survey import OutputVolume
from vlmembed.parts import PartStore
from vlmembed.planning import max_row_bytes
from vlmembed.schema import with_provenance
from vlmembed.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from vlmembed.planning import Plan
    from vlmembed.types import Embedded, ImageRef

MIN_ROWS_TO_HALVE = 16
"""With so many rows two files, of all and of half of them, tell what a file takes by itself and what its rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSize:
    """Bytes of a file: `file_bytes` by itself (provenance, footer), and for each byte of its rows before compression
    `share`. `seconds_per_byte`: writing it, of parts that are there."""

    file_bytes: float
    share: float
    seconds_per_byte: float

    def of(self, volume_bytes: float, num_files: int = 1) -> int:
        """Of rows with so many bytes before compression, in so many files."""
        return round(num_files * self.file_bytes + self.share * volume_bytes)


def measure_output(plan: Plan, rows: Sequence[tuple[ImageRef, Embedded]]) -> OutputSize:
    """Write rows as the run would, into a temporary folder.

    Without rows nothing is known of compression, and `share` is 1; so it is for a Lance dataset, which has none.
    """
    rows = sorted(rows, key=lambda pair: pair[0].row)
    facts = plan.facts | {"counts": {}}
    schema = with_provenance(plan.schema, facts)
    with TemporaryDirectory() as name:
        folder = Path(name)
        empty = _written(folder, schema, plan, plan.schema.empty_table())
        if not rows or plan.paths.format == "lance":
            return OutputSize(file_bytes=empty, share=1.0, seconds_per_byte=0.0)
        table, volumes = _table(folder, plan, rows), [_volume(plan, rows[: len(rows) // 2]), _volume(plan, rows)]
        began = time.perf_counter()
        whole = _written(folder, schema, plan, table)
        seconds = time.perf_counter() - began
        if len(rows) < MIN_ROWS_TO_HALVE:
            share, file_bytes = (whole - empty) / volumes[1], float(empty)
        else:
            half = _written(folder, schema, plan, table.slice(0, len(rows) // 2))
            share = max(0.0, whole - half) / (volumes[1] - volumes[0])
            file_bytes = max(float(empty), whole - share * volumes[1])
    return OutputSize(file_bytes=file_bytes, share=share, seconds_per_byte=seconds / whole)


def _volume(plan: Plan, rows: Sequence[tuple[ImageRef, Embedded]]) -> int:
    volume = OutputVolume()
    for ref, embedded in rows:
        volume.add(ref.key, ref.columns, plan.rule.layout.num_merged(embedded.grid_hw))
    return volume.num_bytes(plan.vectors)


def _table(folder: Path, plan: Plan, rows: Sequence[tuple[ImageRef, Embedded]]) -> pa.Table:
    """The rows as the writer lays them out."""
    most = max_row_bytes(plan.vectors, plan.rule)
    store = PartStore(folder, plan.schema, vectors=plan.vectors, rows_per_part=len(rows), max_row_bytes=most)
    writer = Writer(
        store,
        num_rows=len(rows),
        rows_per_part=len(rows),
        kept=plan.source.kept_schema,
        on_error="skip",
        on_commit=lambda _: None,
        on_computed=lambda _: None,
    )
    for number, (ref, embedded) in enumerate(rows):
        writer.add(replace(ref, row=number, first_row=number))
        writer.add(replace(embedded, row=number))
    (record,) = store.records
    (table,) = read_groups([folder / record.file_name], plan.schema)
    return table


def _written(folder: Path, schema: pa.Schema, plan: Plan, table: pa.Table) -> int:
    """Bytes of an output of these rows."""
    target = folder / "output.parquet"
    concatenate(target, schema, [table], table.num_rows, plan.vectors)
    return target.stat().st_size
