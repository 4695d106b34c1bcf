"""Decoding in processes, which may crash or hang: that costs a row, and never the run."""

from __future__ import annotations

import pickle
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from vlmembed.child import Child, close_all
from vlmembed.errors import FailureCode, ImageError, StoppedError, WorkerError
from vlmembed.parallel import POLL_SECONDS, DeadlinePool
from vlmembed.patcher import PROTOCOL, Patched, too_late
from vlmembed.types import EncodedImage, Failure, UniqueImage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from vlmembed.patcher import Patch

Image: TypeAlias = EncodedImage | UniqueImage

START_SECONDS = 120.0
"""How long a decoding process may take to start; it imports Pillow and numpy, perhaps from a slow disk."""

MAX_FAILED_STARTS = 3
"""So many processes that die before they are ready, one after the other, end the run."""


class ProcessDecoders:
    """Processes, each fed by a thread of this one. One that crashes or hangs costs its row, and is replaced when the
    next picture comes.

    Raises (as the result of a picture):
        WorkerError: no process can be started.
    """

    def __init__(self, patcher: Patch, *, num_processes: int, timeout_seconds: float) -> None:
        self._patcher = patcher
        self._order = pickle.dumps(patcher, protocol=PROTOCOL)
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._is_closed = False
        self._idle: list[Child] = []
        self._at_work: dict[Image, Child] = {}
        self.num_replaced = 0
        self._pool: DeadlinePool[Image, Patched] = DeadlinePool(
            self._decode,
            num_threads=num_processes,
            seconds=timeout_seconds,
            late=self._give_up,
            name="decode",
            around=self._with_process,
        )

    def submit(self, image: Image) -> Future[Patched]:
        """As in `DecodePool`."""
        if not isinstance(image.content, ImageError):
            return self._pool.submit(image)
        future: Future[Patched] = Future()
        future.set_result(self._patcher(image.row, image.content))
        return future

    def oldest(self) -> tuple[Image, float] | None:
        """As in `DecodePool`."""
        return self._pool.oldest()

    def close(self) -> None:
        """As in `DecodePool`: what is under way is of no use any more, so it is not waited for."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for child in self._at_work.values():
                child.kill()
        close_all(idle)
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _with_process(self, image: Image) -> Iterator[None]:
        """Have a process for a picture; start one if there is none."""
        child = self._take_idle() or self._start()
        try:
            with self._lock:
                self._check()
                self._at_work[image] = child
            yield
        finally:
            with self._lock:
                self._at_work.pop(image, None)
                is_kept = child.is_alive and not self._is_closed
                if is_kept:
                    self._idle.append(child)
            if not is_kept:
                child.close()

    def _take_idle(self) -> Child | None:
        """A process that waits; those that have died meanwhile, perhaps for want of memory, are let go of."""
        while True:
            with self._lock:
                self._check()
                child = self._idle.pop() if self._idle else None
            if child is None or child.is_alive:
                return child
            child.close()
            self._count_replaced()

    def _start(self) -> Child:
        """A process that is ready.

        Raises:
            WorkerError: several have died before they were.
        """
        ended = ""
        for _ in range(MAX_FAILED_STARTS):
            try:
                child = Child("vlmembed.decode_worker")
            except OSError as error:
                ended = str(error)
                continue
            try:
                child.connection.send_bytes(self._order)
                self._check_ready(child)
            except (EOFError, OSError) as error:
                ended = str(error) if isinstance(error, TimeoutError) else child.exit()
                child.kill()
                child.close()
            except BaseException:
                child.kill()
                child.close()
                raise
            else:
                return child
        msg = (
            f"no decoding process could be started: {MAX_FAILED_STARTS} ended before they were ready ({ended}); what "
            "they printed says more, and --decode threads does without"
        )
        raise WorkerError(msg)

    def _check_ready(self, child: Child) -> None:
        """Wait until a process says that it is ready.

        Raises:
            EOFError, OSError: it has died. TimeoutError: it says nothing. Exception: what it has raised.
        """
        for _ in range(round(START_SECONDS / POLL_SECONDS)):
            if child.connection.poll(POLL_SECONDS):
                _raised(pickle.loads(child.connection.recv_bytes()))  # noqa: S301  our own child's
                return
            self._check()
        msg = f"it was not ready after {START_SECONDS:g} s"
        raise TimeoutError(msg)

    def _decode(self, image: Image) -> Patched:
        assert isinstance(image.content, bytes)
        child = self._at_work[image]
        began = time.perf_counter()
        try:
            child.connection.send(image.row)
            child.connection.send_bytes(image.content)
            answer = pickle.loads(child.connection.recv_bytes())  # noqa: S301  our own child's
        except (EOFError, OSError):
            return self._crashed(image, child, began)
        except BaseException:
            child.kill()  # half an answer may be left
            raise
        patched = _raised(answer)
        assert isinstance(patched, Patched)
        return patched

    def _crashed(self, image: Image, child: Child, began: float) -> Patched:
        if child.is_killed:  # by us: nobody waits for this
            raise StoppedError
        ended = child.exit()
        child.kill()
        self._count_replaced()
        message = f"the process that decoded it died ({ended})"
        failure = Failure(row=image.row, stage="decode", code=FailureCode.DECODER_CRASH, message=message)
        return Patched(result=failure, seconds=time.perf_counter() - began)

    def _give_up(self, image: Image) -> Patched:
        with self._lock:  # so that a process that is ready just now is not killed over its next picture
            child = self._at_work.get(image)
            if child is not None:
                child.kill()
        if child is not None:
            self._count_replaced()
        return too_late(image.row, self._timeout_seconds)

    def _count_replaced(self) -> None:
        with self._lock:
            self.num_replaced += 1

    def _check(self) -> None:
        if self._is_closed:
            raise StoppedError


def _raised(answer: Any) -> Any:  # noqa: ANN401  whatever a process answers
    """An answer, unless it is an exception: that is raised here."""
    if isinstance(answer, Exception):
        raise answer
    return answer
