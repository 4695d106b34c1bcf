"""What rows that are not there show: one in five the same as an earlier one."""

from __future__ import annotations

import numpy as np

REPEATED_EVERY = 5


def contents(rows: range) -> np.ndarray:
    """int64, by row what it shows. Each fifth row shows what an earlier one does, any of those that are no repetition
    themselves."""
    numbers = np.arange(rows.start, rows.stop, dtype=np.int64)
    repeats = numbers % REPEATED_EVERY == REPEATED_EVERY - 1
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing
    earlier = ((mixed ^ (mixed >> np.uint64(32))) % np.maximum(numbers, 1).astype(np.uint64)).astype(np.int64)
    earlier -= earlier % REPEATED_EVERY == REPEATED_EVERY - 1
    return np.where(repeats, earlier, numbers)
