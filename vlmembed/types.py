"""The values that travel between the stages.

Shape legend: T tokens, N images, S patches (tokens that carry pixels), P values per patch,
D embedding width, K interpolation taps, R runs of equal segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from typing import Self

    import pyarrow as pa

    from vlmembed.errors import FailureCode, ImageError

UInt8Array: TypeAlias = npt.NDArray[np.uint8]
Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
Float32Array: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedImage:
    """One input row as the source read it.

    Attributes:
        row: position in the input, from 0.
        key: the row's id, unique in the run.
        content: the encoded file's bytes, or why they could not be read.
        columns: one-row batch of the kept source columns, or None where none are kept.
    """

    row: int
    key: str
    content: bytes | ImageError
    columns: pa.RecordBatch | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageRef:
    """What the writer must know of every row, whatever becomes of its image.

    `content_hash` is None for a row whose bytes could not be read. `first_row` is the row that holds
    the embedding: the row itself, or, for a duplicate, the first row with the same content.
    """

    row: int
    key: str
    content_hash: bytes | None
    first_row: int
    columns: pa.RecordBatch | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UniqueImage:
    """An image that no earlier row has shown."""

    row: int
    content: bytes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PatchedImage:
    """A decoded, resized image cut into patches.

    Attributes:
        row: its input row.
        patches: uint8 (S, P), raster order, each patch channel-major.
        grid_hw: patches per side.
        size_hw: pixels per side of the source, after orientation.
    """

    row: int
    patches: UInt8Array
    grid_hw: tuple[int, int]
    size_hw: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionMetadata:
    """Everything a tower would otherwise work out from the images' grids, built once per pack.

    Attributes:
        cu_seqlens: int32 (N + 1,), token offsets of the images.
        max_seqlen: longest segment, a host integer.
        segment_runs: (length, count) for each of the R runs of neighbouring equal-length segments, host integers.
        prefix_positions: int64 (N * prefix tokens,), where CLS (and register) tokens stand in the pack.
        patch_positions: int64 (S,), where patches stand in the pack.
        patch_images: int64 (S,), which image of the pack a patch belongs to.
        interp_indices: int32 (S, K), rows of the position table that make a patch's position embedding.
        interp_weights: float32 (S, K), their weights.
    """

    cu_seqlens: Int32Array
    max_seqlen: int
    segment_runs: tuple[tuple[int, int], ...]
    prefix_positions: Int64Array
    patch_positions: Int64Array
    patch_images: Int64Array
    interp_indices: Int32Array
    interp_weights: Float32Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedBatch:
    """Images that share one forward pass.

    Attributes:
        rows: int64 (N,), their input rows.
        grid_hw: int32 (N, 2). size_hw: int32 (N, 2).
        patches: uint8 (S, P), the images one after the other.
        metadata: built for exactly this pack.
    """

    rows: Int64Array
    grid_hw: Int32Array
    size_hw: Int32Array
    patches: UInt8Array
    metadata: AttentionMetadata

    @property
    def num_tokens(self) -> int:
        """Tokens of the pack, prefix tokens included."""
        return int(self.metadata.cu_seqlens[-1])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EmbeddingBatch:
    """The result of one pack: `rows` int64 (N,), `grid_hw` and `size_hw` int32 (N, 2), `embeddings` float32 (N, D)."""

    rows: Int64Array
    grid_hw: Int32Array
    size_hw: Int32Array
    embeddings: Float32Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A row without an embedding, and the stage and reason."""

    row: int
    stage: str
    code: FailureCode
    message: str

    @classmethod
    def from_error(cls, row: int, stage: str, error: ImageError) -> Self:
        """The failure of `row` that `error` stands for."""
        return cls(row=row, stage=stage, code=error.code, message=str(error))
