"""Groups images of any size into packs of a budget of tokens."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from vlmembed.batch import make_batch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vlmembed.layout import TowerLayout
    from vlmembed.types import PackedBatch, PatchedImage

LOOKAHEAD_PACKS = 4
"""Tokens held back before a pack is chosen, in budgets. More delays the first pack; 16 instead of 4 gained 0.5 % of
efficiency at most, where lengths span two orders of magnitude, else nothing (``pipelines/benchmarks/packing.py``)."""


class Sized(Protocol):
    """What the choice of a pack goes by: an image, or no more than its row and its size."""

    @property
    def row(self) -> int:
        """Its input row."""

    @property
    def grid_hw(self) -> tuple[int, int]:
        """Patches per side."""


T = TypeVar("T", bound=Sized)


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

    def count(self, num_images: int, num_tokens: int) -> None:
        """Take in one pack."""
        self.num_packs += 1
        self.num_images += num_images
        self.num_tokens += num_tokens
        self.room += max(self.max_tokens_per_batch, num_tokens)


@dataclass(slots=True)
class _Lookahead(Generic[T]):
    """Images waiting for a pack, by length, and the order in which they came."""

    by_length: list[tuple[int, int]] = field(default_factory=list)  # (tokens, sequence number), sorted
    images: dict[int, T] = field(default_factory=dict)  # sequence number -> image, oldest first
    num_tokens: int = 0
    next_number: int = 0

    def add(self, image: T, tokens: int) -> None:
        insort(self.by_length, (tokens, self.next_number))
        self.images[self.next_number] = image
        self.next_number += 1
        self.num_tokens += tokens

    def _take(self, position: int) -> tuple[int, T]:
        tokens, number = self.by_length.pop(position)
        self.num_tokens -= tokens
        return tokens, self.images.pop(number)

    def take_pack(self, budget: int, layout: TowerLayout) -> list[T]:
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


def choose(
    images: Iterable[T | None],
    layout: TowerLayout,
    stats: PackingStats,
    *,
    alone: bool = False,
    lookahead_packs: int | None = None,
) -> Iterator[list[T]]:
    """Yield the images of each pack: at most ``stats.max_tokens_per_batch`` tokens; an image is never split, and one
    that is longer than the budget travels alone, as all do with `alone`.

    None in the stream asks for everything held back: the pipeline sends it at each part boundary, so that a part's
    packs depend on that part's rows alone. `lookahead_packs` is `LOOKAHEAD_PACKS` unless given.
    """
    budget = stats.max_tokens_per_batch
    held = (LOOKAHEAD_PACKS if lookahead_packs is None else lookahead_packs) * budget
    lookahead = _Lookahead[T]()
    for image in images:
        if image is None:
            yield from _drain(lookahead, layout, stats, until=0)
            continue
        tokens = layout.num_tokens(image.grid_hw)
        if alone:
            stats.count(1, tokens)
            yield [image]
            continue
        lookahead.add(image, tokens)
        yield from _drain(lookahead, layout, stats, until=held)
    yield from _drain(lookahead, layout, stats, until=0)


def _drain(lookahead: _Lookahead[T], layout: TowerLayout, stats: PackingStats, *, until: int) -> Iterator[list[T]]:
    while lookahead.num_tokens > until:
        before = lookahead.num_tokens
        chosen = lookahead.take_pack(stats.max_tokens_per_batch, layout)
        stats.count(len(chosen), before - lookahead.num_tokens)
        yield chosen


def pack(
    images: Iterable[PatchedImage | None],
    layout: TowerLayout,
    stats: PackingStats,
    *,
    alone: bool = False,
    lookahead_packs: int | None = None,
) -> Iterator[PackedBatch]:
    """Yield the packs that `choose` makes of the images."""
    for chosen in choose(images, layout, stats, alone=alone, lookahead_packs=lookahead_packs):
        yield make_batch(chosen, layout)
