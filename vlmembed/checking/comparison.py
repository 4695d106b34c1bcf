"""Do two outputs hold the same? They are compared row by row; no picture is read, and no model is loaded."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlmembed.checking.alignment import Alignment
from vlmembed.checking.deviation import TOLERANCES, deviations_of, version_differences
from vlmembed.checking.whole import count_problems, open_whole
from vlmembed.errors import ConfigError, InputError
from vlmembed.finished import FinishedOutput, reading
from vlmembed.mirror.localcopy import local_copy
from vlmembed.mirror.remoterun import is_remote
from vlmembed.provenance import difference
from vlmembed.schema import VectorColumn

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    import numpy.typing as npt

    Float64Array: TypeAlias = npt.NDArray[np.float64]
    BoolArray: TypeAlias = npt.NDArray[np.bool_]

BATCH_ROWS = 512
MAX_IDS = 10
"""Ids that are kept of every kind of finding."""

_SIZES = ("width", "height", "grid_h", "grid_w")
_OWN = ("id", "content_hash", "duplicate_of", *_SIZES)


@dataclass(slots=True)
class Rows:
    """How many rows there are of a kind, and the ids of the first ten."""

    count: int = 0
    ids: list[str] = field(default_factory=list)

    def add(self, ids: list[str]) -> None:
        """Some more."""
        self.count += len(ids)
        self.ids += ids[: MAX_IDS - len(self.ids)]


@dataclass(slots=True, kw_only=True)
class Comparison:
    """What differs between an output and the one `against` which it was held.

    Attributes:
        num_compared: rows that have vectors in both. num_failed: rows that failed in both.
        only_here, only_there: rows that the other neither has nor has failed at.
        failed_here, failed_there: rows that failed in one and have vectors in the other.
        codes: rows that failed in both, with another code.
        contents: rows whose content hash differs. What follows of that, their sizes and vectors, is not compared.
        sizes, duplicates: rows whose width, height or grid, or whose `duplicate_of` differs.
        kept: rows in which a kept column differs, by column.
        beyond: rows whose vectors deviate more than the tolerance.
        worst: the largest deviation, |here - there| / |there|, of the row `worst_id`; 0 where all bits agree.
        tolerance: what it may be.
        differences: settings and versions in which the two runs differ; they are no fault by themselves.
        problems: what is wrong with the files, or with their columns.
    """

    path: Path | str
    against: Path | str
    tolerance: float
    num_compared: int = 0
    num_failed: int = 0
    only_here: Rows = field(default_factory=Rows)
    only_there: Rows = field(default_factory=Rows)
    failed_here: Rows = field(default_factory=Rows)
    failed_there: Rows = field(default_factory=Rows)
    codes: Rows = field(default_factory=Rows)
    contents: Rows = field(default_factory=Rows)
    sizes: Rows = field(default_factory=Rows)
    duplicates: Rows = field(default_factory=Rows)
    kept: dict[str, Rows] = field(default_factory=dict)
    beyond: Rows = field(default_factory=Rows)
    worst: float = 0.0
    worst_id: str = ""
    differences: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def findings(self) -> Iterator[tuple[str, Rows]]:
        """Rows that are not the same, with what is the matter with them."""
        named = {
            f"are only in {self.path}": self.only_here,
            f"are only in {self.against}": self.only_there,
            f"failed in {self.path} alone": self.failed_here,
            f"failed in {self.against} alone": self.failed_there,
            "failed with another code": self.codes,
            "have other contents": self.contents,
            "have another size or grid": self.sizes,
            "are duplicates of another row, or of none": self.duplicates,
            **{f"have another {column!r}": rows for column, rows in self.kept.items()},
            "deviate more than the tolerance": self.beyond,
        }
        yield from ((what, rows) for what, rows in named.items() if rows.count)

    @property
    def is_good(self) -> bool:
        """The same rows have the same contents, columns, failures and, within the tolerance, vectors."""
        return not self.problems and not any(True for _ in self.findings())


def compare(
    path: str | os.PathLike[str], against: str | os.PathLike[str], *, tolerance: float | None = None
) -> Comparison:
    """Hold an output, of whatever kind, against another: ids, contents, sizes, failures, kept columns, vectors. Both
    are paths or URLs.

    `tolerance` is how far vectors may be apart, |a - b| / |b|; None is the looser of what the two runs' dtypes
    allow. Rows are streamed, and brought together by id; those that are out of step wait in a temporary file.

    Raises:
        InputError: one of them cannot be read, or is damaged. ConfigError: the tolerance is out of range.
        MissingExtraError: one is a Lance dataset, and Lance is not installed.
    """
    if tolerance is not None and not tolerance >= 0:
        msg = f"tolerance is {tolerance}; it must be 0 or more"
        raise ConfigError(msg)
    with ExitStack() as stack:
        here, there = (_open(stack.enter_context(local_copy(each))) for each in (path, against))
        found = _compare(here, there, tolerance)
    found.path, found.against = (str(each) if is_remote(each) else Path(each) for each in (path, against))
    return found


def _compare(here: FinishedOutput, there: FinishedOutput, tolerance: float | None) -> Comparison:
    facts = here.provenance, there.provenance
    if tolerance is None:
        tolerance = max(TOLERANCES[each["fingerprint"]["dtype"]] for each in facts)
    found = Comparison(path=here.path, against=there.path, tolerance=tolerance)
    found.differences = difference(facts[1]["fingerprint"], facts[0]["fingerprint"])
    found.differences += version_differences(*(each.get("versions", {}) for each in facts[::-1]))
    for output in (here, there):
        found.problems += count_problems(output)
    columns = _columns_of_both(here, there, found)
    found.kept = {name: Rows() for name in columns if name not in (*_OWN, *here.vectors)}
    vectors = [_vector_column(here.schema.field(name)) for name in columns if name in here.vectors]
    same_hash = facts[0]["fingerprint"]["dedup"] == facts[1]["fingerprint"]["dedup"]
    with tempfile.TemporaryDirectory(prefix="vlmembed-") as folder, Alignment(Path(folder) / "rows.sqlite") as rows:
        for pair in rows.pairs("row", *(each.batches(columns, BATCH_ROWS) for each in (here, there))):
            _compare_rows(pair, vectors, found, same_hash=same_hash)
        for pair in rows.pairs("failure", *(_failures(each) for each in (here, there))):
            found.num_failed += pair[0].num_rows
            found.codes.add(_ids(pair[0], _differ(pair[0]["code"], pair[1]["code"])))
        _collect(rows, found)
    return found


def _open(path: Path) -> FinishedOutput:
    output = open_whole(path)
    if "id" not in output.schema.names:
        msg = f"{path} has no column of ids any more: name an output as it was written"
        raise InputError(msg)
    return output


def _columns_of_both(here: FinishedOutput, there: FinishedOutput, found: Comparison) -> list[str]:
    """The columns that can be compared; what cannot is noted."""
    columns = [name for name in here.schema.names if name in there.schema.names]
    for one, other in ((here, there), (there, here)):
        found.problems += [
            f"column {name!r} is only in {one.path}" for name in one.schema.names if name not in other.schema.names
        ]
    for name in [name for name in columns if name in here.vectors]:
        widths = [_vector_column(each.schema.field(name)).width for each in (here, there)]
        if widths[0] != widths[1]:
            columns.remove(name)
            found.problems.append(
                f"vectors of column {name!r} have {widths[0]} values in {here.path} and {widths[1]} in {there.path}"
            )
    return columns


def _vector_column(column: pa.Field) -> VectorColumn:
    """What a column of vectors holds."""
    per_token = not pa.types.is_fixed_size_list(column.type)
    vector = column.type.value_type if per_token else column.type
    dtype = "float16" if vector.value_type == pa.float16() else "float32"
    return VectorColumn(name=column.name, width=vector.list_size, dtype=dtype, per_token=per_token)


def _failures(output: FinishedOutput) -> Iterator[pa.RecordBatch]:
    """Ids and codes of the rows that failed; none where the file is missing."""
    if output.has_errors:
        with reading(output.errors), pq.ParquetFile(output.errors, page_checksum_verification=True) as rows:
            yield from rows.iter_batches(columns=["id", "code"], batch_size=BATCH_ROWS)


def _compare_rows(
    pair: tuple[pa.Table, pa.Table], vectors: list[VectorColumn], found: Comparison, *, same_hash: bool
) -> None:
    """Rows of the same ids, one by one."""
    here, there = pair
    found.num_compared += here.num_rows
    if "duplicate_of" in here.column_names:
        found.duplicates.add(_ids(here, _differ(here["duplicate_of"], there["duplicate_of"])))
    for name, rows in found.kept.items():
        rows.add(_ids(here, _differ(here[name], there[name])))
    if same_hash and "content_hash" in here.column_names:
        changed = _differ(here["content_hash"], there["content_hash"])
        found.contents.add(_ids(here, changed))
        here, there = (each.filter(pa.array(~changed)) if changed.any() else each for each in (here, there))
    others = [_differ(here[name], there[name]) for name in _SIZES if name in here.column_names]
    if others:
        found.sizes.add(_ids(here, np.logical_or.reduce(others)))
    if vectors and here.num_rows:
        columns = [deviations_of(each, here[each.name], there[each.name]) for each in vectors]
        _note(np.maximum.reduce(columns), here, found)


def _note(deviations: Float64Array, rows: pa.Table, found: Comparison) -> None:
    found.beyond.add(_ids(rows, deviations > found.tolerance))
    at = int(np.argmax(deviations))
    if deviations[at] > found.worst:
        found.worst, found.worst_id = float(deviations[at]), rows["id"][at].as_py()


def _ids(rows: pa.Table, mask: BoolArray) -> list[str]:
    """Ids of the rows that are marked."""
    ids: list[str] = rows["id"].filter(pa.array(mask)).to_pylist() if mask.any() else []
    return ids


def _differ(here: pa.ChunkedArray, there: pa.ChunkedArray) -> BoolArray:
    """Which values are not the same, (N,); of which type they are does not matter."""
    if here.equals(there):
        return np.zeros(len(here), bool)
    return np.array([not _is_same(one, other) for one, other in zip(here, there, strict=True)], bool)


def _is_same(one: pa.Scalar, other: pa.Scalar) -> bool:
    if one.equals(other):
        return True
    try:
        return repr(one.as_py()) == repr(other.as_py())  # NaN too, and a word whether or not it is in a dictionary
    except (ValueError, OverflowError):  # times that Python has none of
        return False


def _collect(rows: Alignment, found: Comparison) -> None:
    """What has found no partner among its like: it may have failed in the other output, or not be in it at all."""

    def lone(kind: str, side: int, other_kind: str, *, has_other: bool) -> Rows:
        count, ids = rows.alone(kind, side, other_kind=other_kind, has_other=has_other, limit=MAX_IDS)
        return Rows(count=count, ids=ids)

    found.failed_here, found.failed_there = (lone("row", side, "failure", has_other=True) for side in (1, 0))
    for side, only in enumerate((found.only_here, found.only_there)):
        for kind, other_kind in (("row", "failure"), ("failure", "row")):
            some = lone(kind, side, other_kind, has_other=False)
            only.count, only.ids = only.count + some.count, (only.ids + some.ids)[:MAX_IDS]
