"""`--emit tokens`: what a language model would be fed, row by row in Parquet; and outputs that a tower lacks."""

from __future__ import annotations

import json
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
from vlmembed.cli import cli
from vlmembed.config import EncodeConfig
from vlmembed.encoder import Encoder
from vlmembed.errors import ConfigError, ModelError
from vlmembed.inspect import inspect
from vlmembed.parts import PartStore
from vlmembed.schema import read_provenance

if TYPE_CHECKING:
    from pathlib import Path

    from vlmembed.report import RunReport
    from vlmembed.towers.blueprint import Blueprint

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
    monkeypatch.setattr("vlmembed.parts.MAX_GROUP_BYTES", 4096)
    run(pictures, tmp_path / "out.parquet", qwen[1], emit="tokens")
    assert pq.read_metadata(tmp_path / "out.parquet").num_row_groups > 1


def test_a_value_beyond_half_fails_its_row(
    qwen: tuple[Any, Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Encoder.load.__func__  # type: ignore[attr-defined]

    def amplified(cls: type[Encoder], config: EncodeConfig, blueprint: Blueprint) -> Encoder:
        encoder: Encoder = load(cls, config, blueprint)
        plain = encoder._tower.tokens
        encoder._tower.tokens = lambda *inputs, **options: [  # type: ignore[method-assign]
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
        ("qwen2_vl", {"pool": "head"}, r"--pool head is not possible with Qwen2-VL; it has mean"),
        ("kimi_k25", {"pool": "cls"}, r"--pool cls is not possible with Kimi .*; it has mean"),
        ("dinov2", {"pool": "head"}, r"--pool head is not possible with DINOv2; it has cls, mean"),
        ("siglip", {"pool": "cls"}, r"--pool cls is not possible with SigLIP, .*; it has head, mean"),
        ("qwen3_vl", {"pool": "mean", "emit": "tokens"}, r"--pool mean makes one vector .* leave one out"),
        ("qwen3_vl", {"deepstack": True}, r"--deepstack goes with --emit tokens"),
        ("qwen3_5", {"deepstack": True, "emit": "tokens"}, r"--deepstack is not possible with Qwen3.5"),
        ("kimi_k25", {"min_pixels": 3000}, r"--min-pixels is not possible .* never enlarges"),
        ("clip", {"resize": "official", "max_pixels": 3000}, r"--max-pixels belong to --resize native"),
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
