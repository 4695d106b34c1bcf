"""The packed tower alone: load one, pack pictures that are in memory, and run it.

Shape legend: N images, D width, M_i tokens of image i.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from PIL import Image, ImageOps

from vlmembed.attention.metadata import DevicePack
from vlmembed.attention.varlen import pick_attention
from vlmembed.batch import make_batch
from vlmembed.config import CHOICES, DEFAULT_MAX_SOURCE_PIXELS
from vlmembed.devices import pick_devices, pick_dtype
from vlmembed.encoder import DTYPES
from vlmembed.errors import ConfigError, ImageError, InputError
from vlmembed.pixels import to_rgb
from vlmembed.planning import resize_rule
from vlmembed.preprocess import preprocess
from vlmembed.towers import load_tower as load_on_device

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from vlmembed.towers.base import Tower
    from vlmembed.types import PackedBatch, UInt8Array

CHANNELS = 3


def load_tower(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
) -> Tower:
    """Load a vision tower that runs on packs of pictures of any size, with the best attention that is installed.

        tower = vlmembed.load_tower("dinov2-small")
        vectors = vlmembed.embed_pack(vlmembed.pack_images(images, tower), tower)  # (N, D)

    `model` is a built-in name, a local folder, or a Hugging Face id, whose `revision` may be named. `dtype` is
    ``"bf16"``, ``"fp16"``, ``"fp32"`` (or torch's own); ``"auto"`` is bf16 where the processor multiplies it in
    hardware, else fp32. `device` is ``"cpu"`` or ``"cuda:0"``, say (or torch's own); ``"auto"`` the first GPU, or the
    CPU.

    The tower is a `torch.nn.Module` without gradients. `Tower.layout` says what it wants of pictures,
    `Tower.pool_widths` which vectors it makes, with their D, and `Tower.use_attention` chooses another attention.

    Raises:
        ModelError: the files are not there, are broken, or hold a tower of another kind; or there is no memory for it.
        ConfigError: no such device or dtype, or several devices.
    """
    devices = (device,) if isinstance(device, torch.device) else pick_devices(device)
    if len(devices) > 1 and isinstance(device, str) and "," in device:
        msg = f"device is {device!r}, and a tower is on one: name that, or load one on each"
        raise ConfigError(msg)
    name = _dtype_name(dtype, devices[0])
    tower = load_on_device(str(model), revision=revision, dtype=DTYPES[name], device=devices[0])
    with _current(devices[0]):
        backend = pick_attention("auto", device=devices[0], dtype=name, head_dim=tower.head_dim, try_out=True)
    return tower.use_attention(backend)


def _dtype_name(dtype: str | torch.dtype, device: torch.device) -> str:
    known: dict[str | torch.dtype, str] = {"auto": "auto"}
    for name, value in DTYPES.items():
        known[name] = known[value] = name
    if dtype not in known:
        msg = f"dtype is {dtype!r}; it can be auto, {', '.join(DTYPES)}, or {', '.join(map(str, DTYPES.values()))}"
        raise ConfigError(msg)
    return pick_dtype(known[dtype], device)


def pack_images(
    images: Sequence[Image.Image | UInt8Array],
    tower: Tower,
    *,
    resize: str = "auto",
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> PackedBatch:
    """Resize pictures for a tower, and make one pack of them, in the given order; it stays on the host.

    An image is a Pillow image of any mode and size, or a uint8 array (height, width, 3) of RGB. What `vlmembed.encode`
    does with files is done with them: EXIF orientation applied, transparency put on white, 16-bit samples scaled.
    `resize`, `min_pixels` and `max_pixels` (area that a picture is resized into, in pixels) are `EncodeConfig`'s. The
    pack has as many tokens as its pictures need together: `PackedBatch.num_tokens`.

    Raises:
        InputError: no images, or one that is no picture or cannot be decoded or resized; the message names its place.
        ConfigError: a setting that cannot be. ModelError: the model's own processor is of a kind that is not known.
    """
    if resize not in CHOICES["resize"]:
        msg = f"resize is {resize!r}; it can be {', '.join(CHOICES['resize'])}"
        raise ConfigError(msg)
    is_array = isinstance(images, np.ndarray) and images.ndim == CHANNELS
    if is_array or isinstance(images, (Image.Image, str, bytes)):
        msg = f"images is one {type(images).__name__}; it is a list of pictures: [image]"
        raise InputError(msg)
    if not len(images):
        msg = "no images to pack: give one at least"
        raise InputError(msg)
    rule = resize_rule(
        tower.layout,
        resize=resize,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        max_source_pixels=DEFAULT_MAX_SOURCE_PIXELS,
    )
    patched = []
    for place, image in enumerate(images):
        try:
            patched.append(preprocess(_upright_rgb(image), place, rule))
        except (ImageError, OSError, ValueError) as error:
            msg = f"image {place} cannot be packed: {error}"
            raise InputError(msg) from error
    return make_batch(patched, tower.layout)


def _upright_rgb(image: Image.Image | UInt8Array) -> Image.Image:
    """By the pixel policy of `vlmembed.decode`.

    Raises:
        ValueError: it is no picture. OSError, ImageError: it cannot be decoded.
    """
    if not isinstance(image, Image.Image):
        if isinstance(image, (str, os.PathLike)):
            msg = f"{image!r} is a path: open it with PIL.Image.open"
            raise ValueError(msg)  # noqa: TRY004  told with the image's place, like what is wrong with others
        array = np.asarray(image)
        if array.dtype != np.uint8 or array.ndim != CHANNELS or array.shape[-1] != CHANNELS or not array.size:
            msg = f"an array of {array.dtype}, {array.shape}, is no picture: give uint8, (height, width, 3), in RGB"
            raise ValueError(msg)
        return Image.fromarray(np.ascontiguousarray(array))
    if not image.width or not image.height:
        msg = f"it has {image.width}x{image.height} pixels"
        raise ValueError(msg)
    image.load()
    try:
        upright = ImageOps.exif_transpose(image)
    except Exception:  # noqa: BLE001  whatever the EXIF parser trips over: it is ignored, as in files
        upright = image
    return to_rgb(upright)


def embed_pack(batch: PackedBatch, tower: Tower, *, pool: str = "auto", normalize: bool = True) -> torch.Tensor:
    """One vector per image of a pack: float32 (N, D), on the tower's device, in the order of the images.

    `pool` is one of `Tower.pool_widths`; ``"auto"`` the first. `normalize` scales every vector to length 1.

    Raises:
        ConfigError: the tower has no such vector. torch.OutOfMemoryError: the pack is too large for the device.
    """
    device = tower.patch_mean.device
    with torch.inference_mode(), _current(device):
        pack = DevicePack.of(batch, device)
        vectors = tower.forward(
            pack.patches, pack.metadata, pool=next(iter(tower.pool_widths)) if pool == "auto" else pool
        )
        return F.normalize(vectors, dim=-1) if normalize else vectors


def embed_tokens(batch: PackedBatch, tower: Tower) -> list[torch.Tensor]:
    """What a language model would be fed of each image of a pack: per image (M_i, D), of the tower's dtype and on its
    device, in raster order; `Tower.layout.num_merged` of its grid is M_i. Never scaled.

    Raises:
        torch.OutOfMemoryError: the pack is too large for the device.
    """
    device = tower.patch_mean.device
    with torch.inference_mode(), _current(device):
        pack = DevicePack.of(batch, device)
        (tokens_MD,) = tower.tokens(pack.patches, pack.metadata)
        lengths = [tower.layout.num_merged((height, width)) for height, width in batch.grid_hw.tolist()]
        return list(torch.split(tokens_MD, lengths))


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are launched on the thread's current GPU, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
