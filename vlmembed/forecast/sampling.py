"""Which rows stand for all: at random, or evenly over the whole input, so that any beginning of them is spread."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_ROWS = 8
"""Neighbours that are read together: the rows of a table come in groups, which cost as much for one row."""

BLOCKS_AT_ONCE = 4
"""Places that are read at a time, so that files and URLs are read ahead of."""


def random_rows(num_rows: int, num_sampled: int, seed: int) -> list[int]:
    """So many of the rows, ascending; all where there are no more."""
    if num_sampled >= num_rows:
        return list(range(num_rows))
    chosen = np.random.default_rng(seed).choice(num_rows, num_sampled, replace=False, shuffle=False)
    return sorted(chosen.tolist())


def spread_rows(num_rows: int) -> Iterator[list[int]]:
    """Every row once, some at a time, each time ascending: first from the quarters of the input, then from between."""
    blocks = _halving(-(-num_rows // BLOCK_ROWS))
    while chosen := sorted(islice(blocks, BLOCKS_AT_ONCE)):
        yield [row for block in chosen for row in range(block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, num_rows))]


def _halving(count: int) -> Iterator[int]:
    """The numbers below `count`, by their bits backwards: 0, the half, the quarters, …"""
    num_bits = max(0, count - 1).bit_length()
    for number in range(1 << num_bits):
        backwards = int(format(number, f"0{num_bits}b")[::-1], 2) if num_bits else 0
        if backwards < count:
            yield backwards
