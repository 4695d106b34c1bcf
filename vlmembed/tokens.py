"""Single images' tokens out of an output of `--emit tokens`, without reading the rest of it."""

from __future__ import annotations

import os
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vlmembed.errors import InputError
from vlmembed.finished import FinishedOutput, reading
from vlmembed.lance_output import LanceRows
from vlmembed.remote.remotes import Remotes
from vlmembed.remote.urls import is_url
from vlmembed.remote_tokens import RemoteTokens
from vlmembed.schema import VectorColumn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow.parquet as pq

    from vlmembed.finished import StoredRows
    from vlmembed.types import FloatArray, Int64Array

TIMEOUT_SECONDS = 120.0
"""Within which a server must answer."""

MAX_SHOWN = 3
"""Missing ids that a message names."""

_ID_ROWS = 2**16
"""Rows of a Lance dataset whose ids are read at a time."""

_FACTS = ("id", "content_hash", "height", "width", "grid_h", "grid_w")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenFeatures:
    """What a language model would be fed of one image.

    Attributes:
        tokens: (tokens, D) float16 or float32, as stored; in raster order.
        deepstack: the inner layers' features, each (tokens, D), where they are stored (Qwen3-VL).
        grid_hw: patches; a token may stand for several. size_hw: pixels, after EXIF orientation.
        content_hash: SHA-256.
    """

    tokens: FloatArray
    deepstack: tuple[FloatArray, ...]
    grid_hw: tuple[int, int]
    size_hw: tuple[int, int]
    content_hash: bytes


def read_tokens(
    path: str | os.PathLike[str], ids: Iterable[str], *, allow_local_urls: bool = False
) -> dict[str, TokenFeatures]:
    """The tokens of these images, by id in the order given; duplicates have tokens of their own.

    `path` is that of an output, or its s3://, gs://, hf://, http:// or https:// URL. Of a Parquet output the footers
    are read, the ids of the row groups that can hold one of `ids` by their statistics, and the vectors of those that
    do: some megabytes an image, whatever the size of the output. All that is returned is held in memory.
    `allow_local_urls` lets http URLs lead to this machine.

    Raises:
        InputError: there is no such output, it holds no tokens, or not those of an id; for one that failed the message
            says why.
    """
    wanted = list(dict.fromkeys(ids))
    if is_url(os.fspath(path)):
        with Remotes(timeout_seconds=TIMEOUT_SECONDS, allow_local=allow_local_urls) as remotes:
            return _read(RemoteTokens.look(os.fspath(path), remotes), wanted)
    return _read(FinishedOutput.open(Path(path)), wanted)


def _read(output: FinishedOutput | RemoteTokens, wanted: list[str]) -> dict[str, TokenFeatures]:
    columns = _vector_columns(output)
    found: dict[str, TokenFeatures] = {}
    for file in output.files:
        if left := sorted(key for key in wanted if key not in found):
            with reading(file), output.opened(file) as rows:
                found.update(_find(rows, left, columns))
    if missing := [key for key in wanted if key not in found]:
        raise InputError(_describe_missing(output, missing))
    return {key: found[key] for key in wanted}


def _vector_columns(output: FinishedOutput | RemoteTokens) -> list[VectorColumn]:
    """``tokens``, and the deepstack levels in order.

    Raises:
        InputError: there are none.
    """
    if "tokens" not in output.vectors:
        msg = (
            f"{output.path} holds one vector per image and no tokens: read its column embedding, or make an output "
            "with --emit tokens"
        )
        raise InputError(msg)
    levels = [name for name in output.vectors if name != "tokens"]
    names = ["tokens", *sorted(levels, key=lambda name: int(name.removeprefix("deepstack_")))]
    types = {name: output.schema.field(name).type.value_type for name in names}
    return [
        VectorColumn(
            name=name,
            width=types[name].list_size,
            dtype="float16" if types[name].value_type == pa.float16() else "float32",
            per_token=True,
        )
        for name in names
    ]


def _find(rows: StoredRows, wanted: list[str], columns: Sequence[VectorColumn]) -> Iterator[tuple[str, TokenFeatures]]:
    """Those of the `wanted` ids, ascending, that a file has; of several rows with one id, the first."""
    names = [*_FACTS, *(column.name for column in columns)]
    for table in (
        _lance_rows(rows, wanted, names) if isinstance(rows, LanceRows) else _parquet_rows(rows, wanted, names)
    ):
        for place, key in enumerate(table["id"].to_pylist()):
            yield key, _features(table, place, columns)


def _parquet_rows(file: pq.ParquetFile, wanted: list[str], names: list[str]) -> Iterator[pa.Table]:
    left = set(wanted)
    for group in range(file.num_row_groups):
        if not left:
            return
        if _may_hold(file.metadata.row_group(group), wanted):
            places = _places(file.read_row_group(group, columns=["id"])["id"].to_pylist(), left)
            if len(places):
                yield file.read_row_group(group, columns=names).take(places)


def _lance_rows(rows: LanceRows, wanted: list[str], names: list[str]) -> Iterator[pa.Table]:
    left, first = set(wanted), 0
    for batch in rows.iter_batches(_ID_ROWS, columns=["id"]):
        places = _places(batch["id"].to_pylist(), left) + first
        for start in range(0, len(places), rows.group_rows):
            yield rows.take(places[start : start + rows.group_rows], names)
        first += batch.num_rows


def _places(keys: list[str], left: set[str]) -> Int64Array:
    """Where in `keys` those that are `left` first are, ascending; they are left no more."""
    places = []
    for place, key in enumerate(keys):
        if key in left:
            left.remove(key)
            places.append(place)
    return np.array(places, np.int64)


def _may_hold(group: pq.RowGroupMetaData, wanted: list[str]) -> bool:
    """Whether a row group can hold one of the `wanted` ids, by its least and its greatest one, where it tells them."""
    place = next(at for at in range(group.num_columns) if group.column(at).path_in_schema == "id")
    statistics = group.column(place).statistics
    if statistics is None or not statistics.has_min_max:
        return True
    at = bisect_left(wanted, statistics.min)  # code points are in the order of their UTF-8, which Parquet's is
    return at < len(wanted) and wanted[at] <= statistics.max


def _features(table: pa.Table, place: int, columns: Sequence[VectorColumn]) -> TokenFeatures:
    facts = {name: table[name][place].as_py() for name in _FACTS}
    # copies, which do not keep the whole row group in memory
    tokens, *levels = (column.from_arrow(table[column.name][place]).copy() for column in columns)
    return TokenFeatures(
        tokens=tokens,
        deepstack=tuple(levels),
        grid_hw=(facts["grid_h"], facts["grid_w"]),
        size_hw=(facts["height"], facts["width"]),
        content_hash=facts["content_hash"],
    )


def _describe_missing(output: FinishedOutput | RemoteTokens, missing: list[str]) -> str:
    reasons: dict[str, str] = {}
    if output.has_errors:
        with reading(output.errors), output.opened(output.errors) as rows:
            assert not isinstance(rows, LanceRows)
            table = rows.read(columns=["id", "code", "message"])
            failed = table.filter(pc.field("id").isin(missing))
        reasons = {row["id"]: f"failed: {row['code']}, {row['message']}" for row in failed.to_pylist()}
    shown = [f"{key!r} ({reasons.get(key, 'no row of that id')})" for key in missing[:MAX_SHOWN]]
    more = f" and {len(missing) - MAX_SHOWN} more" if len(missing) > MAX_SHOWN else ""
    return f"{output.path} has no tokens of {', '.join(shown)}{more}: leave them out"
