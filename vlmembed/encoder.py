"""The device worker: one forward per pack."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it

from vlmembed.attention import DeviceMetadata
from vlmembed.errors import ConfigError
from vlmembed.towers import load_tower
from vlmembed.types import EmbeddingBatch

if TYPE_CHECKING:
    from vlmembed.config import EncodeConfig
    from vlmembed.layout import TowerLayout
    from vlmembed.towers.dense import DenseTower
    from vlmembed.types import PackedBatch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")


def pick_device(name: str) -> torch.device:
    """The device that ``--device`` names; ``auto`` is the first GPU where there is one, else the CPU.

    Raises:
        ConfigError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        msg = f"device {name!r} is not known: use auto, cpu, cuda or cuda:N"
        raise ConfigError(msg) from error
    if device.type not in ("cpu", "cuda"):
        msg = f"device {name!r} is not supported: use auto, cpu, cuda or cuda:N"
        raise ConfigError(msg)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        msg = f"device {name!r} is not here: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs"
        raise ConfigError(msg)
    return device


def pick_dtype(name: str, device: torch.device) -> str:
    """What ``--dtype auto`` means on `device`: bf16 where it multiplies bf16 in hardware, else fp32."""
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    capabilities = torch.cpu.get_capabilities()
    return "bf16" if any(capabilities.get(name) for name in _BF16_INSTRUCTIONS) else "fp32"


def cpu_name() -> str:
    """The processor as it names itself."""
    return str(torch.cpu.get_capabilities().get("cpu_name") or platform.machine())


class Encoder:
    """A tower on a device, with the pooling of one run.

    Attributes:
        width: D, the embedding width.
        layout: the tower's, for preprocessing and packing.
    """

    def __init__(self, tower: DenseTower, *, pool: str, normalize: bool, name: str = "", revision: str = "") -> None:
        self._tower = tower
        self._pool = pool
        self._normalize = normalize
        self._device: torch.device = tower.position_table.device
        self.width = tower.width
        self.layout: TowerLayout = tower.layout
        self.weights_sha256 = tower.weights_sha256
        self.config_sha256 = tower.config_sha256
        self.identity: dict[str, Any] = {
            "name": name,
            "revision": revision,
            "weights_sha256": tower.weights_sha256,
            "config_sha256": tower.config_sha256,
            "width": tower.width,
        }

    @classmethod
    def load(cls, config: EncodeConfig) -> Encoder:
        """Load the tower of a config whose device and dtype are decided; ``pool="auto"`` is the tower's own."""
        device = pick_device(config.device)
        tower = load_tower(os.fspath(config.model), revision=config.revision, dtype=DTYPES[config.dtype], device=device)
        pool = tower.default_pool if config.pool == "auto" else config.pool
        return cls(tower, pool=pool, normalize=config.normalize, name=os.fspath(config.model), revision=tower.revision)

    @property
    def backend(self) -> dict[str, str]:
        """What the numbers were computed with: recorded, not compared."""
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else cpu_name()
        return {"device": str(self._device), "processor": name, "attention": "bmm per run of equal segments"}

    @property
    def pool(self) -> str:
        """How an image's tokens become one vector."""
        return self._pool

    @torch.inference_mode()
    def encode(self, batch: PackedBatch) -> EmbeddingBatch:
        """One forward over a pack."""
        patches = torch.from_numpy(batch.patches).to(self._device, non_blocking=True)
        metadata = DeviceMetadata.from_host(batch.metadata, self._device)
        embeddings = self._tower(patches, metadata, pool=self._pool)
        if self._normalize:
            embeddings = F.normalize(embeddings, dim=-1)
        return EmbeddingBatch(
            rows=batch.rows, grid_hw=batch.grid_hw, size_hw=batch.size_hw, embeddings=embeddings.cpu().numpy()
        )
