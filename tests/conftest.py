"""Fixtures: the built-in model with its real weights, a tiny random one for speed, and the sample pictures."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from PIL import Image

from vlmembed.batch import make_batch
from vlmembed.layout import ResizeRule
from vlmembed.preprocess import preprocess
from vlmembed.towers import load_tower
from vlmembed.towers.builtin import MODELS, model_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vlmembed.layout import TowerLayout
    from vlmembed.towers.base import Tower
    from vlmembed.types import PackedBatch

ROOT = Path(__file__).parent.parent
SAMPLES = ROOT / "sample_data" / "images"


LONG = {
    *("families", "towers", "end_to_end", "workers", "recipes", "crash", "semantic", "docs"),
    *("pipeline", "resize", "fuzz", "hub", "api", "ray"),
}
"""Files that take twenty seconds or more."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: of the processes that share the tests none shall be left with one of them at the end."""
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)


@pytest.fixture(autouse=True)
def root_logger() -> None:
    """The command line sets its level, when it is called in this process; other tests look at warnings."""
    logging.getLogger().setLevel(logging.WARNING)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are named by their number. Compressed ones may hold the time, and processes that share the tests must all
    collect the same names."""
    return f"{argname}-{len(val)}-bytes" if isinstance(val, bytes) else None


@pytest.fixture(scope="session")
def builtin_folder() -> Path:
    """The converted built-in model; `make test` puts it there."""
    folder = model_folder("dinov2-small")
    assert (folder / "config.json").is_file(), "run `vlmembed models --get dinov2-small`, or `make test`"
    assert MODELS["dinov2-small"].num_layers == json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    return folder


@pytest.fixture(scope="session")
def tower(builtin_folder: Path) -> Tower:
    """The built-in tower in float32 on the CPU."""
    return load_tower(str(builtin_folder), dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DINOv2 of two narrow layers in a Hugging Face folder: fast, and wrong about pictures."""
    from transformers import Dinov2Config, Dinov2Model  # noqa: PLC0415  only where the fixture is used

    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=70, patch_size=14, layerscale_value=1.0
    )
    Dinov2Model(config).save_pretrained(folder)
    processor = {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": 48},
        "crop_size": {"height": 42, "width": 42},
        "do_center_crop": True,
        "resample": 3,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def make_rule(
    layout: TowerLayout, mode: str = "native", max_pixels: int | None = None, min_pixels: int | None = None
) -> ResizeRule:
    """A resize rule; by default with the tower's own limits."""
    resize = layout.official if mode == "official" else layout.native.with_limits(min_pixels, max_pixels)
    assert resize is not None
    return ResizeRule(mode=mode, resize=resize, layout=layout, max_source_pixels=10**8)


def noise(height: int, width: int, seed: int) -> Image.Image:
    """A smooth random picture: unlike white noise, its embedding depends on what is where."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="session")
def pack_images() -> Callable[[Sequence[Image.Image], ResizeRule], PackedBatch]:
    """Make one pack of pictures, in the given order."""

    def pack(images: Sequence[Image.Image], rule: ResizeRule) -> PackedBatch:
        patched = [preprocess(image, row, rule) for row, image in enumerate(images)]
        return make_batch(patched, rule.layout)

    return pack
