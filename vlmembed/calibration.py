"""A pack to try things out with, and the token budget that a device's memory allows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from vlmembed.batch import make_batch
from vlmembed.types import PatchedImage

if TYPE_CHECKING:
    from collections.abc import Callable

    from vlmembed.encoder import Encoder
    from vlmembed.layout import ResizeRule
    from vlmembed.types import PackedBatch

logger = logging.getLogger(__name__)

CPU_PACK_TOKENS = 2048
"""Aim of the token budget on a CPU, where larger packs fall out of the cache; rounded up to whole images."""

MAX_PACK_TOKENS = 16_384
"""Token budget of a GPU with memory to spare: 0.7 TFLOP with a ViT-S, so milliseconds against the microseconds of a
launch. More would let the device wait longer for the first pack, and at each part's end."""

MEMORY_SHARE = 0.7
"""Share of a GPU's free memory that a pack may take; the rest is for blocks that do not fit together."""

CALIBRATION_TOKENS = 4096
CALIBRATION_SIDE = 1024
"""The calibration pack: so many tokens, of square pictures of so many pixels a side."""


class Meter(Protocol):
    """Measures the memory of a device, in bytes."""

    def free(self) -> int:
        """What could be allocated now."""

    def peak(self, work: Callable[[], object]) -> int:
        """The most that `work` holds at a time beyond what was held before."""


class CudaMeter:
    """A GPU's memory, as torch's allocator counts it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        """What the driver has free, and what the allocator holds without using it."""
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0]) + cached

    def peak(self, work: Callable[[], object]) -> int:
        """Peak over the level before."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


def try_out(encoder: Encoder, batch: PackedBatch) -> None:
    """Encode a pack for nothing. One that does not fit into memory is split, as in a run."""
    for _ in encoder.stream([batch]):
        pass


def auto_budget(encoder: Encoder, rule: ResizeRule, meter: Meter | None) -> int:
    """The default of ``--max-tokens-per-batch``, in tokens.

    On a CPU (`meter` is None) it is a question of the cache. On a GPU: `MAX_PACK_TOKENS`, or a half, a quarter, … of
    it, as the free memory allows by what a calibration pack takes per token. Powers of two, so that small differences
    in free memory do not make other packs.
    """
    longest = rule.max_tokens_per_image
    if meter is None:
        return longest * -(-CPU_PACK_TOKENS // longest) if longest <= CPU_PACK_TOKENS else CPU_PACK_TOKENS
    batch = calibration_batch(rule, CALIBRATION_TOKENS)
    per_token = meter.peak(lambda: try_out(encoder, batch)) / batch.num_tokens
    fitting = meter.free() * MEMORY_SHARE / max(per_token, 1.0)
    budget = MAX_PACK_TOKENS
    while budget > fitting and budget > 1:
        budget //= 2
    logger.info("%.0f bytes a token, %.1f GB free: packs of up to %d tokens", per_token, meter.free() / 1e9, budget)
    return budget


def calibration_batch(rule: ResizeRule, num_tokens: int) -> PackedBatch:
    """A pack of `num_tokens` tokens at most, and one image at least: random pixels, all images of one size."""
    height, width = rule.resize.fit((CALIBRATION_SIDE, CALIBRATION_SIDE)).canvas_hw
    patch = rule.layout.patch_size
    grid_hw = (height // patch, width // patch)
    count = max(1, num_tokens // rule.layout.num_tokens(grid_hw))
    shape = (grid_hw[0] * grid_hw[1], 3 * patch**2)
    patches = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    image = PatchedImage(row=0, patches=patches, grid_hw=grid_hw, size_hw=(CALIBRATION_SIDE, CALIBRATION_SIDE))
    return make_batch([image] * count, rule.layout)
