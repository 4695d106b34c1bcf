"""The engine for clusters beside Ray Data's documented recipe and Daft: the sides, and what they are held to."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from floors import floor, quotients, unmeasured
from peer_ways import PHOTOS, Contest, Way, contests

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
