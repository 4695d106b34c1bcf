"""A pack on the device: every array a view of the one block that was copied."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from typing import Self

    from vlmembed.types import AttentionMetadata, PackedBatch, PackHeader

_TORCH_DTYPES = {
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceSegments:
    """`Segments` with `cu_seqlens` on the device; the host integers stay on the host."""

    cu_seqlens: torch.Tensor
    max_seqlen: int
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def one_each(cls, segments: DeviceSegments) -> Self:
        """Segments of one token for each of these."""
        cu_seqlens = torch.arange(len(segments.cu_seqlens), dtype=torch.int32, device=segments.cu_seqlens.device)
        return cls(cu_seqlens=cu_seqlens, max_seqlen=1, runs=tuple((1, count) for _, count in segments.runs))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceMetadata:
    """An `AttentionMetadata` on the device, field by field. One object serves all layers of a forward."""

    segments: DeviceSegments
    windows: DeviceSegments | None
    prefix_positions: torch.Tensor
    patch_positions: torch.Tensor
    interp_indices: torch.Tensor | None
    interp_weights: torch.Tensor | None
    rope_positions: torch.Tensor | None
    window_index: torch.Tensor | None
    window_reverse: torch.Tensor | None
    merge_index: torch.Tensor | None

    def of_images(self, host: AttentionMetadata) -> Self:
        """The metadata of the images alone, where this one is of a pack that was filled up behind them."""

        def cut(value: Any, images: Any) -> Any:  # noqa: ANN401  whatever the field holds
            if value is None or images is None:
                return None
            if isinstance(value, DeviceSegments):
                cu_seqlens = value.cu_seqlens[: len(images.cu_seqlens)]
                return DeviceSegments(cu_seqlens=cu_seqlens, max_seqlen=images.max_seqlen, runs=images.runs)
            return value[: len(images)]

        names = [field.name for field in dataclasses.fields(self)]
        return type(self)(**{name: cut(getattr(self, name), getattr(host, name)) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DevicePack:
    """What a tower is given: `patches`, uint8 or float32 (S, P), and the metadata of the pack."""

    patches: torch.Tensor
    metadata: DeviceMetadata

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device) -> Self:
        """Copy the block, and nothing else: no field is derived here. On a CPU it is not even copied."""
        return cls.view(torch.from_numpy(batch.block).to(device), batch.header)

    @classmethod
    def view(cls, block: torch.Tensor, header: PackHeader) -> Self:
        """The pack in a `block` of bytes on a device."""
        tensors = {
            field.name: block[field.start : field.stop].view(_TORCH_DTYPES[field.dtype]).view(field.shape)
            for field in header.layout.fields
        }

        def segments(name: str, host: tuple[int, tuple[tuple[int, int], ...]] | None) -> Any:  # noqa: ANN401
            if host is None:
                return None
            return DeviceSegments(cu_seqlens=tensors[name], max_seqlen=host[0], runs=host[1])

        taken = {"segments": segments("segments", header.segments), "windows": segments("windows", header.windows)}
        for field in dataclasses.fields(DeviceMetadata):
            taken.setdefault(field.name, tensors.get(field.name))
        return cls(patches=tensors["patches"], metadata=DeviceMetadata(**taken))
