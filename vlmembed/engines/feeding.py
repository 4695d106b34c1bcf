"""What a CPU task does with the rows of a part: first their hashes, for the whole input; then their packs."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from vlmembed.decode import own_pillow_settings
from vlmembed.decoders import decode_in_order
from vlmembed.dedup import dedup
from vlmembed.engines.attempts import attempt
from vlmembed.engines.blocks import PartEnd, end_row, events_row, pack_row
from vlmembed.engines.firsts import FirstRows, hashed_table
from vlmembed.feed import MAX_DECODE_BYTES, Feed
from vlmembed.progress import StageClock
from vlmembed.sources import open_piece
from vlmembed.stages import decoders_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from vlmembed.engines.orders import RunOrder
    from vlmembed.feed import Event, Finder
    from vlmembed.sources.pieces import Piece
    from vlmembed.types import Embedded, EncodedImage

HASHES_AT_ONCE = 2**15
EVENTS_AT_ONCE = 4096
"""Rows of one block, where these are small."""

FEEDING = "tasks that read and decode it died: a picture may crash its decoder (--decode processes outlives that)"


class Nothing:
    """A `vlmembed.feed.Finder` that knows no embedding."""

    def find_all(self, images: Sequence[tuple[bytes, int]]) -> dict[int, Embedded]:
        """None are there."""
        del images
        return {}


def hash_piece(order: RunOrder, piece: Piece, buckets: int) -> Iterator[pa.Table]:
    """Rows and hashes of a piece; rows that cannot be read, or not be decoded where pixels count, have none."""
    order.take_place()
    pairs: list[tuple[int, bytes]] = []
    with ExitStack() as stack:
        stack.enter_context(attempt(order.folder, f"hash-{piece.rows.start}", FEEDING))
        stack.enter_context(own_pillow_settings(order.config.max_source_pixels))
        for pair in _hashes(order, stack.enter_context(open_piece(order.config, piece)), stack):
            pairs.append(pair)
            if len(pairs) == HASHES_AT_ONCE:
                yield hashed_table(pairs, buckets)
                pairs = []
    yield hashed_table(pairs, buckets)


def _hashes(order: RunOrder, images: Iterator[EncodedImage], stack: ExitStack) -> Iterator[tuple[int, bytes]]:
    if order.config.dedup != "pixels":
        refs = (ref for ref, _ in dedup(images, None))
        return ((ref.row, ref.content_hash) for ref in refs if ref.content_hash is not None)
    decoders = stack.enter_context(decoders_of(order.config, order.rule))
    assert order.config.workers is not None
    decoded = decode_in_order(decoders, images, max_items=4 * order.config.workers, max_bytes=MAX_DECODE_BYTES)
    return ((image.row, patched.pixel_hash) for image, patched in decoded if patched.pixel_hash is not None)


def feed_part(order: RunOrder, part: int, piece: Piece, known: Finder) -> Iterator[pa.Table]:
    """The packs of a part, and what the writer must know, as blocks of one row. The packs are those that a run on one
    machine makes."""
    order.take_place()
    config, clock = order.config, StageClock()
    events: list[Event] = []
    place = 0
    with ExitStack() as stack:
        stack.enter_context(attempt(order.folder, f"feed-{part}", FEEDING))
        stack.enter_context(own_pillow_settings(config.max_source_pixels))
        index = None if order.firsts is None else FirstRows(order.folder, order.firsts, order.rows_of(part))
        decoders = stack.enter_context(decoders_of(config, order.rule))
        feed = Feed(
            config,
            index=index,
            known=known,
            decoders=decoders,
            layout=order.rule.layout,
            clock=clock,
            tell=events.extend,
        )
        images = stack.enter_context(open_piece(config, piece))
        num_packs = num_images = num_tokens = 0
        for batch in feed.packs(images):
            yield pack_row(part, place, batch)
            num_packs += 1
            num_images += len(batch.rows)
            num_tokens += batch.num_tokens
            place += 1
        # All at the end: when they come depends on the time, and a task that is done again must give the same blocks.
        for begin in range(0, len(events), EVENTS_AT_ONCE):
            yield events_row(part, place, events[begin : begin + EVENTS_AT_ONCE])
            place += 1
        firsts = frozenset() if index is None else index.firsts
        yield end_row(
            part,
            place,
            PartEnd(
                num_places=place + 1,
                needs=frozenset(row // order.rows_per_part for row in firsts) - {part},
                seconds=dict(clock.seconds),
                num_packs=num_packs,
                num_images=num_images,
                num_tokens=num_tokens,
                num_found=feed.num_found,
                num_malformed_exif=feed.num_malformed_exif,
                num_replaced=decoders.num_replaced,
            ),
        )
