"""What travels between the tasks of a cluster: Arrow tables whose rows are packs, or what the writer must know.

A row has the number of its part, its place in what the part's feed has told, its kind, and bytes. Blocks may come in
any order; by the places, each part's come together again.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from vlmembed.batch import open_batch
from vlmembed.types import ImageRef

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vlmembed.feed import Event
    from vlmembed.types import EmbeddingBatch, Failure, PackedBatch, UInt8Array

SCHEMA = pa.schema(
    [
        pa.field("part", pa.int64()),
        pa.field("place", pa.int64()),
        pa.field("kind", pa.int8()),
        pa.field("seconds", pa.float64()),
        pa.field("num_splits", pa.int32()),
        pa.field("header", pa.large_binary()),
        pa.field("payload", pa.large_binary()),
    ]
)


class Kind(IntEnum):
    """What a row's bytes are."""

    EVENTS = 0
    """For the writer, pickled; the header is the kept columns of the rows among them, as an Arrow stream."""
    PACK = 1
    """For the encoder: a pack's block, and its header, pickled."""
    RESULTS = 2
    """What an encoder makes of a pack: events."""
    END = 3
    """A `PartEnd`, pickled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartEnd:
    """All of a part has been told.

    Attributes:
        num_places: rows that belong to the part, this one included.
        needs: earlier parts that its duplicates take their vectors from.
        seconds: busy, by stage. num_packs, num_images, num_tokens, num_found, num_malformed_exif, num_replaced: of its
            feed.
    """

    num_places: int
    needs: frozenset[int]
    seconds: Mapping[str, float]
    num_packs: int
    num_images: int
    num_tokens: int
    num_found: int
    num_malformed_exif: int
    num_replaced: int


def one_row(
    part: int,
    place: int,
    kind: Kind,
    payload: bytes | UInt8Array,
    header: bytes = b"",
    *,
    seconds: float = 0.0,
    num_splits: int = 0,
) -> pa.Table:
    """A table of one row. `seconds` were taken by the encoder, which split so many packs."""
    buffer = pa.py_buffer(payload)
    offsets = pa.array([0, buffer.size], pa.int64())
    value = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets.buffers()[1], buffer])
    columns = [
        pa.array([part], pa.int64()),
        pa.array([place], pa.int64()),
        pa.array([int(kind)], pa.int8()),
        pa.array([seconds], pa.float64()),
        pa.array([num_splits], pa.int32()),
        pa.array([header], pa.large_binary()),
        value,
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def pack_row(part: int, place: int, batch: PackedBatch) -> pa.Table:
    """A pack as a row; its bytes are not copied."""
    return one_row(part, place, Kind.PACK, batch.block, pickle.dumps(batch.header))


def open_pack(header: pa.Scalar, payload: pa.Scalar) -> PackedBatch:
    """The pack of a row, in memory of its own: that of a row is not aligned, and nobody may write to it."""
    block = np.frombuffer(payload.as_buffer(), np.uint8).copy()
    return open_batch(pickle.loads(header.as_py()), block)  # noqa: S301  our own run's


def events_row(part: int, place: int, events: Sequence[Event]) -> pa.Table:
    """Events as a row. Kept columns go as one table: a pickled slice may hold all that it is a slice of."""
    bare = [replace(event, columns=None) if isinstance(event, ImageRef) else event for event in events]
    kept = {
        number: event.columns
        for number, event in enumerate(events)
        if isinstance(event, ImageRef) and event.columns is not None  # rows that could not be read have none
    }
    header = b""
    if kept:
        table = pa.Table.from_batches(list(kept.values()))
        table = table.combine_chunks() if len(kept) > 1 else table.take([0])  # one alone may keep all its neighbours
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        header = sink.getvalue().to_pybytes()
    return one_row(part, place, Kind.EVENTS, pickle.dumps((bare, list(kept)), protocol=5), header)


def results_row(
    part: int, place: int, results: Sequence[EmbeddingBatch | Failure], *, seconds: float, num_splits: int
) -> pa.Table:
    """What became of a pack as a row in its place."""
    payload = pickle.dumps((list(results), []), protocol=5)
    return one_row(part, place, Kind.RESULTS, payload, seconds=seconds, num_splits=num_splits)


def events_of(header: pa.Scalar, payload: pa.Scalar) -> list[Event]:
    """What `events_row` or `results_row` was given."""
    events: list[Event]
    events, with_columns = pickle.loads(payload.as_buffer())  # noqa: S301  our own run's
    if with_columns:
        kept = pa.ipc.open_stream(header.as_buffer()).read_all().combine_chunks()
        (batch,) = kept.to_batches()
        for row, number in enumerate(with_columns):
            ref = events[number]
            assert isinstance(ref, ImageRef)
            events[number] = replace(ref, columns=batch.slice(row, 1))
    return events


def end_row(part: int, place: int, end: PartEnd) -> pa.Table:
    """The last row of a part."""
    return one_row(part, place, Kind.END, pickle.dumps(end))


def end_of(payload: pa.Scalar) -> PartEnd:
    """What `end_row` was given."""
    end = pickle.loads(payload.as_buffer())  # noqa: S301  our own run's
    assert isinstance(end, PartEnd)
    return end
