"""Runs on a real Ray cluster: several node processes on this machine, two cores in all."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import noise

import vlmembed
from vlmembed.errors import ClusterError, MissingExtraError, RowFailedError
from vlmembed.schema import read_provenance

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytest.importorskip("ray.data")
cluster_utils = pytest.importorskip("ray.cluster_utils")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vlmembed.events import Event
    from vlmembed.report import RunReport

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 200 * 2**20}
RAY: dict[str, Any] = {"engine": "ray"}
PART = 8
SETTINGS: dict[str, Any] = {"rows_per_part": PART, "max_error_rate": 1.0}
SMALL: dict[str, Any] = {"max_pixels": 70 * 70}
"""Of pictures, so that they cost little."""


class StopHere(Exception):  # noqa: N818  no error: a run that is ended from outside
    """Ends a run where it is."""


class Cluster(Protocol):
    """What is used of `ray.cluster_utils.Cluster`."""

    def add_node(self, **settings: float) -> object:
        """Start a node."""

    def remove_node(self, node: object, *, allow_graceful: bool) -> None:
        """End it."""

    def wait_for_nodes(self) -> None:
        """Until all are there."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head and a node, a CPU each; this process is connected."""
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    try:
        cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def jpeg(seed: int, size: tuple[int, int] = (40, 56)) -> bytes:
    buffer = io.BytesIO()
    noise(*size, seed=seed).save(buffer, "JPEG")
    return buffer.getvalue()


CONTENTS: list[bytes | None] = [jpeg(seed, (30 + seed % 9, 50)) for seed in range(60)]
"""Of the input's rows: distinct but for what follows."""

CONTENTS[3] = CONTENTS[1]  # a duplicate in the same part
CONTENTS[20] = CONTENTS[2]  # in another block
CONTENTS[45] = CONTENTS[2]  # in another file, and so is the next one, of a row that is no first one
CONTENTS[58] = CONTENTS[45]
CONTENTS[10] = jpeg(99)[:300]  # cut
CONTENTS[33] = CONTENTS[10]  # a duplicate of a row that fails
CONTENTS[40] = None
CONTENTS[41] = b"no picture"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two Parquet files of several row groups, with a column to keep."""
    folder = tmp_path_factory.mktemp("tables")
    for name, rows in (("a", range(35)), ("b", range(35, 60))):
        table = pa.table(
            {"image": [CONTENTS[row] for row in rows], "label": [f"label {row % 5}" for row in rows]},
            schema=pa.schema([("image", pa.binary()), ("label", pa.string())]),
        )
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=10)
    return folder


def run(
    inputs: Path,
    output: Path | str,
    on_event: Callable[[Event], None] | None = None,
    **settings: Any,  # noqa: ANN401  of all types
) -> RunReport:
    """In the folder that holds the output, so that its name is the same wherever it is."""
    folder = Path(output).parent
    folder.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        name = Path(output).name + ("/" if str(output).endswith("/") else "")
        return vlmembed.encode(inputs, name, on_event=on_event, **SETTINGS, **settings)
    finally:
        os.chdir(before)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def check_law(output: Path) -> dict[str, Any]:
    counts = read_provenance(pq.read_schema(output), str(output))["counts"]
    assert counts["rows"] == counts["embedded"] + counts["duplicates"] + counts["failed"]
    return dict(counts)


@pytest.mark.usefixtures("cluster")
def test_a_cluster_gives_what_one_machine_gives(
    tables: Path, tmp_path: Path, builtin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Duplicates within a block, across blocks and across files, rows that fail, kept columns, the records."""
    monkeypatch.setattr("vlmembed.engines.ray.BUCKET_ROWS", 20)
    monkeypatch.setattr("vlmembed.engines.ray.STRETCH_ROWS", 24)
    settings: dict[str, Any] = {"model": str(builtin_folder), "keep_columns": ("label",), "dtype": "fp32", **SMALL}
    mine = run(tables, tmp_path / "one" / "out.parquet", **settings)
    theirs = run(tables, tmp_path / "many" / "out.parquet", **settings, **RAY, towers="1:2")
    figures = ("num_rows", "num_embedded", "num_duplicates", "num_failed", "codes", "num_encoded", "num_tokens")
    for name in (*figures, "num_packs", "packing_efficiency"):
        assert getattr(theirs, name) == getattr(mine, name)
    assert (mine.num_rows, mine.num_duplicates, mine.num_failed) == (60, 4, 4)
    one, many = (pq.read_table(tmp_path / name / "out.parquet") for name in ("one", "many"))
    np.testing.assert_allclose(vectors_of(many), vectors_of(one), rtol=0, atol=1e-5)  # of length 1
    assert many.drop_columns(["embedding"]).equals(one.drop_columns(["embedding"]), check_metadata=True)
    duplicates = {row["id"]: row["duplicate_of"] for row in many.select(["id", "duplicate_of"]).to_pylist()}
    assert duplicates["b.parquet#10"] == duplicates["b.parquet#23"] == duplicates["a.parquet#20"] == "a.parquet#2"
    assert duplicates["a.parquet#3"] == "a.parquet#1"
    errors = tmp_path / "many" / "out.errors.parquet"
    assert errors.read_bytes() == (tmp_path / "one" / "out.errors.parquet").read_bytes()
    failed = {row["row"]: (row["stage"], row["code"]) for row in pq.read_table(errors).to_pylist()}
    assert failed == {
        10: ("decode", "truncated"),
        33: ("decode", "truncated"),
        40: ("read", "null"),
        41: ("decode", "unsupported_format"),
    }


def vectors_of(table: pa.Table) -> np.ndarray:
    values: np.ndarray = table["embedding"].combine_chunks().flatten().to_numpy()
    return values.reshape(table.num_rows, -1)


@pytest.mark.usefixtures("cluster")
def test_deterministic_output_in_a_folder_is_the_same_bytes(tables: Path, tmp_path: Path, builtin_folder: Path) -> None:
    settings: dict[str, Any] = {
        "model": str(builtin_folder),
        "deterministic": True,
        "dedup": "pixels",
        "dtype": "fp32",
    } | SMALL
    run(tables, f"{tmp_path}/one/out/", **settings)
    run(tables, f"{tmp_path}/many/out/", **settings, **RAY)
    assert len(files_of(tmp_path / "one")) == 8 + 2
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")
    ids = pa.concat_tables(pq.read_table(path) for path in sorted((tmp_path / "many" / "out").glob("part-*.parquet")))
    rows = [(key[0], int(key.split("#")[1])) for key in ids["id"].to_pylist()]
    assert rows == sorted(rows)


def processes(title: str) -> list[psutil.Process]:
    """Of this machine's Ray workers those that run something of this name."""
    names = [(process, (process.info["cmdline"] or [""])[0]) for process in psutil.process_iter(["cmdline"])]
    return [process for process, name in names if name.startswith("ray::") and title in name]


def test_a_killed_tower_and_a_killed_node_cost_nothing(
    cluster: Cluster, tables: Path, tmp_path: Path, builtin_folder: Path
) -> None:
    settings: dict[str, Any] = {"model": str(builtin_folder), "dtype": "fp32"}
    run(tables, tmp_path / "one" / "out.parquet", **settings)
    doomed = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    killed = []

    def kill(event: Event) -> None:
        if event["event"] != "part":
            return
        if event["number"] == 0:
            towers = processes("Tower")
            for process in towers[:1]:
                process.send_signal(signal.SIGKILL)
                killed.append("tower")
        elif event["number"] == 2 and "node" not in killed:
            cluster.remove_node(doomed, allow_graceful=False)
            killed.append("node")

    report = run(tables, tmp_path / "many" / "out.parquet", kill, **settings, **RAY, towers="1:2")
    assert killed == ["tower", "node"]
    assert (report.num_embedded, report.num_duplicates, report.num_failed) == (52, 4, 4)
    one, many = (pq.read_table(tmp_path / name / "out.parquet") for name in ("one", "many"))
    np.testing.assert_allclose(vectors_of(many), vectors_of(one), rtol=0, atol=1e-5)
    assert many.drop_columns(["embedding"]).equals(one.drop_columns(["embedding"]))
    check_law(tmp_path / "many" / "out.parquet")


@pytest.mark.usefixtures("cluster")
def test_a_run_goes_from_engine_to_engine(tables: Path, tmp_path: Path, tiny_model: Path) -> None:
    """Begun here, gone on with on the cluster, finished here: the parts are the same."""

    def stop_at(number: int) -> Callable[[Event], None]:
        def stop(event: Event) -> None:
            if event["event"] == "part" and event["number"] == number:
                raise StopHere

        return stop

    settings: dict[str, Any] = {"model": str(tiny_model), "keep_columns": ("label",)}
    run(tables, tmp_path / "one" / "out.parquet", **settings)
    with pytest.raises(StopHere):
        run(tables, tmp_path / "many" / "out.parquet", stop_at(1), **settings)
    with pytest.raises(StopHere):
        run(tables, tmp_path / "many" / "out.parquet", stop_at(4), **settings, **RAY)
    lines = (tmp_path / "many" / "out.parquet.partial" / "parts.jsonl").read_text().splitlines()
    assert len(lines) == 5
    report = run(tables, tmp_path / "many" / "out.parquet", **settings)
    assert report.num_resumed == 5 * PART
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")


@pytest.mark.usefixtures("cluster")
def test_the_cache_is_shared(tables: Path, tmp_path: Path, tiny_model: Path) -> None:
    settings: dict[str, Any] = {"model": str(tiny_model), "cache": tmp_path / "cache"}
    run(tables / "a.parquet", tmp_path / "first" / "out.parquet", **settings)
    report = run(tables, tmp_path / "many" / "out.parquet", **settings, **RAY)
    assert (report.num_found, report.num_encoded) == (35 - 2 - 2, 52 - 31)  # a.parquet: 2 duplicates, 1 cut; row 33
    again = run(tables, tmp_path / "again" / "out.parquet", **settings)
    assert (again.num_found, again.num_encoded) == (52, 0)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "many")


@pytest.mark.usefixtures("cluster")
def test_tars_are_counted_by_the_cluster_and_bf16_agrees(tmp_path: Path, builtin_folder: Path) -> None:
    folder = tmp_path / "tars"
    folder.mkdir()
    for name, seeds in (("a", range(11)), ("b", range(5, 14))):
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            for seed in seeds:
                member = tarfile.TarInfo(f"{seed:03d}.jpg")
                member.size = len(jpeg(seed))
                tar.addfile(member, io.BytesIO(jpeg(seed)))
    settings: dict[str, Any] = {"model": str(builtin_folder), "limit": 18, "dtype": "bf16"} | SMALL
    run(folder, tmp_path / "one" / "out.parquet", **settings)
    report = run(folder, tmp_path / "many" / "out.parquet", **settings, **RAY)
    assert (report.num_rows, report.num_embedded, report.num_duplicates) == (18, 12, 6)
    one, many = (pq.read_table(tmp_path / name / "out.parquet") for name in ("one", "many"))
    assert (vectors_of(one) * vectors_of(many)).sum(axis=1).min() >= 0.9999
    assert many.drop_columns(["embedding"]).equals(one.drop_columns(["embedding"]), check_metadata=True)


@pytest.mark.usefixtures("cluster")
def test_what_a_task_raises_on_purpose_reaches_the_caller() -> None:
    from vlmembed.engines.cluster import quiet_data, raise_own  # noqa: PLC0415  with Ray

    def fail(_: object) -> pa.Table:
        msg = "a.jpg: truncated"
        raise RowFailedError(msg)

    @contextmanager
    def meant() -> Iterator[None]:
        try:
            yield
        except ray.exceptions.RayError as error:
            raise_own(error)

    with pytest.raises(RowFailedError, match=r"^a\.jpg: truncated$"), meant():
        ray.get(ray.remote(fail).remote(1))

    class Failing:
        def __init__(self) -> None:
            fail(0)

        def __call__(self, block: pa.Table) -> pa.Table:
            return block

    with quiet_data(2**20):
        data = ray.data.from_items([1])
        with pytest.raises(RowFailedError, match=r"^a\.jpg: truncated$"), meant():
            data.map_batches(fail, batch_format="pyarrow").take_all()
        one = ray.data.ActorPoolStrategy(size=1)
        with pytest.raises(ClusterError, match=r"RowFailedError: a\.jpg: truncated\)"), meant():
            data.map_batches(Failing, batch_format="pyarrow", compute=one).take_all()
    with pytest.raises(ClusterError, match=r"could not go on.*What was committed is kept"), meant():
        raise ray.exceptions.WorkerCrashedError


@pytest.mark.usefixtures("cluster")
def test_more_towers_than_the_cluster_can_hold(tables: Path, tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(ClusterError, match=r"2 towers with 1 GPUs and 1 CPUs each.*room for 0.*lower --towers"):
        run(tables, tmp_path / "out.parquet", model=str(tiny_model), engine="ray", device="cuda", towers="2")


def test_no_cluster_is_at_the_address(tables: Path, tmp_path: Path, tiny_model: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "vlmembed",
        "encode",
        str(tables),
        str(tmp_path / "out.parquet"),
        "--model",
        str(tiny_model),
    ]
    began = time.monotonic()
    found = subprocess.run(
        [*command, "--ray-address", "127.0.0.1:9"], capture_output=True, text=True, check=False, timeout=120
    )
    assert found.returncode == 1, found.stderr
    assert "there is no Ray cluster at 127.0.0.1:9" in found.stderr
    assert "Traceback" not in found.stderr
    assert time.monotonic() - began < 100


def test_ray_is_not_installed(tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmembed.engines.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'vlmembed\[ray\]'"):
        run(tables, tmp_path / "out.parquet", engine="ray")
