"""Arrays behind each other in one block of bytes, so that one copy takes them all to a device or to another process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

ALIGNMENT_BYTES = 256
"""What CUDA's own allocator aligns to, so that a view is as good to a kernel as a tensor of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlabField:
    """One array of a slab: its dtype by numpy's name, its shape, and the byte at which it starts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """The byte behind it."""
        return self.start + math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class SlabLayout:
    """Which arrays stand where. Two packs of one layout can share buffers."""

    fields: tuple[SlabField, ...]
    num_bytes: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[npt.DTypeLike, tuple[int, ...]]]) -> Self:
        """Place arrays of these dtypes and shapes, in that order."""
        fields, start = [], 0
        for name, (dtype, shape) in shapes.items():
            fields.append(SlabField(name=name, dtype=np.dtype(dtype).name, shape=shape, start=start))
            start = -(-fields[-1].stop // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(fields=tuple(fields), num_bytes=start)

    def views(self, block: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        """The arrays in `block`, without a copy."""
        return {
            field.name: block[field.start : field.stop].view(field.dtype).reshape(field.shape) for field in self.fields
        }
