"""A whole output, and whether its files still hold what its run has counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from vlmembed.errors import InputError
from vlmembed.finished import FinishedOutput, reading

if TYPE_CHECKING:
    from pathlib import Path


def open_whole(path: Path) -> FinishedOutput:
    """Look at an output that is no part of another.

    Raises:
        InputError: it is one, or as `FinishedOutput.open`.
    """
    output = FinishedOutput.open(path)
    if "counts" not in output.provenance:
        msg = f"{path} is a part of an output, not a whole one: name the folder that it lies in"
        raise InputError(msg)
    return output


def count_problems(output: FinishedOutput) -> list[str]:
    """In what the files do not hold as many rows as the run has counted; a line each.

    Raises:
        InputError: the errors file is damaged.
    """
    problems = []
    counts = output.provenance["counts"]
    promised, num_rows = counts["embedded"] + counts["duplicates"], output.num_rows
    if num_rows != promised:
        problems.append(f"{output.path} holds {num_rows:,} rows, and its run wrote {promised:,}")
    if not output.has_errors:
        if counts["failed"]:
            what = f"the {counts['failed']:,} rows that failed in {output.path} cannot be compared"
            problems.append(f"{output.errors} is not there, so {what}: put it beside it again")
        return problems
    with reading(output.errors):
        num_failed = pq.read_metadata(output.errors).num_rows
    if num_failed != counts["failed"]:
        problems.append(f"{output.errors} holds {num_failed:,} rows, and its run wrote {counts['failed']:,}")
    return problems
