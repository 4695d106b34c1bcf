"""Collect the floors of all result files into one table, print it, and put it into the README between two markers.

Measures nothing. A floor that is not met says so; a result file that is not there is "missing", and so are its floors.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
EXPECTED = {"peers": ("i", "ii", "vi"), "tower_limit": ("iii",), "feeding": ("iv", "v"), "scale": ("memory", "scale")}
"""Result files that hold floors, and which ones each must hold."""

NUMERALS = ("i", "ii", "iii", "iv", "v", "vi")
HEAD = ("floor", "what", "limit", "median (min to max)", "", "from")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A floor as the table shows it; `source` is the name of its result file, without its ending."""

    number: str
    what: str
    limit: str
    figure: str
    verdict: str
    source: str

    @classmethod
    def of(cls, entry: Mapping[str, Any], source: str) -> Line:
        """An entry of a result's list of floors (`floors.floor`)."""
        is_goal, is_met = bool(entry.get("stretch")), bool(entry["met"])
        if entry.get("value") is None:
            verdict = "missing"
        elif is_goal:
            verdict = "goal reached" if is_met else "goal not reached"
        else:
            verdict = "met" if is_met else "not met"
        number, limit = str(entry["floor"]), str(entry["limit"])
        figure = str(entry["figure"])
        return cls(number=number, what=entry["what"], limit=limit, figure=figure, verdict=verdict, source=source)

    @property
    def cells(self) -> tuple[str, ...]:
        """By the columns of `HEAD`."""
        verdict = f"**{self.verdict}**" if self.verdict in ("not met", "missing") else self.verdict
        return (self.number, self.what.replace("|", "\\|"), self.limit, self.figure, verdict, f"`{self.source}.json`")


def place(line: Line) -> int:
    """Floors in their order, what has no number of the six behind them."""
    return NUMERALS.index(line.number) if line.number in NUMERALS else len(NUMERALS)


def collect(results: Path) -> tuple[list[Line], dict[str, Any]]:
    """The floors of all result files, in order, and the files that hold some, by name."""
    files = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))}
    files = {name: result for name, result in files.items() if result["figures"].get("floors")}
    lines = [Line.of(entry, name) for name, result in files.items() for entry in result["figures"]["floors"]]
    for name, numbers in EXPECTED.items():
        found = {line.number for line in lines if line.source == name}
        lines += [
            Line(number=number, what="not measured", limit="", figure="", verdict="missing", source=name)
            for number in numbers
            if number not in found
        ]
    return sorted(lines, key=place), files


def origins(files: Mapping[str, Any]) -> list[str]:
    """Where the figures are from: one sentence for all result files of the same commit and machine."""
    grouped: dict[str, list[str]] = {}
    for name, result in files.items():
        machine = result["machine"]
        instructions = ", ".join(machine["instructions"]) or "none of AVX2, AVX-512, AMX"
        text = f"{machine['processor']}, {machine['cores']} cores ({instructions}), commit {result['commit'][:9]}"
        if "uncommitted" in result["commit"]:
            text += " with uncommitted changes"
        grouped.setdefault(f"{text}, {result['date']}", []).append(f"`{name}.json`")
    return [f"{', '.join(names)}: {text}." for text, names in grouped.items()]


def verdicts(lines: Sequence[Line]) -> str:
    """How many floors of each verdict there are; goals beyond a floor are no floors."""
    counts = {verdict: sum(line.verdict == verdict for line in lines) for verdict in ("met", "not met", "missing")}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)


def render(lines: Sequence[Line], files: Mapping[str, Any]) -> str:
    """The table in Markdown, with what it is from below."""
    rows = [HEAD, tuple("---" for _ in HEAD), *(line.cells for line in lines)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{table}\n\n" + " ".join([f"Floors: {verdicts(lines)}.", *origins(files)])


def put_between(text: str, table: str) -> str:
    """`text` with `table` between the markers.

    Raises:
        ValueError: they are not there, once each and in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        msg = f"the text does not have {BEGIN} and, behind it, {END}, once each: put them where the table is to be"
        raise ValueError(msg)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and write it into the README; 1 where the README has no place for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    options = parser.parse_args(arguments)
    table = render(*collect(options.results))
    print(table)
    try:
        text = put_between(options.readme.read_text(encoding="utf-8"), table)
    except ValueError as error:
        print(f"{options.readme} is left as it is: {error}", file=sys.stderr)
        return 1
    options.readme.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
