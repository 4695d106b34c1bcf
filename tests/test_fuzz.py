"""Twenty seconds of what `make fuzz` does for ten minutes."""

from __future__ import annotations

import fuzzing
import pytest


@pytest.mark.parametrize("target", ["fuzz_parquet", "fuzz_decode"])
def test_mutated_inputs_end_in_rows_or_in_errors_of_ours(target: str) -> None:
    report = fuzzing.fuzz(target, 10.0, seed=1)
    assert not report.crashes, report.crashes[0].reason
    assert report.num_examples > 20
