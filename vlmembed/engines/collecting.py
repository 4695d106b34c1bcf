"""Blocks become parts: gathered by part, written by the project's own writer, committed in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vlmembed.engines.blocks import Kind, end_of, events_of
from vlmembed.errors import AccountingError, InputError
from vlmembed.types import ImageRef
from vlmembed.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa

    from vlmembed.engines.blocks import PartEnd
    from vlmembed.engines.orders import RunOrder
    from vlmembed.feed import Event
    from vlmembed.partfiles import PartFiles, PartRecord
    from vlmembed.schema import VectorColumn
    from vlmembed.types import Embedded, Failure


@dataclass(slots=True, eq=False)
class _Gathering:
    """Blocks of one part, as whoever holds them calls them, and the places of their rows."""

    blocks: list[Any] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    end: PartEnd | None = None

    @property
    def is_whole(self) -> bool:
        """Each place has come, and once: tasks that were done again may have seen other pictures."""
        return self.end is not None and sorted(self.places) == list(range(self.end.num_places))


class Gatherer:
    """Brings the blocks of each part together. `hold` keeps a block, and returns what it can be had back by."""

    def __init__(self, hold: Any) -> None:  # noqa: ANN401  of a table, whatever the engine has
        self._hold = hold
        self._parts: dict[int, _Gathering] = {}

    @property
    def num_open(self) -> int:
        """Parts of which something has come, and not all."""
        return len(self._parts)

    def add(self, block: pa.Table) -> Iterator[tuple[int, list[Any], PartEnd]]:
        """Take a block; yield each part that is whole with it: its number, what holds its blocks, how it ended."""
        numbers = block["part"].to_numpy()
        for number in sorted(set(numbers.tolist())):
            rows = block if (numbers == number).all() else block.filter(numbers == number)
            part = self._parts.setdefault(number, _Gathering())
            part.blocks.append(self._hold(rows))
            part.places += rows["place"].to_pylist()
            for kind, payload in zip(rows["kind"].to_pylist(), rows["payload"], strict=True):
                if kind == Kind.END:
                    part.end = end_of(payload)
            if part.is_whole:
                assert part.end is not None
                del self._parts[number]
                yield number, part.blocks, part.end


class _OnePart:
    """A `vlmembed.writer.Store` that takes one part. What earlier ones hold is looked up in their files."""

    records: Sequence[PartRecord] = ()

    def __init__(self, files: PartFiles, run_id: str) -> None:
        self._files = files
        self._run_id = run_id
        self.record: PartRecord | None = None

    @property
    def vectors(self) -> tuple[VectorColumn, ...]:
        """The columns of vectors."""
        return self._files.vectors

    def commit(self, record: PartRecord, columns: Mapping[str, Any], errors: Mapping[str, Any]) -> None:
        """Write the files, then the note that says so."""
        assert self.record is None
        self.record = self._files.write(record, columns, errors)
        self._files.note(self.record, self._run_id)

    def find(self, row: int) -> tuple[str, Embedded | Failure]:
        """As in `vlmembed.writer.Store`."""
        return self._files.find(row)


def write_part(
    order: RunOrder, number: int, blocks: Sequence[pa.Table]
) -> tuple[PartRecord, list[tuple[bytes, Embedded]]]:
    """Write the files of a part; returns its record, and what was computed for it, by content hash.

    Raises:
        RowFailedError: a row failed and ``on_error`` is ``"fail"``.
        InputError: a file holds something else than it did when duplicates were looked for.
        AccountingError: not all rows of the part are in the blocks.
    """
    files = order.files()
    store = _OnePart(files, order.run_id)
    computed: list[tuple[bytes, Embedded]] = []
    writer = Writer(
        store,
        num_rows=order.num_rows,
        rows_per_part=order.rows_per_part,
        kept=order.kept,
        on_error=order.config.on_error,
        on_commit=lambda _: None,
        on_computed=computed.extend,
        first_part=number,
    )
    events = _in_order(blocks)
    _check_unchanged(order.rows_of(number), events, files)
    for event in events:
        writer.add(event)
    if store.record is None:
        num_rows = sum(isinstance(event, ImageRef) for event in events)
        msg = (
            f"part {number} was told of {num_rows} of its {len(order.rows_of(number))} rows, or of what became of "
            "fewer. The committed parts are kept; please report this"
        )
        raise AccountingError(msg)
    return store.record, computed


def _in_order(blocks: Sequence[pa.Table]) -> list[Event]:
    """What was told of the rows, in its order, and then what became of the packs."""
    rows = [
        (kind == Kind.RESULTS, place, header, payload)
        for block in blocks
        for kind, place, header, payload in zip(
            block["kind"].to_pylist(), block["place"].to_pylist(), block["header"], block["payload"], strict=True
        )
        if kind != Kind.END
    ]
    rows.sort(key=lambda row: row[:2])
    return [event for _, _, header, payload in rows for event in events_of(header, payload)]


def _check_unchanged(rows: range, events: Sequence[Event], files: PartFiles) -> None:
    """Duplicates were found when the inputs were read for the first time: do they hold now what they held then?"""
    refs = {event.row: event for event in events if isinstance(event, ImageRef)}
    for ref in refs.values():
        if ref.first_row == ref.row:
            continue
        if ref.first_row not in rows:
            first = files.content_hash(ref.first_row)
        else:
            first = None if ref.first_row not in refs else refs[ref.first_row].content_hash
        if first is not None and first != ref.content_hash:
            msg = (
                f"row {ref.first_row} held the same as row {ref.row} ({ref.key}) when duplicates were looked for, and "
                "another picture now: let the inputs alone while they are read, and start anew with --overwrite"
            )
            raise InputError(msg)
