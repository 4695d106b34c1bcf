"""What does not fit into memory is split until it does; and what a device's memory and speed decide of a run."""

from __future__ import annotations

import logging
import re
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import make_rule, noise
from fakes import (
    CPU,
    DeferredLanes,
    FakeGraphs,
    by_row,
    encode_all,
    flash_installed,
    make_encoder,
    one_thread,
    random_pack,
    random_packs,
    tower_of,
)
from torch._dynamo.utils import counters

import vlmembed
from vlmembed import calibration, tuning
from vlmembed.batch import split_batch
from vlmembed.calibration import CALIBRATION_TOKENS, MAX_PACK_TOKENS, auto_budget, calibration_batch
from vlmembed.config import EncodeConfig
from vlmembed.devices import is_out_of_memory
from vlmembed.errors import ConfigError, DeviceError, FailureCode, MissingExtraError
from vlmembed.lanes import DeviceLink, HostLink, Ticket
from vlmembed.towers import load_tower
from vlmembed.towers.base import Tower
from vlmembed.towers.dense import DenseTower
from vlmembed.tuning import settle
from vlmembed.types import Failure
from vlmembed.variants import ROUNDS, UNMEASURED_ROUNDS, Variants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from vlmembed.attention.metadata import DeviceMetadata
    from vlmembed.encoder import Encoder
    from vlmembed.lanes import Forward
    from vlmembed.layout import ResizeRule
    from vlmembed.report import RunReport
    from vlmembed.types import EmbeddingBatch, PackedBatch
    from vlmembed.variants import Way

__all__ = ["one_thread", "tower_of"]

pytestmark = pytest.mark.usefixtures("one_thread")

MIXED = [(1, 2), (3, 3), (2, 5), (1, 1), (2, 2), (1, 4), (5, 1), (2, 3)]
TOO_MANY_BYTES = 2**60


def no_room_on_a_gpu() -> NoReturn:
    msg = "CUDA out of memory. Tried to allocate 2.00 GiB"
    raise torch.OutOfMemoryError(msg)


def no_room_for_python() -> NoReturn:
    raise MemoryError


def no_room_for_torch() -> NoReturn:
    torch.empty(TOO_MANY_BYTES, dtype=torch.uint8)
    pytest.fail("this machine has an exbibyte")


SHORTAGES = {"cuda": no_room_on_a_gpu, "python": no_room_for_python, "cpu": no_room_for_torch}


@dataclass(slots=True, eq=False)
class Memory:
    """Room for so many images at a time.

    Attributes:
        held: what failed forwards have allocated before they failed.
        num_released: calls of `make_room`.
    """

    most: int
    fail: Callable[[], NoReturn] = no_room_on_a_gpu
    held: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    num_released: int = 0

    def take(self, num_images: int) -> None:
        """Fail as an allocator fails, half-way through."""
        assert all(each() is None for each in self.held), "what has failed still holds memory"
        activations = torch.zeros(1000)
        if num_images > self.most:
            self.held.append(weakref.ref(activations))
            self.fail()

    def release(self) -> None:
        """Count it."""
        self.num_released += 1


class TightHost(HostLink):
    """A CPU with so much memory."""

    def __init__(self, memory: Memory) -> None:
        self.make_room = memory.release  # type: ignore[method-assign]


class TightDevice(DeviceLink):
    """A device with so much memory, whose allocator fails when work is handed over, not when it runs."""

    def __init__(self, memory: Memory, seed: int | None) -> None:
        self.lanes = DeferredLanes(seed=seed, before=self._take)
        super().__init__(self.lanes)
        self._memory = memory
        self._num_images = 0

    def submit(self, batch: PackedBatch, *rest: Any) -> Any:  # noqa: ANN401  as there
        """Note how many images are to be computed."""
        self._num_images = len(batch.rows)
        return super().submit(batch, *rest)

    def make_room(self) -> None:
        """Nothing is on its way any more but, perhaps, the copy of the pack that does not fit."""
        assert all(job.is_done or job.lane == "in" for job in self.lanes.jobs)
        super().make_room()
        self._memory.release()

    def _take(self, lane: str) -> None:
        if lane == "compute":
            self._memory.take(self._num_images)


def tight_encoder(tower: Tower, memory: Memory, link: str, monkeypatch: pytest.MonkeyPatch) -> Encoder:
    """An encoder of CLS vectors in so much memory; `link` is ``"host"``, ``"late"`` or ``"any time"``."""
    if link != "host":
        return make_encoder(tower, "cls", link=TightDevice(memory, None if link == "late" else 1))
    features = tower.features

    def tight(patches: torch.Tensor, metadata: DeviceMetadata, **settings: Any) -> list[torch.Tensor]:  # noqa: ANN401  as the tower's
        memory.take(len(metadata.segments.cu_seqlens) - 1)
        return features(patches, metadata, **settings)

    monkeypatch.setattr(tower, "features", tight)
    return make_encoder(tower, "cls", link=TightHost(memory))


def num_splits(batch: PackedBatch, most: int, tower: Tower) -> int:
    """How often it is split until no part has more than `most` images."""
    if len(batch.rows) <= max(most, 1):
        return 0
    return 1 + sum(num_splits(half, most, tower) for half in split_batch(batch, tower.layout))


def rows_of(results: Iterable[EmbeddingBatch | Failure]) -> list[int]:
    """In the order in which they came."""
    return [
        row for result in results for row in ([result.row] if isinstance(result, Failure) else result.rows.tolist())
    ]


@pytest.mark.parametrize("shortage", SHORTAGES.values(), ids=SHORTAGES.keys())
@pytest.mark.parametrize("link", ["host", "late", "any time"])
@pytest.mark.parametrize("most", [8, 7, 4, 3, 2, 1, 0])
def test_a_pack_is_split_until_it_fits(
    most: int,
    link: str,
    shortage: Callable[[], NoReturn],
    tower_of: Callable[[str], Tower],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tower, memory = tower_of("dinov2"), Memory(most=most, fail=shortage)
    batches = random_packs([MIXED[:2], MIXED, MIXED[3:6], MIXED[:1]], tower.layout)
    expected = by_row(encode_all(make_encoder(tower, "cls", link=HostLink()), batches))
    encoder = tight_encoder(tower, memory, link, monkeypatch)
    results = list(encoder.stream(batches))
    assert rows_of(results) == list(range(14))
    found = by_row(results)
    failures = [result for result in results if isinstance(result, Failure)]
    assert len(failures) == (0 if most else 14)
    for row, vectors in found.items():
        np.testing.assert_allclose(vectors["embedding"], expected[row]["embedding"], rtol=1e-4, atol=1e-5)
    assert len(found) + len(failures) == 14
    assert encoder.num_splits == sum(num_splits(batch, most, tower) for batch in batches)
    assert memory.num_released == len(memory.held) == encoder.num_splits + len(failures)


def test_every_image_that_does_not_fit_is_a_failure(
    tower_of: Callable[[str], Tower], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tower = tower_of("dinov2")
    encoder = tight_encoder(tower, Memory(most=0), "host", monkeypatch)
    with caplog.at_level(logging.WARNING):
        failures = list(encoder.stream([random_pack([(2, 5), (3, 3)], tower.layout, first_row=5)]))
    assert failures == [
        Failure(
            row=row,
            stage="encode",
            code=FailureCode.OUT_OF_MEMORY,
            message=f"9x{height} pixels are {num_tokens} tokens, which do not fit into the memory of cpu even alone: "
            "lower --max-pixels (it goes with --resize native)",
        )
        for row, height, num_tokens in ((5, 14, 11), (6, 21, 10))
    ]
    (record,) = caplog.records
    assert record.getMessage() == (
        "a pack of 2 images and 21 tokens does not fit into the memory of cpu and is split in two: a lower "
        "--max-tokens-per-batch would spare that"
    )


@pytest.mark.parametrize("link", ["host", "late"])
def test_other_errors_are_not_taken_for_a_lack_of_memory(
    link: str, tower_of: Callable[[str], Tower], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> NoReturn:
        msg = "mat1 and mat2 shapes cannot be multiplied"
        raise RuntimeError(msg)

    tower, memory = tower_of("dinov2"), Memory(most=2, fail=fail)
    encoder = tight_encoder(tower, memory, link, monkeypatch)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        list(encoder.stream(random_packs([MIXED[:2], MIXED], tower.layout)))
    assert encoder.num_splits == memory.num_released == 0


@pytest.mark.parametrize("shortage", SHORTAGES.values(), ids=SHORTAGES.keys())
def test_every_allocator_is_understood(shortage: Callable[[], NoReturn]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        shortage()
    assert is_out_of_memory(raised.value)
    for other in (RuntimeError("CUDA error: an illegal memory access was encountered"), OSError("no space left")):
        assert not is_out_of_memory(other)


def run(inputs: Path, output: Path, model: Path, **settings: Any) -> RunReport:  # noqa: ANN401  any setting
    config = EncodeConfig(inputs=(inputs,), output=output, model=model, dtype="fp32", max_error_rate=1, **settings)
    return vlmembed.encode(config)


def test_the_one_picture_that_never_fits_is_a_row_of_the_errors(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for row in range(40):
        noise(30 + row, 60 - row, seed=row).save(folder / f"{row:02}.png")
    noise(280, 280, seed=40).save(folder / "20-large.png")
    (folder / "21-copy.png").write_bytes((folder / "21.png").read_bytes())
    settings = {"min_pixels": 196, "max_pixels": 280 * 280, "max_tokens_per_batch": 401}
    run(folder, tmp_path / "whole.parquet", tiny_model, **settings)
    features = DenseTower.features
    tried: list[tuple[int, int]] = []

    def tight(
        tower: DenseTower,
        patches: torch.Tensor,
        metadata: DeviceMetadata,
        **rest: Any,  # noqa: ANN401  as the tower's
    ) -> list[torch.Tensor]:
        tried.append((len(patches), len(metadata.segments.cu_seqlens) - 1))
        if len(patches) > 100:
            no_room_on_a_gpu()
        return features(tower, patches, metadata, **rest)

    monkeypatch.setattr(DenseTower, "features", tight)
    report = run(folder, tmp_path / "tight.parquet", tiny_model, **settings)
    assert (report.num_rows, report.num_embedded, report.num_duplicates, report.num_failed) == (42, 40, 1, 1)
    assert max(num_images for num_patches, num_images in tried if num_patches > 100) > 8
    errors = pq.read_table(tmp_path / "tight.errors.parquet").to_pylist()
    assert [(error["id"], error["stage"], error["code"]) for error in errors] == [
        ("20-large.png", "encode", "out_of_memory")
    ]
    assert "280x280 pixels are 401 tokens" in errors[0]["message"]
    whole, found = (
        {row["id"]: row for row in pq.read_table(tmp_path / name).to_pylist()}
        for name in ("whole.parquet", "tight.parquet")
    )
    assert whole.keys() - found.keys() == {"20-large.png"}
    for key, row in found.items():
        np.testing.assert_allclose(row.pop("embedding"), whole[key].pop("embedding"), atol=1e-5)
        assert row == whole[key]


class FakeMeter:
    """A device of so many free bytes, on which a token takes so many."""

    def __init__(self, free: float, per_token: float, num_tokens: int) -> None:
        self._free = int(free)
        self._peak = int(per_token * num_tokens)
        self.has_worked = False

    def free(self) -> int:
        """As told."""
        return self._free

    def peak(self, work: Callable[[], object]) -> int:
        """Let the work be done, for its memory is that of the first forward too."""
        work()
        self.has_worked = True
        return self._peak


@pytest.mark.parametrize(
    ("fitting", "expected"),
    [
        (1e9, MAX_PACK_TOKENS),
        (16_400, MAX_PACK_TOKENS),
        (16_300, 8192),
        (9000, 8192),
        (8000, 4096),
        (1000, 512),
        (3, 2),
        (0, 1),
    ],
)
def test_a_gpus_budget_is_a_power_of_two_that_fits(
    fitting: float, expected: int, tower_of: Callable[[str], Tower]
) -> None:
    tower = tower_of("dinov2")
    rule = make_rule(tower.layout)
    num_tokens = calibration_batch(rule, CALIBRATION_TOKENS).num_tokens
    meter = FakeMeter(fitting * 5000 / calibration.MEMORY_SHARE, 5000, num_tokens)
    assert auto_budget(make_encoder(tower, "cls"), rule, meter) == expected
    assert meter.has_worked


@pytest.mark.parametrize(
    ("max_pixels", "expected"),
    [(70 * 70, 2054), (14 * 14, 2048), (1000 * 196, 3 * 1001), (2047 * 196, 2048), (2048 * 196, 2048)],
)
def test_a_cpus_budget_is_whole_images(max_pixels: int, expected: int, tower_of: Callable[[str], Tower]) -> None:
    tower = tower_of("dinov2")
    rule = make_rule(tower.layout, max_pixels=max_pixels, min_pixels=196)
    budget = auto_budget(make_encoder(tower, "cls"), rule, None)
    assert budget == expected
    assert budget % rule.max_tokens_per_image == 0 or budget < rule.max_tokens_per_image


@pytest.mark.parametrize("num_tokens", [1, 26, 51, 52, 260, 4096])
def test_a_calibration_pack_has_so_many_tokens_or_one_image(num_tokens: int, tower_of: Callable[[str], Tower]) -> None:
    rule = make_rule(tower_of("dinov2").layout)
    batch = calibration_batch(rule, num_tokens)
    assert batch.num_tokens == max(1, num_tokens // 26) * 26
    assert len({tuple(grid) for grid in batch.grid_hw.tolist()}) == 1


@pytest.fixture
def encoder(tiny_model: Path) -> Encoder:
    """Of a tower of its own, which a test may compile or break."""
    return make_encoder(load_tower(str(tiny_model), dtype=torch.float32, device=CPU), "cls")


@pytest.fixture
def rule(encoder: Encoder) -> ResizeRule:
    """Of pictures of 10 tokens."""
    rule = make_rule(encoder.layout, max_pixels=42 * 42, min_pixels=42 * 42)
    assert rule.max_tokens_per_image == 10
    return rule


LONG_RUN = 10**7


def config(**settings: Any) -> EncodeConfig:  # noqa: ANN401  any setting
    values: dict[str, Any] = {"dtype": "fp32", "max_tokens_per_batch": 200, "runtime": "torch", **settings}
    return EncodeConfig(inputs=("in",), output="out.parquet", **values)


@dataclass(slots=True)
class Stopwatch:
    """Stands in for `Variants.seconds`: uses the ways in turn, and says how long they took.

    Attributes:
        gains: of what is measured first, second, and so on.
        measured: the ways, as they were asked for.
    """

    gains: list[float]
    measured: list[Mapping[str, Way]] = field(default_factory=list)

    def seconds(self, variants: Variants, ways: Mapping[str, Way]) -> dict[str, float]:
        """The last way of all stays in use, as it does there."""
        for way in ways.values():
            variants.use(**way)
        self.measured.append(ways)
        return {"plain": self.gains[len(self.measured) - 1], "way": 1.0}


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    """Nothing is measured in earnest, and no run is too short to."""
    watch = Stopwatch(gains=[])

    def seconds(variants: Variants, ways: Mapping[str, Way]) -> dict[str, float]:
        return watch.seconds(variants, ways)

    monkeypatch.setattr(Variants, "seconds", seconds)
    monkeypatch.setattr(tuning, "MIN_SECONDS_TO_COMPILE", 0.0)
    return watch


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What `Tower.use_compiled` is told; nothing is compiled."""
    told: list[bool] = []

    def use_compiled(tower: Tower, compiled: bool) -> Tower:  # noqa: FBT001  as there
        told.append(compiled)
        return tower

    monkeypatch.setattr(Tower, "use_compiled", use_compiled)
    return told


def test_nothing_is_measured_that_is_asked_for(
    encoder: Encoder, rule: ResizeRule, stopwatch: Stopwatch, compiled: list[bool]
) -> None:
    settled, reasons = settle(config(compile="off", cuda_graphs="off"), encoder, rule=rule, num_rows=LONG_RUN)
    assert (settled.attention, settled.compile, settled.cuda_graphs) == ("sdpa", "off", "off")
    assert reasons == dict.fromkeys(("runtime", "compile", "cuda_graphs"), "as asked for")
    assert not any(compiled)
    settled, reasons = settle(config(compile="on", cuda_graphs="off"), encoder, rule=rule, num_rows=1)
    assert (settled.compile, reasons["compile"]) == ("on", "as asked for")
    assert compiled[-1]
    assert not stopwatch.measured


def test_the_budget_is_settled_too(encoder: Encoder, rule: ResizeRule) -> None:
    settled, _ = settle(config(max_tokens_per_batch=None), encoder, rule=rule, num_rows=1)
    assert settled.max_tokens_per_batch == 2050
    num_tokens = calibration_batch(rule, CALIBRATION_TOKENS).num_tokens
    meter = FakeMeter(9000 * 100 / calibration.MEMORY_SHARE, 100, num_tokens)
    settled, _ = settle(config(max_tokens_per_batch=None), encoder, rule=rule, num_rows=1, meter=meter)
    assert settled.max_tokens_per_batch == 8192


def test_a_huge_budget_is_not_filled_to_calibrate(
    encoder: Encoder, rule: ResizeRule, compiled: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget beyond all memory is a way to say that there is none."""
    asked: list[int] = []

    def small(rule: ResizeRule, num_tokens: int) -> PackedBatch:
        asked.append(num_tokens)
        return calibration_batch(rule, 20)

    monkeypatch.setattr(tuning, "calibration_batch", small)
    for choice in ("auto", "off", "on"):
        settled, _ = settle(config(compile=choice, max_tokens_per_batch=10**12), encoder, rule=rule, num_rows=LONG_RUN)
        assert settled.max_tokens_per_batch == 10**12
    assert compiled
    assert max(asked, default=0) <= MAX_PACK_TOKENS


def test_a_short_run_is_not_compiled(encoder: Encoder, rule: ResizeRule, compiled: list[bool]) -> None:
    settled, reasons = settle(config(), encoder, rule=rule, num_rows=20 * 255)
    assert (settled.compile, reasons["compile"]) == ("off", "about 255 packs are too short a run to pay for it")
    settled, reasons = settle(config(), encoder, rule=rule, num_rows=20 * 256)
    assert settled.compile == "off"
    assert re.fullmatch(r"about \d+ s are too short a run to pay for it", reasons["compile"])
    assert not any(compiled)


@pytest.mark.parametrize("choice", ["auto", "on"])
def test_a_calibration_pack_that_does_not_fit_is_split_like_any_other(
    choice: str, encoder: Encoder, rule: ResizeRule, compiled: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    tight = tight_encoder(encoder.tower, Memory(most=3), "host", monkeypatch)
    monkeypatch.setattr(tuning, "MIN_SECONDS_TO_COMPILE", 0.0)
    settled, reasons = settle(config(compile=choice), tight, rule=rule, num_rows=LONG_RUN)
    assert any(compiled)
    assert tight.num_splits == 0  # trials are not the run's
    assert settled.compile == "on" or reasons["compile"].endswith("times as fast as without on a pack of 200 tokens")


@pytest.mark.parametrize("gain", [2.0, 1.05, 1.04, 1.0, 0.5])
def test_compiling_must_be_faster(
    gain: float, encoder: Encoder, rule: ResizeRule, stopwatch: Stopwatch, compiled: list[bool]
) -> None:
    expected = "on" if gain >= 1.05 else "off"
    stopwatch.gains = [gain]
    settled, reasons = settle(config(), encoder, rule=rule, num_rows=LONG_RUN)
    assert (settled.compile, settled.cuda_graphs) == (expected, "off")
    assert reasons == {
        "runtime": "as asked for",
        "compile": f"{gain:.2f} times as fast as without on a pack of 200 tokens",
        "cuda_graphs": "not confirmed on a GPU yet",
    }
    assert compiled[-1] == (expected == "on")
    (ways,) = stopwatch.measured
    assert ways == {"plain": {"compiled": False, "graphs": False}, "way": {"compiled": True, "graphs": False}}


def test_without_a_compiler(encoder: Encoder, rule: ResizeRule, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_pack([(2, 3), (1, 4)], encoder.layout)
    encoder.tower.use_attention("sdpa")  # as will be decided
    expected = encoder.encode(batch).vectors["embedding"]

    def broken(*_: object, **__: object) -> NoReturn:
        msg = "InductorError: InvalidCxxCompiler: No working C++ compiler found\nin a long traceback"
        raise RuntimeError(msg)

    monkeypatch.setattr(torch, "compile", lambda _layer, **_: broken)
    monkeypatch.setattr(tuning, "MIN_SECONDS_TO_COMPILE", 0.0)
    settled, reasons = settle(config(), encoder, rule=rule, num_rows=LONG_RUN)
    assert settled.compile == "off"
    assert reasons["compile"] == "it failed: InductorError: InvalidCxxCompiler: No working C++ compiler found"
    np.testing.assert_array_equal(encoder.encode(batch).vectors["embedding"], expected)
    advice = r"--compile on failed \(InductorError: .* found\): install what .* \(a C\+\+ compiler; .* --compile off"
    with pytest.raises(MissingExtraError, match=advice):
        settle(config(compile="on"), encoder, rule=rule, num_rows=1)


def test_graphs_need_a_gpu(encoder: Encoder, rule: ResizeRule, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--cuda-graphs on needs a GPU, and the device is cpu: use off or auto"):
        settle(config(cuda_graphs="on"), encoder, rule=rule, num_rows=1)
    monkeypatch.setattr(tuning, "GRAPHS_CONFIRMED", True)
    settled, reasons = settle(config(compile="off"), encoder, rule=rule, num_rows=LONG_RUN)
    assert (settled.cuda_graphs, reasons["cuda_graphs"]) == ("off", "not possible with cpu and sdpa attention")
    assert encoder.graphs is None


@pytest.fixture
def on_a_gpu(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> Encoder:
    """A GPU in name, with FlashAttention, on which graphs have been confirmed."""
    encoder.device = torch.device("cuda", 0)
    monkeypatch.setattr(tuning, "GRAPHS_CONFIRMED", True)
    monkeypatch.setattr(tuning, "pick_attention", lambda name, **_: "flash2" if name == "auto" else name)
    return encoder


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlashAttention 2 is installed, so to say."""
    with flash_installed(monkeypatch):
        yield


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize(("gain", "expected"), [(1.5, "on"), (1.05, "on"), (1.04, "off"), (0.9, "off")])
def test_graphs_must_be_faster(
    gain: float, expected: str, on_a_gpu: Encoder, rule: ResizeRule, stopwatch: Stopwatch
) -> None:
    stopwatch.gains = [gain]
    api = FakeGraphs()
    settled, reasons = settle(config(compile="off"), on_a_gpu, rule=rule, num_rows=LONG_RUN, graph_api=lambda: api)
    assert (settled.attention, settled.compile, settled.cuda_graphs) == ("flash2", "off", expected)
    assert reasons["cuda_graphs"] == f"{gain:.2f} times as fast as without on a pack of 200 tokens"
    batches = random_packs([[(1, 4), (2, 3)]] * 3, on_a_gpu.layout)
    found = [result.vectors["embedding"] for result in encode_all(on_a_gpu, batches)]
    assert api.num_replays == (2 if expected == "on" else 0)
    on_a_gpu.graphs = None
    for batch, vectors in zip(batches, found, strict=True):
        np.testing.assert_allclose(vectors, on_a_gpu.encode(batch).vectors["embedding"], rtol=1e-4, atol=1e-5)


def test_graphs_are_not_measured_in_a_short_run(on_a_gpu: Encoder, rule: ResizeRule, stopwatch: Stopwatch) -> None:
    _, reasons = settle(config(), on_a_gpu, rule=rule, num_rows=20 * 255)
    assert reasons["cuda_graphs"] == "about 255 packs are too short a run to pay for it"
    assert not stopwatch.measured


@pytest.mark.parametrize("attention", ["sdpa", "cpu"])
def test_graphs_need_attention_without_lengths_on_the_host(attention: str, on_a_gpu: Encoder, rule: ResizeRule) -> None:
    with pytest.raises(ConfigError, match=f"--cuda-graphs on cannot hold --attention {attention}, which goes by"):
        settle(config(cuda_graphs="on", attention=attention), on_a_gpu, rule=rule, num_rows=1)
    _, reasons = settle(config(attention=attention, compile="off"), on_a_gpu, rule=rule, num_rows=LONG_RUN)
    assert reasons["cuda_graphs"] == f"not possible with cuda and {attention} attention"


@pytest.mark.usefixtures("flash", "compiled")
@pytest.mark.parametrize(("gains", "expected"), [([2.0, 1.5], ("on", "on")), ([0.5, 1.5], ("off", "on"))])
def test_graphs_are_measured_on_the_layers_that_were_chosen(
    gains: list[float], expected: tuple[str, str], on_a_gpu: Encoder, rule: ResizeRule, stopwatch: Stopwatch
) -> None:
    stopwatch.gains = gains
    settled, _ = settle(config(), on_a_gpu, rule=rule, num_rows=LONG_RUN, graph_api=FakeGraphs)
    assert (settled.compile, settled.cuda_graphs) == expected
    chosen = expected[0] == "on"
    assert stopwatch.measured[1] == {
        "plain": {"compiled": chosen, "graphs": False},
        "way": {"compiled": chosen, "graphs": True},
    }


@pytest.mark.usefixtures("flash")
def test_a_graph_is_captured_before_it_is_measured(on_a_gpu: Encoder, rule: ResizeRule) -> None:
    api = FakeGraphs()
    on_a_gpu.tower.use_attention("flash2")
    runs = Variants(on_a_gpu, calibration_batch(rule, 200), budget=200, graph_api=lambda: api)
    ways = {"plain": {"compiled": False, "graphs": False}, "way": {"compiled": False, "graphs": True}}
    seconds = runs.seconds(ways)
    assert seconds.keys() == ways.keys()
    assert min(seconds.values()) > 0
    assert (api.num_captures, api.num_replays) == (1, UNMEASURED_ROUNDS + ROUNDS - 1)
    assert on_a_gpu.graphs is not None
    assert on_a_gpu.graphs.describe()["without"] == {"first of its shape": 1}


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("budget", [101, 102, 103, 3])
def test_a_budget_of_no_whole_merge_blocks_makes_graphs_of_whole_ones(
    budget: int, tower_of: Callable[[str], Tower]
) -> None:
    tower, api = tower_of("qwen2_5_vl").use_attention("flash2"), FakeGraphs()
    encoder = make_encoder(tower)
    batches = random_packs([[(2, 3), (4, 4)]] * 3, tower.layout)
    expected = [result.vectors["tokens"] for result in encode_all(encoder, batches)]
    variants = Variants(encoder, batches[0], budget=budget, graph_api=lambda: api)
    variants.use(compiled=False, graphs=True)
    found = [result.vectors["tokens"] for result in encode_all(encoder, batches)]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert api.num_replays == (2 if budget > 100 else 0)


def test_compiled_layers_give_what_plain_ones_give(encoder: Encoder, rule: ResizeRule) -> None:
    """And are compiled twice at most: for the first pack, and for packs of any size."""
    batches = random_packs([[(3, 3)] * 2, [(1, 2), (2, 5), (3, 3)], [(4, 4)] * 5], encoder.layout)
    expected = encode_all(encoder, batches)
    torch.compiler.reset()
    counters.clear()
    Variants(encoder, calibration_batch(rule, 60), budget=60).use(compiled=True, graphs=False)
    num_frames = counters["frames"]["ok"]
    assert num_frames > 0
    with torch.compiler.set_stance("fail_on_recompile"):
        found = encode_all(encoder, batches)
    assert counters["frames"]["ok"] == num_frames
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.vectors["embedding"], theirs.vectors["embedding"], rtol=0, atol=1e-5)
    torch.compiler.reset()


class FailedLink(HostLink):
    """To a device that has met an illegal access: from then on whatever is asked of it fails."""

    def __init__(self, where: str) -> None:
        self.where = where

    def submit(self, batch: PackedBatch, block: torch.Tensor, forward: Forward) -> Ticket:
        """Fail here, or go on."""
        self.fail("submit")
        return super().submit(batch, block, forward)

    def collect(self, ticket: Ticket) -> list[torch.Tensor]:
        """Fail here, or go on."""
        self.fail("collect")
        return super().collect(ticket)

    def make_room(self) -> None:
        """Fail."""
        self.fail(self.where)

    def fail(self, where: str) -> None:
        """As CUDA does."""
        if where == self.where:
            msg = "CUDA error: an illegal memory access was encountered"
            raise torch.AcceleratorError(msg)


@pytest.mark.parametrize("where", ["submit", "collect"])
def test_a_device_that_failed_is_named_and_can_be_closed(where: str, tower_of: Callable[[str], Tower]) -> None:
    encoder = make_encoder(tower_of("dinov2"), "cls", link=FailedLink(where))
    with pytest.raises(DeviceError, match=r"cpu failed: CUDA error: an illegal .*, and the same command goes on"):
        encoder.encode(random_pack([(2, 3)], encoder.layout))
    encoder.close()
