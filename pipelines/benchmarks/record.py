"""Result files of the benchmarks: what was measured, on what, from which commit, how often."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vlmembed.provenance import versions

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).parent / "results"


def git(*arguments: str) -> str:
    """What git prints, stripped."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def machine() -> dict[str, Any]:
    """The processor and what it can do."""
    capabilities = torch.cpu.get_capabilities()
    return {
        "processor": capabilities.get("cpu_name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instructions": [name for name in ("avx2", "avx512_f", "avx512_bf16", "amx_bf16") if capabilities.get(name)],
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.system(),
    }


def write_result(name: str, claim: str, repeats: int, figures: Mapping[str, Any]) -> Path:
    """Write ``results/NAME.json`` and return its path."""
    changed = [line for line in git("status", "--porcelain").splitlines() if "benchmarks/results/" not in line]
    result = {
        "claim": claim,
        "commit": git("rev-parse", "HEAD") + (" + uncommitted changes" if changed else ""),
        "command": " ".join(["python", str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "repeats": repeats,
        "figures": dict(figures),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
