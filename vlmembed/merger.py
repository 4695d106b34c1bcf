"""`vlmembed merge`: the outputs of a run's shards become the output of the whole run.

The rows are streamed from the shards into the output's own files, which are moved into their places at the end. A merge
that was killed is begun anew by the same command; nothing of it counts before all of it is there.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vlmembed.assembly import READY_ERRORS, READY_PREFIX, concatenate, publish_folder, publish_rows, write_errors
from vlmembed.errors import AccountingError, InputError, NothingEmbeddedError, OutputError
from vlmembed.finished import FinishedOutput, input_rows, read_tables
from vlmembed.mirror.localcopy import local_copy
from vlmembed.output import PUBLICATION, OutputPaths, drop, finish_publication, lock, read_manifest, write_manifest
from vlmembed.overlap import Overlap
from vlmembed.partfiles import PartRecord, file_sha256, part_name, storing
from vlmembed.parts import read_records
from vlmembed.report import RunReport
from vlmembed.schema import ERRORS_SCHEMA, VectorColumn, with_provenance
from vlmembed.shardset import open_shards, whole_counts, whole_provenance

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from vlmembed.merging import Numbered
    from vlmembed.shardset import ShardOutput
    from vlmembed.types import Int64Array

logger = logging.getLogger(__name__)

_RUN = ("fingerprint", "merged_from")
"""By what a finished output is known as that of this very merge."""


def merge(
    outputs: Sequence[str | os.PathLike[str]], target: str | os.PathLike[str], *, overwrite: bool = False
) -> RunReport:
    """Make the output of a whole run, `target`, of the `outputs` of all its shards, paths or URLs, in any order.

    A row whose content an earlier shard has becomes its duplicate, and gets its vectors.

    Raises:
        InputError: an output is no shard, not whole, or of another run than the others; a shard is missing or repeated.
        OutputError: the target exists, or is one of the shards.
        NothingEmbeddedError: no shard has an embedding; nothing is written.
        StorageError: a file could not be written; nothing is left of it.
    """
    began = time.perf_counter()
    if "://" in os.fspath(target):
        msg = f"{os.fspath(target)!r} is a URL, and shards are merged on a local disk: name a file there, and copy it"
        raise InputError(msg)
    with ExitStack() as stack:
        copies = [stack.enter_context(local_copy(name)) for name in outputs]
        return _merge(copies, target, overwrite=overwrite, began=began)


def _merge(outputs: Sequence[Path], target: str | os.PathLike[str], *, overwrite: bool, began: float) -> RunReport:
    paths = OutputPaths.of(target)
    paths.check_writable()
    if (paths.partial / PUBLICATION).exists():
        with lock(paths.partial):
            finish_publication(paths)
    shards = open_shards(outputs)
    _check_apart(paths, shards)
    if not any(shard.num_rows for shard in shards):
        msg = f"not one of {sum(shard.counts['rows'] for shard in shards)} rows has an embedding: nothing to merge; "
        msg += f"the reasons are in {', '.join(str(shard.errors) for shard in shards)}"
        raise NothingEmbeddedError(msg)
    facts = whole_provenance(shards, target)
    report = _find_finished(paths, facts, overwrite=overwrite)
    if report is not None:
        return report
    with lock(paths.partial):
        if (report := _find_finished(paths, facts, overwrite=overwrite)) is not None:
            return report
        with _starting_anew(paths, facts):
            facts = _Merge(paths, shards, facts).finish()
    report = RunReport.from_provenance(paths, facts)
    return replace(report, already_complete=False, seconds=time.perf_counter() - began)


def _check_apart(paths: OutputPaths, shards: Sequence[ShardOutput]) -> None:
    """No shard may be written over.

    Raises:
        OutputError: the target is one of them, or the errors file of one.
    """
    written = {os.path.realpath(path) for path in paths.all()}
    for shard in shards:
        if written & {os.path.realpath(path) for path in (shard.path, shard.errors)}:
            msg = f"{paths.output} is {shard.path}, one of the shards: choose another output"
            raise OutputError(msg)


def _find_finished(paths: OutputPaths, facts: dict[str, Any], *, overwrite: bool) -> RunReport | None:
    """The report of this very merge, where it is done already.

    Raises:
        OutputError: something else is in the way.
    """
    read_manifest(paths.partial, ignore_damage=overwrite)  # a folder that is not ours is not emptied, whatever is asked
    if overwrite:
        return None
    if read_records(paths.partial):
        msg = f"{paths.partial} has the parts of an unfinished run: finish it, choose another output, or --overwrite"
        raise OutputError(msg)
    whole = paths.success if paths.is_folder else paths.output
    found = next((path for path in (whole, paths.errors) if path.exists()), None)
    if found is None:
        return None
    try:
        earlier = FinishedOutput.open(paths.output).provenance
    except InputError:
        earlier = {}
    if found == whole and paths.errors.exists() and all(earlier.get(name) == facts[name] for name in _RUN):
        return RunReport.from_provenance(paths, earlier)
    msg = f"{found} exists, and is not what these shards make: choose another output, or replace it with --overwrite"
    raise OutputError(msg)


@contextmanager
def _starting_anew(paths: OutputPaths, facts: dict[str, Any]) -> Iterator[None]:
    """The partial folder, empty; what was written into it goes where the merge fails before its files are moved."""
    try:
        with storing(paths.partial):
            write_manifest(paths.partial, facts)
        yield
    except BaseException:
        if not (paths.partial / PUBLICATION).exists():
            drop(paths.partial)
        raise


class _Merge:
    """One merge, while it has the lock. `facts` are the whole run's, without counts."""

    def __init__(self, paths: OutputPaths, shards: Sequence[ShardOutput], facts: dict[str, Any]) -> None:
        self._paths = paths
        self._shards = shards
        self._facts = facts
        schema = next(shard.schema for shard in shards if shard.schema is not None)
        self._schema: pa.Schema = schema
        self._vectors = tuple(VectorColumn(**column) for column in facts["fingerprint"]["vectors"])
        self._written: Counter[str] = Counter(embedded=0, duplicates=0)

    def finish(self) -> dict[str, Any]:
        """Write the output and move it into its place; returns its provenance."""
        with self._find_overlap() as overlap:
            num_own = sum(shard.counts["embedded"] for shard in self._shards)
            counts = whole_counts(self._shards, num_own if overlap is None else overlap.num_distinct)
            facts = self._facts | {"counts": counts}
            logger.info("%d rows of later shards are in earlier ones", num_own - counts["embedded"])
            with storing(self._paths.partial / READY_ERRORS):
                write_errors(self._paths, self._errors(), facts, counts["failed"])
            rows = self._rows(overlap)
            if self._paths.is_folder:
                self._write_folder(facts, rows)
            else:
                schema = with_provenance(self._schema, facts)
                tables = self._counted((table for _, table in rows), counts)
                publish_rows(self._paths, schema, tables, counts["embedded"] + counts["duplicates"], self._vectors)
        return facts

    def _find_overlap(self) -> AbstractContextManager[Overlap | None]:
        if self._facts["fingerprint"]["dedup"] == "none":
            return nullcontext()
        return Overlap(
            [shard.files for shard in self._shards],
            vectors=[column.name for column in self._vectors],
            index=self._paths.partial / "index.sqlite",
        )

    def _errors(self) -> Iterator[pa.Table]:
        """The rows that failed, by their rows in the whole."""
        first_row = 0
        for shard in self._shards:
            for table in read_tables(shard.errors, ERRORS_SCHEMA):
                yield table.set_column(1, ERRORS_SCHEMA.field("row"), pc.add(table["row"], first_row))
            first_row += shard.counts["rows"]

    def _rows(self, overlap: Overlap | None) -> Iterator[Numbered]:
        """All rows as they are to be written, with their rows in the whole's input."""
        first_row = position = 0
        for shard in self._shards:
            place = 0
            for path in shard.files:
                for table in read_tables(path, self._schema):
                    rows = first_row + input_rows(shard.failed, np.arange(place, place + len(table)))
                    yield rows, table if overlap is None else overlap.resolve(table, position)
                    place += len(table)
                    position += len(table)
            first_row += shard.counts["rows"]

    def _write_folder(self, facts: dict[str, Any], rows: Iterator[Numbered]) -> None:
        """Parts of the rows that the whole run's parts would have."""
        schema = with_provenance(self._schema, self._facts)  # without counts, as a run writes its parts
        failed, records, ready, cut = self._failed(), [], {}, _Cut(rows)
        num_rows, step = facts["counts"]["rows"], facts["shape"]["rows_per_part"]
        for number, start in enumerate(range(0, num_rows, step)):
            stop = min(start + step, num_rows)
            num_failed = int(np.searchsorted(failed, stop) - np.searchsorted(failed, start))
            before, name = self._written.copy(), part_name(number)
            target = self._paths.partial / (READY_PREFIX + name)
            with storing(target):
                tables = self._counted(cut.until(stop), facts["counts"] if stop == num_rows else None)
                concatenate(target, schema, tables, stop - start - num_failed, self._vectors)
            record = PartRecord(
                number=number,
                first_row=start,
                num_rows=stop - start,
                num_embedded=self._written["embedded"] - before["embedded"],
                num_duplicates=self._written["duplicates"] - before["duplicates"],
                num_failed=num_failed,
                sha256=file_sha256(target),
            )
            records.append(record)
            ready[target.name] = name
        publish_folder(self._paths, records, facts, ready)

    def _counted(self, tables: Iterable[pa.Table], promised: Mapping[str, int] | None) -> Iterator[pa.Table]:
        """Count what is written, and compare it at the end with what was `promised` of all.

        Raises:
            AccountingError: it is not that.
        """
        for table in tables:
            num_embedded = table["duplicate_of"].null_count
            self._written.update(embedded=num_embedded, duplicates=len(table) - num_embedded)
            yield table
        if promised and any(count != promised[name] for name, count in self._written.items()):
            msg = f"the shards gave {dict(self._written)} rows and promised {dict(promised)}; nothing was replaced"
            raise AccountingError(msg)

    def _failed(self) -> Int64Array:
        """The rows of the whole that failed, ascending."""
        first_rows = np.cumsum([0, *(shard.counts["rows"] for shard in self._shards)])
        failed = [shard.failed + first_row for shard, first_row in zip(self._shards, first_rows, strict=False)]
        return np.concatenate(failed).astype(np.int64)


class _Cut:
    """A stream of rows, taken in pieces."""

    def __init__(self, rows: Iterator[Numbered]) -> None:
        self._rows = rows
        self._rest: Numbered | None = None

    def until(self, stop: int) -> Iterator[pa.Table]:
        """The rows that come before the input row `stop`."""
        while (pair := self._rest or next(self._rows, None)) is not None:
            self._rest = None
            rows, table = pair
            count = int(np.searchsorted(rows, stop))
            if count:
                yield table.slice(0, count)
            if count < len(rows):
                self._rest = rows[count:], table.slice(count)
                return
