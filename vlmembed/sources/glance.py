"""Files that need not be read whole: what their first bytes are good for, whoever looks says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmembed.types import EncodedImage

if TYPE_CHECKING:
    from collections.abc import Callable

HEAD_BYTES = 256 * 2**10
"""What is read of a file for its header alone: a JPEG's size stands behind its EXIF block (at most 64 KiB) and its
colour profile (a printer's has some hundred KiB more, and is read whole); a disk or a server takes as long for less."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GlancedImage(EncodedImage):
    """A row that is a file, read only as far as a `Glance` asked for.

    Attributes:
        num_bytes: the whole file's size.
        seen: what the glance made of it.
    """

    num_bytes: int
    seen: object


@dataclass(slots=True)
class Glance:
    """How files are looked at that need not be read whole; whoever shares it with a `ReadAhead` switches it on and off
    between two readings.

    Attributes:
        look: makes something of a file's first bytes (called in the threads that read); None where it needs the whole
            file, which is then read, and is what it gets.
        is_on: off, all files are read whole, and nobody looks.
    """

    look: Callable[[bytes, int], object]
    is_on: bool = False
