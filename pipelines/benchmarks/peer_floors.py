"""Floors (i), (ii) and (vi), of what the rounds of ``peers.py`` measured."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import numpy as np
from floors import floor, quotients, unmeasured
from peer_ways import FORWARDS, GEMMS, OURS, PHOTOS, RUN, STAMPS, our_title

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Answers = Sequence[Mapping[str, Any]]

LEAST_COSINE = 0.999
AGAINST = (
    ("i", PHOTOS, "OpenVINO alone", 0.95),
    ("i", PHOTOS, "plain script, bf16", 1.7),
    ("i", PHOTOS, "plain script, fp32", 4.5),
    ("i", PHOTOS, "Daft", 1.4),
    ("i", PHOTOS, "Ray Data", 2.0),
    ("ii", STAMPS, "transformers loop", 1.75),
    ("ii", STAMPS, "OpenVINO alone, dynamic", 1.2),
)
"""Floor, pictures, peer, and how many times as fast a run of vlmembed is to be."""

REFERENCES = {PHOTOS: "plain script, fp32", STAMPS: "transformers loop"}
"""Whose vectors are compared with."""


def best_runtime(rounds: Mapping[str, Answers], pictures: str, runtimes: Sequence[str]) -> str:
    """The runtime that a user would choose: its runs over these pictures have the higher median rate."""
    return max(
        runtimes,
        key=lambda runtime: statistics.median(each(rounds[our_title(runtime, pictures, RUN)], "rate")),
    )


def each(answers: Answers, name: str) -> list[float]:
    """One figure of every round."""
    return [float(answer[name]) for answer in answers]


def all_floors(
    rounds: Mapping[str, Answers], cosines: Mapping[str, float], runtimes: Sequence[str], dtype: str
) -> list[dict[str, Any]]:
    """As ``floors.py`` has them, for the better of our runtimes.

    Operations of a run are nominal, all layers for all tokens: what the tower need not compute counts as done.
    """
    best = {pictures: best_runtime(rounds, pictures, runtimes) for pictures in (PHOTOS, STAMPS)}
    runs = {pictures: rounds[our_title(runtime, pictures, RUN)] for pictures, runtime in best.items()}
    shown = {pictures: f"{runtime}, {dtype}" for pictures, runtime in best.items()}
    found = []
    for number, pictures, peer, limit in AGAINST:
        what = f"images/s, {OURS} ({shown[pictures]}) / {peer}"
        if peer not in rounds:
            found.append(unmeasured(number, what, at_least=limit))
            continue
        ratios = quotients(each(runs[pictures], "rate"), each(rounds[peer], "rate"))
        found.append(floor(number, what, ratios, at_least=limit))
    if gemms := rounds.get(our_title("torch", PHOTOS, GEMMS)):
        nominal = each(rounds[our_title("torch", PHOTOS, RUN)], "flops")  # the same pictures, whatever computes them
        shares = quotients(
            quotients(nominal, each(runs[PHOTOS], "seconds")), quotients(each(gemms, "flops"), each(gemms, "seconds"))
        )
        what = f"operations/s, whole run ({shown[PHOTOS]}) / bare GEMM chain"
        found.append(floor("i", what, shares, at_least=0.9, stretch=True))
    for number, pictures in (("i", PHOTOS), ("ii", STAMPS)):
        title = our_title(best[pictures], pictures, RUN)
        what = f"lowest cosine to float32 transformers, {pictures}"
        if title in cosines:
            found.append(floor(number, what, [cosines[title]], at_least=LEAST_COSINE, digits=7))
    forwards = rounds[our_title(best[PHOTOS], PHOTOS, FORWARDS)]
    ratios = quotients(each(runs[PHOTOS], "seconds"), each(forwards, "seconds"))
    found.append(floor("vi", f"wall time, whole run ({shown[PHOTOS]}) / the same forwards alone", ratios, at_most=1.08))
    return found


def lowest_cosines(first: Mapping[str, Mapping[str, Any]], pictures: Mapping[str, str]) -> dict[str, float]:
    """By title the lowest cosine between a vector of that side and transformers' own in float32, where both are there;
    `pictures` says what each title was run over."""
    found = {}
    for title, answer in first.items():
        reference = first.get(REFERENCES[STAMPS if pictures[title] == STAMPS else PHOTOS], {}).get("vectors")
        vectors = answer.get("vectors")
        if reference is None or vectors is None:
            continue
        cosines = np.sum(vectors.astype(np.float64) * reference[: len(vectors)], axis=1)
        found[title] = round(float(cosines.min()), 7)
    return found
