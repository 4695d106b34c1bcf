"""Every family's tower on packs, against transformers' own class on one image at a time.

Random weights in the published shapes, with two or three layers: these are tests of structure, not of quality. The full
depth is marked ``slow``.
"""

from __future__ import annotations

import copy
import importlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from checkpoints import DENSE_RECIPES, GRID_RECIPES, RECIPES, Recipe, make_model, save_model
from conftest import noise
from torch.utils._python_dispatch import TorchDispatchMode

from vlmembed.attention.layers import PackedAttention
from vlmembed.attention.metadata import DeviceMetadata, DevicePack
from vlmembed.batch import make_batch
from vlmembed.errors import ConfigError
from vlmembed.layout import ResizeRule
from vlmembed.preprocess import preprocess
from vlmembed.towers import open_tower
from vlmembed.towers.families import FAMILIES, MODEL_TYPES
from vlmembed.towers.grid import KIMI_SPELLINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from PIL.Image import Image

    from vlmembed.towers.base import Tower
    from vlmembed.towers.blueprint import Blueprint
    from vlmembed.types import PackedBatch

CPU, META = torch.device("cpu"), torch.device("meta")
CONFIGS = json.loads((Path(__file__).parent / "vision_configs.json").read_text())
SIZES = [(60, 84), (56, 56), (150, 145), (1, 1), (112, 30), (84, 126)]
DTYPES_OF_FEW = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]  # emulated here: slow

PIL_PROCESSORS = {
    "smart": "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
    "smart_glm": "glm4v.image_processing_pil_glm4v.Glm4vImageProcessorPil",
    "smart_paddle": "paddleocr_vl.image_processing_pil_paddleocr_vl.PaddleOCRVLImageProcessorPil",
    "naflex": "siglip2.image_processing_pil_siglip2.Siglip2ImageProcessorPil",
    "clip": "clip.image_processing_pil_clip.CLIPImageProcessorPil",
    "metaclip_2": "clip.image_processing_pil_clip.CLIPImageProcessorPil",
    "siglip": "siglip.image_processing_pil_siglip.SiglipImageProcessorPil",
}
"""By kind of processor, or by family where a kind has several."""


def published(model_type: str, depth: int | None = None) -> Recipe:
    """The tiny recipe with the vision tower of a published config, cut to `depth` layers if that is given.

    Types that share their module with another one have no config here, and stay as tiny as they are.
    """
    if model_type not in CONFIGS:
        return RECIPES[model_type]
    vision = {name: value for name, value in CONFIGS[model_type].items() if name != "_source"}
    for name in ("depth", "num_hidden_layers", "vt_num_hidden_layers"):
        if name in vision and depth is not None:
            vision[name] = depth
    if depth is not None:
        cut = {"fullatt_block_indexes": [1], "deepstack_visual_indexes": [0, 1]}
        vision |= {name: cut[name] for name in cut if name in vision}
    recipe = RECIPES[model_type]
    if "vision_config" not in recipe.settings:
        return replace(recipe, settings=vision)
    text = dict(recipe.settings["text_config"])
    if model_type == "kimi_k25":
        vision = {KIMI_SPELLINGS.get(name, name): value for name, value in vision.items()}
        text["hidden_size"] = vision["text_hidden_size"]
    settings = {**recipe.settings, "vision_config": vision, "text_config": text}
    if model_type == "kimi_k25":
        settings["projection_hidden_size"] = vision["mm_hidden_size"]
    if "projection_dim" in vision:
        settings["projection_dim"] = vision["projection_dim"]
    return replace(recipe, settings=settings)


def processor_of(model_type: str, recipe: Recipe) -> dict[str, Any]:
    """The recipe's image processor, with limits that keep the pictures small and, for dense towers, with their size."""
    processor: dict[str, Any] = json.loads(json.dumps(recipe.processor))
    vision = recipe.settings.get("vision_config", recipe.settings)
    if "media_proc_cfg" in processor:
        processor["media_proc_cfg"]["in_patch_limit"] = 100
    elif "min_pixels" in processor:
        processor["max_pixels"] = 150 * 150
    elif "longest_edge" in processor.get("size", {}):
        num_frames = 2 if "Glm" in processor["image_processor_type"] else 1
        processor["size"] = {"shortest_edge": num_frames * 56 * 56, "longest_edge": num_frames * 150 * 150}
    elif "max_num_patches" in processor:
        processor["max_num_patches"] = 50
    elif model_type in ("clip", "metaclip_2"):
        side = vision["image_size"]
        processor |= {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    elif model_type == "siglip":
        processor["size"] = {"height": vision["image_size"], "width": vision["image_size"]}
    return processor


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A family's transformers model, and our blueprint of the checkpoint that it saved."""

    model_type: str
    model: Any
    blueprint: Blueprint
    loaded: dict[torch.dtype, Tower] = field(default_factory=dict)
    references: dict[Any, Any] = field(default_factory=dict)
    in_dtypes: dict[torch.dtype, Case] = field(default_factory=dict)

    @property
    def outputs_deepstack(self) -> bool:
        """Whether there are inner features to compare."""
        return self.blueprint.num_deepstack > 0

    def in_dtype(self, dtype: torch.dtype) -> Case:
        """The same with its model's parameters in `dtype`; buffers, as rotary frequencies, stay in float32."""
        if dtype == torch.float32:
            return self
        if dtype not in self.in_dtypes:
            model = copy.deepcopy(self.model)
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
            self.in_dtypes[dtype] = replace(self, model=model, references={})
        return self.in_dtypes[dtype]

    def tower(self, dtype: torch.dtype = torch.float32) -> Tower:
        """Read from the checkpoint once."""
        if dtype not in self.loaded:
            self.loaded[dtype] = open_tower(self.blueprint.files.name).load(dtype=dtype, device=CPU)
        return self.loaded[dtype]

    def rule(self, mode: str | None = None) -> ResizeRule:
        """The family's own rule; our own native one is kept small."""
        layout = self.blueprint.layout
        mode = mode or layout.default_resize
        resize = layout.official if mode == "official" else layout.native
        if mode == "native" and self.model_type in ("clip", "metaclip_2", "siglip", *DINO):
            resize = layout.native.with_limits(56 * 56, 112 * 112)
        assert resize is not None
        return ResizeRule(mode=mode, resize=resize, layout=layout, max_source_pixels=10**8)

    def pack(self, images: Sequence[Image], mode: str | None = None) -> PackedBatch:
        """One pack in the given order."""
        rule = self.rule(mode)
        return make_batch([preprocess(image, row, rule) for row, image in enumerate(images)], rule.layout)


DINO = ("dinov2", "dinov2_with_registers", "dinov3_vit")


def make_case(model_type: str, recipe: Recipe, folder: Path) -> Case:
    model = make_model(recipe)
    save_model(model, folder, recipe)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor_of(model_type, recipe)))
    return Case(model_type=model_type, model=model, blueprint=open_tower(str(folder)))


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """The family of the test, in its published widths and three layers at most; one at a time is kept."""
    model_type = request.param
    depth = 3 if model_type in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe") else 2
    folder = tmp_path_factory.mktemp(model_type)
    yield make_case(model_type, published(model_type, depth), folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()


def each(model_types: Sequence[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", model_types, indirect=True, ids=str)


GRID, DENSE = list(GRID_RECIPES), list(DENSE_RECIPES)


def pictures() -> list[Image]:
    return [noise(height, width, seed) for seed, (height, width) in enumerate(SIZES)]


def run_tokens(tower: Tower, batch: PackedBatch, *, deepstack: bool = False) -> list[torch.Tensor]:
    pack = DevicePack.of(batch, CPU)
    with torch.inference_mode():
        return tower.tokens(pack.patches, pack.metadata, deepstack=deepstack)


def run_pooled(tower: Tower, batch: PackedBatch, pool: str) -> torch.Tensor:
    pack = DevicePack.of(batch, CPU)
    with torch.inference_mode():
        return tower.forward(pack.patches, pack.metadata, pool=pool)


def by_image(tokens: torch.Tensor, batch: PackedBatch) -> list[torch.Tensor]:
    patches_per_token = len(batch.patches) // len(tokens)
    return list(torch.split(tokens, [h * w // patches_per_token for h, w in batch.grid_hw.tolist()]))


def own_processor(case: Case) -> Any:  # noqa: ANN401  a transformers image processor
    """Transformers' image processor of the family that works without torchvision."""
    kind = case.blueprint.family.processor
    path = PIL_PROCESSORS[kind if kind in PIL_PROCESSORS else case.model_type]
    module, name = path.rsplit(".", 1)
    settings = {**case.blueprint.files.processor}
    settings.pop("image_processor_type", None)
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)(**settings)


def normalised(case: Case, batch: PackedBatch) -> torch.Tensor:
    """The pack's patches (S, 3, patch, patch) as an image processor would hand them to the model."""
    layout = case.blueprint.layout
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (layout.image_mean, layout.image_std))
    patches = torch.from_numpy(batch.patches).float().view(-1, 3, layout.patch_size, layout.patch_size)
    return (patches * layout.rescale_factor - mean) / std


def whole_picture(case: Case, batch: PackedBatch) -> torch.Tensor:
    """The only picture of a pack, (1, 3, height, width), put together from its patches."""
    (height, width), patch = batch.grid_hw[0].tolist(), case.blueprint.layout.patch_size
    patches = normalised(case, batch).view(height, width, 3, patch, patch)
    return patches.permute(2, 0, 3, 1, 4).reshape(1, 3, height * patch, width * patch)


def grid_reference(case: Case, image: Image) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Tokens and deepstack features of one image from the whole model's ``get_image_features``, computed once."""
    if image.tobytes() not in case.references:
        case.references[image.tobytes()] = image_features(case, image)
    tokens, deepstack = case.references[image.tobytes()]
    return tokens, deepstack


def image_features(case: Case, image: Image) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What `grid_reference` keeps."""
    if case.model_type == "kimi_k25":  # its processor wants torchvision; the patches are tested in test_resize
        batch = case.pack([image])
        pixels, grid = normalised(case, batch), torch.tensor([[1, *batch.grid_hw[0].tolist()]])
    else:
        inputs = own_processor(case)(images=image, return_tensors="pt")
        pixels, grid = inputs["pixel_values"], inputs["image_grid_thw"]
    with torch.inference_mode():
        output = case.model.get_image_features(pixels.to(case.model.dtype), grid, return_dict=True)
    return output.pooler_output[0], [level[0] for level in getattr(output, "deepstack_features", None) or []]


def dense_reference(case: Case, image: Image, mode: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Patch tokens (S, C) and the pooled vector (C,) of one image from transformers' vision model, computed once."""
    key = image.tobytes(), mode
    if key not in case.references:
        case.references[key] = vision_output(case, image, mode)
    tokens, pooled = case.references[key]
    return tokens, pooled


def vision_output(case: Case, image: Image, mode: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What `dense_reference` keeps."""
    tower = getattr(case.model, "vision_model", case.model)
    dtype = case.model.dtype
    with torch.inference_mode():
        if case.model_type == "siglip2":
            inputs = own_processor(case)(images=image, return_tensors="pt")
            output = tower(**{**inputs, "pixel_values": inputs["pixel_values"].to(dtype)})
            return output.last_hidden_state[0, : int(inputs["pixel_attention_mask"].sum())], output.pooler_output[0]
        if mode == "official" and case.model_type not in DINO:
            pixels, options = own_processor(case)(images=image, return_tensors="pt")["pixel_values"], {}
        else:
            pixels = whole_picture(case, case.pack([image], mode))
            options = {} if case.model_type in DINO else {"interpolate_pos_encoding": True}
        output = tower(pixel_values=pixels.to(dtype), **options)
    tokens = output.last_hidden_state[0, case.blueprint.layout.num_prefix_tokens :]
    return tokens, output.pooler_output[0]


def worst_cosine(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float(F.cosine_similarity(found.float(), expected.float(), dim=-1).min())


@each(GRID)
@pytest.mark.parametrize("dtype", DTYPES_OF_FEW, ids=["float32", "bfloat16"])
def test_tokens_are_what_the_language_model_is_fed(case: Case, dtype: torch.dtype) -> None:
    least = 0.99999 if dtype == torch.float32 else 0.999
    images = pictures()
    batch = case.pack(images)
    found = run_tokens(case.tower(dtype), batch, deepstack=case.outputs_deepstack)
    assert len(found) == 1 + case.blueprint.num_deepstack
    reference = case.in_dtype(dtype)
    for number, image in enumerate(images):
        tokens, deepstack = grid_reference(reference, image)
        for ours, theirs in zip(found, [tokens, *deepstack], strict=True):
            assert worst_cosine(by_image(ours, batch)[number], theirs) >= least, SIZES[number]


@each(GRID)
@pytest.mark.parametrize("dtype", DTYPES_OF_FEW, ids=["float32", "bfloat16"])
def test_mean_is_over_the_merged_tokens(case: Case, dtype: torch.dtype) -> None:
    images, reference = pictures(), case.in_dtype(dtype)
    found = run_pooled(case.tower(dtype), case.pack(images), "mean")
    expected = torch.stack([grid_reference(reference, image)[0].float().mean(dim=0) for image in images])
    assert worst_cosine(found, expected) >= (0.99999 if dtype == torch.float32 else 0.999)
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert found.shape[1] == case.blueprint.pool_widths["mean"] == case.blueprint.token_width


@each(DENSE)
@pytest.mark.parametrize("dtype", DTYPES_OF_FEW, ids=["float32", "bfloat16"])
def test_patch_tokens_are_the_last_hidden_state(case: Case, dtype: torch.dtype) -> None:
    least = 0.99999 if dtype == torch.float32 else 0.999
    images = pictures()
    tower = case.tower(dtype)
    reference = case.in_dtype(dtype)
    for mode in ("native", "official") if dtype == torch.float32 else ("native",):
        batch = case.pack(images, mode)
        found = by_image(run_tokens(tower, batch)[0], batch)
        for number, image in enumerate(images):
            tokens, _ = dense_reference(reference, image, mode)
            assert worst_cosine(found[number], tokens) >= least, (mode, SIZES[number])


@each(DENSE)
@pytest.mark.parametrize("dtype", DTYPES_OF_FEW, ids=["float32", "bfloat16"])
def test_pooled_vectors_are_transformers_own(case: Case, dtype: torch.dtype) -> None:
    images, reference = pictures(), case.in_dtype(dtype)
    tower, batch = case.tower(dtype), case.pack(images, "native")
    tokens, pooled = zip(*(dense_reference(reference, image, "native") for image in images), strict=True)
    expected = {"mean": torch.stack([each.float().mean(dim=0) for each in tokens])}
    expected["head" if case.model_type.startswith("siglip") else "cls"] = torch.stack(pooled)
    if case.model_type in ("clip", "metaclip_2"):
        expected["head"] = reference.model.visual_projection(expected["cls"]).detach()
    assert set(expected) == set(case.blueprint.pool_widths)
    for pool, vectors in expected.items():
        found = run_pooled(tower, batch, pool)
        assert found.shape[1] == case.blueprint.pool_widths[pool]
        assert worst_cosine(found, vectors) >= (0.99999 if dtype == torch.float32 else 0.999), pool
        if dtype == torch.float32:
            torch.testing.assert_close(found, vectors, rtol=1e-4, atol=1e-4 * float(vectors.abs().max()))


@each([model_type for model_type in DENSE if model_type not in DINO])
def test_the_head_is_the_whole_models_image_features(case: Case) -> None:
    images = pictures()
    found = run_pooled(case.tower(), case.pack(images, "official"), "head")
    with torch.inference_mode():
        inputs = own_processor(case)(images=images, return_tensors="pt")  # padded by transformers, where sizes differ
        expected = case.model.get_image_features(**inputs, return_dict=True).pooler_output
    assert worst_cosine(found, expected) >= 0.99999


@each([*GRID, *DENSE])
def test_swapping_a_neighbour_changes_nothing(case: Case) -> None:
    tower, images = case.tower(), pictures()
    before = by_image(run_tokens(tower, (batch := case.pack(images, "native")))[0], batch)
    same_size, other_size = images.copy(), images.copy()
    same_size[2] = noise(*SIZES[2], seed=99)
    other_size[2] = noise(90, 170, seed=99)
    for swapped, tolerance in ((same_size, 0.0), (other_size, 1e-5)):
        batch = case.pack(swapped, "native")
        after = by_image(run_tokens(tower, batch)[0], batch)
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            if number == 2:
                assert old.shape != new.shape or not torch.equal(old, new)
            else:
                assert float((old - new).abs().max()) <= tolerance * float(old.abs().max()), number


class SyncCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Counts operations that make the host wait for a device's values."""

    NAMES = ("_local_scalar_dense", "nonzero", "item", "repeat_interleave.Tensor", "unique", "masked_select")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  torch's own signature
        name = str(func).removeprefix("aten.")
        self.count += any(name.startswith(each) for each in self.NAMES)
        return func(*args, **(kwargs or {}))


@each([*GRID, *DENSE])
def test_a_forward_makes_no_host_sync(case: Case) -> None:
    """It runs on the meta device, where reading a value raises, and counts none on the CPU."""
    tower, batch = case.tower(), case.pack(pictures(), "native")
    deepstack = case.outputs_deepstack
    with SyncCounter() as ours:
        run_tokens(tower, batch, deepstack=deepstack)
        for pool in case.blueprint.pool_widths:
            run_pooled(tower, batch, pool)
    assert ours.count == 0
    tower, pack = copy.deepcopy(tower).to(META), DevicePack.of(batch, META)
    patches, metadata = pack.patches, pack.metadata
    num_merged = sum(case.blueprint.layout.num_merged((h, w)) for h, w in batch.grid_hw.tolist())
    for level in tower.tokens(patches, metadata, deepstack=deepstack):
        assert level.shape == (num_merged, case.blueprint.token_width)
        assert level.device == META
    for pool, width in case.blueprint.pool_widths.items():
        assert tower(patches, metadata, pool=pool).shape == (len(SIZES), width)


@each(["qwen2_5_vl", "qwen3_vl", "kimi_k25", "paddleocr_vl"])
def test_transformers_own_forward_does_sync(case: Case) -> None:
    """The counter sees what it is there to see."""
    with SyncCounter() as theirs:
        image_features(case, pictures()[0])
    assert theirs.count > 0


@each([*GRID, *DENSE])
def test_every_layer_gets_the_one_metadata_object(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DeviceMetadata] = []
    forward = PackedAttention.forward

    def watched(self: PackedAttention, *inputs: Any, metadata: DeviceMetadata, **rest: Any) -> Any:  # noqa: ANN401  as there
        seen.append(metadata)
        return forward(self, *inputs, metadata=metadata, **rest)

    monkeypatch.setattr(PackedAttention, "forward", watched)
    tower, batch = case.tower(), case.pack(pictures()[:2])
    pack = DevicePack.of(batch, CPU)
    tower.tokens(pack.patches, pack.metadata)
    assert len(seen) == len(tower.layers)
    assert all(each is pack.metadata for each in seen)


@each(["qwen2_5_vl"])
def test_only_the_full_layers_see_the_whole_image(case: Case) -> None:
    tower = case.tower()
    windowed = [layer.attn.windowed for layer in tower.layers]  # type: ignore[union-attr]
    assert windowed == [True, False, True]
    metadata = case.pack(pictures()).metadata
    assert metadata.windows is not None
    assert metadata.windows.max_seqlen <= 64 < metadata.segments.max_seqlen


def test_every_family_has_a_config_here_and_every_whole_model_a_recipe() -> None:
    tested = {MODEL_TYPES[model_type].title for model_type in CONFIGS}
    assert tested == {family.title for family in FAMILIES}
    assert len(MODEL_TYPES) == sum(len(family.model_types) for family in FAMILIES)
    towers_alone = {model_type for model_type in MODEL_TYPES if "_vision" in model_type}
    assert set(MODEL_TYPES) - towers_alone == set(RECIPES)


@each(["dinov2", "qwen3_vl"])
def test_a_pooled_vector_that_a_tower_lacks_is_refused(case: Case) -> None:
    with pytest.raises(ConfigError, match=r"pool 'head' is not possible with this tower: use (cls or )?mean"):
        run_pooled(case.tower(), case.pack(pictures()), "head")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_vl", "kimi_k25", "siglip2"])
def test_full_size_equals_transformers(model_type: str, tmp_path: Path) -> None:
    case = make_case(model_type, published(model_type), tmp_path)
    images = pictures()
    batch = case.pack(images)
    for dtype, least in ((torch.float32, 0.99999), (torch.bfloat16, 0.999)):
        found = run_tokens(case.tower(dtype), batch, deepstack=case.outputs_deepstack)
        reference: Callable[[Case, Image], Any] = grid_reference if model_type in GRID else dense_reference
        in_dtype = case.in_dtype(dtype)
        for number, image in enumerate(images):
            tokens, rest = reference(in_dtype, image)
            expected = [tokens, *rest] if model_type in GRID else [tokens]
            for ours, theirs in zip(found, expected, strict=True):
                assert worst_cosine(by_image(ours, batch)[number], theirs) >= least, (dtype, SIZES[number])
            if model_type == "siglip2":
                pooled = run_pooled(case.tower(dtype), batch, "head")[number]
                assert worst_cosine(pooled, rest) >= least, (dtype, SIZES[number])
            else:
                pooled = run_pooled(case.tower(dtype), batch, "mean")[number]
                assert worst_cosine(pooled, tokens.float().mean(dim=0)) >= least, (dtype, SIZES[number])
    before = by_image(run_tokens(case.tower(), batch)[0], batch)
    images[2] = noise(*SIZES[2], seed=99)
    after = by_image(run_tokens(case.tower(), case.pack(images))[0], batch)
    assert [torch.equal(old, new) for old, new in zip(before, after, strict=True)] == [
        True,
        True,
        False,
        True,
        True,
        True,
    ]
