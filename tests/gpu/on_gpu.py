"""What the tests on a CUDA device share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from checkpoints import tiny_checkpoint
from fakes import random_image

from vlmembed.attention.varlen import pick_attention
from vlmembed.batch import make_batch
from vlmembed.encoder import Encoder
from vlmembed.schema import VectorColumn
from vlmembed.towers import open_tower

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vlmembed.layout import TowerLayout
    from vlmembed.towers.base import Tower
    from vlmembed.types import PackedBatch

MARKS = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
GPU = torch.device("cuda", 0)


def tiny_tower(model_type: str, folder: Path) -> Tower:
    """A tiny tower in bf16 on the GPU, with the attention that `auto` means there."""
    tiny_checkpoint(model_type, folder)
    tower = open_tower(str(folder)).load(dtype=torch.bfloat16, device=GPU)
    return tower.use_attention(pick_attention("auto", device=GPU, dtype="bf16", head_dim=tower.head_dim))


def pooling_encoder(tower: Tower) -> Encoder:
    """One vector per image, by the tower's first pool."""
    pool, width = next(iter(tower.pool_widths.items()))
    return Encoder(tower, vectors=(VectorColumn(name="embedding", width=width),), pool=pool, normalize=True)


def noise_pack(grids: Sequence[tuple[int, int]], layout: TowerLayout) -> PackedBatch:
    """Images of random pixels on these patch grids, in this order."""
    return make_batch([random_image(row, grid, layout) for row, grid in enumerate(grids)], layout)


def embed(encoder: Encoder, batch: PackedBatch) -> torch.Tensor:
    """The vectors of one pack."""
    return torch.from_numpy(encoder.encode(batch).vectors["embedding"])
