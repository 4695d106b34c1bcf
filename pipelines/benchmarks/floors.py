"""Floors: what a figure is held to, as every result file lists them under ``figures["floors"]``.

A floor's figure is the median of ratios taken round by round, with the lowest and the highest beside it; the median
alone decides whether it is met. ``table.py`` collects them.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

DIGITS = 4
"""Significant digits of a figure."""


def spread(values: Sequence[float], digits: int = DIGITS) -> str:
    """Median, minimum and maximum of ``values``, to so many significant digits."""
    middle, low, high = (f"{value:.{digits}g}" for value in (statistics.median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def floor(
    number: str,
    what: str,
    values: Sequence[float],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    stretch: bool = False,
    digits: int = DIGITS,
) -> dict[str, Any]:
    """One entry of a result's list of floors: floor ``number`` ("i" to "vi"), ``what`` is compared, and its rounds.

    Exactly one of ``at_least`` and ``at_most`` is the limit. A ``stretch`` is a goal beyond the floor proper.
    `digits` of the figure are significant.
    """
    if not values or (at_least is None) == (at_most is None):
        msg = f"floor {number} ({what}): give one limit and at least one value, not {at_least}, {at_most}, {values}"
        raise ValueError(msg)
    value = statistics.median(values)
    met = value >= at_least if at_least is not None else value <= (at_most or 0.0)
    sign, limit = (">=", at_least) if at_least is not None else ("<=", at_most)
    return {
        "floor": number,
        "what": what,
        "limit": f"{sign} {limit:g}",
        "figure": spread(values, digits),
        "value": value,
        "met": met,
        "stretch": stretch,
    }


def unmeasured(number: str, what: str, *, at_least: float) -> dict[str, Any]:
    """An entry for what could not be measured here, so it is not met either."""
    return {
        "floor": number,
        "what": what,
        "limit": f">= {at_least:g}",
        "figure": "missing",
        "value": None,
        "met": False,
        "stretch": False,
    }


def quotients(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Round-by-round ratios of two sides that were measured in the same rounds."""
    return [one / other for one, other in zip(above, below, strict=True)]
