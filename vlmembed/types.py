"""The values that travel between the stages.

Shape legend: T tokens, N images, S patches (tokens that carry pixels), P values per patch,
M merged tokens, D embedding width, K interpolation taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    import pyarrow as pa

    from vlmembed.errors import FailureCode, ImageError
    from vlmembed.slab import SlabLayout

UInt8Array: TypeAlias = npt.NDArray[np.uint8]
Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
Float32Array: TypeAlias = npt.NDArray[np.float32]
PatchArray: TypeAlias = npt.NDArray[np.uint8] | npt.NDArray[np.float32]
FloatArray: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.float16]


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
    """An image that no earlier row has shown; `content_hash` is the SHA-256 of `content`."""

    row: int
    key: str
    content_hash: bytes
    content: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class EndOfInput:
    """The source is read to its end: it has `num_rows` rows, those of an earlier start included."""

    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PatchedImage:
    """A decoded, resized image cut into patches.

    Attributes:
        row: its input row.
        patches: uint8 (S, P), in the tower's order, each patch channel-major; float32 where the model's own processor
            resizes in float.
        grid_hw: patches per side.
        size_hw: pixels per side of the source, after orientation.
    """

    row: int
    patches: PatchArray
    grid_hw: tuple[int, int]
    size_hw: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segments:
    """Stretches of a pack that attend to themselves only.

    Attributes:
        cu_seqlens: int32 (segments + 1,), their token offsets.
        max_seqlen: the longest, a host integer.
        runs: (length, count) of neighbouring segments of equal length, host integers.
    """

    cu_seqlens: Int32Array
    max_seqlen: int
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionMetadata:
    """Everything a tower would otherwise work out from the images' grids, built once per pack.

    What a tower has no use for is None.

    Attributes:
        segments: one per image.
        windows: of towers with window attention, in the order of `window_index`.
        prefix_positions: int64 (N * prefix tokens,), where CLS (and register) tokens stand in the pack.
        patch_positions: int64 (S,), where patches stand in the pack.
        interp_indices: int32 (S, K), rows of the position table that make a patch's position embedding.
        interp_weights: float32 (S, K), their weights.
        rope_positions: float32 (T, 2), row and column (or patch centre) for rotary embeddings; 0 for prefix tokens.
        window_index: int64 (M,), merged tokens in window order; `window_reverse` is the way back.
        merge_index: int64 (S,), patches in merge-block order, for towers whose patches are in raster order.
    """

    segments: Segments
    windows: Segments | None
    prefix_positions: Int64Array
    patch_positions: Int64Array
    interp_indices: Int32Array | None
    interp_weights: Float32Array | None
    rope_positions: Float32Array | None
    window_index: Int64Array | None
    window_reverse: Int64Array | None
    merge_index: Int64Array | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PackHeader:
    """What must be known to read a pack in its block of bytes.

    Attributes:
        layout: where the arrays stand.
        segments, windows: `Segments` without their tensor: max_seqlen and runs.
    """

    layout: SlabLayout
    segments: tuple[int, tuple[tuple[int, int], ...]]
    windows: tuple[int, tuple[tuple[int, int], ...]] | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedBatch:
    """Images that share one forward pass.

    Attributes:
        rows: int64 (N,), their input rows.
        grid_hw: int32 (N, 2). size_hw: int32 (N, 2).
        patches: uint8 or float32 (S, P), the images one after the other.
        metadata: built for exactly this pack.
        block: uint8, all of the arrays above and in `metadata`, which are views of it. header: how to read it.
    """

    rows: Int64Array
    grid_hw: Int32Array
    size_hw: Int32Array
    patches: PatchArray
    metadata: AttentionMetadata
    block: UInt8Array
    header: PackHeader

    @property
    def num_tokens(self) -> int:
        """Tokens of the pack, prefix tokens included."""
        return int(self.metadata.segments.cu_seqlens[-1])

    @property
    def lengths(self) -> Int64Array:
        """int64 (N,), tokens of each image."""
        return np.diff(self.metadata.segments.cu_seqlens).astype(np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EmbeddingBatch:
    """The result of one pack.

    Attributes:
        rows: int64 (N,). grid_hw, size_hw: int32 (N, 2).
        vectors: by output column: one vector per image (N, D), or, where `offsets` says which image they belong to,
            one per merged token (M, D).
        offsets: int64 (N + 1,) into the merged tokens, or None.
    """

    rows: Int64Array
    grid_hw: Int32Array
    size_hw: Int32Array
    vectors: Mapping[str, FloatArray]
    offsets: Int64Array | None = None

    def of_image(self, index: int) -> Embedded:
        """The result of one image: vectors of (D,), or of (its tokens, D)."""
        at: int | slice = index if self.offsets is None else slice(*self.offsets[index : index + 2].tolist())
        return Embedded(
            row=int(self.rows[index]),
            vectors={name: values[at] for name, values in self.vectors.items()},
            size_hw=tuple(self.size_hw[index].tolist()),
            grid_hw=tuple(self.grid_hw[index].tolist()),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Embedded:
    """The result of one row's image.

    Attributes:
        row: the row that was encoded (or whose vectors were found).
        vectors: by output column, (D,) or (tokens, D).
        size_hw: pixels. grid_hw: patches.
    """

    row: int
    vectors: Mapping[str, FloatArray]
    size_hw: tuple[int, int]
    grid_hw: tuple[int, int]


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
