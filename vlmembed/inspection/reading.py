"""Reads an output back: what is in it, where it came from, and which rows are nearest to each other. Also what an
unfinished run has so far, and what an errors file holds."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from vlmembed.errors import InputError
from vlmembed.finished import FinishedOutput, read_schema
from vlmembed.inspection.failures import codes_of, read_failures
from vlmembed.inspection.nearest import nearest_pairs
from vlmembed.inspection.recorded import settings_of
from vlmembed.inspection.rowscan import RowScan
from vlmembed.inspection.unfinished import UnfinishedRun, partial_of
from vlmembed.mirror.localcopy import local_copy
from vlmembed.mirror.partialcopy import partial_copy
from vlmembed.mirror.remoterun import is_remote
from vlmembed.output import LANCE, SUCCESS
from vlmembed.schema import ERRORS_SCHEMA, read_provenance

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vlmembed.inspection.failures import FailedGroup
    from vlmembed.inspection.nearest import Pair


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Facts of an output, of what an unfinished run has of one, or of an output as its errors file tells them.

    Attributes:
        kind: which of the three.
        path: as it was named.
        num_rows: with vectors, duplicates included. width: values per vector.
        vectors: columns of vectors. dtype: of their values. num_tokens: tokens of all rows, where they are stored and
            the run is finished.
        num_duplicates: rows whose `duplicate_of` is set.
        num_failed: rows without vectors; None where it is not known.
        codes: failed rows by code, from the errors file beside it; None where that file is not there.
        failures: the same with stages, and the first few rows of each.
        provenance: as recorded; of an unfinished run without counts.
        asked, decided: settings that differ from their defaults because somebody said so, and what ``auto`` became.
        files: bytes on disk by name, of all that belongs to it. num_bytes: of those with vectors alone.
        num_compared: distinct rows among which `nearest` was looked for; 0 where tokens are stored.
        nearest: the pairs with the highest cosine, best first.
        unfinished: the run whose parts lie there, also where they lie beside a finished output.
    """

    kind: Literal["output", "unfinished", "errors"]
    path: Path | str
    num_rows: int
    width: int
    vectors: tuple[str, ...]
    dtype: str
    num_tokens: int | None
    num_duplicates: int
    num_failed: int | None
    codes: dict[str, int] | None
    failures: tuple[FailedGroup, ...]
    provenance: dict[str, Any]
    asked: dict[str, Any]
    decided: dict[str, Any]
    files: dict[str, int]
    num_bytes: int
    num_compared: int = 0
    nearest: list[Pair] = field(default_factory=list)
    unfinished: UnfinishedRun | None = None

    @property
    def shard(self) -> str | None:
        """``i/n`` where it is a piece of a run, else None."""
        shard: str | None = self.provenance["fingerprint"].get("shard")
        return shard

    @property
    def bytes_per_row(self) -> float | None:
        """On disk, of a row with vectors."""
        return self.num_bytes / self.num_rows if self.num_rows and self.num_bytes else None


def inspect(path: str | os.PathLike[str], *, num_pairs: int = 3) -> Inspection:
    """Read the facts of an output, by its path or its URL: a Parquet file, a folder of parts, a Lance dataset; of one
    that is not finished, by its own path or that of its partial folder; or of an errors file.

    A remote output is downloaded. Nothing is changed, and a run that is going on is not disturbed.

    Raises:
        InputError: it cannot be read, or was not written by vlmembed.
        MissingExtraError: it is a Lance dataset, and Lance is not installed.
    """
    try:
        with local_copy(path) as copy:
            found = _inspect(copy, num_pairs)
    except InputError:
        unfinished = _remote_unfinished(os.fspath(path)) if is_remote(path) else None
        if unfinished is None:
            raise
        found = unfinished
    return replace(found, path=path if isinstance(path, Path) else os.fspath(path))


def _remote_unfinished(url: str) -> Inspection | None:
    """What an unfinished run has so far whose output is remote; its vectors are not downloaded."""
    with partial_copy(url) as copy:
        if copy is None:
            return None
        found = _unfinished(copy.path, copy.path)
    assert found.unfinished is not None
    run = replace(found.unfinished, partial=copy.partial, output=copy.output, is_held=copy.is_held)
    return replace(found, files=copy.sizes, num_bytes=_bytes_of(run, copy.sizes), unfinished=run)


def _inspect(path: Path, num_pairs: int) -> Inspection:
    partial = partial_of(path)
    if partial is not None and (partial == path or not _is_finished(path)):
        return _unfinished(path, partial)
    if path.is_file() and (provenance := _provenance_of_errors(path)) is not None:
        return _errors(path, provenance)
    return _output(path, num_pairs, None if partial is None else _beside(partial))


def _is_finished(path: Path) -> bool:
    return (path / SUCCESS).is_file() if path.is_dir() and path.suffix != LANCE else path.exists()


def _beside(partial: Path) -> UnfinishedRun | None:
    """The run whose parts lie there, beside a finished output perhaps, if it is one."""
    try:
        return UnfinishedRun.open(partial)
    except InputError:
        return None


def _provenance_of_errors(path: Path) -> dict[str, Any] | None:
    """How an errors file was made; None for any other file."""
    try:
        schema = read_schema(path)
    except (OSError, ValueError, pa.ArrowException):
        return None
    return read_provenance(schema, str(path)) if schema.names == ERRORS_SCHEMA.names else None


def _output(path: Path, num_pairs: int, unfinished: UnfinishedRun | None) -> Inspection:
    output = FinishedOutput.open(path)
    vectors, provenance, rows = output.vectors, output.provenance, RowScan.of(output)
    pooled = "embedding" in vectors
    vector = output.schema.field(vectors[0]).type
    vector = vector if pooled else vector.value_type
    compared = np.concatenate([np.empty((0, vector.list_size), np.float32), *rows.embeddings])
    failures = read_failures([output.errors]) if output.has_errors else ()
    codes = codes_of(failures) if output.has_errors else None
    others = [each for each in (output.errors, path / SUCCESS) if each.is_file()]
    asked, decided = settings_of(provenance)
    return Inspection(
        kind="output",
        path=path,
        num_rows=rows.num_rows,
        width=vector.list_size,
        vectors=vectors,
        dtype="float16" if vector.value_type == pa.float16() else "float32",
        num_tokens=None if pooled else rows.num_patches // provenance["model"].get("patches_per_token", 1),
        num_duplicates=rows.num_duplicates,
        num_failed=provenance.get("counts", {}).get("failed") if codes is None else sum(codes.values()),
        codes=codes,
        failures=failures,
        provenance=provenance,
        asked=asked,
        decided=decided,
        files=_sizes([*output.files, *others]),
        num_bytes=sum(_sizes(output.files).values()),
        num_compared=len(rows.ids),
        nearest=nearest_pairs(rows.ids, compared, num_pairs),
        unfinished=unfinished,
    )


def _unfinished(path: Path, partial: Path) -> Inspection:
    run = UnfinishedRun.open(partial)
    try:
        return _of_run(path, run, partial)
    except (OSError, InputError) as error:
        if _beside(partial) == run:
            raise
        msg = f"{partial} has changed while it was read: look again"
        raise InputError(msg) from error


def _of_run(path: Path, run: UnfinishedRun, partial: Path) -> Inspection:
    failures = read_failures(partial / record.errors_name for record in run.records if record.num_failed)
    files = _sizes(each for each in sorted(partial.iterdir()) if each.name != "lock")
    asked, decided = settings_of(run.provenance)
    return Inspection(
        kind="unfinished",
        path=path,
        num_rows=run.num_embedded + run.num_duplicates,
        num_duplicates=run.num_duplicates,
        num_failed=run.num_failed,
        codes=codes_of(failures),
        failures=failures,
        files=files,
        num_bytes=_bytes_of(run, files),
        unfinished=run,
        asked=asked,
        decided=decided,
        **_vectors_of(run.provenance),
    )


def _bytes_of(run: UnfinishedRun, files: Mapping[str, int]) -> int:
    """What its parts' rows with vectors take."""
    return sum(files.get(record.file_name, 0) for record in run.records)


def _errors(path: Path, provenance: dict[str, Any]) -> Inspection:
    failures = read_failures([path])
    codes = codes_of(failures)
    counts = provenance.get("counts", {})
    asked, decided = settings_of(provenance)
    return Inspection(
        kind="errors",
        path=path,
        num_rows=counts.get("embedded", 0) + counts.get("duplicates", 0),
        num_duplicates=counts.get("duplicates", 0),
        num_failed=sum(codes.values()),
        codes=codes,
        failures=failures,
        files=_sizes([path]),
        num_bytes=0,
        asked=asked,
        decided=decided,
        **_vectors_of(provenance),
    )


def _vectors_of(provenance: dict[str, Any]) -> dict[str, Any]:
    """What the vectors are, where only the provenance tells."""
    columns: list[Mapping[str, Any]] = provenance["fingerprint"].get("vectors", [])
    return {
        "provenance": provenance,
        "vectors": tuple(column["name"] for column in columns),
        "width": columns[0]["width"] if columns else provenance["model"]["width"],
        "dtype": columns[0]["dtype"] if columns else "unknown",
        "num_tokens": None,
    }


def _sizes(paths: Iterable[Path]) -> dict[str, int]:
    """Bytes by name; of a folder those of all that is in it. What has just gone has none."""
    sizes = {}
    for path in paths:
        files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
        sizes[path.name] = sum(each.stat().st_size for each in files if each.exists())
    return sizes
