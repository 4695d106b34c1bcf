"""The packed tower alone: pictures in memory become the vectors that a run would make of their files."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from conftest import noise
from PIL import Image

import vlmembed
from vlmembed.errors import ConfigError, InputError, ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vlmembed.towers.base import Tower

SIZES = [(300, 200), (64, 64), (10, 400), (333, 77), (1, 1), (42, 42)]


@pytest.fixture(scope="module")
def small(tiny_model: Path) -> Tower:
    return vlmembed.load_tower(tiny_model, dtype="fp32", device="cpu")


def pictures() -> list[Image.Image]:
    """Mixed sizes, and of each mode that the pixel policy has a rule for one."""
    plain = [noise(height, width, seed) for seed, (height, width) in enumerate(SIZES)]
    transparent = noise(60, 80, 10)
    transparent.putalpha(Image.linear_gradient("L").resize(transparent.size))
    palette = noise(50, 50, 11).quantize(16)
    palette.info["transparency"] = 3
    deep = Image.fromarray((np.arange(48 * 64, dtype=np.uint32) * 21).astype(np.uint16).reshape(48, 64))
    turned = noise(40, 90, 12)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.info["exif"] = exif.tobytes()
    return [*plain, transparent, palette, deep, turned, noise(30, 30, 13).convert("CMYK")]


def opened(images: Sequence[Image.Image], folder: Path | None = None) -> list[Image.Image]:
    """The pictures as somebody has opened them from files, which are left in `folder`."""
    found: list[Image.Image] = []
    for row, image in enumerate(images):
        buffer = io.BytesIO()
        image.save(buffer, "TIFF" if image.mode == "CMYK" else "PNG", exif=image.info.get("exif", b""))
        if folder is not None:
            (folder / f"{row:02}.png").write_bytes(buffer.getvalue())
        found.append(Image.open(buffer))
    return found


def embed(images: Sequence[Any], tower: Tower, **settings: Any) -> np.ndarray:  # noqa: ANN401
    return vlmembed.embed_pack(vlmembed.pack_images(images, tower), tower, **settings).numpy()


def test_a_pack_equals_the_stream_of_the_same_pictures_in_files(tmp_path: Path, tiny_model: Path, small: Tower) -> None:
    images = opened(pictures(), tmp_path)
    with vlmembed.stream(tmp_path, model=tiny_model, dtype="fp32", device="cpu", dedup="none") as stream:
        (batch,) = stream
    assert batch.num_rows == len(images)
    expected = np.array(batch["embedding"].to_pylist(), np.float32)
    packed = vlmembed.pack_images(images, small)
    assert packed.size_hw.tolist() == [[row["height"], row["width"]] for row in batch.to_pylist()]
    assert packed.grid_hw.tolist() == [[row["grid_h"], row["grid_w"]] for row in batch.to_pylist()]
    vectors = vlmembed.embed_pack(packed, small)
    assert vectors.dtype == torch.float32
    assert vectors.is_inference()
    np.testing.assert_allclose(vectors.numpy(), expected, atol=2e-6)


def test_a_pack_equals_its_pictures_alone(small: Tower) -> None:
    images = pictures()
    alone = np.concatenate([embed([image], small) for image in images])
    np.testing.assert_allclose(embed(images, small), alone, atol=2e-6)
    np.testing.assert_allclose(embed(images[::-1], small)[::-1], alone, atol=2e-6)


def test_arrays_are_pictures_too(small: Tower) -> None:
    images = [noise(height, width, seed) for seed, (height, width) in enumerate(SIZES)]
    arrays = [np.asarray(image) for image in images]
    arrays[1] = np.asfortranarray(arrays[1])
    np.testing.assert_array_equal(embed(arrays, small), embed(images, small))


def test_vectors_are_scaled_unless_told_and_pooled_as_told(small: Tower) -> None:
    images = pictures()
    raw, unit = embed(images, small, normalize=False), embed(images, small)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), unit, atol=1e-6)
    assert not np.allclose(embed(images, small, pool="mean"), unit, atol=1e-2)
    with pytest.raises(ConfigError, match="pool 'head' is not possible with this tower: use cls or mean"):
        embed(images, small, pool="head")


def test_tokens_are_those_of_a_stream(tmp_path: Path, tiny_model: Path, small: Tower) -> None:
    images = opened(pictures()[:4], tmp_path)
    settings: dict[str, Any] = {"model": tiny_model, "dtype": "fp32", "device": "cpu", "embedding_dtype": "float32"}
    with vlmembed.stream(tmp_path, **settings, emit="tokens") as stream:
        (batch,) = stream
    packed = vlmembed.pack_images(images, small)
    found = vlmembed.embed_tokens(packed, small)
    assert [tokens.shape for tokens in found] == [(height * width, 32) for height, width in packed.grid_hw.tolist()]
    for tokens, expected in zip(found, batch["tokens"].to_pylist(), strict=True):
        np.testing.assert_allclose(tokens.numpy(), np.array(expected, np.float32), atol=2e-6)


def test_limits_and_the_models_own_processor(small: Tower) -> None:
    images = [noise(300, 200, 0)]
    assert vlmembed.pack_images(images, small, max_pixels=28 * 28).num_tokens < 6
    assert vlmembed.pack_images(images, small, resize="official").grid_hw.tolist() == [[3, 3]]
    with pytest.raises(ConfigError, match="--min-pixels and --max-pixels belong to --resize native"):
        vlmembed.pack_images(images, small, resize="official", max_pixels=28 * 28)
    with pytest.raises(ConfigError, match="resize is 'big'; it can be auto, native, official"):
        vlmembed.pack_images(images, small, resize="big")


def truncated() -> Image.Image:
    buffer = io.BytesIO()
    noise(200, 200, 0).save(buffer, "JPEG")
    return Image.open(io.BytesIO(buffer.getvalue()[:-500]))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], "no images to pack: give one at least"),
        ([noise(9, 9, 0), np.zeros((3, 4), np.uint8)], r"image 1 cannot be packed: an array of uint8, \(3, 4\), is no"),
        ([np.zeros((3, 4, 3), np.float32)], r"image 0 cannot be packed: an array of float32, \(3, 4, 3\), is no pict"),
        ([np.zeros((0, 4, 3), np.uint8)], r"give uint8, \(height, width, 3\), in RGB"),
        (["a.png"], "image 0 cannot be packed: 'a.png' is a path: open it with PIL.Image.open"),
        (noise(9, 9, 0), r"images is one Image; it is a list of pictures: \[image\]"),
        (np.zeros((9, 9, 3), np.uint8), "images is one ndarray; it is a list of pictures"),
        ([Image.new("RGB", (0, 5))], "image 0 cannot be packed: it has 0x5 pixels"),
        ([truncated()], "image 0 cannot be packed: image file is truncated"),
        ([Image.fromarray(np.full((4, 4), np.nan, np.float32))], "image 0 cannot be packed: the picture holds NaN"),
    ],
)
def test_what_is_no_picture_is_named(images: list[Any], message: str, small: Tower) -> None:
    with pytest.raises(InputError, match=message):
        vlmembed.pack_images(images, small)


def test_a_malformed_exif_block_is_ignored(small: Tower) -> None:
    image = noise(40, 90, 12)
    image.info["exif"] = b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"
    assert vlmembed.pack_images([image], small).size_hw.tolist() == [[40, 90]]


def test_a_tower_is_loaded_by_words_and_by_torchs_own_objects(tiny_model: Path) -> None:
    by_words = vlmembed.load_tower(str(tiny_model), dtype="bf16", device="cpu")
    by_objects = vlmembed.load_tower(tiny_model, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert by_words.dtype == by_objects.dtype == torch.bfloat16
    assert {attention.backend for attention in by_words.attentions} == {"cpu"}
    images = pictures()
    np.testing.assert_array_equal(embed(images, by_words), embed(images, by_objects))
    assert vlmembed.load_tower(tiny_model, device="cpu").dtype in (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float32"}, "dtype is 'float32'; it can be auto, bf16, fp16, fp32, or torch.bfloat16"),
        ({"dtype": torch.float64}, "dtype is torch.float64"),
        ({"device": "cpu,cpu"}, "device is 'cpu,cpu', and a tower is on one: name that, or load one on each"),
        ({"device": "gpu"}, "device 'gpu' is not known"),
    ],
)
def test_devices_and_dtypes_that_cannot_be(settings: dict[str, Any], message: str, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        vlmembed.load_tower(tiny_model, **settings)


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ModelError):
        vlmembed.load_tower("no_such_folder/model", device="cpu")
