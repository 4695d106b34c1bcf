"""The bare chain of a tower's matrix products: what its forward would take if it were nothing else."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vlmembed.towers.base import Tower


def products(tower: Tower) -> list[tuple[torch.Tensor, float]]:
    """Weights (out, in) of all products of a forward, as often per patch or token as the second value says; together
    they are what `Tower.cost` counts per token."""
    weights = [(tower.patch_weight.detach(), 1.0)]
    weights += [(weight.detach(), 1.0) for weight in tower.layers.parameters() if weight.dim() > 1]
    if (merger := getattr(tower, "merger", None)) is not None:
        share = 1.0 / tower.layout.merge_size**2
        weights += [(weight.detach(), share) for weight in merger.parameters() if weight.dim() > 1]
    return weights


class GemmChain:
    """The products of one pack back to back: no bias, no norm, no attention, inputs and outputs made beforehand.

    `num_tokens` rows go through each weight. Operations of `flops` are two for a multiplication and an addition.
    """

    def __init__(self, tower: Tower, num_tokens: int) -> None:
        self._calls = []
        self.flops = 0.0
        spare: dict[tuple[str, int, int], torch.Tensor] = {}

        def buffer(kind: str, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
            key = (kind, rows, width)
            if key not in spare:
                spare[key] = torch.randn(rows, width).to(dtype)
            return spare[key]

        for weight, share in products(tower):
            rows = round(num_tokens * share)
            width_out, width_in = weight.shape
            source, target = (
                buffer(kind, rows, width, weight.dtype) for kind, width in (("in", width_in), ("out", width_out))
            )
            self._calls.append((source, weight.t(), target))
            self.flops += 2.0 * rows * weight.numel()

    @torch.inference_mode()
    def seconds(self) -> float:
        """Of one time through."""
        began = time.perf_counter()
        for source, weight, target in self._calls:
            torch.mm(source, weight, out=target)
        return time.perf_counter() - began
