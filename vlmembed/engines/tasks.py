"""What the tasks of a cluster run: functions from block to blocks. No torch here: these processes have no model."""

from __future__ import annotations

import pickle
import platform
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray

from vlmembed.engines.collecting import write_part
from vlmembed.engines.feeding import Nothing, feed_part, hash_piece
from vlmembed.engines.firsts import repeated_rows, write_stretch
from vlmembed.engines.orders import check_folder, check_inputs, go_to
from vlmembed.errors import ClusterError, VlmembedError
from vlmembed.known import Known
from vlmembed.provenance import versions
from vlmembed.sources import count_piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from vlmembed.config import EncodeConfig
    from vlmembed.engines.orders import RunOrder
    from vlmembed.partfiles import PartRecord
    from vlmembed.types import Embedded

_SAME_ON_ALL = ("vlmembed", "torch", "transformers", "pillow", "pyarrow", "numpy")


WRITTEN = pa.schema([pa.field("stretch", pa.int64()), pa.field("num_repeated", pa.int64())])


def packed(items: Iterable[Any]) -> list[dict[str, bytes]]:
    """Rows with any values, pickled."""
    return [{"item": pickle.dumps(item, protocol=5)} for item in items]


def unpacked(block: pa.Table) -> Iterator[Any]:
    """What `packed` was given."""
    return (pickle.loads(item.as_buffer()) for item in block["item"])  # noqa: S301  our own run's


class Keeper:
    """Has the known embeddings of a run open, in a process of its own; the arguments are those of `Known`."""

    def __init__(self, *arguments: Any) -> None:  # noqa: ANN401  see `Known`
        self._arguments = arguments
        self._known: Known | None = None

    def open(self) -> Known:
        """Open them, unless they are. Raises as `Known`, which an actor's own start could not."""
        if self._known is None:
            self._known = Known(*self._arguments)
        return self._known

    def check(self) -> None:
        """Open them; raises as `Known`."""
        self.open()

    def find_all(self, images: Sequence[tuple[bytes, int]]) -> dict[int, Embedded]:
        """As `Known.find_all`."""
        return self.open().find_all(images)

    def keep(self, images: Sequence[tuple[bytes, Embedded]]) -> None:
        """As `Known.keep`."""
        self.open().keep(images)

    def close(self) -> None:
        """Close what is open."""
        if self._known is not None:
            self._known.close()


class RemoteKnown:
    """The known embeddings of a run, which one process of the cluster has open. `actor` is it, a `Keeper`."""

    def __init__(self, actor: Any) -> None:  # noqa: ANN401  Ray's own
        self._actor = actor

    def find_all(self, images: Sequence[tuple[bytes, int]]) -> dict[int, Embedded]:
        """As in `vlmembed.feed.Finder`."""
        found: dict[int, Embedded] = ray.get(self._actor.find_all.remote(images)) if images else {}
        return found

    def keep(self, images: Sequence[tuple[bytes, Embedded]]) -> None:
        """As `vlmembed.known.Known.keep`."""
        if images:
            ray.get(self._actor.keep.remote(images))


def check_machine(
    config: EncodeConfig, working_folder: str, folder: Path, expected: Mapping[str, str]
) -> VlmembedError | None:
    """Why this machine cannot take part, if it cannot."""
    go_to(working_folder)
    mine = versions()
    others = [
        f"{name} {mine[name]} there, {expected[name]} here" for name in _SAME_ON_ALL if mine[name] != expected[name]
    ]
    try:
        check_folder(folder)
        check_inputs(tuple(config.inputs))
    except ClusterError as error:
        return error
    if others:
        msg = f"machine {platform.node()} has other versions, which can give other vectors: {'; '.join(others)}"
        return ClusterError(f"{msg}. Install the same ones on all nodes")
    return None


def count_task(config: EncodeConfig, working_folder: str, block: pa.Table) -> pa.Table:
    """Count the rows of files that tell only so: numbers and `CountPiece`s to numbers and `Counted`s."""
    go_to(working_folder)
    check_inputs(tuple(config.inputs))
    counted = ((number, count_piece(config, piece)) for number, piece in unpacked(block))
    return pa.Table.from_pylist(packed(counted))


def hash_task(order: RunOrder, buckets: int, block: pa.Table) -> Iterator[pa.Table]:
    """Hash the rows of pieces."""
    for piece in unpacked(block):
        yield from hash_piece(order, piece, buckets)


def repeated_task(stretch_rows: int, bucket: pa.Table) -> pa.Table:
    """Find what is repeated within a bucket."""
    return repeated_rows(bucket, stretch_rows)


def stretch_task(folder: Path, rows: pa.Table) -> pa.Table:
    """Write what was found for a stretch of rows."""
    check_folder(folder)
    if not rows.num_rows:
        return WRITTEN.empty_table()
    return pa.table({"stretch": [write_stretch(folder, rows)], "num_repeated": [rows.num_rows]}, schema=WRITTEN)


def whole_task(stretch_rows: int, folder: Path, hashed: pa.Table) -> pa.Table:
    """Both for an input that is one bucket and one stretch."""
    return stretch_task(folder, repeated_task(stretch_rows, hashed))


def feed_task(order: RunOrder, known: RemoteKnown | None, block: pa.Table) -> Iterator[pa.Table]:
    """Make packs of the rows of pieces, each of which is a part."""
    for piece in unpacked(block):
        yield from feed_part(order, piece.rows.start // order.rows_per_part, piece, known or Nothing())


def write_task(order: RunOrder, known: RemoteKnown | None, number: int, *blocks: pa.Table) -> PartRecord:
    """Write a part, and give what was computed for it to the cache."""
    record, computed = write_part(order, number, blocks)
    if known is not None:
        known.keep(computed)
    return record
