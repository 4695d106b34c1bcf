"""Which device and dtype `auto` means, and what is said when a device is not there."""

from __future__ import annotations

import pytest
import torch

from vlmembed.devices import is_out_of_memory, name_of, pick_devices, pick_dtype, weakest_first
from vlmembed.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx2": True, "avx512_bf16": False}, "fp32"),
        ({"avx2": True, "avx512_f": True, "avx512_bf16": True}, "bf16"),
        ({"amx_bf16": True}, "bf16"),
        ({"neon": True, "bf16": True}, "bf16"),
        ({}, "fp32"),
    ],
)
def test_auto_dtype_follows_the_processor(
    capabilities: dict[str, bool], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert pick_dtype("auto", CPU) == expected
    assert pick_dtype("fp16", CPU) == "fp16"


def test_auto_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, expected in ((True, "cuda:0,1"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        devices = pick_devices("auto")
        assert name_of(devices) == expected
        assert pick_devices(expected) == devices


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"device 'cuda' is not here: torch .* sees 0 GPUs"):
        pick_devices("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert pick_devices("cuda:0") == (torch.device("cuda:0"),)
    assert pick_devices("cuda:2,0") == (torch.device("cuda:2"), torch.device("cuda:0"))
    assert name_of(pick_devices("cuda")) == "cuda:0,1,2"
    with pytest.raises(ConfigError, match=r"device 'cuda:0,3' is not here: torch .* sees 3 GPUs"):
        pick_devices("cuda:0,3")
    with pytest.raises(ConfigError, match="device 'cuda:1,1' names a GPU twice"):
        pick_devices("cuda:1,1")
    for name in ("meta", "gpu", "cuda:", "cpu,", "cpu,cuda", "cuda:0,", ""):
        with pytest.raises(ConfigError, match=f"device '{name}' is not known: use auto, cpu, cuda, cuda:N"):
            pick_devices(name)


def test_workers_on_the_cpu() -> None:
    assert pick_devices("cpu,cpu,cpu") == (CPU, CPU, CPU)
    assert name_of(pick_devices("cpu,cpu")) == "cpu,cpu"


def test_the_weakest_gpu_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {0: (8, 0), 1: (7, 5), 2: (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    gpus = tuple(torch.device("cuda", index) for index in capabilities)
    assert [device.index for device in weakest_first(gpus)] == [1, 0, 2]
    assert weakest_first((CPU, CPU)) == (CPU, CPU)
    assert [pick_dtype("auto", device) for device in gpus] == ["bf16", "fp32", "bf16"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("shape mismatch"), False),
        (KeyError("CUDA error: out of memory"), False),
    ],
)
def test_a_lack_of_memory_is_told_from_other_errors(error: BaseException, expected: bool) -> None:  # noqa: FBT001
    assert is_out_of_memory(error) == expected
