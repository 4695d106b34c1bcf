"""The null tower: in the place of a model, a hash of each image's pixels. What a run costs then is all but the model.

The hash is CRC-32 over an image's patches: every burst of up to 32 bits that changes changes it. It costs about 50 us
for the 150 kB of a 224x224 picture (by hand, on a core that takes about 900 us to decode and resize a food photo).
"""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from vlmembed.layout import TowerLayout
from vlmembed.official import CropResize
from vlmembed.resize import BICUBIC, AreaResize
from vlmembed.towers.base import Parts, Tower
from vlmembed.towers.blueprint import Blueprint
from vlmembed.towers.families import FAMILIES, IMAGENET_MEAN, IMAGENET_STD
from vlmembed.towers.weights import ModelFiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from vlmembed.attention.metadata import DeviceMetadata

WIDTH = 2
"""Values of an embedding: 16 bits of the 32 each, exact in float32."""


def pixel_hash(patches: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The hash of one image's patches (S, P), as `WIDTH` numbers of 16 bits."""
    return np.array(divmod(zlib.crc32(np.ascontiguousarray(patches).data), 2**16), np.float32)


class NullTower(Tower):
    """Takes packs as every tower does, and computes `pixel_hash` of each image."""

    def __init__(self, blueprint: Blueprint) -> None:
        nothing = torch.zeros(1, 3 * blueprint.layout.patch_size**2)
        parts = Parts(patch_weight=nothing, patch_bias=None, layers=nn.ModuleList())
        super().__init__(blueprint, parts, weights_sha256="0" * 64)

    @property
    def head_dim(self) -> int:
        """There are no heads; any backend may have them."""
        return 64

    def features(
        self, patches_SP: torch.Tensor, metadata: DeviceMetadata, *, pool: str | None = None, deepstack: bool = False
    ) -> list[torch.Tensor]:
        """The hashes, (N, WIDTH)."""
        del pool
        assert not deepstack
        patches, hashes, start = patches_SP.numpy(), [], 0
        for length, count in metadata.segments.runs:
            for _ in range(count):
                stop = start + length - self.layout.num_prefix_tokens
                hashes.append(pixel_hash(patches[start:stop]))
                start = stop
        return [torch.from_numpy(np.stack(hashes))]

    def pooled_of(self, features: list[torch.Tensor], metadata: DeviceMetadata, pool: str) -> torch.Tensor:
        """The hashes as they are."""
        del metadata, pool
        return features[0]


class NullBlueprint(Blueprint):
    """A blueprint that needs no weights."""

    __slots__ = ()

    def load(self, *, dtype: torch.dtype, device: torch.device) -> Tower:
        """At once."""
        return NullTower(self).prepare(dtype=dtype, device=device)


def photo_layout() -> TowerLayout:
    """That of the built-in model: the shortest edge to 256, 224x224 out of the middle, patches of 14, one CLS token."""
    return TowerLayout(
        patch_size=14,
        native=AreaResize(patch_size=14, min_pixels=224**2, max_pixels=224**2),
        official=CropResize(shortest_edge=256, size_hw=None, crop_hw=(224, 224), resample=BICUBIC),
        default_resize="official",
        image_mean=IMAGENET_MEAN,
        image_std=IMAGENET_STD,
        num_prefix_tokens=1,
    )


def small_layout() -> TowerLayout:
    """For pictures of 32x32: they become 2x2 patches of 16, and no picture more."""
    return TowerLayout(
        patch_size=16,
        native=AreaResize(patch_size=16, min_pixels=32**2, max_pixels=32**2),
        official=None,
        official_problem="there is none",
        image_mean=IMAGENET_MEAN,
        image_std=IMAGENET_STD,
    )


@contextmanager
def null_tower(layout: TowerLayout) -> Iterator[None]:
    """Within this block every run in this process on the CPU has the null tower, whatever its ``model`` says. Give it
    ``normalize=False``, so that the vectors are the hashes."""
    blueprint = NullBlueprint(
        files=ModelFiles(name="null", revision="", folder=Path(), repo=None, config={"null": 1}, processor={}),
        family=FAMILIES[0],
        layout=layout,
        make_skeleton=nn.Module,
        num_heads=1,
        pool_widths={"cls": WIDTH},
        token_width=WIDTH,
        build=lambda blueprint, _skeleton, _sha256: NullTower(blueprint),
    )
    with mock.patch("vlmembed.planning.open_tower", return_value=blueprint):
        yield
