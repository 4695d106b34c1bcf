"""Of a checkpoint only the tower is read: whatever its names, shards and format, and wherever it lies."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
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
from safetensors.torch import load_file, save_file

from vlmembed.errors import ModelError
from vlmembed.towers import load_tower, open_tower
from vlmembed.towers.families import MODEL_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
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
    known = ", ".join(MODEL_TYPES)
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


@pytest.mark.parametrize("model_type", ["qwen2_vl", "kimi_k25", "siglip", "dinov2"])
@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "_attn_implementation_autoset"])
def test_an_attention_implementation_in_the_config_is_nobodys_business(
    model_type: str, key: str, tmp_path: Path
) -> None:
    tiny_checkpoint(model_type, tmp_path)
    config = read_json(tmp_path / "config.json")
    config.get("vision_config", config)[key] = "flash_attention_2"
    write_json(tmp_path / "config.json", config)
    load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_a_quantised_tower_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny_checkpoint("siglip", tmp_path)
    name = "vision_model.encoder.layers.1.mlp.fc1.weight"
    change_tensors(tmp_path, lambda tensors: tensors | {name: tensors[name].to(dtype)})
    stored = str(dtype).removeprefix("torch.")
    with pytest.raises(ModelError, match=rf"{name}' of .* is stored as {stored}: quantised towers are not supported"):
        load(tmp_path)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_load_in_float32(stored: torch.dtype, tmp_path: Path) -> None:
    model = tiny_checkpoint("clip", tmp_path)
    change_tensors(tmp_path, lambda tensors: {name: tensor.to(stored) for name, tensor in tensors.items()})
    tower = load(tmp_path)
    assert {parameter.dtype for parameter in tower.parameters()} == {torch.float32}
    embeddings = model.vision_model.embeddings
    cls, table = (
        tensor.detach().to(stored).float()
        for tensor in (embeddings.class_embedding, embeddings.position_embedding.weight)
    )
    assert torch.equal(tower.prefix[0], cls + table[0])  # added in float32


def test_shards_of_one_name_in_two_folders(tmp_path: Path) -> None:
    tiny_checkpoint("qwen2_vl", tmp_path)
    expected = load(tmp_path).weights_sha256
    tensors = load_file(tmp_path / WHOLE)
    where: dict[str, str] = {}
    for number, folder in enumerate(("a", "b")):
        part = {name: tensor for at, (name, tensor) in enumerate(sorted(tensors.items())) if at % 2 == number}
        (tmp_path / folder).mkdir()
        save_file(part, tmp_path / folder / WHOLE)
        where |= dict.fromkeys(part, f"{folder}/{WHOLE}")
    (tmp_path / WHOLE).unlink()
    write_json(tmp_path / INDEX, {"weight_map": where})
    assert load(tmp_path).weights_sha256 == expected


def test_a_blueprint_can_be_loaded_again(tmp_path: Path) -> None:
    tiny_checkpoint("qwen3_vl", tmp_path)
    blueprint = open_tower(str(tmp_path))
    first, second = (blueprint.load(dtype=torch.float32, device=CPU) for _ in range(2))
    assert first.weights_sha256 == second.weights_sha256


@pytest.mark.parametrize(
    ("model_type", "file", "changes"),
    [
        ("siglip", "preprocessor_config.json", {"rescale_factor": "x"}),
        ("clip", "preprocessor_config.json", {"crop_size": {}, "image_mean": 3}),
        ("glm4v", "preprocessor_config.json", {"temporal_patch_size": 0}),
        ("qwen3_vl", "preprocessor_config.json", {"size": {"shortest_edge": -5, "longest_edge": 9000}}),
        ("kimi_k25", "preprocessor_config.json", {"media_proc_cfg": {"in_patch_limit": -1}}),
        ("paddleocr_vl", "config.json", {"text_config": "x"}),
        ("clip", "config.json", {"projection_dim": "x"}),
        ("clip", "config.json", {"architectures": [1]}),
        ("qwen2_vl", "config.json", {"vision_config": {"spatial_merge_size": 0}}),
        ("qwen2_vl", "config.json", {"vision_config": {"num_heads": 0}}),
        ("siglip", "config.json", {"vision_config": []}),
    ],
)
def test_settings_that_cannot_be_are_errors_of_the_model(
    model_type: str, file: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    tiny_checkpoint(model_type, tmp_path)
    content = read_json(tmp_path / file)
    nested = {name: value for name, value in changes.items() if isinstance(value, dict) and name in content}
    merged = {name: content[name] | value for name, value in nested.items() if value}
    write_json(tmp_path / file, content | changes | merged)
    with pytest.raises(ModelError):
        load(tmp_path)
