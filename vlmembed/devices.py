"""Which devices, dtype and processor a run has."""

from __future__ import annotations

import platform
import re

import psutil
import torch

from vlmembed.attention.backends import FLASH_MIN_CAPABILITY
from vlmembed.errors import ConfigError

Devices = tuple[torch.device, ...]
"""One per worker."""

_BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
_CUDA_LIST = re.compile(r"cuda:(\d+(?:,\d+)*)")
_OUT_OF_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator has said so: CUDA's, for pinned memory or a library's workspace too, the CPU's, Python's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def pick_devices(name: str) -> Devices:
    """The devices that ``--device`` names, one worker each: ``auto`` and ``cuda`` are all visible GPUs, ``cuda:0,1``
    some of them, ``cpu,cpu`` two workers on the CPU. ``auto`` is the CPU where there is no GPU.

    Raises:
        ConfigError: no such device here, or one twice.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if num_gpus else "cpu"
    if re.fullmatch(r"cpu(,cpu)*", name):
        return tuple(torch.device("cpu") for _ in name.split(","))
    if name == "cuda":
        indices = list(range(num_gpus))
    elif match := _CUDA_LIST.fullmatch(name):
        indices = [int(index) for index in match[1].split(",")]
    else:
        msg = f"device {name!r} is not known: use auto, cpu, cuda, cuda:N, cuda:N,M, or cpu,cpu for two workers"
        raise ConfigError(msg)
    if not indices or max(indices) >= num_gpus:
        msg = f"device {name!r} is not here: torch {torch.__version__} sees {num_gpus} GPUs; auto takes what there is"
        raise ConfigError(msg)
    if len(set(indices)) < len(indices):
        msg = f"device {name!r} names a GPU twice: one worker fills it"
        raise ConfigError(msg)
    return tuple(torch.device("cuda", index) for index in indices)


def weakest_first(devices: Devices) -> Devices:
    """The devices in the order of their compute capability: what the first one can do, all can."""
    if devices[0].type == "cpu":
        return devices
    return tuple(sorted(devices, key=torch.cuda.get_device_capability))


def name_of(devices: Devices) -> str:
    """These devices as ``--device`` names them."""
    if devices[0].type == "cpu":
        return ",".join("cpu" for _ in devices)
    return "cuda:" + ",".join(str(device.index) for device in devices)


def kind_of(name: str) -> str:
    """``cpu`` or ``cuda``, of what `name_of` returned."""
    return re.split("[:,]", name)[0]


def pick_dtype(name: str, device: torch.device) -> str:
    """What ``--dtype auto`` means on `device`: bf16 where it multiplies bf16 in hardware, else fp32."""
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device)[0] >= FLASH_MIN_CAPABILITY else "fp32"
    capabilities = torch.cpu.get_capabilities()
    return "bf16" if any(capabilities.get(name) for name in _BF16_INSTRUCTIONS) else "fp32"


def processor_name(device: torch.device) -> str:
    """The GPU or CPU as it names itself."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return str(torch.cpu.get_capabilities().get("cpu_name") or platform.machine())


def cores_per_worker(num_workers: int) -> int:
    """Cores for each of `num_workers` on the CPU."""
    cores = psutil.cpu_count(logical=False) or 1
    return max(1, min(cores, torch.get_num_threads()) // num_workers)
