"""Question: what does a GPU make of it, and are the floors met?

On one GPU, without a network, in less than 8 minutes: numerics first (each backend that is installed against float32
math on the CPU, images packed against the same alone), then

a  one forward of a full-size MoonViT, and the same with a sync in every block;
b  Qwen3-VL-8B's tower at 360p, 720p, 1080p and mixed, packed in every way and image by image;
c  host syncs per pack;
d  JPEG files to Parquet, with the built-in model and with a ViT-L;
e  small images of mixed sizes: one by one, in batches of one size, packed.

``--device cpu --tiny`` is the dry run: the same code on a CPU with tiny sizes, whose figures mean nothing. A result
file is written only after a whole run on a GPU; ``--output`` writes one elsewhere, whatever was run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_cases import Bench, problem_with
from gpu_parts import PARTS
from gpu_sizes import FULL, TINY
from gpu_table import Row, table
from record import machine, write_result

from vlmembed.attention.backends import BACKENDS
from vlmembed.attention.varlen import pick_attention
from vlmembed.config import CHOICES
from vlmembed.errors import VlmembedError
from vlmembed.provenance import versions

if TYPE_CHECKING:
    from collections.abc import Sequence

CLAIM = "a packed vision tower on one GPU: what it reaches, beside the floors for an H200"
HEAD_DIM = 72
"""Of both full-size towers; the tiny ones' suits whatever takes it."""

FLASH_PACKAGES = ("flash-attn", "flash-attn-3", "flash-attn-4")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="the first GPU, or a CPU with --tiny")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: does everything run?")
    parser.add_argument("--only", help=f"parts, with commas between: {','.join(PARTS)}")
    parser.add_argument(
        "--attention",
        choices=CHOICES["attention"],
        default="auto",
        help="auto: the best that is installed and, in parts a and b, torch's beside it",
    )
    parser.add_argument("--repeats", type=int, help="measured rounds (20)")
    parser.add_argument("--output", type=Path, help="write the result there")
    return parser


def pick_parts(parser: argparse.ArgumentParser, only: str | None) -> list[str]:
    """The parts that are asked for, in their own order."""
    if only is None:
        return list(PARTS)
    wanted = only.split(",")
    if unknown := [name for name in wanted if name not in PARTS]:
        parser.error(f"--only {unknown[0]} is no part: use {', '.join(PARTS)}")
    return [name for name in PARTS if name in wanted]


def pick_device(parser: argparse.ArgumentParser, name: str, *, is_tiny: bool) -> torch.device:
    """The device, or the end with exit code 2 and what to do instead."""
    if name == "cpu":
        if not is_tiny:
            parser.error("--device cpu is for a dry run: add --tiny")
        torch.set_num_threads(1)  # for tiny sizes the threads cost more than they save
        return torch.device("cpu")
    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no GPU: --device cpu --tiny is the dry run without one")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def pick_backends(name: str, device: torch.device) -> tuple[str, ...]:
    """The backends to measure.

    Raises:
        VlmembedError: the one that is asked for cannot run here.
    """
    picked = pick_attention(name, device=device, dtype="bf16", head_dim=HEAD_DIM)
    beside = name == "auto" and picked != "torch" and not problem_with("torch", device, HEAD_DIM)
    return (picked, "torch") if beside else (picked,)


def run_parts(names: Sequence[str], bench: Bench) -> tuple[list[Row], bool]:
    """All rows; and whether every part came to its end. One that fails keeps what it has measured."""
    rows: list[Row] = []
    is_whole = True
    for name in names:
        began = time.perf_counter()
        try:
            for row in PARTS[name](bench):
                rows.append(row)
                print("  ".join(row.cells(is_real=False)[:3]), file=sys.stderr, flush=True)
        except Exception as error:  # noqa: BLE001  the other parts are worth having
            traceback.print_exc()
            rows.append(Row(part=name, case="(the rest)", note=f"failed: {type(error).__name__}: {error}"[:120]))
            is_whole = False
        print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return rows, is_whole


def describe(bench: Bench) -> dict[str, Any]:
    """What it ran on."""
    found = {}
    for package in FLASH_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    is_gpu = bench.device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(bench.device) if is_gpu else None,
        "cuda": torch.version.cuda,
        "attention": {name: BACKENDS[name].title for name in bench.attention},
        "flash_attention": found,
    }


def write(figures: dict[str, Any], arguments: argparse.Namespace, repeats: int, *, is_result: bool) -> None:
    """The result file, and the one that is asked for."""
    if arguments.output is not None:
        result = {"claim": CLAIM, "machine": machine(), "versions": versions(), "repeats": repeats, "figures": figures}
        arguments.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if not is_result:
        return
    try:
        print(write_result("gpu", CLAIM, repeats, figures))
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no result file, for there is no git checkout here ({error}); --output FILE needs none", file=sys.stderr)


def main() -> int:
    """Run the parts, print the table; 1 where a part failed or a check of the numerics did not hold."""
    began = time.perf_counter()
    parser = make_parser()
    arguments = parser.parse_args()
    names = pick_parts(parser, arguments.only)
    if arguments.output is not None and not arguments.output.parent.is_dir():
        parser.error(f"--output {arguments.output}: there is no folder {arguments.output.parent}")
    device = pick_device(parser, arguments.device, is_tiny=arguments.tiny)
    is_real = device.type == "cuda" and not arguments.tiny
    sizes = TINY if arguments.tiny else FULL
    sizes = replace(sizes, repeats=arguments.repeats or sizes.repeats)
    try:
        backends = pick_backends(arguments.attention, device)
    except VlmembedError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(device=device, sizes=sizes, attention=backends, scratch=Path(scratch))
        rows, is_whole = run_parts(names, bench)
    seconds = time.perf_counter() - began
    ran_on = describe(bench)
    print(f"\n{ran_on['gpu'] or 'dry run on a CPU: these figures mean nothing'}; torch {torch.__version__}")
    print(table(rows, is_real=is_real))
    print(f"{seconds:.0f} s")
    figures = {**ran_on, "seconds": round(seconds, 1), "rows": [row.plain(is_real=is_real) for row in rows]}
    write(figures, arguments, sizes.repeats, is_result=is_real and is_whole and names == list(PARTS))
    holds = all(row.verdict(is_real=is_real) == "met" for row in rows if row.is_check)
    return 0 if is_whole and holds else 1


if __name__ == "__main__":
    sys.exit(main())
