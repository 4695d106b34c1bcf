"""The nodes of a cluster as a site: the first tower that is loaded decides what a plan leaves open."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from vlmembed.elsewhere import Elsewhere
from vlmembed.engines.cluster import raise_own
from vlmembed.engines.tower import Scout
from vlmembed.exchange import LoadOrder

if TYPE_CHECKING:
    import torch

    from vlmembed.config import EncodeConfig
    from vlmembed.devices import Devices
    from vlmembed.engines.sizing import TowerPool
    from vlmembed.layout import ResizeRule
    from vlmembed.schema import VectorColumn
    from vlmembed.towers.blueprint import Blueprint
    from vlmembed.tuning import Settled

logger = logging.getLogger(__name__)

WAIT_SECONDS = 120.0
"""After how long without an answer of the first tower it is said that one is waited for."""


class RaySite:
    """A `vlmembed.site.Site` that asks a process on a node, as large as a tower. It ends once the model was loaded.

    Attributes:
        order: what all towers are to load, once `load` has returned. weights_sha256: of what the first has loaded.
    """

    def __init__(self, pool: TowerPool) -> None:
        self._pool = pool
        self._scout: Any = None
        self.order: LoadOrder | None = None
        self.weights_sha256 = ""

    def devices(self, name: str) -> Devices:
        """As in `vlmembed.site.Site`; which devices there are, the pool has decided by `name`."""
        del name
        found: Devices = self._ask("devices", self._pool.device)
        return found

    def pick_dtype(self, name: str, device: torch.device) -> str:
        """As in `vlmembed.site.Site`."""
        found: str = self._ask("pick_dtype", name, device)
        return found

    def check(self, config: EncodeConfig, device: torch.device) -> None:
        """As in `vlmembed.site.Site`."""
        self._ask("check", config, device)

    def load(
        self,
        config: EncodeConfig,
        devices: Devices,
        blueprint: Blueprint,
        vectors: tuple[VectorColumn, ...],
        *,
        rule: ResizeRule,
        num_rows: int,
    ) -> tuple[Elsewhere, Settled]:
        """As in `vlmembed.site.Site`. The nodes read the model themselves, from where `config` says."""
        del devices, blueprint
        order = LoadOrder(
            config=config,
            vectors=vectors,
            rule=rule,
            num_rows=num_rows // self._pool.max_size,
            device=self._pool.device,
            num_workers=1,
            log_level=logging.getLogger().getEffectiveLevel(),
            num_threads=self._pool.num_threads,
        )
        settled: Settled = self._ask("settle", order, str(Path.cwd()))
        self.close()
        self.order = replace(order, config=settled.config)
        self.weights_sha256 = settled.model["weights_sha256"]
        return Elsewhere(), settled

    def auto_workers(self, device_type: str) -> int:
        """A task decodes with one thread, since there are many tasks."""
        del device_type
        return 1

    def close(self) -> None:
        """End the process."""
        if self._scout is not None:
            ray.kill(self._scout)
            self._scout = None

    def _ask(self, method: str, *arguments: Any) -> Any:  # noqa: ANN401  whatever the method returns
        """Let the process answer.

        Raises:
            VlmembedError: it could not.
        """
        try:
            if self._scout is None:
                actor: Any = ray.remote(num_cpus=self._pool.num_cpus, num_gpus=self._pool.num_gpus)(Scout)
                self._scout = actor.remote()
            answer = getattr(self._scout, method).remote(*arguments)
            while not ray.wait([answer], timeout=WAIT_SECONDS)[0]:
                logger.error(
                    "a tower, with %g GPUs and %g CPUs, has not started or not answered yet (see `ray status`)",
                    self._pool.num_gpus,
                    self._pool.num_cpus,
                )
            return ray.get(answer)
        except RayError as error:
            raise_own(error)
