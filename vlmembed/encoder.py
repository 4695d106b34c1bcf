"""The device worker: one forward per pack."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it

from vlmembed.attention import DeviceMetadata
from vlmembed.errors import ConfigError, DeviceMemoryError
from vlmembed.schema import VectorColumn
from vlmembed.types import EmbeddingBatch

if TYPE_CHECKING:
    from vlmembed.config import EncodeConfig
    from vlmembed.layout import TowerLayout
    from vlmembed.towers.base import Tower
    from vlmembed.towers.blueprint import Blueprint
    from vlmembed.types import PackedBatch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STORED_DTYPES = {"float16": torch.float16, "float32": torch.float32}

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
    """A tower on a device, with the output of one run.

    Attributes:
        layout: the tower's, for preprocessing and packing.
        vectors: the output columns that it fills.
        pool: how an image's tokens become one vector; None where they are stored themselves.
    """

    def __init__(
        self,
        tower: Tower,
        *,
        vectors: tuple[VectorColumn, ...],
        pool: str | None,
        normalize: bool,
        identity: dict[str, Any] | None = None,
    ) -> None:
        self._tower = tower
        self._normalize = normalize
        self._device: torch.device = tower.patch_mean.device
        self.layout: TowerLayout = tower.layout
        self.vectors = vectors
        self.pool = pool
        self.identity: dict[str, Any] = {
            "weights_sha256": tower.weights_sha256,
            "width": vectors[0].width,
            "patches_per_token": tower.layout.merge_size**2,
            **(identity or {}),
        }

    @classmethod
    def load(cls, config: EncodeConfig, blueprint: Blueprint, vectors: tuple[VectorColumn, ...]) -> Encoder:
        """Load the tower for a config whose device and dtype are decided.

        Raises:
            ModelError: from `Blueprint.load`.
        """
        device, pool = pick_device(config.device), pick_pool(config, blueprint)
        tower = blueprint.load(dtype=DTYPES[config.dtype], device=device)
        files = blueprint.files
        identity = {
            "name": os.fspath(config.model),
            "revision": files.revision,
            "config_sha256": files.config_sha256,
            "family": blueprint.family.title,
            "aligned_with_text": blueprint.family.aligned and pool == "head",
        }
        normalize = config.normalize and pool is not None
        return cls(tower, vectors=vectors, pool=pool, normalize=normalize, identity=identity)

    @property
    def normalize(self) -> bool:
        """Vectors are scaled to length 1; tokens never are."""
        return self._normalize

    @property
    def backend(self) -> dict[str, str]:
        """What the numbers were computed with: recorded, not compared."""
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else cpu_name()
        return {"device": str(self._device), "processor": name, "attention": "bmm per run of equal segments"}

    def encode(self, batch: PackedBatch) -> EmbeddingBatch:
        """One forward over a pack.

        Raises:
            DeviceMemoryError: the pack does not fit beside the weights.
        """
        try:
            return self._encode(batch)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
                raise
            msg = (
                f"a pack of {len(batch.rows)} images and {batch.num_tokens} tokens does not fit into the memory of "
                f"{self._device}: lower --max-pixels, or --max-tokens-per-batch; what was committed is kept"
            )
            raise DeviceMemoryError(msg) from error

    @torch.inference_mode()
    def _encode(self, batch: PackedBatch) -> EmbeddingBatch:
        patches = torch.from_numpy(batch.patches).to(self._device, non_blocking=True)
        metadata = DeviceMetadata.from_host(batch.metadata, self._device)
        if self.pool is None:
            outputs = self._tower.tokens(patches, metadata, deepstack=len(self.vectors) > 1)
            lengths = [self.layout.num_merged((h, w)) for h, w in batch.grid_hw.tolist()]
            offsets = np.concatenate([[0], np.cumsum(lengths)])
        else:
            pooled = self._tower(patches, metadata, pool=self.pool)
            outputs, offsets = [F.normalize(pooled, dim=-1) if self._normalize else pooled], None
        return EmbeddingBatch(
            rows=batch.rows,
            grid_hw=batch.grid_hw,
            size_hw=batch.size_hw,
            vectors={
                column.name: output.to(STORED_DTYPES[column.dtype]).cpu().numpy()
                for column, output in zip(self.vectors, outputs, strict=True)
            },
            offsets=offsets,
        )


def pick_pool(config: EncodeConfig, blueprint: Blueprint) -> str | None:
    """What ``--pool auto`` means for a tower; None where tokens are stored.

    Raises:
        ConfigError: the tower has no such vector, or ``--pool`` comes with tokens.
    """
    choices = tuple(blueprint.pool_widths)
    if config.emit == "tokens":
        if config.pool != "auto":
            msg = f"--pool {config.pool} makes one vector of an image, and --emit tokens stores all: leave one out"
            raise ConfigError(msg)
        return None
    if config.pool == "auto":
        return choices[0]
    if config.pool not in choices:
        msg = f"--pool {config.pool} is not possible with {blueprint.family.title}: use {' or '.join(choices)}"
        raise ConfigError(msg)
    return config.pool


def vector_columns(config: EncodeConfig, blueprint: Blueprint) -> tuple[VectorColumn, ...]:
    """The output columns of a run: one embedding, or tokens and what ``--deepstack`` adds.

    Raises:
        ConfigError: from `pick_pool`; or ``--deepstack`` for a tower without such features, or without tokens.
    """
    pool = pick_pool(config, blueprint)
    if config.deepstack and (pool is not None or not blueprint.num_deepstack):
        reason = "goes with --emit tokens" if pool is not None else f"is not possible with {blueprint.family.title}"
        msg = f"--deepstack {reason}: it stores the inner layers' tokens, which Qwen3-VL has"
        raise ConfigError(msg)
    if pool is not None:
        dtype = "float32" if config.embedding_dtype == "auto" else config.embedding_dtype
        return (VectorColumn(name="embedding", width=blueprint.pool_widths[pool], dtype=dtype),)
    dtype = "float16" if config.embedding_dtype == "auto" else config.embedding_dtype
    names = ["tokens", *(f"deepstack_{level}" for level in range(blueprint.num_deepstack * config.deepstack))]
    return tuple(VectorColumn(name=name, width=blueprint.token_width, dtype=dtype, per_token=True) for name in names)
