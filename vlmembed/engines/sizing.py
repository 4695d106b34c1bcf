"""How many towers a cluster can hold, and what each takes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmembed.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlmembed.config import EncodeConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What a machine of the cluster has to give."""

    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerPool:
    """The towers of a run.

    Attributes:
        num_gpus, num_cpus: what each takes.
        min_size, max_size: how many there are at a time.
        num_threads: of each, where it computes on the CPU; None beside a GPU.
    """

    num_gpus: float
    num_cpus: float
    min_size: int
    max_size: int
    num_threads: int | None

    @property
    def device(self) -> str:
        """As a tower sees it: Ray shows it no other GPU than its own."""
        return "cpu" if self.num_threads is not None else "cuda:0"


def size_towers(config: EncodeConfig, nodes: Sequence[Node]) -> TowerPool:
    """The towers that the settings ask for, on this cluster. At least one feeding task must have room beside them.

    Raises:
        ConfigError: a device that a cluster has no use for. ClusterError: there is too little.
    """
    if config.device not in ("auto", "cuda", "cpu"):
        msg = f"device is {config.device!r}; on a cluster it is auto, cuda or cpu, and --towers says how many there are"
        raise ConfigError(msg)
    total_gpus = sum(node.num_gpus for node in nodes)
    on_gpus = config.device == "cuda" or (config.device == "auto" and total_gpus > 0)
    if not on_gpus and config.tower_gpus is not None and config.device == "cpu":
        msg = "tower_gpus is given, and device is cpu: leave one out"
        raise ConfigError(msg)
    if on_gpus or config.tower_gpus is not None:
        num_gpus, num_cpus, num_threads = config.tower_gpus or 1.0, config.tower_cpus or 1.0, None
        fit = most_fit = [_fit_of(node, num_gpus, num_cpus) for node in nodes]
    else:
        num_gpus, num_cpus, num_threads = _on_cpus(config, nodes)
        fit = most_fit = [math.floor(node.num_cpus / num_cpus) for node in nodes]
        if config.tower_cpus is None:
            fit = [min(1, each) for each in fit]
    room = min(sum(fit), _beside_feeding(nodes, most_fit, num_cpus, config.workers or 1))
    least, most = config.num_towers or (1, max(1, room))
    if room < least:
        have = ", ".join(f"{node.num_cpus:g} CPUs and {node.num_gpus:g} GPUs" for node in nodes)
        each = f"{num_gpus:g} GPUs and {num_cpus:g} CPUs" if num_gpus else f"{num_cpus:g} CPUs"
        msg = (
            f"{least} towers with {each} each are asked for, and {config.workers or 1} CPUs to feed them; the cluster "
            f"has room for {max(0, room)} (its nodes have {have}): lower --towers, --tower-gpus, --tower-cpus or "
            "--workers, or add nodes"
        )
        raise ClusterError(msg)
    return TowerPool(
        num_gpus=num_gpus,
        num_cpus=num_cpus,
        min_size=least,
        max_size=most,
        num_threads=num_threads,
    )


def _beside_feeding(nodes: Sequence[Node], fit: Sequence[int], num_cpus: float, workers: int) -> int:
    """Towers beside which a feeding task has room, whichever nodes they are on: one fewer than would leave it none on
    any. A node that takes fewer than those always has room."""
    closing = 0
    for node, most in zip(nodes, fit, strict=True):
        if node.num_cpus >= workers:
            needed = math.floor((node.num_cpus - workers) / num_cpus) + 1
            if needed > most:
                return sum(fit)
            closing += needed
    return max(0, closing - 1)


def _fit_of(node: Node, num_gpus: float, num_cpus: float) -> int:
    """Towers for which a node has room: several share a GPU, or one has several."""
    by_gpus = int(node.num_gpus) * math.floor(1 / num_gpus) if num_gpus < 1 else int(node.num_gpus // num_gpus)
    return min(by_gpus, math.floor(node.num_cpus / num_cpus))


def _on_cpus(config: EncodeConfig, nodes: Sequence[Node]) -> tuple[float, float, int]:
    """As on one machine: the tower computes with all cores of a node, and a quarter of them is held for decoding."""
    if config.tower_cpus is not None:
        return 0.0, config.tower_cpus, max(1, round(config.tower_cpus))
    cores = int(min((node.num_cpus for node in nodes if node.num_cpus >= 1), default=1))
    return 0.0, float(max(1, cores - max(1, cores // 4))), max(1, cores)
