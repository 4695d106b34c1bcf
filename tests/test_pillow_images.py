"""A picture is embedded if Pillow alone decodes all of it within the limit, and only then.

Held on the pictures of Pillow's own tests, a good part of which once crashed a decoder, and on damaged copies of the
samples.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from conftest import SAMPLES

import vlmembed
from vlmembed.config import DEFAULT_MAX_SOURCE_PIXELS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vlmembed.report import RunReport

LIMIT = DEFAULT_MAX_SOURCE_PIXELS
DECODE = ["threads"]
"""Values of ``--decode`` that the runs are made with."""

NO_SIGNATURE = {
    "bw_gradient.imt": "IM Tools: any text of keys and values",
    "cmx3g8_wv_1998.260_0745_mcidas.ara": "McIDAS: begins with the numbers 0 and 4, like many other files",
    "hopper.spider": "SPIDER: begins with floats",
}
"""Pillow decodes them, but neither their bytes nor their extensions say picture: skipped, and counted by kind."""


@pytest.fixture(scope="module")
def pillow_images() -> Path:
    """The folder ``Tests/images`` of the Pillow 12.0.0 sdist."""
    named = os.environ.get("VLMEMBED_PILLOW_IMAGES", "")
    if not named or not Path(named).is_dir():
        pytest.skip("VLMEMBED_PILLOW_IMAGES names no folder: `make test` puts the sdist's pictures there if pip can")
    return Path(named)


def accepted_by_pillow(paths: Iterable[Path], scratch: Path) -> dict[Path, str]:
    """Why plain Pillow refuses a file, or an empty string. A crash or a hang of a decoder is a refusal too."""
    left, found = list(paths), {}
    while left:
        (scratch / "list").write_text("\n".join(map(str, left)))
        command = [sys.executable, str(Path(__file__).parent / "plain_pillow.py"), str(LIMIT), str(scratch / "list")]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False, timeout=600)
        for line in done.stdout.splitlines():
            path, problem, _ = json.loads(line)
            found[Path(path)] = problem
        left = [path for path in left if path not in found]
        if left and done.returncode:
            found[left.pop(0)] = f"the process ended with {done.returncode}"
    return found


def outcomes_of(folder: Path, scratch: Path, model: Path, decode: str) -> tuple[RunReport, dict[Path, str]]:
    """One run over a folder: for each row an empty string or its code."""
    output = scratch / "out.parquet"
    report = vlmembed.encode(
        vlmembed.EncodeConfig(inputs=(str(folder),), output=str(output), model=str(model), decode=decode)
    )
    found = {folder / key: "" for key in pq.read_table(output, columns=["id"])["id"].to_pylist()}
    errors = pq.read_table(output.with_suffix(".errors.parquet")).to_pylist()
    assert all(row["message"] for row in errors)
    return report, found | {folder / row["id"]: row["code"] for row in errors}


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def check_accounts(report: RunReport, outcomes: dict[Path, str], num_files: int) -> None:
    assert report.num_rows + sum(report.skipped.values()) == num_files
    assert report.num_rows == report.num_embedded + report.num_duplicates + report.num_failed == len(outcomes)
    assert report.num_failed == sum(map(bool, outcomes.values()))


@pytest.mark.parametrize("decode", DECODE)
def test_every_picture_of_pillows_tests_that_it_decodes_is_embedded(
    pillow_images: Path, tmp_path: Path, tiny_model: Path, decode: str
) -> None:
    files = files_below(pillow_images)
    assert len(files) > 1000
    report, outcomes = outcomes_of(pillow_images, tmp_path, tiny_model, decode)
    check_accounts(report, outcomes, len(files))
    problems = accepted_by_pillow(files, tmp_path)
    lost = {
        str(path.relative_to(pillow_images)): outcomes.get(path, "skipped")
        for path in files
        if not problems[path] and outcomes.get(path, "skipped")
    }
    assert lost == dict.fromkeys(NO_SIGNATURE, "skipped")
    assert not {path: problems[path] for path, code in outcomes.items() if problems[path] and not code}
    assert sum(not code for code in outcomes.values()) > 840


def damaged(content: bytes, generator: random.Random) -> bytes:
    """One byte is another one, or the end is cut off."""
    position = generator.randrange(len(content))
    if generator.random() < 0.3:
        return content[:position]
    return content[:position] + bytes([content[position] ^ generator.randrange(1, 256)]) + content[position + 1 :]


@pytest.mark.parametrize("decode", DECODE)
def test_a_damaged_sample_is_embedded_if_pillow_still_decodes_it(tmp_path: Path, tiny_model: Path, decode: str) -> None:
    generator = random.Random(6)  # noqa: S311  no secret
    samples = [path for path in files_below(SAMPLES) if path.stat().st_size and path.suffix not in (".txt", ".json")]
    folder = tmp_path / "damaged"
    folder.mkdir()
    for number in range(500):
        sample = samples[number % len(samples)]
        (folder / f"{number:03}{sample.suffix or '.jpg'}").write_bytes(damaged(sample.read_bytes(), generator))
    report, outcomes = outcomes_of(folder, tmp_path, tiny_model, decode)
    check_accounts(report, outcomes, 500)
    problems = accepted_by_pillow(outcomes, tmp_path)
    assert {path.name: code for path, code in outcomes.items() if bool(code) != bool(problems[path])} == {}
    assert 100 < report.num_failed < 400
