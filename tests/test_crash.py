"""Runs that are killed at any moment: the next start goes on, and the file is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from breaking import CRASH
from crash_server import DEAD
from test_end_to_end import COMMAND, many_pictures, wait_for_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_KILLS = 60
"""Of the long test; `make crash-test`."""


class Server:
    """A `crash_server`, and the pictures that its runs embed."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, model: Path) -> None:
        self._process = process
        self.folder = folder
        self.model = model
        self.root = folder.parent

    def config(self, output: str, **settings: Any) -> dict[str, Any]:  # noqa: ANN401  of `EncodeConfig`
        """The settings of a run into `output`."""
        fixed = {"inputs": [str(self.folder)], "model": str(self.model), "rows_per_part": 10}
        return {**fixed, "output": output, **settings}

    def start(self, config: dict[str, Any], **order: Any) -> dict[str, Any]:  # noqa: ANN401  see `crash_server`
        """One run."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"config": config, **order}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    """One that serves this module's tests."""
    folder = many_pictures(tmp_path_factory.mktemp("crash") / "in", 120)
    command = [sys.executable, str(Path(__file__).parent / "crash_server.py")]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        yield Server(process, folder, tiny_model)
        assert process.stdin is not None
        process.stdin.close()


def content_of(output: str) -> tuple[pa.Table, pa.Table]:
    """Rows and errors of an output, file or folder."""
    path = Path(output)
    if path.is_dir():
        assert sorted(each.name for each in path.iterdir())[:2] == ["_SUCCESS", "_errors.parquet"]
        tables = [pq.read_table(each).replace_schema_metadata() for each in sorted(path.glob("part-*.parquet"))]
        return pa.concat_tables(tables), pq.read_table(path / "_errors.parquet").replace_schema_metadata()
    assert not path.with_name(path.name + ".partial").exists()
    both = (pq.read_table(each) for each in (path, path.with_suffix(".errors.parquet")))
    rows, errors = (table.replace_schema_metadata() for table in both)
    return rows, errors


def remove(output: str) -> None:
    """Everything that a run may have left."""
    path = Path(output)
    for each in (path, path.with_suffix(".errors.parquet"), path.with_name(path.name + ".partial")):
        if each.is_dir():
            shutil.rmtree(each)
        else:
            each.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> tuple[pa.Table, pa.Table, float]:
    """What every run must come to, and the seconds that it takes."""
    config = server.config(f"{server.root}/whole.parquet")
    answers = [server.start(config | {"overwrite": bool(number)}) for number in range(2)]
    assert [answer["code"] for answer in answers] == [0, 0], answers
    rows, errors = content_of(config["output"])
    assert len(rows) + len(errors) == 120
    assert len(set(rows["id"].to_pylist() + errors["id"].to_pylist())) == 120
    return rows, errors, min(answer["seconds"] for answer in answers)


def check(output: str, expected: tuple[pa.Table, pa.Table, float]) -> None:
    rows, errors = content_of(output)
    assert rows.equals(expected[0])  # the embeddings byte for byte, every row once, in order
    assert errors.equals(expected[1])


def kill_at_random(
    server: Server, expected: tuple[pa.Table, pa.Table, float], num_kills: int, seed: int
) -> dict[str, int]:
    """Kill runs at random moments until `num_kills` were; each start goes on where the one before was killed."""
    generator = random.Random(seed)  # noqa: S311  no secret
    counts = {"kills": 0, "starts": 0, "finished": 0, "resumed": 0}
    kinds = [("out.parquet", {}), ("out/", {}), ("cached.parquet", {"cache": f"{server.root}/cache"})]
    while counts["kills"] < num_kills:
        name, settings = generator.choice(kinds)
        config = server.config(f"{server.root}/{seed}-{name}", **settings)
        while True:
            lines = [f"{config['output']}.partial/parts.jsonl", f"{config['output']}_partial/parts.jsonl"]
            counts["resumed"] += any(Path(path).exists() and Path(path).read_bytes() for path in lines)
            seconds = generator.uniform(0.0, 1.1 * expected[2]) if counts["kills"] < num_kills else None
            answer = server.start(config, kill_after_seconds=seconds)
            counts["starts"] += 1
            if answer["code"] == 0:
                break
            assert answer["code"] == -signal.SIGKILL, answer["said"]
            counts["kills"] += 1
        check(config["output"], expected)
        counts["finished"] += 1
        remove(config["output"])
        if generator.random() < 0.5:
            shutil.rmtree(f"{server.root}/cache", ignore_errors=True)
    return counts


def test_kill_9_at_random_moments(server: Server, undisturbed: tuple[pa.Table, pa.Table, float]) -> None:
    counts = kill_at_random(server, undisturbed, 8, seed=0)
    assert counts["kills"] == 8


@pytest.mark.crash
def test_kill_9_at_many_random_moments(server: Server, undisturbed: tuple[pa.Table, pa.Table, float]) -> None:
    counts = kill_at_random(server, undisturbed, NUM_KILLS, seed=1)
    sys.stderr.write(f"\n{counts}\n")
    assert counts["resumed"] > 5


def die_everywhere(
    server: Server, config: dict[str, Any], expected: tuple[pa.Table, pa.Table, float], step: int
) -> tuple[int, int]:
    """Let runs die at every `step`-th file operation, and go on; how many died, of how many operations."""
    num_died = 0
    operation = 1 + step // 2
    while True:
        remove(config["output"])
        answer = server.start(config, die_at_operation=operation)
        if answer["code"] == 0:
            return num_died, int(answer["operations"])
        assert answer["code"] == DEAD, answer["said"]
        num_died += 1
        again = server.start(config)
        assert again["code"] == 0, (operation, again["said"])
        check(config["output"], expected)
        operation += step


@pytest.mark.parametrize("name", ["ops.parquet", "ops/"])
def test_death_at_some_file_operations(
    name: str, server: Server, undisturbed: tuple[pa.Table, pa.Table, float]
) -> None:
    num_died, num_operations = die_everywhere(server, server.config(f"{server.root}/{name}"), undisturbed, step=47)
    assert num_died > 1
    assert num_operations > 47 * num_died


@pytest.mark.crash
@pytest.mark.parametrize("name", ["all-ops.parquet", "all-ops/"])
def test_death_at_every_file_operation(
    name: str, server: Server, undisturbed: tuple[pa.Table, pa.Table, float]
) -> None:
    num_died, num_operations = die_everywhere(server, server.config(f"{server.root}/{name}"), undisturbed, step=1)
    assert num_died >= num_operations - 5
    sys.stderr.write(f"\n{name}: died at {num_died} operations\n")


def test_a_limit_on_the_size_of_files_stops_the_run_cleanly(
    server: Server, undisturbed: tuple[pa.Table, pa.Table, float]
) -> None:
    """Where no disk can be mounted: a file that may not grow is what a quota gives."""
    config = server.config(f"{server.root}/limited.parquet")
    for max_file_bytes, what in ((1_000, "the list of rows"), (20_000, "")):
        answer = server.start(config, max_file_bytes=max_file_bytes)
        assert answer["code"] == 1
        assert f"StorageError: cannot write {what}" in answer["said"]
        assert "make room" in answer["said"]
        assert not Path(config["output"]).exists()
    assert server.start(config)["code"] == 0
    check(config["output"], undisturbed)


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """A file system of so many bytes at `folder`."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)  # noqa: S607  as mount above


def test_a_full_disk_stops_the_run_cleanly(
    server: Server, undisturbed: tuple[pa.Table, pa.Table, float], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 200 * 1024):
        config = server.config(f"{disk}/out.parquet")
        filling = disk / "filling"
        filling.write_bytes(bytes(120 * 1024))
        answer = server.start(config)
        assert answer["code"] == 1, answer
        assert "No space left on device" in answer["said"] or "full" in answer["said"]
        assert "what was committed is kept; make room" in answer["said"]
        filling.unlink()
        assert server.start(config)["code"] == 0
        check(config["output"], undisturbed)


def test_after_a_crash_with_threads_the_next_start_names_the_suspects(server: Server, tmp_path: Path) -> None:
    shutil.copytree(server.folder, tmp_path / "in")
    with (tmp_path / "in" / "0044.png").open("ab") as file:
        file.write(CRASH)
    config = server.config(str(tmp_path / "out.parquet"), inputs=[str(tmp_path / "in")], workers=1)
    died = server.start(config, breaks=True)
    assert died["code"] == -signal.SIGSEGV
    again = server.start(config, breaks=True)
    assert again["code"] == -signal.SIGSEGV
    assert "an earlier start ended without a word while it decoded rows 44 (0044.png)." in again["said"]
    assert "with --decode processes that is a failed row (decoder_crash)" in again["said"]
    last = server.start(config | {"decode": "processes"}, breaks=True)
    assert last["code"] == 0, last["said"]
    errors = pq.read_table(tmp_path / "out.errors.parquet").to_pylist()
    assert {row["id"]: row["code"] for row in errors}["0044.png"] == "decoder_crash"


def test_sigterm_keeps_what_was_committed_and_a_second_process_is_refused(
    server: Server, undisturbed: tuple[pa.Table, pa.Table, float], tmp_path: Path
) -> None:
    config = server.config(str(tmp_path / "out.parquet"))
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(
        "import os, time\n"
        "fsync = os.fsync\n"
        "def slowly(descriptor):\n    time.sleep(0.05)\n    fsync(descriptor)\n"
        "os.fsync = slowly\n"
    )
    arguments = [str(server.folder), config["output"], "--model", str(server.model), "--rows-per-part", "10"]
    environment = os.environ | {"PYTHONPATH": str(slow), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*COMMAND, *arguments], stderr=-1, text=True, env=environment)
    lines = wait_for_parts(process, tmp_path / "out.parquet", 2)
    process.send_signal(signal.SIGSTOP)  # so that it is there for as long as the second one needs
    refused = server.start(config)
    assert refused["code"] == 1
    assert "OutputError: another process is writing to" in refused["said"]
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "terminated; whatever was committed is kept, and the same command goes on from there" in stderr
    assert "Traceback" not in stderr
    committed = lines.read_text().count("\n")
    assert 2 <= committed < 12
    assert server.start(config)["code"] == 0
    check(config["output"], undisturbed)
