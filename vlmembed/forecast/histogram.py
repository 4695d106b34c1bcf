"""Counts of whole numbers, however many come: median, mean, extremes, and the bars of a histogram."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import count

EXACT_BITS = 12
"""Numbers of so many bits are counted exactly, larger ones by their first bits: within 0.05 %, and at most some 2,000
counts for each further power of two."""

MAX_BINS = 12
LINEAR_RATIO = 8
"""Bars are of one width where the largest number is less than so many times the smallest; else each is twice as wide as
the one before."""

_NICE = (1, 2, 5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """So many numbers, `count`, from `first` to `last`."""

    first: int
    last: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Of some numbers; all 0 where there are none."""

    min: int
    median: int
    mean: float
    max: int
    total: int


class Spread:
    """Whole numbers from 0 on, counted. Extremes and total are exact."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._smallest = self._largest = self._total = 0

    def add(self, number: int) -> None:
        """Count a number."""
        self._smallest = min(self._smallest, number) if self._counts else number
        self._largest = max(self._largest, number)
        self._total += number
        shift = max(0, number.bit_length() - EXACT_BITS)
        self._counts[number >> shift << shift] += 1

    def summary(self, scale: float = 1.0) -> Summary:
        """The numbers' extremes, middle and sum, where each stands for `scale` ones; the median is the lower of two."""
        num = self._counts.total()
        return Summary(
            min=self._smallest,
            median=self._median(),
            mean=self._total / num if num else 0.0,
            max=self._largest,
            total=round(self._total * scale),
        )

    def _median(self) -> int:
        left = (self._counts.total() + 1) // 2
        for number, times in sorted(self._counts.items()):
            left -= times
            if left <= 0:
                return max(number, self._smallest)
        return 0

    def bins(self, scale: float = 1.0) -> tuple[Bin, ...]:
        """At most `MAX_BINS` bars from the smallest to the largest number, empty ones between them included."""
        if not self._counts:
            return ()
        edges = self._edges()
        counts: Counter[int] = Counter()
        for number, times in self._counts.items():
            counts[bisect_right(edges, max(number, self._smallest)) - 1] += times
        return tuple(
            Bin(first=edges[at], last=edges[at + 1] - 1, count=round(counts[at] * scale))
            for at in range(len(edges) - 1)
        )

    def _edges(self) -> list[int]:
        """Where each bar begins, and where the last one ends."""
        low, high = self._smallest, self._largest
        if high >= LINEAR_RATIO * max(low, 1):
            edges = [1 << max(0, low.bit_length() - 1)] if low else [0, 1]
            step = 2
            while (high // edges[-1]) >= step**MAX_BINS:
                step *= 2
            while edges[-1] <= high:
                edges.append(edges[-1] * step)
            return edges
        width = next(
            size
            for power in count()
            for size in (nice * 10**power for nice in _NICE)
            if high // size - low // size < MAX_BINS
        )
        return [number * width for number in range(low // width, high // width + 2)]
