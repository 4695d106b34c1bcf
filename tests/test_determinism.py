"""The same bytes, however a run is cut, fed and packed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from test_end_to_end import embeddings_of, many_pictures, run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return many_pictures(tmp_path_factory.mktemp("determinism") / "in", 60)


def are_the_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> bool:
    return set(ours) == set(theirs) and all(np.array_equal(ours[key], theirs[key]) for key in ours)


def test_the_number_of_decoders_and_their_kind_change_nothing(pictures: Path, tmp_path: Path, tiny_model: Path) -> None:
    model = {"model": str(tiny_model), "rows_per_part": 25}
    run(pictures, tmp_path / "a.parquet", **model, workers=1)
    expected = embeddings_of(tmp_path / "a.parquet")
    for name, settings in (("b", {"workers": 5}), ("c", {"workers": 2, "decode": "processes"})):
        run(pictures, tmp_path / f"{name}.parquet", **model, **settings)
        assert are_the_same(embeddings_of(tmp_path / f"{name}.parquet"), expected)


@pytest.mark.parametrize(
    "other",
    [
        {"rows_per_part": 7},
        {"max_tokens_per_batch": 10},
        {"max_tokens_per_batch": 4096, "rows_per_part": 1000},
        {"limit": 31},
    ],
)
def test_deterministic_is_independent_of_what_is_packed_with_what(
    other: dict[str, Any], pictures: Path, tmp_path: Path, tiny_model: Path
) -> None:
    settings = {"model": str(tiny_model), "deterministic": True}
    run(pictures, tmp_path / "a.parquet", **settings)
    expected = embeddings_of(tmp_path / "a.parquet")
    run(pictures, tmp_path / "b.parquet", **settings, **other)
    found = embeddings_of(tmp_path / "b.parquet")
    assert len(found) > 25
    assert are_the_same(found, {key: expected[key] for key in found})


def test_alone_in_a_run_is_what_it_is_among_others(pictures: Path, tmp_path: Path, builtin_folder: Path) -> None:
    """The built-in model, whose matrix products are large enough for the kernels to choose by shape."""
    settings = {"model": str(builtin_folder), "deterministic": True, "limit": 12}
    run(pictures, tmp_path / "all.parquet", **settings)
    expected = embeddings_of(tmp_path / "all.parquet")
    for name in ("0001.png", "0007.png"):
        run(pictures / name, tmp_path / "one.parquet", **settings, overwrite=True)
        (vector,) = embeddings_of(tmp_path / "one.parquet").values()
        assert np.array_equal(vector, expected[name])
