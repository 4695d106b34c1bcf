"""The layers by OpenVINO give what torch's give; and the last layer for one token of each image gives that token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
import torch
from conftest import noise
from fakes import CPU, encode_all, make_encoder, random_pack, tower_of
from test_memory import config, encoder, rule

import vlmembed
from vlmembed import tuning
from vlmembed.attention.metadata import DevicePack
from vlmembed.config import EncodeConfig
from vlmembed.errors import ConfigError, MissingExtraError
from vlmembed.towers import openvino_layers
from vlmembed.towers.openvino_layers import OpenVinoLayers, check_openvino
from vlmembed.tuning import settle
from vlmembed.variants import Variants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from vlmembed.encoder import Encoder
    from vlmembed.layout import ResizeRule
    from vlmembed.towers.base import Tower

__all__ = ["encoder", "rule", "tower_of"]

GRIDS = [(2, 3), (2, 3), (4, 1), (3, 3), (1, 1)]
"""In merge blocks: a run of two equal pictures, and others."""


@pytest.fixture
def plain(tower_of: Callable[[str], Tower]) -> Iterator[Callable[[str], Tower]]:
    """Towers that are torch's again afterwards."""
    used = []

    def of(model_type: str) -> Tower:
        used.append(tower_of(model_type).use_attention("sdpa").use_stack(None))
        return used[-1]

    yield of
    for tower in used:
        tower.use_stack(None)


def pooled(tower: Tower, pool: str) -> torch.Tensor:
    pack = DevicePack.of(random_pack(GRIDS, tower.layout), CPU)
    with torch.inference_mode():
        vectors: torch.Tensor = tower(pack.patches, pack.metadata, pool=pool)
    return vectors


@pytest.mark.parametrize("backend", ["sdpa", "cpu"])
@pytest.mark.parametrize("model_type", ["clip", "dinov2", "dinov2_with_registers", "dinov3_vit"])
def test_the_last_layer_for_the_first_token_gives_what_the_whole_layer_gives(
    model_type: str, backend: str, plain: Callable[[str], Tower], monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = plain(model_type).use_attention(backend)
    pool = "head" if "head" in tower.pool_widths else "cls"
    short = pooled(tower, pool)

    def whole(tower: Tower, hidden_TC: torch.Tensor, metadata: Any, rope: Any) -> torch.Tensor:  # noqa: ANN401
        hidden_TC, *_ = tower.run_layers(hidden_TC, metadata, rope)
        return hidden_TC[metadata.segments.cu_seqlens[:-1]]

    monkeypatch.setattr(type(tower), "first_of_layers", whole)
    torch.testing.assert_close(short, pooled(tower, pool), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("model_type", "pool"),
    [("dinov2", "cls"), ("dinov2", "mean"), ("dinov3_vit", "cls"), ("siglip", "head")],
)
def test_pooled_vectors_are_torchs(model_type: str, pool: str, plain: Callable[[str], Tower]) -> None:
    tower = plain(model_type)
    expected = pooled(tower, pool)
    assert tower.use_stack(OpenVinoLayers(tower, "fp32")) is tower
    torch.testing.assert_close(pooled(tower, pool), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "kimi_k25"])
def test_tokens_and_the_inner_layers_features_are_torchs(model_type: str, plain: Callable[[str], Tower]) -> None:
    tower = plain(model_type)
    pack = random_pack(GRIDS, tower.layout)
    (expected,) = encode_all(make_encoder(tower), [pack])
    tower.use_stack(OpenVinoLayers(tower, "fp32"))
    (found,) = encode_all(make_encoder(tower), [pack])
    assert found.vectors.keys() == expected.vectors.keys()
    for name, values in found.vectors.items():
        torch.testing.assert_close(
            torch.from_numpy(values), torch.from_numpy(expected.vectors[name]), rtol=1e-3, atol=1e-4
        )


def test_half_precision_layers_are_converted_in_float32(plain: Callable[[str], Tower]) -> None:
    """Weights that came in bf16 are exact in float32; the hidden states come back in the dtype that they had."""
    tower = plain("dinov2")
    stack = OpenVinoLayers(tower, "fp32")
    pack = DevicePack.of(random_pack(GRIDS, tower.layout), CPU)
    width = tower.patch_weight.shape[0]
    hidden = torch.randn(int(pack.metadata.segments.cu_seqlens[-1]), width).bfloat16()
    found = stack.run(hidden, pack.metadata, None, taps=())[0]
    assert found.dtype == torch.bfloat16
    with torch.inference_mode():
        expected = tower.run_layers(hidden.float(), pack.metadata, None)[0]
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


def test_it_is_for_the_cpu_for_what_the_processor_computes_and_without_windows() -> None:
    check_openvino("fp32", CPU)
    with pytest.raises(ConfigError, match="--runtime openvino is for the CPU, and the device is cuda:1: use --runtime"):
        check_openvino("fp32", torch.device("cuda:1"))
    with pytest.raises(ConfigError, match="knows no window attention, which this tower has: use --runtime torch"):
        check_openvino("fp32", CPU, windowed=True)


def test_a_dtype_that_the_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Core:
        def get_property(self, *_: str) -> list[str]:
            return ["FP32", "INT8"]

    monkeypatch.setattr(openvino_layers, "_core", Core)
    with pytest.raises(
        ConfigError, match="computes no bf16 on this processor, which does FP32, INT8: use --dtype fp32"
    ):
        check_openvino("bf16", CPU)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("vlmembed.towers.openvino_layers.importlib.import_module", missing)
    with pytest.raises(MissingExtraError, match=r"--runtime openvino needs OpenVINO .*: pip install openvino"):
        check_openvino("fp32", CPU)


def test_layers_that_cannot_be_converted_are_a_clear_error(
    plain: Callable[[str], Tower], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        msg = "No conversion rule\nand much more"
        raise RuntimeError(msg)

    monkeypatch.setattr(openvino_layers, "run_layer", broken)
    tower = plain("dinov2")
    tower.use_stack(OpenVinoLayers(tower, "fp32"))
    with pytest.raises(ConfigError, match=r"openvino cannot run this tower \(.*\): use --runtime torch"):
        pooled(tower, "cls")


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Told instead of measured: `job` seconds, and OpenVINO that is `gain` times faster. Nothing is converted."""
    values = {"job": 1e9, "gain": 2.0}
    monkeypatch.setattr(Variants, "job_seconds", lambda *_: values["job"])
    monkeypatch.setattr(Variants, "seconds", lambda *_: {"plain": values["gain"], "way": 1.0})
    return values


def test_auto_takes_openvino_in_a_long_run_where_it_is_faster(
    encoder: Encoder, rule: ResizeRule, timed: dict[str, float]
) -> None:
    settings = config(runtime="auto", compile="off", cuda_graphs="off")
    settled, reasons = settle(settings, encoder, rule=rule, num_rows=10**6)
    assert settled.runtime == "openvino"
    assert reasons["runtime"].startswith("2.00 times as fast as without on a pack of ")
    timed["gain"] = 1.04
    settled, _ = settle(settings, encoder, rule=rule, num_rows=10**6)
    assert settled.runtime == "torch"
    timed |= {"gain": 2.0, "job": tuning.MIN_SECONDS_TO_CONVERT - 1}
    settled, reasons = settle(settings, encoder, rule=rule, num_rows=10**6)
    assert (settled.runtime, reasons["runtime"]) == ("torch", "about 599 s are too short a run to pay for it")


def test_auto_is_torch_where_openvino_cannot_be(
    encoder: Encoder, rule: ResizeRule, timed: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert timed["gain"] > 1
    settings = config(runtime="auto", compile="off", cuda_graphs="off")
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "openvino_version", lambda: None)
        assert settle(settings, encoder, rule=rule, num_rows=10**6)[0].runtime == "torch"

    def refuse(*_: object, **__: object) -> None:
        msg = "not on this processor"
        raise ConfigError(msg)

    monkeypatch.setattr(tuning, "check_openvino", refuse)
    settled, reasons = settle(settings, encoder, rule=rule, num_rows=10**6)
    assert (settled.runtime, reasons["runtime"]) == ("torch", "it failed: not on this processor")


def test_auto_goes_on_with_torch_where_a_trial_fails(
    encoder: Encoder, rule: ResizeRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what comes after it runs the layers once more: compiling, in a run that is long enough."""

    def broken(*_: object, **__: object) -> None:
        msg = "no conversion rule\nand much more"
        raise RuntimeError(msg)

    monkeypatch.setattr(tuning, "MIN_SECONDS_TO_CONVERT", 0.0)
    batch = random_pack(GRIDS, encoder.layout)
    for place, reason in (
        ("_convert", "it failed: no conversion rule"),
        ("run_layer", "it failed: --runtime openvino cannot run"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(openvino_layers, place, broken)
            settled, reasons = settle(config(runtime="auto"), encoder, rule=rule, num_rows=10**6)
            assert settled.runtime == "torch"
            assert reasons["runtime"].startswith(reason)
            assert reasons["compile"].endswith("too short a run to pay for it")
            assert len(encoder.encode(batch).rows) == len(GRIDS)


def test_a_run_by_openvino_is_recorded_and_verified_by_torch(tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for row in range(6):
        noise(30 + row, 60 - row, seed=row).save(folder / f"{row}.png")
    settings: dict[str, Any] = {"inputs": (str(folder),), "model": str(tiny_model), "dtype": "fp32"}
    torch_run, openvino_run = (str(tmp_path / f"{name}.parquet") for name in ("torch", "openvino"))
    vlmembed.encode(EncodeConfig(output=torch_run, **settings))
    vlmembed.encode(EncodeConfig(output=openvino_run, runtime="openvino", **settings))
    facts = vlmembed.inspect(openvino_run).provenance
    assert facts["backend"]["runtime"] == f"openvino {openvino_layers.openvino_version()}"
    assert facts["backend"]["attention"] == "openvino"
    vectors = [torch.tensor(pq.read_table(path)["embedding"].to_pylist()) for path in (torch_run, openvino_run)]
    torch.testing.assert_close(vectors[0], vectors[1], rtol=1e-4, atol=1e-5)
    assert vlmembed.verify(openvino_run).is_good
    with pytest.raises(ConfigError, match="--compile on is of --runtime torch"):
        vlmembed.encode(EncodeConfig(output=str(tmp_path / "x.parquet"), runtime="openvino", compile="on", **settings))
