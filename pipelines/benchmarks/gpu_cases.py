"""What the parts of the GPU benchmark run on: towers with random weights, packs of noise, photos.

All of it is made here and from a seed: nothing is fetched.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from gpu_clocks import forward_seconds
from gpu_sizes import BUILT_IN
from PIL import Image
from transformers import Dinov2Config, Dinov2Model
from transformers.initialization import no_init_weights

from vlmembed.attention.backends import BACKENDS, refusal
from vlmembed.attention.varlen import load_kernel, varlen_attention
from vlmembed.batch import make_batch
from vlmembed.encoder import Encoder
from vlmembed.errors import MissingExtraError
from vlmembed.graphs import CudaGraphs
from vlmembed.layout import make_segments
from vlmembed.schema import VectorColumn
from vlmembed.towers.builtin import model_folder
from vlmembed.towers.families import HALF, IMAGENET_MEAN, IMAGENET_STD, MODEL_TYPES
from vlmembed.towers.grid import open_grid
from vlmembed.towers.weights import ModelFiles
from vlmembed.types import PatchedImage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gpu_sizes import Dinov2, Grid, Sizes

    from vlmembed.graphs import GraphApi
    from vlmembed.layout import TowerLayout
    from vlmembed.towers.base import Tower
    from vlmembed.types import PackedBatch


class Bench:
    """The device, the sizes, and what several parts share.

    Attributes:
        attention: the backends to measure, the one that is preferred first.
        scratch: an empty folder.
    """

    def __init__(self, *, device: torch.device, sizes: Sizes, attention: tuple[str, ...], scratch: Path) -> None:
        self.device = device
        self.sizes = sizes
        self.attention = attention
        self.scratch = scratch

    @cached_property
    def qwen(self) -> Tower:
        """The tower of parts b, c and e."""
        return random_tower("qwen3_vl", self.sizes.qwen, self.device)

    @cached_property
    def peak_flops(self) -> float:
        """Operations per second of the best bf16 product of two square matrices of noise."""
        return max(self._matmul_flops(side) for side in self.sizes.matmul_sides)

    def _matmul_flops(self, side: int) -> float:
        a, b = (torch.randn(side, side, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        return 2 * side**3 / self.forward_seconds(lambda: torch.mm(a, b, out=out))

    def forward_seconds(self, work: Callable[[], object]) -> float:
        """Median seconds of `work` on the device."""
        return forward_seconds(work, self.device, warm_ups=self.sizes.warm_ups, repeats=self.sizes.repeats)

    def graph_api(self) -> GraphApi:
        """CUDA's graphs, or what stands in for them on a CPU."""
        return CudaGraphs() if self.device.type == "cuda" else RecordedWork()

    def compiler(self) -> Any:  # noqa: ANN401  a context manager
        """Around what is compiled: on a CPU plain layers stand in, for a dry run is not to wait for a compiler."""
        return patch.object(torch, "compile", lambda layer, **_: layer) if self.device.type == "cpu" else nullcontext()


class RecordedWork:
    """Stands in for CUDA graphs: a replay does the work again, into the same tensors."""

    def capture(self, work: Callable[[], list[torch.Tensor]]) -> tuple[Callable[[], None], list[torch.Tensor]]:
        """Nothing is captured."""
        outputs = work()

        def replay() -> None:
            for output, result in zip(outputs, work(), strict=True):
                output.copy_(result)

        return replay, outputs


def by_offsets(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Any, **options: Any) -> torch.Tensor:  # noqa: ANN401  as `varlen_attention`
    """Attention on a CPU that reads the lengths from the device, as the flash kernels do: a graph gives no others."""
    lengths = [length for length in segments.cu_seqlens.diff().tolist() if length]
    return varlen_attention(q, k, v, replace(segments, runs=make_segments(lengths).runs), **options)


def by_longest(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Any, **options: Any) -> torch.Tensor:  # noqa: ANN401  as `varlen_attention`
    """Attention that asks the device in every block how long the longest segment is."""
    max_seqlen = int(segments.cu_seqlens.diff().max().item())
    return varlen_attention(q, k, v, replace(segments, max_seqlen=max_seqlen), **options)


@contextmanager
def attending(tower: Tower, attend: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let `attend` compute the attention of a tower that is not compiled."""
    for attention in tower.attentions:
        attention.attend = attend
    yield
    for attention in tower.attentions:
        attention.attend = varlen_attention


def graph_attention(bench: Bench) -> Any:  # noqa: ANN401  a context manager
    """Around what runs through graphs; on a CPU, attention that can."""
    return attending(bench.qwen, by_offsets) if bench.device.type == "cpu" else nullcontext()


def problem_with(backend: str, device: torch.device, head_dim: int) -> str:
    """Why attention in bf16 by `backend` is not possible here; empty where it is."""
    capability = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None
    if refusal(backend, capability=capability, dtype="bf16", head_dim=head_dim):
        return "not for this device"
    if BACKENDS[backend].is_flash:
        try:
            load_kernel(backend)
        except MissingExtraError as error:
            return "not installed" if "No module named" in str(error) else str(error)[:120]
    return ""


def fill(module: torch.nn.Module) -> None:
    """Random weights, the same on every device of a kind; norms are around one."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(std=0.02)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)


def random_tower(model_type: str, vision: Mapping[str, Any], device: torch.device) -> Tower:
    """A tower of these vision settings in bf16."""
    files = ModelFiles(
        name=model_type,
        revision="",
        folder=Path(),
        repo=None,
        config={"vision_config": dict(vision)},
        processor={"image_mean": HALF, "image_std": HALF},
    )
    blueprint = open_grid(files, MODEL_TYPES[model_type])
    skeleton = blueprint.make_skeleton().to_empty(device=device)
    fill(skeleton)
    return blueprint.build(blueprint, skeleton, "").prepare(dtype=torch.bfloat16, device=device)


def save_dinov2(folder: Path, sizes: Dinov2) -> Path:
    """A DINOv2 with random weights in a Hugging Face folder."""
    config = Dinov2Config(
        hidden_size=sizes.width,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        image_size=518,
        patch_size=14,
    )
    with no_init_weights():
        model = Dinov2Model(config).to(torch.bfloat16)
    fill(model)
    model.save_pretrained(folder)
    processor = {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": 256},
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
        "resample": 3,
        "image_mean": IMAGENET_MEAN,
        "image_std": IMAGENET_STD,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def built_in_model(bench: Bench) -> tuple[str, Path]:
    """The built-in model where it has been fetched, or one of its shape with random weights; and what it is."""
    folder = model_folder(BUILT_IN)
    if (folder / "config.json").is_file():
        return f"built-in {BUILT_IN}", folder
    return f"random weights, shape of {BUILT_IN}", save_dinov2(bench.scratch / BUILT_IN, bench.sizes.stand_in)


PHOTO_SIZES = ((640, 480), (480, 640), (640, 427), (512, 512))
"""Width and height."""


def write_photos(folder: Path, num_photos: int) -> Path:
    """JPEG files of noise about as coarse as what a photo shows."""
    folder.mkdir()

    def write(number: int) -> None:
        width, height = PHOTO_SIZES[number % len(PHOTO_SIZES)]
        generator = np.random.default_rng(number)
        coarse = Image.fromarray(generator.integers(0, 256, (height // 6, width // 6, 3), dtype=np.uint8))
        photo = coarse.resize((width, height), Image.Resampling.BICUBIC)
        photo.save(folder / f"{number:05}.jpg", quality=85)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(num_photos)))
    return folder


def noise_images(grids: Sequence[Grid], layout: TowerLayout) -> list[PatchedImage]:
    """An image of random pixels for each grid of patches."""
    generator, patch = np.random.default_rng(0), layout.patch_size
    return [
        PatchedImage(
            row=row,
            patches=generator.integers(0, 256, (height * width, 3 * patch**2), dtype=np.uint8),
            grid_hw=(height, width),
            size_hw=(height * patch, width * patch),
        )
        for row, (height, width) in enumerate(grids)
    ]


def noise_pack(images: Mapping[Grid, int], layout: TowerLayout) -> PackedBatch:
    """A pack of so many images of random pixels of each grid."""
    return make_batch(noise_images([grid for grid, count in images.items() for _ in range(count)], layout), layout)


def one_by_one(batch: PackedBatch, bench: Bench) -> list[PackedBatch]:
    """A pack of noise as packs of one image each."""
    layout = bench.qwen.layout
    images = noise_images([(height, width) for height, width in batch.grid_hw.tolist()], layout)
    return [make_batch([image], layout) for image in images]


def pooling_encoder(tower: Tower) -> Encoder:
    """One vector per image."""
    columns = (VectorColumn(name="embedding", width=tower.token_width),)
    return Encoder(tower, vectors=columns, pool="mean", normalize=True)


def token_encoder(tower: Tower) -> Encoder:
    """All tokens of every image."""
    columns = (VectorColumn(name="tokens", width=tower.token_width, dtype="float16", per_token=True),)
    return Encoder(tower, vectors=columns, pool=None, normalize=False)
