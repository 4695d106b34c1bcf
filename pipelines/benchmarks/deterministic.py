"""Question: what does ``--deterministic`` (every image alone in its pack) cost, and decoding in processes?

Food photos, the built-in model, files in and Parquet out, interleaved rounds in one process, start-up left out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from cache import encode
from floors import quotients, spread
from photos import fetch_photos
from record import write_result

SIDES: dict[str, dict[str, Any]] = {
    "default": {},
    "deterministic": {"deterministic": True},
    "decode in processes": {"decode": "processes"},
}


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-photos", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        chosen = scratch / "photos"
        chosen.mkdir()
        for photo in fetch_photos(scratch)[: arguments.num_photos]:
            photo.rename(chosen / photo.name)
        for number in range(arguments.repeats + 1):
            for side, settings in SIDES.items():
                report = encode([chosen], scratch / "out.parquet", **settings)
                if number:  # the first round warms up
                    rates[side].append(report.num_encoded / report.seconds)
            print(number, {side: round(each[-1], 2) for side, each in rates.items() if each}, flush=True)
    figures = {
        "photos": arguments.num_photos,
        "images/s, median (min to max)": {side: spread(each) for side, each in rates.items()},
        "ratio to default, median of rounds (min to max)": {
            side: spread(quotients(rates[side], rates["default"])) for side in SIDES if side != "default"
        },
    }
    print(json.dumps(figures, indent=1))
    claim = "every image alone in its pack, and decoding in processes, beside the default"
    print(write_result("deterministic", claim, arguments.repeats, figures))


if __name__ == "__main__":
    main()
