"""The table of the GPU benchmark: what was measured, and beside it the floor that it is to reach."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HEAD = ("part", "case", "figures", "floor on an H200", "verdict")


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """A limit for the figure `unit`: the most that it may be, where it is `at_most`, else the least."""

    unit: str
    limit: float
    at_most: bool = False

    def is_met_by(self, figure: float) -> bool:
        """False for what is no number."""
        return figure <= self.limit if self.at_most else figure >= self.limit

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.limit:g} {self.unit}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line.

    Attributes:
        part: ``"numerics"``, or the letter of the part.
        case: what was measured.
        figures: by unit.
        note: what is to be said beside the figures, or why there are none.
        floor: for one of the figures.
        is_check: the floor holds on any device and for any size, and the script fails where it is not met.
    """

    part: str
    case: str
    figures: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    floor: Floor | None = None
    is_check: bool = False

    def verdict(self, *, is_real: bool) -> str:
        """What `figures` are by the floor. A run that is not real, tiny or on a CPU, is judged by its checks alone."""
        if self.floor is None:
            return ""
        figure = self.figures.get(self.floor.unit)
        if figure is None or not (is_real or self.is_check):
            return "not measured"
        return "met" if self.floor.is_met_by(figure) else "not met"

    def cells(self, *, is_real: bool) -> tuple[str, ...]:
        """As text, by the columns of `HEAD`."""
        figures = [f"{_number(value)} {unit}" for unit, value in self.figures.items()]
        floor = "" if self.floor is None else str(self.floor)
        return (
            self.part,
            self.case,
            ", ".join([*figures, *filter(None, [self.note])]),
            floor,
            self.verdict(is_real=is_real),
        )

    def plain(self, *, is_real: bool) -> dict[str, Any]:
        """For a result file."""
        values: dict[str, Any] = {"part": self.part, "case": self.case, **self.figures}
        if self.note:
            values["note"] = self.note
        if self.floor is not None:
            values |= {"floor": str(self.floor), "verdict": self.verdict(is_real=is_real)}
        return values


def _number(value: float) -> str:
    """Four digits or more, of a cosine six behind the point."""
    if value != value or abs(value) >= 1000:  # noqa: PLR0124, PLR2004  not a number; no digits behind the point
        return f"{value:,.0f}"
    return f"{value:.6f}" if 0.99 < value < 1 else f"{value:.4g}"  # noqa: PLR2004  what a cosine is


def table(rows: Sequence[Row], *, is_real: bool) -> str:
    """All rows under one head."""
    lines = [HEAD, *(row.cells(is_real=is_real) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    padded = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([padded[0], "  ".join("-" * width for width in widths), *padded[1:]])
