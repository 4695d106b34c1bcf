"""The embeddings of an output as plain NumPy, for faiss and the like: ``embeddings.npy`` and ``ids.jsonl``."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmembed.atomic import atomic
from vlmembed.errors import ConfigError, InputError, OutputError, StorageError
from vlmembed.finished import FinishedOutput
from vlmembed.mirror.localcopy import local_copy
from vlmembed.remote.urls import is_url, shown_url

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    import pyarrow as pa

EMBEDDINGS, IDS = "embeddings.npy", "ids.jsonl"
DTYPES = ("float32", "float16")

BATCH_ROWS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """What was written into `folder`: `num_rows` vectors of `width` values of `dtype`, and as many ids."""

    folder: Path
    num_rows: int
    width: int
    dtype: str

    @property
    def embeddings(self) -> Path:
        """The vectors."""
        return self.folder / EMBEDDINGS

    @property
    def ids(self) -> Path:
        """Their ids."""
        return self.folder / IDS


def export(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    duplicates: bool = True,
    overwrite: bool = False,
) -> ExportReport:
    """Write the embeddings of an output, a path or a URL, into `folder` as ``embeddings.npy``, (rows, D) in C order,
    and their ids, one JSON string a line in the same order, as ``ids.jsonl``: an id can hold a line break.

    Both appear when they are whole, the ids last. Memory does not grow with the output. Without `duplicates`, rows
    whose `duplicate_of` is set are left out.

    Raises:
        InputError: there is no such output, it holds tokens or no rows, or values beyond `dtype`.
        OutputError: the folder holds something, and may not be overwritten.
        ConfigError: `dtype` is none of `DTYPES`. StorageError: the disk is full, or the like.
    """
    if dtype not in DTYPES:
        msg = f"dtype is {dtype!r}; it can be {', '.join(DTYPES)}"
        raise ConfigError(msg)
    if is_url(os.fspath(folder)):
        shown = shown_url(os.fspath(folder))
        msg = f"{shown} is a URL; an export is written to a disk: name a folder, and copy it there"
        raise OutputError(msg)
    with local_copy(path) as copy:
        return _export(FinishedOutput.open(copy), Path(folder), dtype, duplicates=duplicates, overwrite=overwrite)


def _export(output: FinishedOutput, folder: Path, dtype: str, *, duplicates: bool, overwrite: bool) -> ExportReport:
    if "embedding" not in output.vectors:
        msg = f"{output.path} holds tokens, and not one vector per image: read them with vlmembed.read_tokens"
        raise InputError(msg)
    num_rows = _count(output, duplicates=duplicates)
    if num_rows < 1:
        msg = f"{output.path} holds no rows: there is nothing to export"
        raise InputError(msg)
    width = int(output.schema.field("embedding").type.list_size)
    _make_room(folder, overwrite=overwrite)
    report = ExportReport(folder=folder, num_rows=num_rows, width=width, dtype=dtype)
    with _exporting(folder), ExitStack() as stack:
        # left in the opposite order: the vectors get their name first
        ids_path, vectors_path = (stack.enter_context(atomic(each)) for each in (report.ids, report.embeddings))
        with vectors_path.open("wb") as vectors, ids_path.open("wb") as ids:
            num_written = _write(output, report, vectors, ids, duplicates=duplicates)
        if num_written != num_rows:
            msg = f"{output.path} had {num_rows} rows and then {num_written}: export it when nobody writes to it"
            raise InputError(msg)
        report.ids.unlink(missing_ok=True)
    return report


def _write(output: FinishedOutput, report: ExportReport, vectors: BinaryIO, ids: BinaryIO, *, duplicates: bool) -> int:
    """Stream both files. Not into a memory map: on a disk that is full, that is a SIGBUS and no exception."""
    shape = (report.num_rows, report.width)
    header: dict[str, Any] = {"descr": np.dtype(report.dtype).str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(vectors, header)
    num_written = 0
    for batch in _batches(output, ["id", "duplicate_of", "embedding"], duplicates=duplicates):
        values = batch["embedding"].flatten().to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore"):
            stored = values.astype(report.dtype, copy=False)
        if not np.isfinite(stored).all():
            row = int(np.flatnonzero(~np.isfinite(stored))[0]) // report.width
            msg = f"the embedding of {batch['id'][row].as_py()!r} has values beyond {report.dtype}: use float32"
            raise InputError(msg)
        vectors.write(stored.data)
        ids.write("".join(json.dumps(key) + "\n" for key in batch["id"].to_pylist()).encode())
        num_written += batch.num_rows
    return num_written


def _count(output: FinishedOutput, *, duplicates: bool) -> int:
    if duplicates:
        return output.num_rows
    return sum(batch.num_rows for batch in _batches(output, ["duplicate_of"], duplicates=False))


def _batches(output: FinishedOutput, columns: list[str], *, duplicates: bool) -> Iterator[pa.RecordBatch]:
    for batch in output.batches(columns, BATCH_ROWS):
        yield batch if duplicates else batch.filter(batch["duplicate_of"].is_null())


def _make_room(folder: Path, *, overwrite: bool) -> None:
    """Have a folder to write into.

    Raises:
        OutputError: there cannot be one, or it holds something.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = sorted(path.name for path in folder.iterdir() if path.name not in (f".{EMBEDDINGS}.tmp", f".{IDS}.tmp"))
    except OSError as error:
        msg = f"cannot write to {folder} ({error}): name a folder that is new or empty"
        raise OutputError(msg) from error
    if held and not overwrite:
        msg = f"{folder} holds {held[0]!r}: name a folder that is new or empty, or replace the export with --overwrite"
        raise OutputError(msg)


@contextmanager
def _exporting(folder: Path) -> Iterator[None]:
    """Say as a person would what kept a file from being written.

    Raises:
        StorageError: the disk is full, the folder went away, ...
    """
    try:
        yield
    except OSError as error:
        msg = f"cannot write into {folder} ({error}): make room, or make it writable, and give the command again"
        raise StorageError(msg) from error
