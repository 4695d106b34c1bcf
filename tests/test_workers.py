"""Several devices: every row comes once whatever becomes of the workers, and long images are not all one worker's."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from conftest import make_rule
from fakes import random_image
from odd_children import echoed, opened
from test_end_to_end import COMMAND, many_pictures, run, wait_for_parts

import vlmembed.worker
import vlmembed.workers
from vlmembed.batch import PackCost, make_batch
from vlmembed.child import Child
from vlmembed.config import EncodeConfig
from vlmembed.encoder import vector_columns
from vlmembed.errors import ModelError, WorkerError
from vlmembed.exchange import GROWTH_BYTES, PACKS_IN_FLIGHT, LoadOrder, Result, SharedBlock, Trouble
from vlmembed.towers import open_tower
from vlmembed.tuning import Settled
from vlmembed.types import EmbeddingBatch, Failure
from vlmembed.worker import PinnedBlock
from vlmembed.worker import packs as packs_of
from vlmembed.workers import WorkerPool, _check_same_weights, _Job, _load, _Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.connection import Connection

    from vlmembed.layout import TowerLayout
    from vlmembed.types import PackedBatch


def kill_when_given(monkeypatch: pytest.MonkeyPatch, should_die: Callable[[int, PackedBatch], bool]) -> None:
    """SIGKILL a worker right after it was given a pack; `should_die` sees the pack's number, from 1, and the pack."""
    give, given = _Worker.give, 0

    def watched(self: _Worker, job: Any) -> None:  # noqa: ANN401  as there
        nonlocal given
        given += 1
        give(self, job)
        if should_die(given, job.batch):
            self.process.kill()

    monkeypatch.setattr(_Worker, "give", watched)


@pytest.mark.parametrize("num_workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_worker_that_is_killed_costs_no_row(
    num_workers: int, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = many_pictures(tmp_path / "in", 300)
    settings = {"model": str(tiny_model), "rows_per_part": 100, "max_tokens_per_batch": 60}
    alone = run(folder, tmp_path / "alone.parquet", **settings)
    kill_when_given(monkeypatch, lambda number, _: number == 12)
    devices = ",".join(["cpu"] * num_workers)
    report = run(folder, tmp_path / "out.parquet", device=devices, **settings)
    assert report.num_lost_workers == 1
    assert (report.num_rows, report.num_embedded, report.num_duplicates) == (
        alone.num_rows,
        alone.num_embedded,
        alone.num_duplicates,
    )
    assert report.codes == alone.codes
    assert report.num_tokens == alone.num_tokens
    tables = [pq.read_table(tmp_path / f"{name}.parquet") for name in ("out", "alone")]
    assert tables[0].drop(["embedding"]).equals(tables[1].drop(["embedding"]))
    found, expected = (np.stack(table["embedding"].to_numpy()) for table in tables)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    errors = [pq.read_table(tmp_path / f"{name}.errors.parquet") for name in ("out", "alone")]
    assert errors[0].equals(errors[1])
    assert not psutil.Process().children()


def test_when_the_last_worker_dies_the_run_says_so_and_the_next_start_goes_on(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = many_pictures(tmp_path / "in", 120)
    settings = {"model": str(tiny_model), "rows_per_part": 20, "max_tokens_per_batch": 60}
    with monkeypatch.context() as patch:
        kill_when_given(patch, lambda number, _: number >= 12)
        with pytest.raises(
            WorkerError, match=r"no worker is left: .* died \(killed.*the same command goes on from there"
        ):
            run(folder, tmp_path / "out.parquet", device="cpu,cpu", **settings)
    assert not psutil.Process().children()
    again = run(folder, tmp_path / "out.parquet", **settings)
    assert again.num_resumed >= 20
    assert again.num_rows == again.num_embedded + again.num_duplicates + again.num_failed == 120


def test_what_a_worker_cannot_load_is_said_as_if_this_process_had_tried(tmp_path: Path, tiny_model: Path) -> None:
    folder = many_pictures(tmp_path / "in", 3)
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match=weights.name):
        run(folder, tmp_path / "out.parquet", model=str(model), device="cpu,cpu")
    assert not psutil.Process().children()
    assert not (tmp_path / "out.parquet.partial").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_workers_end_with_the_run(number: signal.Signals, tmp_path: Path, tiny_model: Path) -> None:
    """SIGINT to the whole group, as a terminal sends it; SIGKILL to the run alone, which cannot tell its workers."""
    folder = many_pictures(tmp_path / "in", 2000)
    settings = ["--model", tiny_model, "--rows-per-part", 20, "--max-tokens-per-batch", 60, "--device", "cpu,cpu"]
    process = subprocess.Popen(
        [*COMMAND, *map(str, [folder, tmp_path / "out.parquet", *settings])],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for_parts(process, tmp_path / "out.parquet", 1)
    children = psutil.Process(process.pid).children()
    assert len(children) == 2
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in stderr
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


# From here on the workers are threads of this process: nothing is imported anew.


class ThreadWorker(_Worker):
    """A worker whose process is a thread; it dies when its end of the connection is closed."""

    def __init__(self, device: str, serve: Callable[[Connection, list[int]], None]) -> None:
        self.device = device
        self.blocks = [SharedBlock() for _ in range(PACKS_IN_FLIGHT)]
        self.connection, self.theirs = multiprocessing.Pipe()
        self.jobs = {}
        self.num_splits = 0
        self.silent_seconds = 0.0
        self.is_killed = False
        descriptors = [block.descriptor for block in self.blocks]
        self.thread = threading.Thread(target=serve, args=(self.theirs, descriptors), daemon=True)
        self.thread.start()

    @property
    def is_alive(self) -> bool:  # noqa: D102  as there
        return True  # its connection tells

    def kill(self) -> None:  # noqa: D102  as there
        self.is_killed = True

    def exit(self) -> str:  # noqa: D102  as there
        return "as the test wanted"

    def close(self) -> None:  # noqa: D102  as there
        self.connection.close()
        self.thread.join(10)
        assert not self.thread.is_alive()


LINEAR = PackCost(per_token=1.0, per_pair=0.0)
QUADRATIC = PackCost(per_token=1.0, per_pair=1.0)


@pytest.fixture(scope="module")
def layout(tiny_model: Path) -> TowerLayout:
    return open_tower(str(tiny_model)).layout


def make_pack(rows: list[int], grids: list[tuple[int, int]], layout: TowerLayout) -> PackedBatch:
    return make_batch([random_image(row, grid, layout) for row, grid in zip(rows, grids, strict=True)], layout)


def echo(connection: Connection, descriptors: list[int]) -> None:
    """A worker that gives back the sum of each image's patches, one image at a time."""
    blocks = [SharedBlock(os.dup(descriptor)) for descriptor in descriptors]
    try:
        while True:
            order = connection.recv()
            batch = opened(order, blocks)
            for value in echoed(batch):
                connection.send(Result(value=value, num_splits=0))
    except (EOFError, OSError):
        connection.close()
        for block in blocks:
            block.close()


def sums(results: list[EmbeddingBatch | Failure | None]) -> dict[int, float]:
    """By row; fails where a row came twice."""
    found: dict[int, float] = {}
    for result in results:
        if isinstance(result, EmbeddingBatch):
            for row, value in zip(result.rows.tolist(), result.vectors["sum"][:, 0].tolist(), strict=True):
                assert row not in found
                found[row] = value
    return found


def some_packs(layout: TowerLayout, count: int = 40) -> list[PackedBatch]:
    """Packs of one to six images, the largest far larger than the first."""
    generator = np.random.default_rng(1)
    packs, row = [], 0
    for number in range(count):
        size = int(generator.integers(1, 7))
        grids = [(int(h), int(w)) for h, w in generator.integers(1, 4 + 2 * number, (size, 2))]
        packs.append(make_pack(list(range(row, row + size)), grids, layout))
        row += size
    return packs


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_results_come_once_each_through_blocks_that_grow(num_workers: int, layout: TowerLayout) -> None:
    packs = some_packs(layout)
    assert max(len(batch.block) for batch in packs) > 4 * GROWTH_BYTES
    pool = WorkerPool([ThreadWorker("cpu", echo) for _ in range(num_workers)], LINEAR)
    found = sums(list(pool.stream([None, *packs[:20], None, None, *packs[20:]])))
    pool.close()
    assert found == sums([value for batch in packs for value in echoed(batch)])


def dies_at(call: int) -> Callable[[Connection, list[int]], None]:
    """A worker that delivers the first image of its `call`-th pack, and is gone."""

    def serve(connection: Connection, descriptors: list[int]) -> None:
        blocks = [SharedBlock(os.dup(descriptor)) for descriptor in descriptors]
        for number in range(1, call + 1):
            order = connection.recv()
            batch = opened(order, blocks)
            for value in list(echoed(batch))[: None if number < call else 1]:
                connection.send(Result(value=value, num_splits=number))
        connection.close()

    return serve


def test_half_a_pack_from_a_worker_that_dies_is_not_delivered(
    layout: TowerLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlmembed.workers.MAX_DEATHS_PER_PACK", 3)  # both that die may have the same one in hand
    packs = [make_pack([3 * n, 3 * n + 1, 3 * n + 2], [(2, 2)] * 3, layout) for n in range(20)]
    workers = [ThreadWorker("cpu", serve) for serve in (dies_at(1), dies_at(3), echo)]
    pool = WorkerPool(list(workers), LINEAR)
    found = sums(list(pool.stream(packs)))
    assert (pool.num_lost, pool.num_splits) == (2, 4)
    pool.close()
    assert found == sums([value for batch in packs for value in echoed(batch)])


class EchoProcess(_Worker):
    """A worker that is a process, but has no device and no model; what `silent_row` does is said there."""

    def __init__(self, device: str, silent_row: int = -1) -> None:
        self.device = device
        self.blocks = [SharedBlock() for _ in range(PACKS_IN_FLIGHT)]
        self.jobs = {}
        self.num_splits = 0
        self.silent_seconds = 0.0
        descriptors = [block.descriptor for block in self.blocks]
        Child.__init__(self, "odd_children", descriptors, silent_row, descriptors=descriptors)


@pytest.mark.parametrize(
    ("silent_row", "reason"), [(14, "it did not answer for 0.4 s"), (15, "it stopped in the middle of an answer")]
)
def test_a_worker_that_hangs_is_buried_and_its_packs_go_to_the_others(
    silent_row: int, reason: str, layout: TowerLayout, caplog: pytest.LogCaptureFixture
) -> None:
    hangs = EchoProcess("cuda:0", silent_row)
    assert len(list(WorkerPool([hangs], LINEAR).stream([make_pack([0], [(2, 2)], layout)]))) >= 1  # it has started
    packs = [make_pack([silent_row + number], [(2, 3)], layout) for number in range(40)]
    pool = WorkerPool([hangs, ThreadWorker("cuda:1", echo)], LINEAR, answer_seconds=0.4)
    assert sums(list(pool.stream(packs))) == sums([value for batch in packs for value in echoed(batch)])
    assert (pool.num_lost, hangs.process.returncode) == (1, -signal.SIGKILL)
    assert f"the worker on cuda:0 died ({reason})" in caplog.text
    pool.close()


def test_a_worker_is_not_silent_while_nobody_listens(layout: TowerLayout) -> None:
    """The run was stopped with Ctrl-Z, or its writer waited for a disk."""

    def holds(connection: Connection, _: list[int]) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                connection.recv()
        connection.close()

    worker = ThreadWorker("cpu", holds)
    pool = WorkerPool([worker], LINEAR, answer_seconds=30.0)
    stream = pool.stream([make_pack([0], [(2, 2)], layout)])
    next(stream)
    pool._listened_at -= 1000
    next(stream)
    assert 1.0 <= worker.silent_seconds < 2.0
    assert pool.num_lost == 0
    pool._answer_seconds = 0.1
    with pytest.raises(WorkerError, match=r"no worker is left: .* \(it did not answer for 0\.1 s\)"):
        list(stream)


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGSTOP, "it had not loaded after 0.3 s"), (signal.SIGKILL, "killed; .*")]
)
def test_a_worker_that_does_not_load_is_not_waited_for_without_end(
    number: signal.Signals, reason: str, layout: TowerLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vlmembed.workers, "LOAD_SECONDS", 0.3)
    order = LoadOrder(
        config=EncodeConfig(inputs=("x",), output="y"),
        vectors=(),
        rule=make_rule(layout),
        num_rows=1,
        device="",
        num_workers=1,
        log_level=40,
    )
    worker = EchoProcess("cuda:3")
    worker.process.send_signal(number)
    with pytest.raises(WorkerError, match=rf"the worker on cuda:3 ended while it loaded the model \({reason}\)"):
        _load([worker], order)
    worker.close()


def test_ctrl_c_does_not_reach_a_worker_however_early_it_comes() -> None:
    worker = EchoProcess("cpu")
    worker.process.send_signal(signal.SIGINT)
    worker.close()
    assert worker.process.returncode == 0


def test_a_pack_that_workers_die_of_is_not_given_to_all_of_them(layout: TowerLayout) -> None:
    def serve(connection: Connection, descriptors: list[int]) -> None:
        blocks = [SharedBlock(os.dup(descriptor)) for descriptor in descriptors]
        rows: list[int] = []
        try:
            while 7 not in rows:
                order = connection.recv()
                batch = opened(order, blocks)
                rows = batch.rows.tolist()
                for value in echoed(batch) if 7 not in rows else ():
                    connection.send(Result(value=value, num_splits=0))
        except (EOFError, OSError):
            pass
        connection.close()

    pool = WorkerPool([ThreadWorker("cpu", serve) for _ in range(4)], LINEAR)
    packs = [make_pack([row], [(2, 2)], layout) for row in range(12)]
    with pytest.raises(WorkerError, match=r"2 workers died with the same pack of 1 images in hand .*, rows 7"):
        list(pool.stream(packs))
    assert pool.num_lost == 2
    pool.close()


def test_an_error_inside_a_worker_is_a_death_with_last_words(layout: TowerLayout) -> None:
    def serve(connection: Connection, _: list[int]) -> None:
        connection.recv()
        connection.send(Trouble(text="CUDA error: an illegal memory access was encountered"))
        connection.close()

    packs = some_packs(layout, 6)
    pool = WorkerPool([ThreadWorker("cuda:1", serve), ThreadWorker("cuda:0", echo)], LINEAR)
    assert sums(list(pool.stream(packs))) == sums([value for batch in packs for value in echoed(batch)])
    pool.close()
    pool = WorkerPool([ThreadWorker("cuda:1", serve)], LINEAR)
    with pytest.raises(WorkerError, match=r"no worker is left: the last one, on cuda:1, .*illegal memory access"):
        list(pool.stream(packs))


@pytest.mark.parametrize(("cost", "together"), [(LINEAR, 1), (QUADRATIC, 3)])
def test_a_long_image_weighs_by_its_square(cost: PackCost, together: int, layout: TowerLayout) -> None:
    """One image of 401 tokens, then packs of 405 in 81 images: by tokens alone the second worker gets no more than the
    first; by operations it gets both that it can have in hand before the first gets another."""

    def holds(connection: Connection, _: list[int]) -> None:
        try:
            while True:
                connection.recv()
        except (EOFError, OSError):
            connection.close()

    workers = [ThreadWorker("cpu", holds) for _ in range(2)]
    pool = WorkerPool(list(workers), cost)
    long = make_pack([0], [(20, 20)], layout)
    short = [make_pack(list(range(81 * n, 81 * n + 81)), [(2, 2)] * 81, layout) for n in range(1, 3)]
    assert (long.num_tokens, short[0].num_tokens) == (401, 405)
    stream = pool.stream([long, *short])
    next(stream)
    given = [sorted(job.batch.num_tokens for job in worker.jobs.values()) for worker in workers]
    assert given == ([[401, 405], [405]] if together == 1 else [[401], [405, 405]])
    pool.close()


def test_the_cost_of_a_tower_is_its_operations(tiny_model: Path) -> None:
    tower = open_tower(str(tiny_model)).load(dtype=torch.float32, device=torch.device("cpu"))
    width, layers = 32, 2
    per_layer = 2 * (3 * width**2 + width**2 + 2 * 4 * width**2)
    assert tower.cost.per_token == layers * per_layer + 2 * width * 588
    assert tower.cost.per_pair == layers * 4 * width
    assert tower.cost.of(np.array([3, 5])) == 8 * tower.cost.per_token + 34 * tower.cost.per_pair


def test_the_worker_itself_gives_what_an_encoder_gives(tiny_model: Path) -> None:
    """`serve`, as it runs in the process: load, encode, give back at once when nothing waits, end when the run does."""
    blueprint = open_tower(str(tiny_model))
    config = EncodeConfig(inputs=("x",), output="y", model=str(tiny_model), dtype="fp32", device="cpu,cpu")
    rule = make_rule(blueprint.layout)
    order = LoadOrder(
        config=config,
        vectors=vector_columns(config, blueprint),
        rule=rule,
        num_rows=10,
        device="cpu",
        num_workers=1,
        log_level=40,
    )
    worker = ThreadWorker("cpu", vlmembed.worker.serve)
    worker.connection.send(order)
    settled = worker.connection.recv()
    assert (settled.config.attention, settled.config.compile, settled.config.cuda_graphs) == ("sdpa", "off", "off")
    assert settled.cost == blueprint.load(dtype=torch.float32, device=torch.device("cpu")).cost
    batch = make_pack([5, 9], [(3, 2), (4, 4)], blueprint.layout)
    worker.give(_Job(batch=batch, cost=1.0))
    result = worker.connection.recv().value
    from vlmembed.encoder import Encoder  # noqa: PLC0415

    encoder = Encoder(
        blueprint.load(dtype=torch.float32, device=torch.device("cpu")),
        vectors=order.vectors,
        pool="cls",
        normalize=True,
    )
    np.testing.assert_allclose(result.vectors["embedding"], encoder.encode(batch).vectors["embedding"], atol=1e-6)
    assert result.rows.tolist() == [5, 9]
    worker.close()


def test_a_worker_that_breaks_tells_its_last_words(tiny_model: Path) -> None:
    blueprint = open_tower(str(tiny_model))
    config = EncodeConfig(inputs=("x",), output="y", model=str(tiny_model / "no such folder"), dtype="fp32")
    order = LoadOrder(
        config=config,
        vectors=vector_columns(config, blueprint),
        rule=make_rule(blueprint.layout),
        num_rows=10,
        device="cpu",
        num_workers=1,
        log_level=40,
    )
    worker = ThreadWorker("cpu", vlmembed.worker.serve)
    worker.connection.send(order)
    assert isinstance(worker.connection.recv().error, vlmembed.errors.VlmembedError)
    worker.close()
    worker = ThreadWorker("cpu", vlmembed.worker.serve)
    worker.connection.send("nonsense")
    trouble = worker.connection.recv()
    assert trouble.error is None
    assert "Traceback" in trouble.text
    worker.close()


def test_a_worker_that_is_kept_busy_is_never_asked_to_empty_its_device(layout: TowerLayout) -> None:
    """A None among the packs makes an encoder wait for all that is on its way: only where the run has nothing more."""
    seen: list[bool] = []

    def serve(connection: Connection, descriptors: list[int]) -> None:
        blocks = [PinnedBlock(os.dup(descriptor), torch.device("cpu")) for descriptor in descriptors]
        waiting: list[PackedBatch] = []
        try:
            for batch in packs_of(connection, blocks):
                seen.append(batch is None)
                if batch is not None:
                    time.sleep(0.01)  # the device is at work
                    waiting.append(batch)
                while len(waiting) > (batch is not None):  # as an encoder: one pack later
                    for value in echoed(waiting.pop(0)):
                        connection.send(Result(value=value, num_splits=0))
        except (EOFError, OSError):
            connection.close()

    pool = WorkerPool([ThreadWorker("cpu", serve)], LINEAR)
    packs = [make_pack([number], [(3, 3)], layout) for number in range(40)]
    assert len(sums(list(pool.stream(packs)))) == 40
    pool.close()
    assert seen.count(False) == 40
    assert not any(seen[3:38])


class FakeRuntime:
    """CUDA's registering of host memory: refuses what it must, and keeps its last error as CUDA does."""

    def __init__(self, refused: Iterable[int] = ()) -> None:
        self.registered: dict[int, int] = {}
        self.refused = set(refused)
        self.num_calls = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802  CUDA's name
        """0, or the number of an error."""
        assert flags == 0
        assert address not in self.registered
        self.num_calls += 1
        if self.num_calls in self.refused:
            return 2
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  the same
        """0; fails where nothing was registered."""
        del self.registered[address]
        return 0


@pytest.mark.parametrize("refused", [[], [1], [2], [1, 2, 3]])
def test_shared_memory_is_registered_anew_when_it_has_grown(
    refused: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, cleared = FakeRuntime(refused), []

    def report(*_: object, **__: object) -> None:
        cleared.append(runtime.num_calls)
        raise RuntimeError

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", report)
    ours = SharedBlock()
    block = PinnedBlock(os.dup(ours.descriptor), torch.device("cuda", 0))
    for num_bytes in (10, 20, GROWTH_BYTES + 1, GROWTH_BYTES, 4 * GROWTH_BYTES):
        ours.reserve(num_bytes)[:] = num_bytes % 251
        view = block.view(num_bytes)
        assert view.tolist()[::1000] == [num_bytes % 251] * -(-num_bytes // 1000)
        if runtime.num_calls not in refused:
            assert list(runtime.registered) == [view.ctypes.data]
            assert runtime.registered[view.ctypes.data] >= num_bytes
        else:
            assert not runtime.registered
    assert runtime.num_calls == 3
    assert cleared == refused
    ours.close()


def test_workers_start_where_stderr_is_no_file() -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        worker = _Worker("cpu")
        worker.close()
    assert worker.process.returncode == 0


def test_workers_that_read_other_weights_than_the_first_are_refused() -> None:
    def settled(sha256: str) -> Settled:
        config = EncodeConfig(inputs=("x",), output="y", model="org/name")
        return Settled(config=config, model={"weights_sha256": sha256}, backend={}, cost=LINEAR)

    _check_same_weights(settled("a"), [settled("a"), settled("a")])
    with pytest.raises(ModelError, match=r"the weights of org/name changed while the workers loaded them"):
        _check_same_weights(settled("a"), [settled("a"), settled("b")])


def test_a_block_is_seen_by_both_sides_and_grows() -> None:
    ours, theirs = SharedBlock(), None
    theirs = SharedBlock(os.dup(ours.descriptor))
    ours.reserve(10)[:] = 7
    assert theirs.view(10).tolist() == [7] * 10
    old = ours.reserve(10)
    big = ours.reserve(3 * GROWTH_BYTES + 1)
    big[-1] = 9
    assert theirs.view(3 * GROWTH_BYTES + 1)[-1] == 9
    assert old.tolist() == [7] * 10
    ours.close()
    theirs.close()


def test_nothing_of_a_caller_script_runs_in_a_worker(tmp_path: Path) -> None:
    """No guard against `__main__` is needed, as multiprocessing would need it."""
    script = tmp_path / "script.py"
    script.write_text(
        "print('once')\nfrom vlmembed.workers import _Worker\n"
        "worker = _Worker('cpu')\nworker.connection.close()\nprint(worker.process.wait(60))\n"
    )
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert printed == "once\n0\n"
