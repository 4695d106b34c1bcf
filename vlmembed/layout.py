"""What a tower asks of the host, in numpy: segments, windows, positions.

Nothing here knows torch. Whatever depends on one image's grid alone is memoised per grid; a pack's metadata is
then a few concatenations.

Shape legend: T tokens, N images, S patches, M merged tokens, K interpolation taps.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmembed.errors import FailureCode, ImageError
from vlmembed.interpolation import PositionTable, interpolate
from vlmembed.resize import Fit, Resize, describe
from vlmembed.types import AttentionMetadata, Segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vlmembed.types import Float32Array, Int32Array, Int64Array


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerLayout:
    """What preprocessing and packing must know of a tower.

    Attributes:
        patch_size: pixels per patch side.
        native: resize rule that keeps the aspect ratio.
        official: the model's own image processor, or None where it is of a kind that is not known here;
            `official_problem` then says why.
        default_resize: ``"native"`` or ``"official"``.
        image_mean, image_std: per RGB channel, for pixel values times `rescale_factor`.
        num_prefix_tokens: CLS and register tokens in front of every image's patches.
        merge_size: patches per side of a merged token.
        block_order: patches go merge block by merge block, not in raster order.
        table: the learned position table, if there is one.
        rope: ``"index"`` for rotary embeddings of row and column numbers, ``"centre"`` for those of patch centres in
            -1..1, None for none.
        window_size: merged tokens per side of an attention window, or None.
    """

    patch_size: int
    native: Resize
    official: Resize | None
    official_problem: str = ""
    default_resize: str = "native"
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    rescale_factor: float = 1 / 255
    num_prefix_tokens: int = 0
    merge_size: int = 1
    block_order: bool = False
    table: PositionTable | None = None
    rope: str | None = None
    window_size: int | None = None

    def num_tokens(self, grid_hw: tuple[int, int]) -> int:
        """Tokens that attention sees for an image of `grid_hw` patches."""
        return self.num_prefix_tokens + grid_hw[0] * grid_hw[1]

    def num_merged(self, grid_hw: tuple[int, int]) -> int:
        """Merged tokens of an image of `grid_hw` patches: what ``--emit tokens`` stores."""
        return grid_hw[0] * grid_hw[1] // self.merge_size**2


@dataclass(frozen=True, kw_only=True, slots=True)
class ResizeRule:
    """How the images of one run are brought to the tower's patch grid.

    Attributes:
        mode: ``"native"`` keeps the aspect ratio; ``"official"`` is the model's own processor.
        resize: the rule.
        max_source_pixels: no image, given or intermediate, may be larger, in pixels.
    """

    mode: str
    resize: Resize
    layout: TowerLayout
    max_source_pixels: int

    @property
    def max_tokens_per_image(self) -> int:
        """The most tokens that one image can become, prefix tokens included."""
        return self.layout.num_prefix_tokens + self.resize.max_canvas_pixels // self.layout.patch_size**2

    def fit(self, size_hw: tuple[int, int]) -> Fit:
        """Sizes for a `size_hw` image.

        Raises:
            ImageError: ``aspect_ratio`` where the rule refuses it, or would make an intermediate image larger than
                `max_source_pixels`.
        """
        fit = self.resize.fit(size_hw)
        height, width = fit.resized_hw
        if height * width > self.max_source_pixels:
            msg = (
                f"{size_hw[1]}x{size_hw[0]} pixels would become {width}x{height} in the model's own processor, over "
                f"the limit of {self.max_source_pixels} pixels: use --resize native, or raise --max-source-pixels"
            )
            raise ImageError(FailureCode.ASPECT_RATIO, msg)
        return fit

    def describe(self) -> dict[str, Any]:
        """The rule as plain values, for the run's fingerprint."""
        return {
            "resize": self.mode,
            **describe(self.resize),
            "patch_size": self.layout.patch_size,
            "image_mean": list(self.layout.image_mean),
            "image_std": list(self.layout.image_std),
            "rescale_factor": self.layout.rescale_factor,
            "max_source_pixels": self.max_source_pixels,
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageLayout:
    """The part of a pack's metadata that one image's grid decides; see `AttentionMetadata` for the fields.

    `window_lengths` are the image's windows, in patches; all indices count from the image's own start.
    """

    interp_indices: Int32Array | None = None
    interp_weights: Float32Array | None = None
    rope_positions: Float32Array | None = None
    window_index: Int64Array | None = None
    window_lengths: tuple[int, ...] = ()
    merge_index: Int64Array | None = None

    def __post_init__(self) -> None:
        for name in ("interp_indices", "interp_weights", "rope_positions", "window_index", "merge_index"):
            if (array := getattr(self, name)) is not None:
                array.flags.writeable = False  # shared by every pack


def patch_coordinates(grid_hw: tuple[int, int], block_size: int) -> tuple[Int64Array, Int64Array]:
    """Row and column, each (S,), of an image's patches: block by block of `block_size` a side; 1 is raster order."""
    height, width = grid_hw
    rows, columns = np.divmod(np.arange(height * width), width)
    if block_size > 1:
        blocks = (height // block_size, block_size, width // block_size, block_size)
        rows, columns = (axis.reshape(blocks).transpose(0, 2, 1, 3).reshape(-1) for axis in (rows, columns))
    return rows, columns


@lru_cache(maxsize=64)
def image_layout(grid_hw: tuple[int, int], layout: TowerLayout) -> ImageLayout:
    """Everything that depends on the grid alone; 30 to 150 bytes per patch (a kilobyte where an antialiased table is
    shrunk) stay cached for each of the last 64 grids.

    Where pictures fill one area there are fewer grids than that, and where each has another grid a larger cache would
    not be hit.
    """
    rows, columns = patch_coordinates(grid_hw, layout.merge_size if layout.block_order else 1)
    fields: dict[str, Any] = {}
    if layout.table is not None:
        fields["interp_indices"], fields["interp_weights"] = interpolate(rows, columns, grid_hw, layout.table)
    if layout.rope is not None:
        fields["rope_positions"] = _rope_positions(rows, columns, grid_hw, layout)
    if layout.window_size is not None:
        fields["window_index"], fields["window_lengths"] = _windows(grid_hw, layout)
    if layout.merge_size > 1 and not layout.block_order:
        by_block_rows, by_block_columns = patch_coordinates(grid_hw, layout.merge_size)
        fields["merge_index"] = by_block_rows * grid_hw[1] + by_block_columns
    return ImageLayout(**fields)


def _rope_positions(
    rows: Int64Array, columns: Int64Array, grid_hw: tuple[int, int], layout: TowerLayout
) -> Float32Array:
    positions: Float32Array = np.stack([rows, columns], axis=1).astype(np.float32)
    if layout.rope == "centre":
        positions = (2 * ((positions + 0.5) / np.array(grid_hw, dtype=np.float32)) - 1).astype(np.float32)
    prefix = np.zeros((layout.num_prefix_tokens, 2), dtype=np.float32)
    return np.concatenate([prefix, positions])


def _windows(grid_hw: tuple[int, int], layout: TowerLayout) -> tuple[Int64Array, tuple[int, ...]]:
    """Merged tokens in window order, each window in raster order, and the windows' lengths in patches."""
    assert layout.window_size is not None
    side, merge = layout.window_size, layout.merge_size
    rows, columns = patch_coordinates((grid_hw[0] // merge, grid_hw[1] // merge), 1)
    windows = (rows // side) * -(-grid_hw[1] // (merge * side)) + columns // side
    _, lengths = np.unique(windows, return_counts=True)
    return np.argsort(windows, kind="stable"), tuple((lengths * merge**2).tolist())


def make_segments(lengths: Iterable[int]) -> Segments:
    """Neighbouring segments of these lengths, in tokens."""
    known = list(lengths)
    return Segments(
        cu_seqlens=np.concatenate([[0], np.cumsum(known)]).astype(np.int32),
        max_seqlen=max(known),
        runs=tuple((length, len(list(run))) for length, run in itertools.groupby(known)),
    )


def attention_metadata(grids: Sequence[tuple[int, int]], layout: TowerLayout) -> AttentionMetadata:
    """Metadata of a pack whose images have these patch grids, in this order."""
    images = [image_layout(grid, layout) for grid in grids]
    num_prefix = layout.num_prefix_tokens
    num_patches = np.array([h * w for h, w in grids], dtype=np.int64)
    num_merged = np.array([layout.num_merged(grid) for grid in grids], dtype=np.int64)
    segments = make_segments((num_patches + num_prefix).tolist())
    patch_images = np.repeat(np.arange(len(grids)), num_patches)
    starts = segments.cu_seqlens[:-1].astype(np.int64)
    merged_starts = np.cumsum(num_merged) - num_merged
    patch_starts = np.cumsum(num_patches) - num_patches
    window_index = _joined(images, "window_index", merged_starts)
    interp_indices, interp_weights = _padded_taps(images)
    return AttentionMetadata(
        segments=segments,
        windows=None if window_index is None else make_segments(n for image in images for n in image.window_lengths),
        prefix_positions=(starts[:, None] + np.arange(num_prefix)).reshape(-1),
        patch_positions=np.arange(len(patch_images)) + (patch_images + 1) * num_prefix,
        interp_indices=interp_indices,
        interp_weights=interp_weights,
        rope_positions=_joined(images, "rope_positions"),
        window_index=window_index,
        window_reverse=None if window_index is None else np.argsort(window_index),
        merge_index=_joined(images, "merge_index", patch_starts),
    )


def _joined(images: Sequence[ImageLayout], name: str, starts: Int64Array | None = None) -> Any:  # noqa: ANN401  one of the arrays
    """The images' arrays of that name behind each other, each shifted to its start; None where the tower has none."""
    arrays = [getattr(image, name) for image in images]
    if arrays[0] is None:
        return None
    if starts is None:
        return np.concatenate(arrays)
    return np.concatenate([array + start for array, start in zip(arrays, starts.tolist(), strict=True)])


def _padded_taps(images: Sequence[ImageLayout]) -> tuple[Int32Array | None, Float32Array | None]:
    """Antialiased tables have as many taps as the smallest side asks for: the other images get taps of weight 0."""
    if images[0].interp_indices is None:
        return None, None
    most = max(image.interp_indices.shape[1] for image in images if image.interp_indices is not None)

    def widened(array: Any) -> Any:  # noqa: ANN401  either dtype
        return np.pad(array, ((0, 0), (0, most - array.shape[1]))) if array.shape[1] < most else array

    pick: Callable[[str], Any] = lambda name: np.concatenate([widened(getattr(image, name)) for image in images])  # noqa: E731
    return pick("interp_indices"), pick("interp_weights")
