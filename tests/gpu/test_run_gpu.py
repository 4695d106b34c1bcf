"""Whole runs on all CUDA devices, two workers where there are two, against the CPU. Skipped where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from conftest import noise
from on_gpu import MARKS

import vlmembed

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = MARKS

SIZES = [(64, 80), (33, 120), (90, 90), (200, 40)]


@pytest.mark.parametrize(("dtype", "cosine"), [("fp32", 0.9999), ("bf16", 0.99)])
def test_a_run_on_the_gpus_equals_one_on_the_cpu(dtype: str, cosine: float, tiny_model: Path, tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(24):
        height, width = SIZES[number % len(SIZES)]
        noise(height, width, number).save(pictures / f"{number:02}.png")

    def embed(device: str, dtype: str) -> torch.Tensor:
        output = tmp_path / f"{device.replace(':', '-').replace(',', '-')}.parquet"
        config = vlmembed.EncodeConfig(
            inputs=(pictures,), output=output, model=tiny_model, device=device, dtype=dtype, max_tokens_per_batch=64
        )
        report = vlmembed.encode(config)
        assert report.num_embedded == 24
        return torch.tensor(pq.read_table(output).sort_by("id")["embedding"].to_pylist())

    on_gpus = embed("cuda:0,1" if torch.cuda.device_count() > 1 else "cuda:0", dtype)
    assert F.cosine_similarity(on_gpus, embed("cpu", "fp32")).min() >= cosine
