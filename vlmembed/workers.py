"""Several devices of one machine: a process each, fed from one reader and packer.

A pack goes to the worker that has least to do, by the operations that its packs need: a few long images cost more than
as many tokens of short ones. What a worker that dies had in hand goes to the others.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vlmembed.child import Child, close_all
from vlmembed.errors import ModelError, WorkerError
from vlmembed.exchange import PACKS_IN_FLIGHT, LoadOrder, PackOrder, Result, SharedBlock, Trouble
from vlmembed.types import EmbeddingBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Self

    from vlmembed.batch import PackCost
    from vlmembed.tuning import Settled
    from vlmembed.types import Failure, PackedBatch

logger = logging.getLogger(__name__)

MAX_DEATHS_PER_PACK = 2
"""A pack that was in hand when so many workers died is not given to another one."""

WAIT_SECONDS = 0.1

LOAD_SECONDS = 3600.0
"""How long a worker may take to load the model."""

ANSWER_SECONDS = 3600.0
"""How long a worker may say nothing while it has packs in hand."""

LISTEN_SECONDS = 1.0
"""At most so much of the time between two looks at the workers counts as their silence: nobody listens while the run is
stopped (Ctrl-Z) or held up by its writer."""


@dataclass(slots=True, eq=False)
class _Job:
    """A pack on its way. Its results are held until it is whole: a worker that dies half-way has delivered nothing."""

    batch: PackedBatch
    cost: float
    num_deaths: int = 0
    results: list[EmbeddingBatch | Failure] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        done = sum(len(each.rows) if isinstance(each, EmbeddingBatch) else 1 for each in self.results)
        return done == len(self.batch.rows)


class _Worker(Child):
    """A process, the way to it, what it has in hand, by slot, and how long it has said nothing meanwhile."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.blocks = [SharedBlock() for _ in range(PACKS_IN_FLIGHT)]
        self.jobs: dict[int, _Job] = {}
        self.num_splits = 0
        self.silent_seconds = 0.0
        descriptors = [block.descriptor for block in self.blocks]
        super().__init__("vlmembed.worker", descriptors, descriptors=descriptors)

    @property
    def cost(self) -> float:
        """Of what it has in hand."""
        return sum(job.cost for job in self.jobs.values())

    def give(self, job: _Job) -> None:
        """Hand a pack over. A worker that is gone has it in hand all the same, until it is listened to."""
        slot = next(slot for slot in range(PACKS_IN_FLIGHT) if slot not in self.jobs)
        block, header = job.batch.block, np.frombuffer(pickle.dumps(job.batch.header), dtype=np.uint8)
        shared = self.blocks[slot].reserve(len(block) + len(header))
        shared[: len(block)], shared[len(block) :] = block, header
        self.jobs[slot] = job
        with suppress(OSError):
            self.connection.send(PackOrder(slot=slot, num_bytes=len(block), num_header_bytes=len(header)))

    def take(self, value: EmbeddingBatch | Failure) -> list[EmbeddingBatch | Failure]:
        """Note a result; all of its pack's, once that is whole."""
        row = int(value.rows[0]) if isinstance(value, EmbeddingBatch) else value.row
        slot = next(slot for slot, job in self.jobs.items() if row in job.batch.rows)
        self.jobs[slot].results.append(value)
        return self.jobs.pop(slot).results if self.jobs[slot].is_done else []

    def listen(self, seconds: float) -> Any:  # noqa: ANN401  whatever it says
        """Its next message, of which the first bytes are there. One that stops in the middle is killed after so long.

        Raises:
            EOFError, OSError: it is gone.
        """
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()
        try:
            return self.connection.recv()
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process, and let go of the shared memory."""
        super().close()
        for block in self.blocks:
            block.close()


def _check_same_weights(first: Settled, others: list[Settled]) -> None:
    """The workers read the model one after the other.

    Raises:
        ModelError: it was replaced meanwhile.
    """
    if any(other.model != first.model for other in others):
        msg = f"the weights of {first.config.model} changed while the workers loaded them: run the command again"
        raise ModelError(msg)


def _load(workers: list[_Worker], order: LoadOrder) -> list[Settled]:
    """Let workers load, all at a time."""
    for worker in workers:
        with suppress(OSError):  # one that is gone already is found below
            worker.connection.send(replace(order, device=worker.device))
    answers = []
    for worker in workers:
        answer = _loaded(worker)
        if isinstance(answer, Trouble):
            raise answer.error or WorkerError(f"the worker on {worker.device} could not load: {answer.text}")
        answers.append(answer)
    return answers


def _loaded(worker: _Worker) -> Settled | Trouble:
    """What a worker says once it has loaded, or failed to.

    Raises:
        WorkerError: it died, or says nothing.
    """
    cause: Exception | None = None
    ended = ""
    try:
        for _ in range(round(LOAD_SECONDS / WAIT_SECONDS)):
            if worker.connection.poll(WAIT_SECONDS):
                return cast("Settled | Trouble", worker.listen(LOAD_SECONDS))
            if not worker.is_alive and not worker.connection.poll():
                break
        else:
            ended = f"it had not loaded after {LOAD_SECONDS:g} s"
            worker.kill()
    except (EOFError, OSError) as error:
        cause = error
    msg = (
        f"the worker on {worker.device} ended while it loaded the model ({ended or worker.exit()}): what it printed "
        "says more; --device can leave it out"
    )
    raise WorkerError(msg) from cause


class WorkerPool:
    """Encodes like an `Encoder`, on several devices.

    Attributes:
        num_lost: workers that have died.
        num_splits: packs that were split because they did not fit into memory.
    """

    def __init__(self, workers: list[_Worker], cost: PackCost, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._workers = workers
        self._cost = cost
        self._answer_seconds = answer_seconds
        self._listened_at = time.monotonic()
        self._waiting: deque[_Job] = deque()
        self._num_splits_before = 0
        self.num_lost = 0

    @classmethod
    def start(
        cls, order: LoadOrder, devices: list[str], *, answer_seconds: float = ANSWER_SECONDS
    ) -> tuple[Self, Settled]:
        """Start a worker per device and load `order` in each. The first one decides what is left to decide. A worker
        that says nothing for `answer_seconds` while it has packs in hand counts as dead.

        Raises:
            VlmembedError: as for `load_encoder`. WorkerError: a worker could not be started.
        """
        workers: list[_Worker] = []
        try:
            for device in devices:
                workers.append(_Worker(device))  # noqa: PERF401  one that fails leaves the others to be ended
            (settled,) = _load(workers[:1], order)
            others = _load(workers[1:], replace(order, config=settled.config))
            _check_same_weights(settled, others)
        except BaseException:
            close_all(workers)
            raise
        return cls(workers, settled.cost, answer_seconds), settled

    def stream(self, batches: Iterable[PackedBatch | None]) -> Iterator[EmbeddingBatch | Failure | None]:
        """Encode packs; results come in the order in which the workers finish them. None: nothing came for a while.

        Raises:
            WorkerError: no worker is left, or a pack was in hand when several died.
        """
        for batch in batches:
            if batch is not None:
                self._waiting.append(_Job(batch=batch, cost=self._cost.of(batch.lengths)))
            yield from self._go_on(0.0)
            while self._waiting:
                yield from self._go_on(WAIT_SECONDS)
        while self._waiting or any(worker.jobs for worker in self._workers):
            yield from self._go_on(WAIT_SECONDS)

    @property
    def num_splits(self) -> int:
        """Over all workers, those that have died included."""
        return self._num_splits_before + sum(worker.num_splits for worker in self._workers)

    def close(self) -> None:
        """End all workers."""
        close_all(self._workers)
        self._workers.clear()

    def _go_on(self, seconds: float) -> Iterator[EmbeddingBatch | Failure | None]:
        """Hand out what waits, as far as there is room; then give what has come, for which it waits so long."""
        while self._waiting and (free := [each for each in self._workers if len(each.jobs) < PACKS_IN_FLIGHT]):
            min(free, key=lambda each: each.cost).give(self._waiting.popleft())
        by_connection = {worker.connection: worker for worker in self._workers}
        ready = wait(by_connection, seconds)
        passed = min(time.monotonic() - self._listened_at, LISTEN_SECONDS)
        for connection, worker in by_connection.items():
            if connection in ready:
                worker.silent_seconds = 0.0
                yield from self._receive(worker)
            else:
                self._note_silence(worker, passed)
        self._listened_at = time.monotonic()
        if not ready and seconds:
            yield None

    def _receive(self, worker: _Worker) -> Iterator[EmbeddingBatch | Failure]:
        try:
            message = worker.listen(self._answer_seconds)
        except (EOFError, OSError):
            self._bury(worker, ended="it stopped in the middle of an answer" if worker.is_killed else "")
            return
        if isinstance(message, Result):
            worker.num_splits = message.num_splits
            yield from worker.take(message.value)
            return
        assert isinstance(message, Trouble)
        if message.error is not None:
            raise message.error
        self._bury(worker, message.text)

    def _note_silence(self, worker: _Worker, seconds: float) -> None:
        """Bury a worker that has said nothing for too long, or has died and something else holds its connection open.

        Raises:
            WorkerError: as in `_bury`.
        """
        worker.silent_seconds = worker.silent_seconds + seconds if worker.jobs else 0.0
        if worker.silent_seconds >= self._answer_seconds:
            worker.kill()
            self._bury(worker, ended=f"it did not answer for {self._answer_seconds:g} s")
        elif not worker.is_alive and not worker.connection.poll():
            self._bury(worker)

    def _bury(self, worker: _Worker, last_words: str = "", ended: str = "") -> None:
        """Take a worker that has died out of the pool, and what it had in hand back.

        Raises:
            WorkerError: it was the last one, or it had a pack that others have died of.
        """
        self._workers.remove(worker)
        self.num_lost += 1
        self._num_splits_before += worker.num_splits
        ended = ended or worker.exit()
        logger.error(
            "the worker on %s died (%s): %d packs go to the %d that are left\n%s",
            worker.device,
            ended,
            len(worker.jobs),
            len(self._workers),
            last_words,
        )
        jobs = list(worker.jobs.values())
        worker.close()
        if not self._workers:
            msg = (
                f"no worker is left: the last one, on {worker.device}, died ({ended}). What was committed is kept, and "
                f"the same command goes on from there. {last_words}"
            )
            raise WorkerError(msg)
        for job in jobs:  # the oldest is the one that it was at
            job.results.clear()
            job.num_deaths += 1
            if job.num_deaths >= MAX_DEATHS_PER_PACK:
                rows = ", ".join(map(str, job.batch.rows[:10].tolist()))
                msg = (
                    f"{job.num_deaths} workers died with the same pack of {len(job.batch.rows)} images in hand "
                    f"({ended}), rows {rows}, …: what was committed is kept. {last_words}"
                )
                raise WorkerError(msg)
        self._waiting.extendleft(reversed(jobs))
