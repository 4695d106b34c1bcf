"""`--retry-failed`: the failed rows of a finished output as a run of their own, and its rows back among the others.

The run has its parts beside the output like any other, so it can be stopped and gone on with; the output is replaced at
its end. A row whose content another row of the output has is that row's duplicate.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from vlmembed.assembly import (
    READY_ERRORS,
    READY_PREFIX,
    check_parts,
    concatenate,
    publish_folder,
    publish_rows,
    read_groups,
    write_errors,
)
from vlmembed.errors import InputError, OutputError
from vlmembed.finished import FinishedOutput, input_rows, read_tables
from vlmembed.merging import merge_rows
from vlmembed.partfiles import PartRecord, file_sha256, storing
from vlmembed.schema import ERRORS_SCHEMA, with_provenance
from vlmembed.sources.shard import shard_entries

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from vlmembed.merging import Numbered
    from vlmembed.output import OutputPaths
    from vlmembed.parts import PartStore
    from vlmembed.reuse import EarlierOutputs
    from vlmembed.sources.base import Source
    from vlmembed.types import EncodedImage, Int64Array


MAX_ROW = 2**63 - 1


class FailedRows:
    """The rows of a source that failed, as a source.

    Attributes:
        rows: their numbers in the whole source, ascending.
    """

    def __init__(self, source: Source, errors: pa.Table) -> None:
        self._source = source
        self._keys: list[str] = errors["id"].to_pylist()
        self.rows: Int64Array = errors["row"].to_numpy()
        self.num_rows = len(self.rows)
        self.skipped: Counter[str] = source.skipped
        self.kept_schema: pa.Schema = source.kept_schema

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over the whole source and which of its rows these are."""
        listed = json.dumps([self._source.digest, self.rows.tolist()])
        return hashlib.sha256(listed.encode()).hexdigest()

    @property
    def keys_digest(self) -> str:
        """That of the whole source."""
        return self._source.keys_digest

    def read(self, start: int) -> Iterator[EncodedImage]:
        """Yield the rows, numbered from 0."""
        return self._numbered(range(start, self.num_rows))

    def read_rows(self, rows: Iterable[int]) -> Iterator[EncodedImage]:
        """Yield these of them."""
        return self._numbered(list(rows))

    def _numbered(self, numbers: range | list[int]) -> Iterator[EncodedImage]:
        images = self._source.read_rows([int(self.rows[number]) for number in numbers])
        for number, image in zip_longest(numbers, images):
            if image is None:
                msg = f"the inputs have no row {self.rows[number]} any more: start anew with --overwrite"
                raise InputError(msg)
            if image.key != self._keys[number]:
                msg = (
                    f"row {image.row} is {image.key!r} now and was {self._keys[number]!r}: start anew with --overwrite"
                )
                raise InputError(msg)
            yield replace(image, row=number)

    def close(self) -> None:
        """The whole source is its opener's."""


class Retry:
    """What a finished output lacks, and how it gets it.

    Attributes:
        source: the rows that failed.
        facts: the output's provenance.
    """

    def __init__(self, paths: OutputPaths, facts: dict[str, Any] | None, source: Source) -> None:
        """Look at a finished output.

        Raises:
            OutputError: there is none. InputError: its files cannot be read, or the inputs are others now.
        """
        if facts is None:
            msg = f"--retry-failed needs a finished output, and {paths.output} is none: run without it first"
            raise OutputError(msg)
        self._paths = paths
        self._whole = source
        self.facts = facts
        self._output = FinishedOutput.open(paths.output)
        self.source = FailedRows(source, self._output.failed())
        if facts["counts"]["failed"] != self.source.num_rows:
            msg = (
                f"{self._output.errors} holds {self.source.num_rows} rows, and {paths.output} was written with "
                f"{facts['counts']['failed']}: they do not belong together"
            )
            raise InputError(msg)
        had = facts["fingerprint"]["num_rows"]
        if had is not None and source.num_rows is not None and had > source.num_rows:
            msg = f"the inputs have {source.num_rows} rows and had {had} when {paths.output} was written: --overwrite"
            raise InputError(msg)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the run of the failed rows must have: that of the output, but for what says which rows are read."""
        of_output = self.facts["fingerprint"]
        return {name: value for name, value in of_output.items() if name not in ("shard", "whole", "limit")} | {
            "source_sha256": self.source.digest,
            "num_rows": self.source.num_rows,
            "retry_failed": True,
        }

    def goes_on(self, again: Mapping[str, Any], partial: Mapping[str, Any] | None) -> bool:
        """Whether the parts beside the output, of `partial`, are those of an earlier start of this very run, which is
        `again`.

        Raises:
            OutputError: they are of another run.
        """
        if partial is None:
            return False
        if all(partial[name] == again[name] for name in ("fingerprint", "shape")):
            return True
        msg = (
            f"{self._paths.partial} belongs to another run: finish that with its own command, or delete the folder, "
            "before --retry-failed"
        )
        raise OutputError(msg)

    def finish(self, store: PartStore, again: Mapping[str, Any], earlier: EarlierOutputs | None) -> dict[str, Any]:
        """Put the rows that are embedded now in their places; returns the output's new provenance.

        `store` has the parts of the failed rows, `again` is how they were made; `earlier` knows the output's rows by
        their content, where duplicates are looked for.

        Raises:
            StorageError: a file cannot be written. AccountingError: rows would be lost.
        """
        check_parts(store)
        new = _Recovered(store, self.source.rows, earlier)
        facts = self._facts(new, again)
        errors = (
            table.set_column(1, ERRORS_SCHEMA.field("row"), pa.array(self.source.rows[table["row"].to_numpy()]))
            for table in read_groups([store.folder / each.errors_name for each in store.records], ERRORS_SCHEMA)
        )
        with storing(self._paths.partial / READY_ERRORS):
            write_errors(self._paths, errors, facts, facts["counts"]["failed"])
        if self._paths.is_folder:
            self._finish_folder(new, facts)
        else:
            self._finish_file(new, facts)
        return facts

    def _facts(self, new: _Recovered, again: Mapping[str, Any]) -> dict[str, Any]:
        num_new, num_duplicates = new.count()
        before = self.facts["counts"]
        counts = before | {
            "embedded": before["embedded"] + num_new - num_duplicates,
            "duplicates": before["duplicates"] + num_duplicates,
            "failed": before["failed"] - num_new,
            "codes": dict(new.store.codes()),
        }
        now = {"source_sha256": self._whole.digest, **shard_entries(self._whole)}
        fingerprint = self.facts["fingerprint"] | now
        retried = [*self.facts.get("retried", []), {name: again[name] for name in ("backend", "versions")}]
        return {**self.facts, "counts": counts, "fingerprint": fingerprint, "retried": retried}

    def _finish_file(self, new: _Recovered, facts: dict[str, Any]) -> None:
        paths, store = self._paths, new.store
        num_rows = facts["counts"]["embedded"] + facts["counts"]["duplicates"]
        old = _number(self._old(self._output.files, store.schema), self.source.rows)
        schema = with_provenance(store.schema, facts)
        publish_rows(paths, schema, merge_rows(old, new.tables()), num_rows, store.vectors)

    def _finish_folder(self, new: _Recovered, facts: dict[str, Any]) -> None:
        """Write the parts anew that get a row; the others stay as they are."""
        records, ready = [], {}
        for before in (PartRecord(**each) for each in facts.pop("parts")):
            record = self._rewrite(before, new)
            if record is not before:
                ready[READY_PREFIX + record.file_name] = record.file_name
            records.append(record)
        publish_folder(self._paths, records, facts, ready)

    @staticmethod
    def _old(files: Iterable[Path], schema: pa.Schema) -> Iterator[pa.Table]:
        for path in files:
            yield from read_tables(path, schema)

    def _rewrite(self, record: PartRecord, new: _Recovered) -> PartRecord:
        """A part of the output with its new rows, ready to be published; itself where it has none."""
        store, stop = new.store, record.first_row + record.num_rows
        num_new, num_duplicates = new.count(record.first_row, stop)
        if not num_new:
            return record
        before = self._paths.output / record.file_name
        failed = self.source.rows[np.searchsorted(self.source.rows, record.first_row) :] - record.first_row
        old = ((rows + record.first_row, table) for rows, table in _number(self._old([before], store.schema), failed))
        target = self._paths.partial / (READY_PREFIX + record.file_name)
        with storing(target):
            merged = merge_rows(old, new.tables(record.first_row, stop))
            num_rows = record.num_embedded + record.num_duplicates + num_new
            schema = store.schema.with_metadata(self._output.schema.metadata)
            concatenate(target, schema, merged, num_rows, store.vectors)
        return replace(
            record,
            num_embedded=record.num_embedded + num_new - num_duplicates,
            num_duplicates=record.num_duplicates + num_duplicates,
            num_failed=record.num_failed - num_new,
            sha256=file_sha256(target),
        )


class _Recovered:
    """The rows that failed and are embedded now, in the parts of `store`; `failed` are all that were tried again.

    Rows whose content `earlier` has point at the row that has it.
    """

    def __init__(self, store: PartStore, failed: Int64Array, earlier: EarlierOutputs | None) -> None:
        self.store = store
        self._earlier = earlier
        self._rows = [failed[store.rows_of(number)[0]] for number in range(len(store.records))]
        self._bounds = np.cumsum([0, *map(len, self._rows)])
        self._all = np.concatenate([np.empty(0, np.int64), *self._rows])

    def tables(self, start: int = 0, stop: int = MAX_ROW, schema: pa.Schema | None = None) -> Iterator[Numbered]:
        """Those of the input rows `start` to `stop`, with the columns of `schema` or all."""
        first, last = np.searchsorted(self._all, [start, stop])
        parts = range(len(self._rows)) if first < last else ()
        for number in parts:
            low, high = max(first, self._bounds[number]), min(last, self._bounds[number + 1])
            if low < high:
                yield from self._tables_of(
                    number, slice(low - self._bounds[number], high - self._bounds[number]), schema
                )

    def _tables_of(self, number: int, wanted: slice, schema: pa.Schema | None) -> Iterator[Numbered]:
        rows, position = self._rows[number], 0
        path = self.store.folder / self.store.records[number].file_name
        for table in read_groups([path], schema or self.store.schema):
            low, high = max(wanted.start, position), min(wanted.stop, position + len(table))
            if low < high:
                part = table.slice(low - position, high - low)
                yield rows[low:high], part if self._earlier is None else _as_duplicates(part, self._earlier)
            position += len(table)

    def count(self, start: int = 0, stop: int = MAX_ROW) -> tuple[int, int]:
        """How many there are of the input rows `start` to `stop`, and how many of them are duplicates."""
        fields = pa.schema([self.store.schema.field(name) for name in ("content_hash", "duplicate_of")])
        points = [table["duplicate_of"] for _, table in self.tables(start, stop, fields)]
        return sum(map(len, points)), sum(len(column) - column.null_count for column in points)


def _number(tables: Iterable[pa.Table], failed: Int64Array) -> Iterator[Numbered]:
    """The rows of an output with their input rows, all but `failed`."""
    position = 0
    for table in tables:
        yield input_rows(failed, np.arange(position, position + len(table))), table
        position += len(table)


def _as_duplicates(table: pa.Table, earlier: EarlierOutputs) -> pa.Table:
    """Let rows whose content the output has already point at the row that has it."""
    points = [
        earlier.find_key(content_hash) or before
        for content_hash, before in zip(
            table["content_hash"].to_pylist(), table["duplicate_of"].to_pylist(), strict=True
        )
    ]
    place = table.schema.get_field_index("duplicate_of")
    return table.set_column(place, table.schema.field(place), pa.array(points, pa.string()))
