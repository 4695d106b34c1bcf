"""How long a run takes, by what its rows ask for and what a trial has measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vlmembed.forecast.survey import Survey
    from vlmembed.forecast.trial import Timings


LEAST_SHARE = 0.5
"""Whoever shares cores with one other takes twice as long for it at most; a smaller share is the noise of few packs."""


def stage_seconds(survey: Survey, timings: Timings, *, num_workers: int, scan_seconds: float) -> dict[str, float]:
    """What each stage takes for the rows of a survey while the others are at work too, were it never to wait for them:
    encoding by operations, decoding by pixels, each format for itself, reading by bytes, and by what its thread does
    with each row.

    `scan_seconds` is what the survey has waited for its rows: of those that came whole it has read as a run does, one
    after the other, where a trial jumps. `num_workers` decode at a time.
    """
    work, seconds = timings.work, timings.encode_seconds
    if not work:  # it was over before anything was encoded
        work, seconds = timings.alone_work, timings.alone_encode_seconds
    of_any = sum(timings.decode_seconds.values()) / sum(timings.decode_pixels.values())
    decode = 0.0
    for name, pixels in survey.decode_pixels.items():
        known = timings.decode_pixels[name]
        decode += pixels * (timings.decode_seconds[name] / known if known else of_any)
    waiting = scan_seconds
    if survey.file_bytes:
        waiting = survey.num_bytes * timings.read_seconds / max(1, timings.read_bytes)
    own = survey.num_rows * timings.reader_seconds / timings.num_read
    return {"read": waiting + own, "decode": decode / num_workers, "encode": survey.work * seconds / work}


def alone_shares(timings: Timings) -> dict[str, float]:
    """What share of its time beside the other one decoding and encoding take while the other one rests: less than 1 on
    a CPU, whose cores they share; 1 where that was not seen."""
    shares = {"decode": 1.0, "encode": 1.0}
    if timings.work and timings.alone_work:
        beside = timings.encode_seconds / timings.work
        shares["encode"] = timings.alone_encode_seconds / timings.alone_work / beside
    num_pixels = sum(timings.decode_pixels.values()) - timings.alone_decode_pixels
    if num_pixels and timings.alone_decode_pixels:
        beside = (sum(timings.decode_seconds.values()) - timings.alone_decode_seconds) / num_pixels
        shares["decode"] = timings.alone_decode_seconds / timings.alone_decode_pixels / beside
    return {name: min(1.0, max(LEAST_SHARE, share)) for name, share in shares.items()}


def run_seconds(stages: Mapping[str, float], alone: Mapping[str, float], *, held_share: float) -> float:
    """The slowest stage's time, and what decoding and encoding do one after the other: while the first packs are looked
    for nothing is encoded, and while the last ones are encoded nothing is decoded. `held_share` of the tokens is held
    back for that, 0 to 1: all of a short run's."""
    apart = sum(stages[name] * alone[name] for name in ("decode", "encode"))
    return max(stages["read"], held_share * apart + (1 - held_share) * max(stages.values()))
