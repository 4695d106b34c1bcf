"""Which device and dtype `auto` means, and what is said when a device is not there."""

from __future__ import annotations

import pytest
import torch

from vlmembed.encoder import pick_device, pick_dtype
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
    for available, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert pick_device("auto").type == expected


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ConfigError, match=r"device 'cuda:1' is not here: torch .* sees 1 GPUs"):
        pick_device("cuda:1")
    with pytest.raises(ConfigError, match="device 'meta' is not supported: use auto, cpu, cuda or cuda:N"):
        pick_device("meta")
    with pytest.raises(ConfigError, match="device 'gpu' is not known"):
        pick_device("gpu")
