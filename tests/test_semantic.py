"""Do the embeddings know what is in a picture? 202 labelled Tux Paint stamps in 14 folders, default settings."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import Dinov2Config, Dinov2Model

import vlmembed

LABELS = (
    "animals/birds",
    "food/fruit",
    "plants/flowers",
    "town/roadsigns",
    "food/vegetables",
    "animals/mammals/bovines",
    "household/tools",
    "animals/fish",
    "animals/insects",
    "animals/mammals/rodents",
    "plants/trees",
    "hobbies/music/string",
    "animals/mammals/cats",
    "animals/mammals/equines",
)


@pytest.fixture(scope="session")
def stamps() -> list[str]:
    """The pictures' paths. In CI they must be there; elsewhere the test may be skipped."""
    folder = Path(os.environ.get("VLMEMBED_STAMPS", ".data/tuxpaint-stamps")).resolve()
    paths = sorted(str(path) for label in LABELS for path in (folder / label).glob("*.png"))
    if not paths and not os.environ.get("CI"):
        pytest.skip("Debian's tuxpaint-stamps-default is not unpacked: `make data` on a Debian machine")
    assert len(paths) == 202
    return paths


def nearest_neighbour_accuracy(paths: list[str], output: Path, **settings: str) -> float:
    """Leave-one-out 1-nearest-neighbour accuracy by cosine, a picture's folder being its label."""
    vlmembed.encode(vlmembed.EncodeConfig(inputs=tuple(paths), output=str(output), **settings))  # type: ignore[arg-type]
    table = pq.read_table(output)
    assert table.num_rows == len(paths)
    vectors = np.array(table["embedding"].to_pylist(), np.float32)
    labels = np.array([Path(key).parent.name for key in table["id"].to_pylist()])
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -np.inf)
    return float((labels[cosines.argmax(axis=1)] == labels).mean())


def test_the_built_in_model_knows_stamps(stamps: list[str], tmp_path: Path, builtin_folder: Path) -> None:
    assert builtin_folder.exists()
    found = nearest_neighbour_accuracy(stamps, tmp_path / "real.parquet")
    print(f"1-NN accuracy: {found:.3f} with the built-in weights")  # noqa: T201
    assert found >= 0.64


@pytest.mark.slow
def test_random_weights_know_less(stamps: list[str], tmp_path: Path, builtin_folder: Path) -> None:
    torch.manual_seed(0)
    Dinov2Model(Dinov2Config.from_pretrained(builtin_folder)).save_pretrained(tmp_path / "random")
    processor = (builtin_folder / "preprocessor_config.json").read_bytes()
    (tmp_path / "random" / "preprocessor_config.json").write_bytes(processor)
    found = nearest_neighbour_accuracy(stamps, tmp_path / "random.parquet", model=str(tmp_path / "random"))
    print(f"1-NN accuracy: {found:.3f} with random weights")  # noqa: T201
    assert found <= 0.44
