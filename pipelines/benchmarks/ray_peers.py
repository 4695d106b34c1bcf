"""Question: is another way to embed on Ray, or Daft, faster than the engine for clusters?

The steady state beside Ray Data's documented recipe and Daft, as in ``peers.py`` (same photos, weights, dtype, cores,
rounds; start-up taken off). What is counted of our side, ``peer_vlmembed_ray.py`` says. Its parts are smaller than by
default, where all these pictures would be one part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from floors import floor, quotients, spread, unmeasured
from peer_ways import PHOTOS, Contest, Way, contests
from peers import CPU, PEERS_PYTHON, Arena, choose, distinct, evenly, figures_of, measure, runtimes_here
from photos import fetch_photos
from record import write_result

from vlmembed.devices import pick_dtype
from vlmembed.towers.builtin import model_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Rounds = Mapping[str, Sequence[Mapping[str, Any]]]

PEERS = ("Daft", "Ray Data")
LEAST_RATIO = 1.0
NUMBER = "ray"


def our_title(runtime: str) -> str:
    """As the results name our side."""
    return f"vlmembed on Ray, {runtime}"


def ray_contests(dtype: str, runtimes: Sequence[str], threads: int, rows_per_part: int) -> list[Contest]:
    """Our side for each runtime, and the peers with the ways that ``peers.py`` gives them."""
    way = Way(label=f"{rows_per_part} rows a part", order={"rows_per_part": rows_per_part})
    ours = [
        Contest(title=our_title(runtime), script="peer_vlmembed_ray.py", runtime=runtime, pictures=PHOTOS, ways=(way,))
        for runtime in runtimes
    ]
    peers = contests(dtype, (), threads, is_bf16_emulated=True)
    return ours + [contest for contest in peers if contest.title in PEERS]


def rates(rounds: Rounds, title: str) -> list[float]:
    """Pictures a second in every round."""
    return [float(answer["rate"]) for answer in rounds[title]]


def fastest(rounds: Rounds, titles: Sequence[str]) -> str:
    """Whose median rate is the highest."""
    return max(titles, key=lambda title: statistics.median(rates(rounds, title)))


def peer_floor(rounds: Rounds, dtype: str) -> dict[str, Any]:
    """The better of our runtimes over the faster of the peers; not measured where one of these is missing."""
    missing = [title for title in PEERS if title not in rounds]
    ours = fastest(rounds, [title for title in rounds if title not in PEERS])
    what = f"images/s in the steady state, {ours}, {dtype}"
    if missing:
        return unmeasured(NUMBER, f"{what} / the faster of {' and '.join(PEERS)}", at_least=LEAST_RATIO)
    peer = fastest(rounds, PEERS)
    (other,) = (title for title in PEERS if title != peer)
    ratios = quotients(rates(rounds, ours), rates(rounds, peer))
    return floor(NUMBER, f"{what} / {peer}, which is faster than {other}", ratios, at_least=LEAST_RATIO)


def beside_peers(photos: list[Path], scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The steady state of all sides in the same rounds."""
    dtype, threads = pick_dtype("fp32", CPU), torch.get_num_threads()
    settings = {"model": str(model_folder("dinov2-small")), "dtype": dtype, "threads": threads, "scratch": str(scratch)}
    with ExitStack() as stack:
        arena = Arena(stack, settings, arguments.peers_python, {PHOTOS: photos})
        entered = [
            contest
            for contest in ray_contests(dtype, arguments.runtimes, threads, arguments.rows_per_part)
            if not contest.is_foreign or arguments.peers_python.exists()
        ]
        part = max(4, min(32, len(photos) // 2))
        trials = {contest.title: choose(arena, contest, part) for contest in entered}
        chosen = {contest.title: (contest, trials[contest.title][0]) for contest in entered}
        rounds, first = measure(arena, chosen, arguments.repeats)
        figures = figures_of(arena, chosen, rounds, first)
    ours = fastest(rounds, [title for title in rounds if title not in PEERS])
    cosines = {
        title: round(float((first[ours]["vectors"].astype("f8") * first[title]["vectors"]).sum(1).min()), 7)
        for title in PEERS
        if title in first
    }
    finished = [answer["num"] / answer["seconds until the file is finished"] for answer in rounds[ours]]
    return {
        "photos": len(photos),
        "dtype": dtype,
        **figures,
        f"images/s, {ours}, until the file is finished": spread(finished),
        "trials, images/s": {title: found for title, (_, found) in trials.items() if found},
        f"lowest cosine of {ours} to": cosines,
        "floors": [peer_floor(rounds, dtype)],
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-photos", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows-per-part", type=int, default=32)
    parser.add_argument("--runtimes", nargs="+", default=runtimes_here(), help="of ours")
    parser.add_argument("--peers-python", type=Path, default=PEERS_PYTHON)
    arguments = parser.parse_args()
    os.environ.pop("RAY_ADDRESS", None)  # no other cluster
    with tempfile.TemporaryDirectory() as name:
        photos = evenly(distinct(fetch_photos(Path(name))), arguments.num_photos)
        figures = beside_peers(photos, Path(name), arguments)
    print(json.dumps(figures, indent=1))
    print(
        write_result(
            "ray_peers", "the engine for clusters in its steady state beside its peers", arguments.repeats, figures
        )
    )


if __name__ == "__main__":
    main()
