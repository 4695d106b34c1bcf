"""`--emit tokens`: what a language model would be fed, row by row in Parquet; and outputs that a tower lacks."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from checkpoints import TEXT_WIDTH, tiny_checkpoint
from click.testing import CliRunner
from conftest import noise
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import vlmembed
from vlmembed.assembly import assemble
from vlmembed.cli import cli
from vlmembed.config import EncodeConfig
from vlmembed.encoder import Encoder
from vlmembed.errors import ConfigError, ModelError, NothingEmbeddedError, OutputError
from vlmembed.inspection.reading import inspect
from vlmembed.parts import PartStore
from vlmembed.schema import read_provenance, with_provenance
from vlmembed.towers.blueprint import Blueprint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vlmembed.report import RunReport

SIZES = [(90, 120), (64, 64), (13, 300), (1, 1), (200, 150)]
LEVELS = ("tokens", "deepstack_0", "deepstack_1")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A tiny Qwen3-VL, and its checkpoint."""
    folder = tmp_path_factory.mktemp("qwen3_vl")
    return tiny_checkpoint("qwen3_vl", folder), folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of five sizes, a copy of one of them, and a broken one."""
    folder = tmp_path_factory.mktemp("pictures")
    for number, (height, width) in enumerate(SIZES):
        noise(height, width, number).save(folder / f"{number}.png")
    (folder / "5-copy.png").write_bytes((folder / "0.png").read_bytes())
    (folder / "6-broken.png").write_bytes((folder / "0.png").read_bytes()[:200])
    return folder


def run(pictures: Path, output: Path, model: Path, **settings: Any) -> RunReport:  # noqa: ANN401  any setting
    return vlmembed.encode(
        EncodeConfig(inputs=(pictures,), output=output, model=model, dtype="fp32", max_error_rate=1, **settings)
    )


def arrays(table: pa.Table, name: str) -> list[np.ndarray]:
    return [np.array(value, np.float32) for value in table[name].to_pylist()]


def expected(model: Any, folder: Path, picture: Path) -> list[np.ndarray]:  # noqa: ANN401  a transformers model
    """Tokens and deepstack features of the whole model for one picture."""
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings.pop("image_processor_type")
    inputs = Qwen2VLImageProcessorPil(**settings)(images=Image.open(picture).convert("RGB"), return_tensors="pt")
    with torch.inference_mode():
        output = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
    return [output.pooler_output[0].numpy(), *(level[0].numpy() for level in output.deepstack_features)]


@pytest.mark.parametrize(("stored", "tolerance"), [("auto", 2e-3), ("float32", 1e-5)])
def test_tokens_and_deepstack_are_the_whole_models(
    stored: str, tolerance: float, qwen: tuple[Any, Path], pictures: Path, tmp_path: Path
) -> None:
    model, folder = qwen
    output = tmp_path / "out.parquet"
    report = run(pictures, output, folder, emit="tokens", deepstack=True, embedding_dtype=stored)
    assert (report.num_rows, report.num_embedded, report.num_duplicates, report.num_failed) == (7, 5, 1, 1)
    table = pq.read_table(output)
    value = pa.float16() if stored == "auto" else pa.float32()
    for name in LEVELS:
        assert table.schema.field(name).type == pa.list_(pa.list_(value, TEXT_WIDTH))
    assert table["id"].to_pylist() == ["0.png", "1.png", "2.png", "3.png", "4.png", "5-copy.png"]
    for level, name in enumerate(LEVELS):
        found = arrays(table, name)
        for number in range(len(SIZES)):
            reference = expected(model, folder, pictures / f"{number}.png")[level]
            assert found[number].shape == reference.shape
            scale = float(np.abs(reference).max())
            np.testing.assert_allclose(found[number], reference, atol=tolerance * scale)
        np.testing.assert_array_equal(found[5], found[0])
    grids = np.stack([table["grid_h"].to_numpy(), table["grid_w"].to_numpy()], axis=1)
    assert [len(tokens) for tokens in arrays(table, "tokens")] == (grids.prod(axis=1) // 4).tolist()
    facts = read_provenance(table.schema, "x")
    assert facts["fingerprint"]["emit"] == "tokens"
    assert facts["fingerprint"]["normalize"] is False
    assert facts["model"]["aligned_with_text"] is False


def test_other_readers_open_tokens(qwen: tuple[Any, Path], pictures: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    run(pictures, output, qwen[1], emit="tokens", embedding_dtype="float32")
    counts = [len(tokens) for tokens in arrays(pq.read_table(output), "tokens")]
    assert pl.read_parquet(output)["tokens"].list.len().to_list() == counts
    assert duckdb.read_parquet(str(output)).project("len(tokens)").fetchall() == [(count,) for count in counts]
    run(pictures, tmp_path / "half.parquet", qwen[1], emit="tokens")
    assert pl.read_parquet(tmp_path / "half.parquet")["tokens"].list.len().to_list() == counts
    assert len(duckdb.read_parquet(str(tmp_path / "half.parquet")).fetchall()) == len(counts)


def test_tokens_survive_a_stop_and_a_late_duplicate(
    qwen: tuple[Any, Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, stopped = tmp_path / "a.parquet", tmp_path / "b.parquet"
    settings: dict[str, Any] = {"emit": "tokens", "deepstack": True, "rows_per_part": 2}
    run(pictures, undisturbed, qwen[1], **settings)
    commit = PartStore.commit

    def failing(self: PartStore, record: Any, *rest: Any) -> None:  # noqa: ANN401  as there
        if record.number == 2:
            raise KeyboardInterrupt
        commit(self, record, *rest)

    monkeypatch.setattr(PartStore, "commit", failing)
    with pytest.raises(KeyboardInterrupt):
        run(pictures, stopped, qwen[1], **settings)
    monkeypatch.undo()
    assert run(pictures, stopped, qwen[1], **settings).num_resumed == 4
    assert pq.read_table(stopped).equals(pq.read_table(undisturbed))


def test_row_groups_are_bounded_by_bytes(
    qwen: tuple[Any, Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlmembed.assembly.MAX_TOKEN_GROUP_BYTES", 4096)
    run(pictures, tmp_path / "out.parquet", qwen[1], emit="tokens")
    assert pq.read_metadata(tmp_path / "out.parquet").num_row_groups > 1


def test_a_value_beyond_half_fails_its_row(
    qwen: tuple[Any, Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Encoder.load.__func__  # type: ignore[attr-defined]

    def amplified(cls: type[Encoder], *inputs: Any) -> Encoder:  # noqa: ANN401  as there
        encoder: Encoder = load(cls, *inputs)
        plain = encoder.tower.features
        encoder.tower.features = lambda *inputs, **options: [  # type: ignore[method-assign]
            tokens * 1e6 for tokens in plain(*inputs, **options)
        ]
        return encoder

    monkeypatch.setattr(Encoder, "load", classmethod(amplified))
    report = run(pictures, tmp_path / "wide.parquet", qwen[1], emit="tokens", embedding_dtype="float32")
    assert report.codes == {"truncated": 1}
    with pytest.raises(vlmembed.errors.NothingEmbeddedError):
        run(pictures, tmp_path / "half.parquet", qwen[1], emit="tokens")
    errors = pq.read_table(tmp_path / "half.errors.parquet").to_pylist()
    assert [row["code"] for row in errors] == ["non_finite"] * 6 + ["truncated"]
    assert "beyond --embedding-dtype" in errors[0]["message"]


def test_half_precision_embeddings(qwen: tuple[Any, Path], pictures: Path, tmp_path: Path) -> None:
    run(pictures, tmp_path / "full.parquet", qwen[1])
    run(pictures, tmp_path / "half.parquet", qwen[1], embedding_dtype="float16")
    full, half = (pq.read_table(tmp_path / f"{name}.parquet")["embedding"] for name in ("full", "half"))
    assert half.type == pa.list_(pa.float16(), TEXT_WIDTH)
    np.testing.assert_allclose(np.array(half.to_pylist(), float), np.array(full.to_pylist()), atol=1e-3)
    assert len(inspect(tmp_path / "half.parquet").nearest) == 3


def test_inspect_shows_tokens(qwen: tuple[Any, Path], pictures: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    run(pictures, output, qwen[1], emit="tokens", deepstack=True)
    found = inspect(output)
    assert found.vectors == LEVELS
    assert (found.num_rows, found.width, found.num_duplicates, found.nearest) == (6, TEXT_WIDTH, 1, [])
    assert found.num_tokens == sum(len(tokens) for tokens in arrays(pq.read_table(output), "tokens"))
    shown = CliRunner().invoke(cli, ["inspect", str(output)]).output
    assert "emit tokens, resize native" in shown
    assert "not aligned with text" in shown
    assert f"{TEXT_WIDTH} x float16, {found.num_tokens:,} tokens in all rows" in shown


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("qwen2_vl", {"pool": "head"}, r"--pool head is not possible with Qwen2-VL: use mean"),
        ("kimi_k25", {"pool": "cls"}, r"--pool cls is not possible with Kimi .*: use mean"),
        ("dinov2", {"pool": "head"}, r"--pool head is not possible with DINOv2: use cls or mean"),
        ("siglip", {"pool": "cls"}, r"--pool cls is not possible with SigLIP, .*: use head or mean"),
        ("qwen3_vl", {"pool": "mean", "emit": "tokens"}, r"--pool mean makes one vector .* leave one out"),
        ("qwen3_vl", {"deepstack": True}, r"--deepstack goes with --emit tokens"),
        ("qwen3_5", {"deepstack": True, "emit": "tokens"}, r"--deepstack is not possible with Qwen3.5"),
        ("kimi_k25", {"min_pixels": 3000}, r"--min-pixels is not possible .* never enlarges"),
        ("clip", {"resize": "official", "max_pixels": 3000}, r"--max-pixels belong to --resize native"),
        ("clip", {"max_pixels": 3000}, r"--max-pixels belong to --resize native.*add --resize native"),
        ("qwen3_vl", {"max_tokens_per_batch": 300}, r"one image can have 707 tokens.*or lower --max-pixels"),
    ],
)
def test_outputs_that_a_tower_lacks_are_usage_errors(
    model_type: str, settings: dict[str, Any], message: str, pictures: Path, tmp_path: Path
) -> None:
    tiny_checkpoint(model_type, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")  # all of it is told before weights are read
    with pytest.raises(ConfigError, match=message):
        run(pictures, tmp_path / "out.parquet", tmp_path / "model", **settings)
    assert not (tmp_path / "out.parquet").exists()


def test_a_tower_that_does_not_fit_is_told_before_loading(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint("siglip", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()

    class Memory:
        available = 1000

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    with pytest.raises(
        ModelError, match=r"parameters: its weights alone need .* GB in float32, and cpu has 0.0 GB free"
    ):
        run(pictures, tmp_path / "out.parquet", tmp_path / "model")


def test_clip_is_cropped_like_its_own_processor_and_aligned_with_text(pictures: Path, tmp_path: Path) -> None:
    tiny_checkpoint("clip", tmp_path / "model")
    run(pictures, tmp_path / "out.parquet", tmp_path / "model")
    table = pq.read_table(tmp_path / "out.parquet")
    assert set(zip(table["grid_h"].to_pylist(), table["grid_w"].to_pylist(), strict=True)) == {(5, 5)}
    facts = read_provenance(table.schema, "x")
    assert facts["fingerprint"]["resize"] == "official"
    assert (facts["fingerprint"]["pool"], facts["model"]["aligned_with_text"]) == ("head", True)
    run(pictures, tmp_path / "native.parquet", tmp_path / "model", resize="native")
    grids = pq.read_table(tmp_path / "native.parquet").select(["grid_h", "grid_w"]).to_pylist()
    assert grids[2] == {"grid_h": 1, "grid_w": 24}


PUBLISHED_LIMITS = {
    "qwen2_vl": {"min_pixels": 3136, "max_pixels": 12_845_056},
    "qwen3_vl": {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}},
    "glm4v": {"size": {"shortest_edge": 12_545, "longest_edge": 9_633_793}},
    "kimi_k25": {"media_proc_cfg": {"in_patch_limit": 16_384, "patch_limit_on_one_side": 512}},
    "clip": {},
    "dinov2": {},
}


@pytest.mark.parametrize("model_type", PUBLISHED_LIMITS)
def test_the_recorded_recipe_is_the_same_run(model_type: str, pictures: Path, tmp_path: Path) -> None:
    tiny_checkpoint(model_type, tmp_path / "model")
    settings = tmp_path / "model" / "preprocessor_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | PUBLISHED_LIMITS[model_type]))
    output = tmp_path / "out.parquet"
    run(pictures, output, tmp_path / "model")
    facts = read_provenance(pq.read_schema(output), "x")
    assert vlmembed.encode(EncodeConfig.from_toml(facts["recipe"])).already_complete
    if model_type in ("qwen2_vl", "qwen3_vl", "glm4v", "kimi_k25"):  # longer than an automatic budget
        assert facts["shape"]["max_tokens_per_batch"] == 2048
        assert "max_tokens_per_batch" not in facts["recipe"]


def test_overwriting_another_run_loads_the_tower_once(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint("siglip", tmp_path / "model")
    loads: list[str] = []
    load = Blueprint.load

    def counted(self: Blueprint, **options: Any) -> Any:  # noqa: ANN401  as there
        loads.append(self.family.title)
        return load(self, **options)

    monkeypatch.setattr(Blueprint, "load", counted)
    output = tmp_path / "out.parquet"
    monkeypatch.setattr("vlmembed.run.assemble", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(pictures, output, tmp_path / "model")
    monkeypatch.setattr("vlmembed.run.assemble", assemble)
    with pytest.raises(OutputError, match=r"pool: \"head\" there, \"mean\" now"):
        run(pictures, output, tmp_path / "model", pool="mean")
    assert len(loads) == 1  # the refusal needed no weights
    assert run(pictures, output, tmp_path / "model", pool="mean", overwrite=True).num_resumed == 0
    assert len(loads) == 2


def test_a_processor_that_is_not_understood_is_not_replaced_in_silence(pictures: Path, tmp_path: Path) -> None:
    tiny_checkpoint("clip", tmp_path / "model")
    settings = tmp_path / "model" / "preprocessor_config.json"
    known = json.loads(settings.read_text())
    settings.write_text(json.dumps(known | {"size": {"longest_edge": 80}}))
    with pytest.raises(ModelError, match=r"--resize official is not possible .*longest_edge.*use --resize native"):
        run(pictures, tmp_path / "out.parquet", tmp_path / "model")
    assert run(pictures, tmp_path / "out.parquet", tmp_path / "model", resize="native").num_embedded == 5
    settings.write_text(json.dumps(known | {"resample": None, "image_mean": None}))  # null is silence
    assert run(pictures, tmp_path / "null.parquet", tmp_path / "model").num_embedded == 5


def allocate_on_a_gpu() -> None:
    raise torch.OutOfMemoryError


def allocate_on_a_cpu() -> None:
    torch.empty(10**15)  # really refused, so that the message is torch's own


@pytest.mark.parametrize("allocate", [allocate_on_a_gpu, allocate_on_a_cpu])
def test_a_pack_that_does_not_fit_says_what_to_lower(
    allocate: Callable[[], None],
    qwen: tuple[Any, Path],
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any, **__: Any) -> None:  # noqa: ANN401  whatever it is called with
        allocate()

    monkeypatch.setattr("vlmembed.towers.grid.GridTower.features", full)
    with pytest.raises(NothingEmbeddedError, match=r"6 out_of_memory, 1 truncated"):
        run(pictures, tmp_path / "out.parquet", qwen[1])
    messages = [row["message"] for row in pq.read_table(tmp_path / "out.errors.parquet").to_pylist()]
    assert re.fullmatch(r"\d+x\d+ pixels are \d+ tokens, which .* even alone: lower --max-pixels .*", messages[0])


def test_an_output_of_an_older_version_can_be_inspected(qwen: tuple[Any, Path], pictures: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    run(pictures, output, qwen[1])
    table = pq.read_table(output)
    facts = read_provenance(table.schema, "x")
    del facts["model"]["aligned_with_text"], facts["fingerprint"]["emit"], facts["model"]["patches_per_token"]
    pq.write_table(table.cast(with_provenance(table.schema, facts)), output)
    shown = CliRunner().invoke(cli, ["inspect", str(output)], catch_exceptions=False).output
    assert "embedding: 32 x float32" in shown
