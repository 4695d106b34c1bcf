"""Groups images of any size into packs of a budget of tokens."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vlmembed.batch import make_batch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vlmembed.layout import TowerLayout
    from vlmembed.types import PackedBatch, PatchedImage

LOOKAHEAD_PACKS = 4
"""Tokens held back before a pack is chosen, in budgets. More delays the first pack; 16 instead of 4 gained 0.5 % of
efficiency at most, where lengths span two orders of magnitude, else nothing (``pipelines/benchmarks/packing.py``)."""


@dataclass(slots=True)
class PackingStats:
    """What the packer did; `room` is the tokens that its packs had room for."""

    max_tokens_per_batch: int
    num_packs: int = 0
    num_images: int = 0
    num_tokens: int = 0

    room: int = 0

    @property
    def efficiency(self) -> float:
        """Share of the packs' room that tokens fill, 0 to 1; 0 before the first pack. A pack's room is the budget, or
        what its only image needs."""
        return self.num_tokens / self.room if self.room else 0.0

    def count(self, batch: PackedBatch) -> None:
        """Take in one pack."""
        self.num_packs += 1
        self.num_images += len(batch.rows)
        self.num_tokens += batch.num_tokens
        self.room += max(self.max_tokens_per_batch, batch.num_tokens)


@dataclass(slots=True)
class _Lookahead:
    """Images waiting for a pack, by length, and the order in which they came."""

    by_length: list[tuple[int, int]] = field(default_factory=list)  # (tokens, sequence number), sorted
    images: dict[int, PatchedImage] = field(default_factory=dict)  # sequence number -> image, oldest first
    num_tokens: int = 0
    next_number: int = 0

    def add(self, image: PatchedImage, tokens: int) -> None:
        insort(self.by_length, (tokens, self.next_number))
        self.images[self.next_number] = image
        self.next_number += 1
        self.num_tokens += tokens

    def _take(self, position: int) -> tuple[int, PatchedImage]:
        tokens, number = self.by_length.pop(position)
        self.num_tokens -= tokens
        return tokens, self.images.pop(number)

    def take_pack(self, budget: int, layout: TowerLayout) -> list[PatchedImage]:
        """Take the oldest image, so that none waits for ever, then always the longest one that still fits."""
        oldest = next(iter(self.images))
        tokens = layout.num_tokens(self.images[oldest].grid_hw)
        tokens, image = self._take(bisect_right(self.by_length, (tokens, oldest)) - 1)
        chosen, room = [(tokens, image)], budget - tokens
        while position := bisect_right(self.by_length, (room, self.next_number)):
            tokens, image = self._take(position - 1)
            chosen.append((tokens, image))
            room -= tokens
        chosen.sort(key=lambda pair: (pair[0], pair[1].row))  # equal lengths stand together: one attention call
        return [image for _, image in chosen]


def pack(
    images: Iterable[PatchedImage | None], layout: TowerLayout, stats: PackingStats, *, alone: bool = False
) -> Iterator[PackedBatch]:
    """Yield packs of at most ``stats.max_tokens_per_batch`` tokens; an image is never split, and one that is longer
    than the budget travels alone, as all do with `alone`.

    None in the stream asks for everything held back: the pipeline sends it at each part boundary, so that a part's
    packs depend on that part's rows alone.
    """
    budget = stats.max_tokens_per_batch
    lookahead = _Lookahead()
    for image in images:
        if image is None:
            yield from _drain(lookahead, layout, stats, until=0)
            continue
        if alone:
            yield _packed([image], layout, stats)
            continue
        tokens = layout.num_tokens(image.grid_hw)
        lookahead.add(image, tokens)
        yield from _drain(lookahead, layout, stats, until=LOOKAHEAD_PACKS * budget)
    yield from _drain(lookahead, layout, stats, until=0)


def _drain(lookahead: _Lookahead, layout: TowerLayout, stats: PackingStats, *, until: int) -> Iterator[PackedBatch]:
    while lookahead.num_tokens > until:
        yield _packed(lookahead.take_pack(stats.max_tokens_per_batch, layout), layout, stats)


def _packed(images: list[PatchedImage], layout: TowerLayout, stats: PackingStats) -> PackedBatch:
    batch = make_batch(images, layout)
    stats.count(batch)
    return batch
