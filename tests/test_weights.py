"""Of a checkpoint only the tower is read: whatever its names, shards and format, and wherever it lies."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from checkpoints import (
    DENSE_RECIPES,
    GRID_RECIPES,
    RECIPES,
    TEXT_WIDTH,
    is_of_tower,
    kimi_released_checkpoint,
    kimi_released_config,
    make_model,
    save_model,
    tiny_checkpoint,
    write_json,
)
from conftest import SAMPLES
from safetensors.torch import load_file, save_file

from vlmembed.errors import ModelError
from vlmembed.towers import load_tower, open_tower
from vlmembed.towers.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

CPU = torch.device("cpu")
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
PICKLE_INDEX, PICKLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
WITH_TEXT = [*GRID_RECIPES, "clip", "metaclip_2", "siglip", "siglip2"]
WITHOUT_TEXT = [model_type for model_type in DENSE_RECIPES if model_type not in WITH_TEXT]


def load(folder: Path) -> Any:  # noqa: ANN401  a Tower, whose modules are transformers' own
    return load_tower(str(folder), dtype=torch.float32, device=CPU)


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def weight_map(folder: Path, index: str = INDEX) -> dict[str, str]:
    found: dict[str, str] = read_json(folder / index)["weight_map"]
    return found


def delete_other_shards(folder: Path, index: str = INDEX) -> list[str]:
    """Delete every shard without a tensor of the tower, and return their names."""
    where = weight_map(folder, index)
    needed = {shard for name, shard in where.items() if is_of_tower(name)}
    others = sorted(set(where.values()) - needed)
    for shard in others:
        (folder / shard).unlink()
    return others


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Rewrite the one weights file of a folder."""
    tensors = change(load_file(folder / WHOLE))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WHOLE)


def assert_layers_are_the_models(tower: Any, model_type: str, model: Any) -> None:  # noqa: ANN401
    """Norms and MLPs by name; query, key and value in one matrix, as the tower has them."""
    layers = model.get_submodule(RECIPES[model_type].layers)
    assert len(tower.layers) == len(layers) >= 2
    expected = dict(layers.named_parameters())
    compared = 0
    for name, parameter in tower.layers.named_parameters():
        if name in expected:
            assert torch.equal(parameter, expected[name]), name
            compared += 1
        elif (projection := name.replace("qkv", "q_proj")) in expected and name.endswith("weight"):
            three = [expected[projection.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            assert torch.equal(parameter, torch.cat(three)), name
    assert compared >= 4 * len(layers)


@pytest.mark.parametrize("model_type", WITH_TEXT)
def test_shards_without_a_tensor_of_the_tower_are_not_needed(model_type: str, tmp_path: Path) -> None:
    model = tiny_checkpoint(model_type, tmp_path, max_shard_size="20KB")
    whole = load(tmp_path)
    assert delete_other_shards(tmp_path)
    tower = load(tmp_path)
    assert tower.weights_sha256 == whole.weights_sha256
    assert_layers_are_the_models(tower, model_type, model)


@pytest.mark.parametrize("model_type", WITHOUT_TEXT)
def test_a_tower_alone_loads_from_shards(model_type: str, tmp_path: Path) -> None:
    model = tiny_checkpoint(model_type, tmp_path, max_shard_size="20KB")
    assert_layers_are_the_models(load(tmp_path), model_type, model)


@pytest.mark.parametrize("model_type", RECIPES)
def test_no_tensor_of_the_tiny_towers_is_constant(model_type: str, tmp_path: Path) -> None:
    """A tensor of equal values would hide its loss, or an exchange of its rows, from these tests and others."""
    tiny_checkpoint(model_type, tmp_path)
    tensors = load_file(tmp_path / WHOLE)
    constant = [name for name, tensor in tensors.items() if tensor.numel() > 1 and tensor.float().std() < 0.01]
    assert constant == []


@pytest.mark.parametrize("model_type", WITH_TEXT)
def test_a_missing_shard_of_the_tower_is_named(model_type: str, tmp_path: Path) -> None:
    tiny_checkpoint(model_type, tmp_path, max_shard_size="20KB")
    where = weight_map(tmp_path)
    shard = where[next(name for name in sorted(where) if is_of_tower(name))]
    (tmp_path / shard).unlink()
    lost = [name for name in where if where[name] == shard and is_of_tower(name)]
    names = "|".join(map(re.escape, lost))
    with pytest.raises(
        ModelError, match=rf"{re.escape(shard)} is not there, and it holds '({names})' of the vision tower"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "class_prefix"),
    [("qwen2_vl", "Qwen2Vision"), ("qwen2_5_vl", "Qwen2_5_Vision"), ("qwen3_vl", "Qwen3VL")],
)
def test_qwens_prefixes_make_no_difference(model_type: str, class_prefix: str, tmp_path: Path) -> None:
    """Old checkpoints say `visual.`, new ones `model.visual.`, and a tower saved alone neither."""
    model = tiny_checkpoint(model_type, tmp_path / "new", save_original_format=False)
    save_model(model, tmp_path / "old", RECIPES[model_type])
    if model_type == "qwen3_vl":  # which was never published under the old prefix
        change_tensors(
            tmp_path / "old", lambda tensors: {name.removeprefix("model."): tensors[name] for name in tensors}
        )
    alone = model.model.visual
    assert type(alone).__name__.startswith(class_prefix)
    save_model(alone, tmp_path / "alone", RECIPES[model_type])
    for name, prefix in (("new", "model.visual."), ("old", "visual."), ("alone", "")):
        assert f"{prefix}patch_embed.proj.weight" in load_file(tmp_path / name / WHOLE)
    towers = [load(tmp_path / name) for name in ("new", "old", "alone")]
    assert len({tower.weights_sha256 for tower in towers}) == 1
    assert_layers_are_the_models(towers[2], model_type, model)


def test_paddleocrs_prefixes_make_no_difference(tmp_path: Path) -> None:
    model = tiny_checkpoint("paddleocr_vl", tmp_path / "new", save_original_format=False)
    save_model(model, tmp_path / "released", RECIPES["paddleocr_vl"])
    for name, projector, tower in (
        ("new", "model.projector.", "model.visual.vision_model."),
        ("released", "mlp_AR.", "visual.vision_model."),
    ):
        tensors = load_file(tmp_path / name / WHOLE)
        assert f"{projector}linear_1.weight" in tensors
        assert f"{tower}post_layernorm.weight" in tensors
    towers = [load(tmp_path / name) for name in ("new", "released")]
    assert towers[0].weights_sha256 == towers[1].weights_sha256
    assert torch.equal(towers[1].merger.second.weight, model.model.projector.linear_2.weight)


@pytest.mark.parametrize("model_type", WITHOUT_TEXT)
def test_released_dino_names_are_those_of_transformers_modules(model_type: str, tmp_path: Path) -> None:
    """Publishers' names are older than the modules that transformers has now; `save_pretrained` goes back to them."""
    model = tiny_checkpoint(model_type, tmp_path / "released")
    save_model(model, tmp_path / "new", RECIPES[model_type], save_original_format=False)
    names = [set(load_file(tmp_path / name / WHOLE)) for name in ("released", "new")]
    assert names[0] != names[1] == set(model.state_dict())
    assert load(tmp_path / "released").weights_sha256 == load(tmp_path / "new").weights_sha256


@pytest.mark.parametrize("model_type", ["dinov2", "dinov2_with_registers"])
def test_dinov2_giants_joined_mlp_is_split(model_type: str, tmp_path: Path) -> None:
    recipe = RECIPES[model_type]
    recipe = replace(recipe, settings={**recipe.settings, "use_swiglu_ffn": True})
    model = make_model(recipe)
    save_model(model, tmp_path / "released", recipe)
    save_model(model, tmp_path / "new", recipe, save_original_format=False)
    assert "encoder.layer.1.mlp.weights_in.weight" in load_file(tmp_path / "released" / WHOLE)
    towers = [load(tmp_path / name) for name in ("released", "new")]
    assert towers[0].weights_sha256 == towers[1].weights_sha256
    assert_layers_are_the_models(towers[0], model_type, model)


@pytest.mark.parametrize(
    ("model_type", "class_name"),
    [
        ("clip", "CLIPVisionModelWithProjection"),
        ("metaclip_2", "MetaClip2VisionModelWithProjection"),
        ("siglip", "SiglipVisionModel"),
        ("siglip2", "Siglip2VisionModel"),
        ("dinov2", "Dinov2ForImageClassification"),
        ("dinov2_with_registers", "Dinov2WithRegistersForImageClassification"),
        ("dinov3_vit", "DINOv3ViTBackbone"),
    ],
)
def test_a_dense_tower_is_the_same_in_another_of_its_classes(model_type: str, class_name: str, tmp_path: Path) -> None:
    """Alone, or under a classifier."""
    tiny_checkpoint(model_type, tmp_path / "whole")
    other = getattr(transformers, class_name).from_pretrained(tmp_path / "whole")
    save_model(other, tmp_path / "other", RECIPES[model_type])
    assert load(tmp_path / "other").weights_sha256 == load(tmp_path / "whole").weights_sha256


def test_a_clip_without_its_projection_has_no_head(tmp_path: Path) -> None:
    tiny_checkpoint("clip", tmp_path / "whole")
    alone = transformers.CLIPVisionModel.from_pretrained(tmp_path / "whole")
    save_model(alone, tmp_path / "alone", RECIPES["clip"])
    assert open_tower(str(tmp_path / "whole")).pool_widths == {"head": 24, "cls": 48, "mean": 48}
    assert open_tower(str(tmp_path / "alone")).pool_widths == {"cls": 48, "mean": 48}
    assert load(tmp_path / "alone").projection is None


KIMI_NAMES = {
    "vision_tower.patch_embed.proj.weight",
    "vision_tower.patch_embed.proj.bias",
    "vision_tower.patch_embed.pos_emb.weight",
    *(
        f"vision_tower.encoder.blocks.N.{part}.{kind}"
        for part in ("norm0", "norm1", "mlp.fc0", "mlp.fc1", "wqkv", "wo")
        for kind in ("weight", "bias")
    ),
    "vision_tower.encoder.final_layernorm.weight",
    "vision_tower.encoder.final_layernorm.bias",
    *(f"mm_projector.{part}.{kind}" for part in ("pre_norm", "proj.0", "proj.2") for kind in ("weight", "bias")),
}
"""The tower of moonshotai/Kimi-K2.5 and its successors, N for a layer's number."""


@pytest.fixture
def kimi(tmp_path: Path) -> tuple[Path, Any]:
    """A Kimi under its released names in many shards, and the model that it was made of."""
    folder = tmp_path / "released"
    return folder, kimi_released_checkpoint(folder, max_shard_size="20KB")


def test_the_kimi_of_these_tests_is_the_released_one_to_transformers(kimi: tuple[Path, Any]) -> None:
    folder, model = kimi
    where = weight_map(folder)
    assert {re.sub(r"\.blocks\.\d+\.", ".blocks.N.", name) for name in where if is_of_tower(name)} == KIMI_NAMES
    language = [name for name in where if not is_of_tower(name)]
    assert all(name.startswith(("language_model.model.", "language_model.lm_head.")) for name in language)
    again, report = transformers.Kimi_K25ForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    expected = model.state_dict()
    found = again.state_dict()
    assert set(found) == set(expected)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_kimis_fused_projections_are_split_and_reordered(kimi: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = kimi
    save_model(model, tmp_path / "split", RECIPES["kimi_k25"])
    assert "model.vision_tower.layers.0.attn.q_proj.weight" in load_file(tmp_path / "split" / WHOLE)
    assert delete_other_shards(folder)
    tower = load(folder)
    assert tower.weights_sha256 == load(tmp_path / "split").weights_sha256
    assert_layers_are_the_models(tower, "kimi_k25", model)
    for packed, layer in zip(tower.layers, model.model.vision_tower.layers, strict=True):
        for kind in ("weight", "bias"):
            parts = zip(getattr(packed.attn.qkv, kind).chunk(3), ("q_proj", "k_proj", "v_proj"), strict=True)
            for rows, name in parts:
                assert torch.equal(rows, getattr(getattr(layer.attn, name), kind)), name
    assert torch.equal(tower.table, model.model.vision_tower.patch_embed.pos_emb.position_embeddings.flatten(0, 1))
    assert torch.equal(tower.merger.first.weight, model.model.mm_projector.in_proj.weight)


def test_kimis_released_config_says_the_same(kimi: tuple[Path, Any]) -> None:
    folder, _ = kimi
    config = read_json(folder / "config.json")
    config["projection_layer_norm_eps"] = 1e-3
    write_json(folder / "config.json", config)
    ours, our_layout = load(folder), open_tower(str(folder)).layout
    write_json(folder / "config.json", kimi_released_config(config))
    blueprint, released = open_tower(str(folder)), load(folder)
    assert blueprint.layout == our_layout
    assert blueprint.token_width == TEXT_WIDTH
    assert blueprint.num_heads == config["vision_config"]["num_attention_heads"] == 3
    assert released.merger.norm.eps == ours.merger.norm.eps == 1e-3
    assert released.weights_sha256 == ours.weights_sha256


def test_a_kimi_that_transformers_saved_loads(tmp_path: Path) -> None:
    """`save_pretrained` of transformers 5.24 mixes released names and its own; `from_pretrained` takes them back."""
    model = tiny_checkpoint("kimi_k25", tmp_path / "resaved", save_original_format=True)
    names = set(load_file(tmp_path / "resaved" / WHOLE))
    assert {"model.mm_projector.pre_norm.weight", "mm_projector.proj.0.weight"} <= names
    save_model(model, tmp_path / "split", RECIPES["kimi_k25"])
    assert load(tmp_path / "resaved").weights_sha256 == load(tmp_path / "split").weights_sha256


def of_second_layer(names: Iterable[str]) -> str:
    """The weight of the first norm of the tower's second layer; a tiny text model has but one."""
    return next(name for name in names if re.search(r"(blocks|layers?)\.1\.(layer_)?norm1\.weight$", name))


@pytest.mark.parametrize("model_type", RECIPES)
def test_a_tensor_that_the_checkpoint_lacks_is_named(model_type: str, tmp_path: Path) -> None:
    tiny_checkpoint(model_type, tmp_path)
    lost = of_second_layer(load_file(tmp_path / WHOLE))
    change_tensors(tmp_path, lambda tensors: {name: tensors[name] for name in tensors if name != lost})
    tail = re.escape(lost.partition(".1.")[2])
    with pytest.raises(
        ModelError, match=rf"lacks 1 of \d+ tensors of its vision tower .*, the first is '\S*\.1\.{tail}'"
    ):
        load(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    tiny_checkpoint("qwen3_vl", tmp_path, max_shard_size="20KB")
    where = weight_map(tmp_path)
    lost = of_second_layer(where)
    shard = tmp_path / where.pop(lost)
    save_file({name: tensor for name, tensor in load_file(shard).items() if name != lost}, shard)
    with pytest.raises(ModelError, match=rf"{shard.name} lacks '{lost}' of the vision tower, which its index promises"):
        load(tmp_path)
    write_json(tmp_path / INDEX, {"weight_map": where})
    with pytest.raises(ModelError, match=r"lacks 1 of \d+ tensors .*, the first is 'blocks\.1\.norm1\.weight'"):
        load(tmp_path)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "paddleocr_vl", "siglip2", "dinov2"])
def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(model_type: str, tmp_path: Path) -> None:
    tiny_checkpoint(model_type, tmp_path)
    wrong = of_second_layer(load_file(tmp_path / WHOLE))
    change_tensors(tmp_path, lambda tensors: tensors | {wrong: tensors[wrong][:-5]})
    with pytest.raises(ModelError, match=rf"'{wrong}' of .* has shape \(43,\), and config.json asks for \(48,\)"):
        load(tmp_path)


@pytest.mark.parametrize("rows", [147, 145, 141, 96])
def test_a_fused_tensor_of_the_wrong_shape_is_named(rows: int, tmp_path: Path) -> None:
    """Whether or not the rows can be cut into three, or into heads."""
    kimi_released_checkpoint(tmp_path)
    wrong = "vision_tower.encoder.blocks.1.wqkv.weight"
    change_tensors(tmp_path, lambda tensors: tensors | {wrong: torch.zeros(rows, 48)})
    with pytest.raises(ModelError, match=rf"'{wrong}' of .* has shape \({rows}, 48\)"):
        load(tmp_path)


@pytest.mark.parametrize("model_type", WITH_TEXT)
def test_nobody_misses_the_language_model(model_type: str, tmp_path: Path) -> None:
    tiny_checkpoint(model_type, tmp_path)
    before = load(tmp_path).weights_sha256
    change_tensors(tmp_path, lambda tensors: {name: tensors[name] for name in tensors if is_of_tower(name)})
    assert load(tmp_path).weights_sha256 == before


def test_the_hash_tells_towers_apart(tmp_path: Path) -> None:
    tiny_checkpoint("qwen2_vl", tmp_path)
    before = load(tmp_path).weights_sha256
    change_tensors(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1})
    assert load(tmp_path).weights_sha256 == before
    changed = of_second_layer(load_file(tmp_path / WHOLE))
    change_tensors(tmp_path, lambda tensors: tensors | {changed: tensors[changed].nextafter(torch.tensor(9.0))})
    assert load(tmp_path).weights_sha256 != before


def test_the_hash_is_of_the_weights_as_they_are_stored(tmp_path: Path) -> None:
    """Whatever type the layers are given, and in whichever the checkpoint has them."""
    tiny_checkpoint("qwen2_vl", tmp_path)
    full = load(tmp_path)
    half = load_tower(str(tmp_path), dtype=torch.bfloat16, device=CPU)
    assert half.weights_sha256 == full.weights_sha256
    change_tensors(tmp_path, lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()})
    assert load(tmp_path).weights_sha256 != full.weights_sha256


@pytest.fixture
def qwen(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A tiny Qwen2-VL without a weights file, and its tensors."""
    folder = tmp_path / "qwen"
    tiny_checkpoint("qwen2_vl", folder)
    tensors = load_file(folder / WHOLE)
    (folder / WHOLE).rename(tmp_path / WHOLE)
    return folder, tensors


def safe_sha256(folder: Path) -> str:
    """The hash of the same weights in a safetensors file, which `qwen` moved out of the way."""
    (folder.parent / "safe").mkdir()
    for path in (folder / "config.json", folder / "preprocessor_config.json", folder.parent / WHOLE):
        (folder.parent / "safe" / path.name).symlink_to(path)
    sha256: str = load(folder.parent / "safe").weights_sha256
    return sha256


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "as before torch 1.6"])
def test_a_pickle_of_plain_tensors_loads(*, zipped: bool, qwen: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, tensors = qwen
    torch.save(tensors, folder / PICKLE, _use_new_zipfile_serialization=zipped)
    assert load(folder).weights_sha256 == safe_sha256(folder)


def test_pickled_shards_without_a_tensor_of_the_tower_are_not_needed(
    qwen: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, tensors = qwen
    names = {True: "pytorch_model-00001-of-00002.bin", False: "pytorch_model-00002-of-00002.bin"}
    for of_tower, shard in names.items():
        torch.save({name: tensors[name] for name in tensors if is_of_tower(name) == of_tower}, folder / shard)
    write_json(folder / PICKLE_INDEX, {"weight_map": {name: names[is_of_tower(name)] for name in tensors}})
    assert delete_other_shards(folder, PICKLE_INDEX) == [names[False]]
    assert load(folder).weights_sha256 == safe_sha256(folder)


class MakesFolder:
    """Unpickling it makes a folder: the trace of code that ran."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_a_pickle_that_runs_code_is_refused(qwen: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, tensors = qwen
    trace = tmp_path / "trace"
    torch.save({**tensors, "extra": MakesFolder(trace)}, folder / PICKLE)
    with pytest.raises(
        ModelError, match=r"pytorch_model.bin holds more than tensors, and unpickling it could run code"
    ):
        load(folder)
    assert not trace.exists()
    torch.load(folder / PICKLE, weights_only=False)  # the file is as evil as it should be
    assert trace.exists()


@pytest.mark.parametrize(
    "content",
    [5, [1.0, 2.0], torch.zeros(3), {0: torch.zeros(3)}, {"visual.patch_embed.proj.weight": "x"}],
    ids=["number", "list", "tensor", "number for a name", "text for a tensor"],
)
def test_a_pickle_of_anything_else_is_an_error_of_the_model(
    content: object, qwen: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    folder, tensors = qwen
    if isinstance(content, dict) and set(content) <= set(tensors):
        content = tensors | content
    torch.save(content, folder / PICKLE)
    with pytest.raises(
        ModelError, match=r"pytorch_model\.bin|'visual\.patch_embed\.proj\.weight'|lacks 31 of 31 tensors"
    ):
        load(folder)


def test_safetensors_come_first(qwen: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """Repositories often hold the weights in both formats, and each may be sharded or not."""
    folder, tensors = qwen
    expected = safe_sha256(folder)
    (folder / WHOLE).symlink_to(folder.parent / WHOLE)
    torch.save(dict.fromkeys(tensors, torch.zeros(1)), folder / PICKLE)
    assert load(folder).weights_sha256 == expected
    write_json(folder / PICKLE_INDEX, {"weight_map": dict.fromkeys(tensors, PICKLE)})
    assert load(folder).weights_sha256 == expected


def test_code_in_the_folder_never_runs(kimi: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = kimi
    write_json(folder / "config.json", kimi_released_config(read_json(folder / "config.json")))
    auto_map = read_json(folder / "config.json")["auto_map"]
    modules = {reference.partition(".")[0] for reference in auto_map.values()}
    assert len(modules) == 2
    trace = tmp_path / "trace"
    for module in (*modules, "modeling_x", "image_processing_kimi_k25"):
        code = f"open({str(trace)!r}, 'w').close()\nraise RuntimeError('remote code ran')\n"
        (folder / f"{module}.py").write_text(code, encoding="utf-8")
    processor = read_json(folder / "preprocessor_config.json")
    processor["auto_map"] = {"AutoImageProcessor": "image_processing_kimi_k25.KimiImageProcessor"}
    write_json(folder / "preprocessor_config.json", processor)
    load(folder)
    assert not trace.exists()
    assert not modules & set(sys.modules)


@pytest.mark.parametrize("model_type", ["resnet", None, ["qwen2_vl"]])
def test_an_unknown_model_type_is_told_the_known_ones(model_type: object, tmp_path: Path) -> None:
    tiny_checkpoint("qwen2_vl", tmp_path)
    write_json(tmp_path / "config.json", read_json(tmp_path / "config.json") | {"model_type": model_type})
    known = ", ".join(family.model_types[0] for family in FAMILIES)
    expected = rf"has model_type {re.escape(repr(model_type))}; supported: {known} \(see `vlmembed models`\)"
    with pytest.raises(ModelError, match=expected):
        load(tmp_path)


def test_a_tower_too_large_for_the_memory_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder holds no weights: an attempt to open them would be another error, and is, when there is memory."""
    config = transformers.Qwen2VLConfig(
        text_config=GRID_RECIPES["qwen2_vl"].settings["text_config"],
        vision_config={"depth": 2, "embed_dim": 16384, "num_heads": 128, "hidden_size": TEXT_WIDTH},
    )
    config.save_pretrained(tmp_path)
    write_json(tmp_path / "preprocessor_config.json", GRID_RECIPES["qwen2_vl"].processor)
    with torch.device("meta"):
        model = transformers.Qwen2VLForConditionalGeneration(config)
    count = sum(parameter.numel() for parameter in model.model.visual.parameters())
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=12_340_000_000))
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        needed = f"{count * size / 1e9:.1f}"
        assert float(needed) > 12.3
        name = str(dtype).removeprefix("torch.")
        expected = rf"has {count:,} parameters: .* need {needed} GB in {name}, and cpu has 12\.3 GB free"
        with pytest.raises(ModelError, match=expected):
            load_tower(str(tmp_path), dtype=dtype, device=CPU)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10**15))
    with pytest.raises(
        ModelError, match=r"holds neither model.safetensors nor pytorch_model.bin, nor an index of shards"
    ):
        load(tmp_path)


@pytest.mark.parametrize("length", [0, 4, 1000, -1])
def test_a_cut_file_is_broken(length: int, tmp_path: Path) -> None:
    tiny_checkpoint("qwen2_vl", tmp_path)
    content = (tmp_path / WHOLE).read_bytes()
    (tmp_path / WHOLE).write_bytes(content[:length])
    with pytest.raises(ModelError, match=r"model\.safetensors is broken \(.*\): fetch the model again"):
        load(tmp_path)


def test_a_cut_shard_is_broken(tmp_path: Path) -> None:
    tiny_checkpoint("qwen2_vl", tmp_path, max_shard_size="20KB")
    where = weight_map(tmp_path)
    shard = tmp_path / where[of_second_layer(where)]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ModelError, match=rf"{shard.name} is broken \(.*\): fetch the model again"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": null}', '{"weight_map": ["a"]}', "{}"])
def test_a_broken_index_is_an_error_of_the_model(content: str, tmp_path: Path) -> None:
    tiny_checkpoint("qwen2_vl", tmp_path, max_shard_size="20KB")
    (tmp_path / INDEX).write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=r"index\.json|lacks 31 of 31 tensors"):
        load(tmp_path)


class Hub(ThreadingHTTPServer):
    """As much of a hub as `snapshot_download` asks for, over loopback.

    Attributes:
        repos: folder of each repository's revision, by both names.
        requests: every path that was asked for.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.repos: dict[tuple[str, str], Path] = {}
        self.requests: list[str] = []

    def commit(self, repo: str, revision: str) -> str:
        """A commit's id, the same for each branch and for itself."""
        return hashlib.sha1(f"{repo}@{revision}".encode(), usedforsecurity=False).hexdigest()

    def find(self, repo: str, revision: str) -> tuple[str, Path] | None:
        """The commit and the folder of a branch or commit."""
        for (name, branch), folder in self.repos.items():
            commit = self.commit(name, branch)
            if name == repo and revision in (branch, commit):
                return commit, folder
        return None

    def files(self, repo: str) -> set[str]:
        """The files of a repository that were asked for."""
        return {path.rpartition("/")[2] for path in self.requests if path.startswith(f"/{repo}/resolve/")}


class HubHandler(BaseHTTPRequestHandler):
    """Answers as huggingface.co does."""

    server: Hub

    def do_GET(self) -> None:
        """With a body."""
        path = self.path.partition("?")[0]
        self.server.requests.append(path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path):
            repo, kind, revision = match.groups()
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo, revision, kind = match.groups()
        else:
            self.answer(404, b"")
            return
        found = self.server.find(repo, revision)
        if found is None:
            known = any(name == repo for name, _ in self.server.repos)
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"})
            return
        commit, folder = found
        names = sorted(file.name for file in folder.iterdir())
        if kind == "revision":
            info = {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in names]}
            self.answer(200, json.dumps(info).encode())
        elif kind == "tree":
            tree = [
                {"type": "file", "path": name, "oid": name, "size": (folder / name).stat().st_size} for name in names
            ]
            self.answer(200, json.dumps(tree).encode())
        elif (folder / kind).is_file():
            content = (folder / kind).read_bytes()
            etag = hashlib.sha1(content, usedforsecurity=False).hexdigest()
            self.answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})
        else:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})

    def do_HEAD(self) -> None:
        """Without one."""
        self.do_GET()

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Send it, as far as it was asked for."""
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A hub, empty at first."""
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run_with_hub(
    arguments: list[str], hub: Hub, cache: Path, *, offline: bool = False
) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, for the hub's client reads its settings when it is imported."""
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(cache),
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": str(int(offline)),
        "PATH": "",
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=cache, capture_output=True, text=True, check=False)


LOAD = """
import sys, torch
from vlmembed.towers import load_tower
for argument in sys.argv[1:]:
    name, _, revision = argument.partition("@")
    tower = load_tower(name, revision=revision or None, dtype=torch.float32, device=torch.device("cpu"))
    print(tower.weights_sha256)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Downloads:
    """Two towers, loaded from a hub and then from its cache.

    Attributes:
        sharded, pickled: the models as the hub has them: `some/sharded`, and revision `v2` of `some/pickled`.
        cache: where they were downloaded to.
        hashes: of the towers, as the product printed them.
        offline_hashes: the same without a hub.
        offline_requests: what was asked of the hub then.
    """

    sharded: Path
    pickled: Path
    cache: Path
    hashes: list[str]
    offline_hashes: list[str]
    offline_requests: list[str]


@pytest.fixture(scope="module")
def downloads(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Downloads:
    """One process for all that is loaded online, and one for all offline: each takes seconds to import torch."""
    root = tmp_path_factory.mktemp("hub")
    sharded, main, pickled, cache = (root / name for name in ("sharded", "main", "pickled", "cache"))
    cache.mkdir()
    tiny_checkpoint("qwen2_5_vl", sharded, max_shard_size="20KB")
    for name in ("README.md", "modeling_x.py", "tokenizer.json", "model.gguf"):
        (sharded / name).write_text("raise RuntimeError", encoding="utf-8")
    tiny_checkpoint("qwen2_vl", main)
    tiny_checkpoint("siglip", pickled)
    torch.save(load_file(pickled / WHOLE), pickled / PICKLE)
    (pickled / WHOLE).unlink()
    hub.repos |= {("some/sharded", "main"): sharded, ("some/pickled", "main"): main, ("some/pickled", "v2"): pickled}
    command = ["-c", LOAD, "some/sharded", "some/pickled@v2"]
    online = run_with_hub(command, hub, cache)
    assert online.returncode == 0, online.stderr
    num_requests = len(hub.requests)
    offline = run_with_hub(command, hub, cache, offline=True)
    assert offline.returncode == 0, offline.stderr
    return Downloads(
        sharded=sharded,
        pickled=pickled,
        cache=cache,
        hashes=online.stdout.split(),
        offline_hashes=offline.stdout.split(),
        offline_requests=hub.requests[num_requests:],
    )


def test_only_the_shards_with_tensors_of_the_tower_are_downloaded(hub: Hub, downloads: Downloads) -> None:
    where = weight_map(downloads.sharded)
    shards = {shard for name, shard in where.items() if is_of_tower(name)}
    assert shards < set(where.values())
    expected = {"config.json", "preprocessor_config.json", INDEX} | shards
    assert hub.files("some/sharded") == expected
    snapshots = downloads.cache / "models--some--sharded" / "snapshots"
    assert {path.name for path in snapshots.glob("*/*")} == expected
    assert downloads.hashes[0] == load(downloads.sharded).weights_sha256


def test_the_revision_that_was_asked_for_is_downloaded(hub: Hub, downloads: Downloads) -> None:
    assert hub.files("some/pickled") == {"config.json", "preprocessor_config.json", PICKLE}
    assert "/api/models/some/pickled/revision/v2" in hub.requests
    assert "/api/models/some/pickled/revision/main" not in hub.requests
    assert downloads.hashes[1] == load(downloads.pickled).weights_sha256


def test_what_was_downloaded_loads_without_a_hub(downloads: Downloads) -> None:
    assert downloads.offline_hashes == downloads.hashes
    assert downloads.offline_requests == []


def test_the_command_line_asks_the_hub_for_the_revision(hub: Hub, tmp_path: Path) -> None:
    """And says so when the hub does not have the model."""
    command = ["-m", "vlmembed", "encode", str(SAMPLES / "drawings"), "out.parquet", "--model", "some/tower"]
    run = run_with_hub([*command, "--revision", "v2"], hub, tmp_path)
    assert run.returncode == 1
    assert "'some/tower' is neither a built-in model (dinov2-small) nor a folder here, and the hub" in run.stderr
    assert "404" in run.stderr
    assert "Traceback" not in run.stderr
    asked = [path for path in hub.requests if "some/tower" in path]
    assert asked == ["/api/models/some/tower/revision/v2"]
