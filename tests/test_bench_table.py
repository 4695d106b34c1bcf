"""The table of floors, of result files that are made up."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent / "pipelines" / "benchmarks"
MACHINE = {"processor": "Abacus", "cores": 2, "instructions": ["avx2"], "threads": 2, "gpu": None, "system": "Linux"}


@pytest.fixture
def floors(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401  a module
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("floors")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401  a module
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("table")


def write(folder: Path, name: str, entries: list[dict[str, Any]] | None, commit: str = "0123456789abcdef") -> None:
    figures = {"anything": 1} if entries is None else {"floors": entries}
    result = {"claim": "", "commit": commit, "date": "2024-02-29", "machine": MACHINE, "figures": figures}
    (folder / f"{name}.json").write_text(json.dumps(result))


def rows(text: str) -> list[list[str]]:
    """The table's lines below its head, cell by cell."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_a_floor_is_decided_by_the_median_of_its_rounds(floors: Any) -> None:  # noqa: ANN401  a module
    entry = floors.floor("iv", "feeding / a bare loop", [0.8, 0.93, 0.9], at_least=0.85)
    assert entry == {
        "floor": "iv",
        "what": "feeding / a bare loop",
        "limit": ">= 0.85",
        "figure": "0.9 (0.8 to 0.93)",
        "value": 0.9,
        "met": True,
        "stretch": False,
    }
    assert not floors.floor("iv", "feeding", [0.8, 0.84, 0.99], at_least=0.85)["met"]


def test_a_limit_from_above_is_met_below_it(floors: Any) -> None:  # noqa: ANN401  a module
    entry = floors.floor("vi", "wall time / forwards", [1.08], at_most=1.08)
    assert (entry["limit"], entry["figure"], entry["met"]) == ("<= 1.08", "1.08", True)
    assert not floors.floor("vi", "wall time / forwards", [1.081], at_most=1.08)["met"]


@pytest.mark.parametrize(
    ("values", "limits"), [([], {"at_least": 1.0}), ([1.0], {}), ([1.0], {"at_least": 1.0, "at_most": 2.0})]
)
def test_a_floor_has_rounds_and_one_limit(
    floors: Any,  # noqa: ANN401  a module
    values: list[float],
    limits: dict[str, float],
) -> None:
    with pytest.raises(ValueError, match="give one limit and at least one value"):
        floors.floor("i", "this / that", values, **limits)


def test_the_table_has_every_floor_in_order_with_its_verdict(
    tmp_path: Path,
    floors: Any,  # noqa: ANN401  a module
    table: Any,  # noqa: ANN401  a module
) -> None:
    feeding = floors.floor("iv", "feeding / a loop", [0.9], at_least=0.85)
    write(tmp_path, "feeding", [feeding, floors.floor("v", "duplicates", [0.1], at_most=0.15)])
    write(tmp_path, "packing", None)
    write(
        tmp_path,
        "peers",
        [
            floors.floor("vi", "wall time / forwards", [1.2, 1.1, 1.3], at_most=1.08),
            floors.floor("i", "images/s / OpenVINO", [0.96], at_least=0.95),
            floors.floor("i", "operations/s / chain", [0.7], at_least=0.9, stretch=True),
            floors.unmeasured("i", "images/s / Daft", at_least=1.4),
            floors.floor("ii", "a | b", [2.0], at_least=1.2),
        ],
    )
    write(tmp_path, "scale", [floors.floor(each, "rows", [1.0], at_most=1.1) for each in ("scale", "memory")])
    write(tmp_path, "tower_limit", [floors.floor("iii", "tower / chain", [0.95], at_least=0.9, stretch=True)])
    lines, files = table.collect(tmp_path)
    text = table.render(lines, files)
    assert rows(text.replace("\\|", "or")) == [
        ["i", "images/s / OpenVINO", ">= 0.95", "0.96", "met", "`peers.json`"],
        ["i", "operations/s / chain", ">= 0.9", "0.7", "goal not reached", "`peers.json`"],
        ["i", "images/s / Daft", ">= 1.4", "missing", "**missing**", "`peers.json`"],
        ["ii", "a or b", ">= 1.2", "2", "met", "`peers.json`"],
        ["iii", "tower / chain", ">= 0.9", "0.95", "goal reached", "`tower_limit.json`"],
        ["iv", "feeding / a loop", ">= 0.85", "0.9", "met", "`feeding.json`"],
        ["v", "duplicates", "<= 0.15", "0.1", "met", "`feeding.json`"],
        ["vi", "wall time / forwards", "<= 1.08", "1.2 (1.1 to 1.3)", "**not met**", "`peers.json`"],
        ["scale", "rows", "<= 1.1", "1", "met", "`scale.json`"],
        ["memory", "rows", "<= 1.1", "1", "met", "`scale.json`"],
    ]
    assert "Floors: 6 met, 1 not met, 1 missing." in text
    origin = "Abacus, 2 cores (avx2), commit 012345678, 2024-02-29."
    assert text.endswith(f"`feeding.json`, `peers.json`, `scale.json`, `tower_limit.json`: {origin}")


def test_floors_of_a_result_file_that_is_not_there_are_missing(
    tmp_path: Path,
    floors: Any,  # noqa: ANN401  a module
    table: Any,  # noqa: ANN401  a module
) -> None:
    write(
        tmp_path, "peers", [floors.floor("i", "this / that", [1.0], at_least=1.0)], commit="abc + uncommitted changes"
    )
    lines, files = table.collect(tmp_path)
    found = {(line.number, line.source): line.verdict for line in lines}
    assert found == {
        ("i", "peers"): "met",
        ("ii", "peers"): "missing",
        ("iii", "tower_limit"): "missing",
        ("iv", "feeding"): "missing",
        ("v", "feeding"): "missing",
        ("scale", "scale"): "missing",
        ("memory", "scale"): "missing",
        ("vi", "peers"): "missing",
    }
    assert "with uncommitted changes" in table.render(lines, files)


def test_the_table_is_written_between_the_markers_and_nowhere_else(
    tmp_path: Path,
    floors: Any,  # noqa: ANN401  a module
    table: Any,  # noqa: ANN401  a module
    capsys: pytest.CaptureFixture[str],
) -> None:
    results, readme = tmp_path / "results", tmp_path / "README.md"
    results.mkdir()
    write(results, "feeding", [floors.floor("iv", "feeding / a loop", [0.5], at_least=0.85)])
    readme.write_text(f"Speed\n\n{table.BEGIN}\nolder figures\n{table.END}\n\nThe end\n")
    arguments = ["--results", str(results), "--readme", str(readme)]
    for _ in range(2):  # a second time changes nothing
        assert table.main(arguments) == 0
        text = readme.read_text()
        assert text == f"Speed\n\n{table.BEGIN}\n{capsys.readouterr().out.strip()}\n{table.END}\n\nThe end\n"
    assert "older figures" not in text
    assert ["iv", "feeding / a loop", ">= 0.85", "0.5", "**not met**", "`feeding.json`"] in rows(text)


@pytest.mark.parametrize("text", ["none", "{END} {BEGIN}", "{BEGIN} {END} {BEGIN} {END}", "{BEGIN}"])
def test_a_readme_without_a_place_for_the_table_is_left_alone(
    tmp_path: Path,
    table: Any,  # noqa: ANN401  a module
    capsys: pytest.CaptureFixture[str],
    text: str,
) -> None:
    readme, before = tmp_path / "README.md", text.format(BEGIN=table.BEGIN, END=table.END)
    readme.write_text(before)
    assert table.main(["--results", str(tmp_path), "--readme", str(readme)]) == 1
    assert readme.read_text() == before
    assert "put them where the table is to be" in capsys.readouterr().err


def answers(seconds: list[float], flops: float = 0.0, num: int = 8) -> list[dict[str, float]]:
    """What a side says of its rounds."""
    return [{"seconds": each, "rate": num / each, "flops": flops} for each in seconds]


def test_the_floors_of_the_peers_are_of_the_faster_runtime_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    peers = importlib.import_module("peer_floors")
    rounds = {
        "vlmembed, torch, photos, run": answers([2.0, 2.0], flops=80.0),
        "vlmembed, torch, photos, forwards": answers([1.9, 1.9]),
        "vlmembed, torch, photos, gemms": answers([1.0, 2.0], flops=70.0),
        "vlmembed, torch, stamps, run": answers([1.0, 1.0]),
        "vlmembed, openvino, photos, run": answers([1.0, 2.0]),
        "vlmembed, openvino, photos, forwards": answers([0.9, 2.0]),
        "vlmembed, openvino, stamps, run": answers([3.0, 3.0]),
        "OpenVINO alone": answers([1.1, 2.0]),
        "plain script, fp32": answers([4.0, 10.0]),
        "plain script, bf16": answers([8.0, 8.0], num=4),
        "transformers loop": answers([2.0, 2.0]),
    }
    cosines = {"vlmembed, openvino, photos, run": 0.9999, "vlmembed, torch, stamps, run": 0.5}
    found = peers.all_floors(rounds, cosines, ("torch", "openvino"), "fp32")
    assert [(entry["floor"], entry["what"], entry["value"], entry["met"]) for entry in found] == [
        ("i", "images/s, vlmembed (openvino, fp32) / OpenVINO alone", pytest.approx(1.05), True),
        ("i", "images/s, vlmembed (openvino, fp32) / plain script, bf16", pytest.approx(12.0), True),
        ("i", "images/s, vlmembed (openvino, fp32) / plain script, fp32", pytest.approx(4.5), True),
        ("i", "images/s, vlmembed (openvino, fp32) / Daft", None, False),
        ("i", "images/s, vlmembed (openvino, fp32) / Ray Data", None, False),
        ("ii", "images/s, vlmembed (torch, fp32) / transformers loop", pytest.approx(2.0), True),
        ("ii", "images/s, vlmembed (torch, fp32) / OpenVINO alone, dynamic", None, False),
        ("i", "operations/s, whole run (openvino, fp32) / bare GEMM chain", pytest.approx(8 / 7), True),
        ("i", "lowest cosine to float32 transformers, photos", 0.9999, True),
        ("ii", "lowest cosine to float32 transformers, stamps", 0.5, False),
        (
            "vi",
            "wall time, whole run (openvino, fp32) / the same forwards alone",
            pytest.approx((1 / 0.9 + 1) / 2),
            True,
        ),
    ]
    assert [entry["stretch"] for entry in found].count(True) == 1
    assert [entry["figure"] for entry in found if "cosine" in entry["what"]] == ["0.9999", "0.5"]


def test_the_engine_for_clusters_is_held_to_the_faster_of_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    ray_peers = importlib.import_module("ray_peers")
    titles = [contest.title for contest in ray_peers.ray_contests("fp32", ("torch", "openvino"), 2, 32)]
    assert titles == ["vlmembed on Ray, torch", "vlmembed on Ray, openvino", "Daft", "Ray Data"]
    rounds = dict(
        zip(titles, (answers([2.0, 2.0]), answers([1.0, 2.0]), answers([2.0, 2.0]), answers([1.0, 2.5])), strict=True)
    )
    entry = ray_peers.peer_floor(rounds, "fp32")
    assert entry["what"] == (
        "images/s in the steady state, vlmembed on Ray, openvino, fp32 / Ray Data, which is faster than Daft"
    )
    assert (entry["floor"], entry["value"], entry["met"]) == ("ray", pytest.approx((1 + 1.25) / 2), True)
    del rounds["Daft"]
    entry = ray_peers.peer_floor(rounds, "fp32")
    assert (entry["value"], entry["met"], entry["limit"]) == (None, False, ">= 1")


def test_floors_of_the_engine_for_clusters_are_in_the_table_once_they_are_measured(
    tmp_path: Path,
    floors: Any,  # noqa: ANN401  a module
    table: Any,  # noqa: ANN401  a module
) -> None:
    assert "ray_engine" not in {line.source for line in table.collect(tmp_path)[0]}
    write(tmp_path, "ray_engine", [floors.floor("ray", "ray / local", [1.2], at_most=1.3)])
    lines, files = table.collect(tmp_path)
    assert ["ray", "ray / local", "<= 1.3", "1.2", "met", "`ray_engine.json`"] in rows(table.render(lines, files))


def test_repeated_rows_of_the_made_up_hashes_come_behind_their_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    shown = importlib.import_module("row_contents").contents(range(1000)).tolist()
    repeated = [row for row, content in enumerate(shown) if content != row]
    assert repeated == list(range(4, 1000, 5))
    assert all(shown[row] < row and shown[shown[row]] == shown[row] for row in repeated)
