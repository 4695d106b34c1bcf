"""A decoder that some pictures break: whatever follows a picture's end is told to it. Imports no torch: children do."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmembed.patcher import Patched, Patcher

if TYPE_CHECKING:
    from vlmembed.errors import ImageError

CRASH, HANG = b"CRASH", b"HANG"
HANG_SECONDS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakingPatcher(Patcher):
    """As its base, but for pictures that end in `CRASH` or `HANG`."""

    def __call__(self, row: int, content: bytes | ImageError) -> Patched:
        """Decode, or not."""
        if isinstance(content, bytes) and content.endswith(CRASH):
            signal.raise_signal(signal.SIGSEGV)
        if isinstance(content, bytes) and content.endswith(HANG):
            time.sleep(HANG_SECONDS)
        return Patcher.__call__(self, row, content)
