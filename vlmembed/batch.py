"""Makes a pack of images, takes it apart, and fills it up to a fixed shape. Every pack is one block of bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmembed.layout import attention_metadata, make_segments
from vlmembed.slab import SlabLayout
from vlmembed.types import AttentionMetadata, PackedBatch, PackHeader, Segments

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from vlmembed.layout import TowerLayout
    from vlmembed.types import Int32Array, Int64Array, PatchArray, PatchedImage, UInt8Array

_SEGMENTS = ("segments", "windows")
_INDICES = tuple(field.name for field in fields(AttentionMetadata) if field.name not in _SEGMENTS)


def make_batch(images: Sequence[PatchedImage], layout: TowerLayout) -> PackedBatch:
    """Put the patches of `images` behind each other and attach the metadata of the pack."""
    return _assemble(
        rows=np.array([image.row for image in images], dtype=np.int64),
        grid_hw=np.array([image.grid_hw for image in images], dtype=np.int32),
        size_hw=np.array([image.size_hw for image in images], dtype=np.int32),
        patches=[image.patches for image in images],
        metadata=_metadata_of(tuple(image.grid_hw for image in images), layout),
    )


@lru_cache(maxsize=4)
def _metadata_of(grids: tuple[tuple[int, int], ...], layout: TowerLayout) -> AttentionMetadata:
    """Where pictures have one size, so have most packs: a few megabytes for what was made again for each."""
    return attention_metadata(grids, layout)


@lru_cache(maxsize=16)
def _slab_of(shapes: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]) -> SlabLayout:
    return SlabLayout.of({name: (dtype, shape) for name, dtype, shape in shapes})


def open_batch(header: PackHeader, block: UInt8Array) -> PackedBatch:
    """The pack in `block`, which its arrays are views of."""
    arrays = header.layout.views(block)
    segments = _segments(arrays, "segments", header.segments)
    assert segments is not None
    indices: dict[str, Any] = {name: arrays.get(name) for name in _INDICES}
    return PackedBatch(
        rows=arrays["rows"],
        grid_hw=arrays["grid_hw"],
        size_hw=arrays["size_hw"],
        patches=arrays["patches"],
        metadata=AttentionMetadata(
            segments=segments,
            windows=_segments(arrays, "windows", header.windows),
            **indices,
        ),
        block=block,
        header=header,
    )


def split_batch(batch: PackedBatch, layout: TowerLayout) -> tuple[PackedBatch, PackedBatch]:
    """Two packs of the images of `batch`, which has at least two, with about half of its tokens each."""
    before = np.cumsum(batch.lengths)[:-1]
    cut = 1 + int(np.argmin(np.abs(before - batch.num_tokens / 2)))
    return _part(batch, layout, 0, cut), _part(batch, layout, cut, len(batch.rows))


def _part(batch: PackedBatch, layout: TowerLayout, first: int, stop: int) -> PackedBatch:
    starts = np.concatenate([[0], np.cumsum(batch.grid_hw.astype(np.int64).prod(axis=1))])
    grids = [(height, width) for height, width in batch.grid_hw[first:stop].tolist()]
    return _assemble(
        rows=batch.rows[first:stop],
        grid_hw=batch.grid_hw[first:stop],
        size_hw=batch.size_hw[first:stop],
        patches=[batch.patches[starts[first] : starts[stop]]],
        metadata=attention_metadata(grids, layout),
    )


def _assemble(
    *,
    rows: Int64Array,
    grid_hw: Int32Array,
    size_hw: Int32Array,
    patches: Sequence[PatchArray],
    metadata: AttentionMetadata,
) -> PackedBatch:
    """Lay everything out in one new block."""
    arrays: dict[str, npt.NDArray[Any]] = {"rows": rows, "grid_hw": grid_hw, "size_hw": size_hw}
    for name in _SEGMENTS:
        if (segments := getattr(metadata, name)) is not None:
            arrays[name] = segments.cu_seqlens
    arrays |= {name: array for name in _INDICES if (array := getattr(metadata, name)) is not None}
    shapes = [(name, array.dtype, array.shape) for name, array in arrays.items()]
    num_patches = sum(len(each) for each in patches)
    shapes.append(("patches", np.result_type(*patches), (num_patches, patches[0].shape[1])))
    windows = metadata.windows
    header = PackHeader(
        layout=_slab_of(tuple(shapes)),
        segments=(metadata.segments.max_seqlen, metadata.segments.runs),
        windows=None if windows is None else (windows.max_seqlen, windows.runs),
    )
    batch = open_batch(header, np.empty(header.layout.num_bytes, dtype=np.uint8))
    views = header.layout.views(batch.block)
    for name, array in arrays.items():
        views[name][...] = array
    np.concatenate(patches, out=views["patches"])
    return batch


def _segments(
    arrays: Mapping[str, npt.NDArray[Any]], name: str, host: tuple[int, tuple[tuple[int, int], ...]] | None
) -> Segments | None:
    return None if host is None else Segments(cu_seqlens=arrays[name], max_seqlen=host[0], runs=host[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class PackCost:
    """Floating-point operations of a forward: `per_token`, and `per_pair` of tokens that attend to each other."""

    per_token: float
    per_pair: float

    def of(self, lengths: Int64Array) -> float:
        """Of images with so many tokens: per_token * sum(n) + per_pair * sum(n^2)."""
        return float(self.per_token * lengths.sum() + self.per_pair * np.square(lengths).sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class PackShape:
    """A fixed shape that packs are filled up to.

    Attributes:
        num_patches: patches, those of the filling included.
        num_slots: segments; one that is not needed has no patches.
        max_seqlen: no segment is longer, in tokens.
        num_window_slots, max_window_seqlen: the same for windows; 0 where the tower has none.
    """

    num_patches: int
    num_slots: int
    max_seqlen: int
    num_window_slots: int = 0
    max_window_seqlen: int = 0

    @classmethod
    def holding(cls, batch: PackedBatch, layout: TowerLayout, *, max_patches: int) -> PackShape | None:
        """The smallest of the shapes with room for `batch`: `max_patches` or a half, a quarter, … of it; segments and
        lengths by powers of two. None where the pack has more patches than `max_patches`."""
        num_patches, unit = len(batch.patches), layout.merge_size**2
        if num_patches > max_patches:
            return None
        room = max_patches
        while room // 2 >= num_patches and (room // 2) % unit == 0:
            room //= 2
        filling = room - num_patches
        max_seqlen = _power_of_two(batch.metadata.segments.max_seqlen)
        per_segment = _filling_per_segment(max_seqlen, layout)
        shape = cls(
            num_patches=room,
            num_slots=_power_of_two(len(batch.rows) + -(-filling // per_segment)),
            max_seqlen=max_seqlen,
        )
        windows = batch.metadata.windows
        if windows is None:
            return shape
        assert layout.window_size is not None
        longest = (layout.window_size * layout.merge_size) ** 2
        num_windows = len(windows.cu_seqlens) - 1 + -(-filling // longest)
        return replace(shape, num_window_slots=_power_of_two(num_windows), max_window_seqlen=longest)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


def _filling_per_segment(max_seqlen: int, layout: TowerLayout) -> int:
    """Patches that one segment of filling can take: whole merge blocks."""
    unit = layout.merge_size**2
    return max(unit, (max_seqlen - layout.num_prefix_tokens) // unit * unit)


def fill_batch(batch: PackedBatch, shape: PackShape, layout: TowerLayout) -> PackedBatch:
    """`batch` filled up to `shape` with segments of zeros behind its images.

    The images' own entries stay where they are, so whoever reads only those reads the same values. The filling
    attends to itself alone; a slot without patches has the tower's prefix tokens, or no tokens. Its row is -1 and its
    size 0, so that all packs of a shape have one layout in memory.
    """
    metadata, prefix, unit = batch.metadata, layout.num_prefix_tokens, layout.merge_size**2
    num_images, num_patches = len(batch.rows), len(batch.patches)
    lengths = batch.lengths.tolist() + _filling(
        shape.num_patches - num_patches, shape.num_slots - num_images, _filling_per_segment(shape.max_seqlen, layout)
    )
    lengths[num_images:] = [patches + prefix for patches in lengths[num_images:]]
    segments = _filled_segments(lengths, shape.max_seqlen)
    starts = segments.cu_seqlens[num_images:-1].astype(np.int64)
    filler_prefix = (starts[:, None] + np.arange(prefix)).reshape(-1)
    num_tokens, num_merged = int(segments.cu_seqlens[-1]), shape.num_patches // unit
    filler_tokens = np.arange(batch.num_tokens, num_tokens)
    windows = metadata.windows
    if windows is not None:
        per_window = np.diff(windows.cu_seqlens).tolist()
        num_slots = shape.num_window_slots - len(per_window)
        filling = _filling(shape.num_patches - num_patches, num_slots, shape.max_window_seqlen)
        windows = _filled_segments(per_window + filling, shape.max_window_seqlen)
    return _assemble(
        rows=np.concatenate([batch.rows, np.full(shape.num_slots - num_images, -1)]),
        grid_hw=_zeros_behind(batch.grid_hw, shape.num_slots),
        size_hw=_zeros_behind(batch.size_hw, shape.num_slots),
        patches=[batch.patches, np.zeros((shape.num_patches - num_patches, batch.patches.shape[1]), np.uint8)],
        metadata=AttentionMetadata(
            segments=segments,
            windows=windows,
            prefix_positions=np.concatenate([metadata.prefix_positions, filler_prefix]),
            patch_positions=np.concatenate([metadata.patch_positions, np.setdiff1d(filler_tokens, filler_prefix)]),
            interp_indices=_zeros_behind(metadata.interp_indices, shape.num_patches),
            interp_weights=_zeros_behind(metadata.interp_weights, shape.num_patches),
            rope_positions=_zeros_behind(metadata.rope_positions, num_tokens),
            window_index=_identity_behind(metadata.window_index, num_merged),
            window_reverse=_identity_behind(metadata.window_reverse, num_merged),
            merge_index=_identity_behind(metadata.merge_index, shape.num_patches),
        ),
    )


def _filling(num_patches: int, num_slots: int, per_segment: int) -> list[int]:
    """Patches of each of `num_slots` segments of filling, full ones first."""
    full, rest = divmod(num_patches, per_segment)
    lengths = [per_segment] * full + ([rest] if rest else [])
    assert len(lengths) <= num_slots
    return lengths + [0] * (num_slots - len(lengths))


def _filled_segments(lengths: list[int], max_seqlen: int) -> Segments:
    """Segments whose `max_seqlen` is that of the shape. They have no runs: these would differ from pack to pack, and
    what is captured once must not depend on them."""
    return replace(make_segments(lengths), max_seqlen=max_seqlen, runs=())


def _zeros_behind(array: Any, length: int) -> Any:  # noqa: ANN401  an array or None
    if array is None:
        return None
    return np.concatenate([array, np.zeros((length - len(array), *array.shape[1:]), array.dtype)])


def _identity_behind(array: Any, length: int) -> Any:  # noqa: ANN401  an array or None
    return None if array is None else np.concatenate([array, np.arange(len(array), length)])
