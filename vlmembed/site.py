"""Where the devices of a run are, and who loads the model on them: this machine; a cluster is another site."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Protocol, TypeAlias

from vlmembed.config import STALL_TIMEOUTS
from vlmembed.devices import pick_devices, pick_dtype, weakest_first
from vlmembed.elsewhere import Elsewhere
from vlmembed.encoder import Encoder
from vlmembed.exchange import LoadOrder
from vlmembed.tuning import check_choices, load_encoder
from vlmembed.workers import WorkerPool

if TYPE_CHECKING:
    import torch

    from vlmembed.config import EncodeConfig
    from vlmembed.devices import Devices
    from vlmembed.layout import ResizeRule
    from vlmembed.schema import VectorColumn
    from vlmembed.towers.blueprint import Blueprint
    from vlmembed.tuning import Settled


AnyEncoder: TypeAlias = Encoder | WorkerPool | Elsewhere


class Site(Protocol):
    """What a plan asks of the place that has the devices."""

    def devices(self, name: str) -> Devices:
        """The devices that ``--device`` names, the weakest first. Raises `ConfigError`."""
        ...

    def pick_dtype(self, name: str, device: torch.device) -> str:
        """What ``--dtype`` means there."""
        ...

    def check(self, config: EncodeConfig, device: torch.device) -> None:
        """What can be said of the settings before the weights are read. Raises as `vlmembed.tuning.check_choices`."""
        ...

    def load(
        self,
        config: EncodeConfig,
        devices: Devices,
        blueprint: Blueprint,
        vectors: tuple[VectorColumn, ...],
        *,
        rule: ResizeRule,
        num_rows: int,
    ) -> tuple[AnyEncoder, Settled]:
        """Load the model, and decide what is left to decide. Raises as `vlmembed.tuning.load_encoder`."""
        ...

    def auto_workers(self, device_type: str) -> int:
        """Decoding threads, where their number is not given."""
        ...


class Here:
    """The machine that the command runs on: one device is this process's own, several have a process each."""

    def devices(self, name: str) -> Devices:
        """As in `Site`."""
        return weakest_first(pick_devices(name))

    def pick_dtype(self, name: str, device: torch.device) -> str:
        """As in `Site`."""
        return pick_dtype(name, device)

    def check(self, config: EncodeConfig, device: torch.device) -> None:
        """As in `Site`."""
        check_choices(config, device)

    def load(
        self,
        config: EncodeConfig,
        devices: Devices,
        blueprint: Blueprint,
        vectors: tuple[VectorColumn, ...],
        *,
        rule: ResizeRule,
        num_rows: int,
    ) -> tuple[AnyEncoder, Settled]:
        """As in `Site`."""
        if len(devices) == 1:
            return load_encoder(config, blueprint, vectors, rule=rule, num_rows=num_rows, device=devices[0])
        order = LoadOrder(
            config=config,
            vectors=vectors,
            rule=rule,
            num_rows=num_rows,
            device="",
            num_workers=len(devices),
            log_level=logging.getLogger().getEffectiveLevel(),
        )
        names = [str(device) for device in devices]
        return WorkerPool.start(order, names, answer_seconds=STALL_TIMEOUTS * config.timeout)

    def auto_workers(self, device_type: str) -> int:
        """On a CPU the model needs the cores, beside a GPU the decoders do."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
        return max(1, cores // 4) if device_type == "cpu" else max(1, cores - 1)
