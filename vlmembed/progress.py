"""Where a run's time goes, and the bar a person watches."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Work:
    """What a thread is at, and the seconds that blocks inside of that one have taken."""

    stage: str = ""
    inner_seconds: float = 0.0


class _Block:
    """A block whose time counts for a stage. No generator: there is one for every image."""

    __slots__ = ("_around", "_clock", "_inner_before", "_stage", "_start", "_work")

    def __init__(self, clock: StageClock, work: _Work, stage: str) -> None:
        self._clock = clock
        self._work = work
        self._stage = stage

    def __enter__(self) -> None:
        work = self._work
        self._inner_before, work.inner_seconds = work.inner_seconds, 0.0
        self._around, work.stage = work.stage, self._stage
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        elapsed, work = time.perf_counter() - self._start, self._work
        work.stage = self._around
        self._clock.add(self._stage, elapsed - work.inner_seconds)
        work.inner_seconds = self._inner_before + elapsed


class StageClock:
    """Busy seconds of every stage, each stage's waiting for another one left out; and what each thread is at.

    Blocks may nest: what an inner block takes is not counted for the outer one. Used by many threads.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._threads: dict[str, _Work] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    def measure(self, stage: str) -> AbstractContextManager[None]:
        """Count the block's time for `stage`."""
        work: _Work | None = getattr(self._local, "work", None)
        if work is None:
            work = self._local.work = self._threads[threading.current_thread().name] = _Work()
        return _Block(self, work, stage)

    def add(self, stage: str, seconds: float) -> None:
        """Count time that was measured elsewhere."""
        with self._lock:
            self.seconds[stage] += seconds

    def doing(self) -> dict[str, str]:
        """The stage that each thread is in, by its name."""
        return {thread: work.stage for thread, work in dict(self._threads).items() if work.stage}

    def iterate(self, stage: str, items: Iterable[T]) -> Iterator[T]:
        """Count the time that producing `items` takes for `stage`."""
        iterator = iter(items)
        while True:
            with self.measure(stage):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def busiest(self, threads: dict[str, int], wall_seconds: float) -> tuple[str, float]:
        """The stage with the largest busy share of its threads' time, and that share, 0 to 1.

        `threads` names the stages that count; what is not in it is waiting.
        """
        with self._lock:
            shares = {name: self.seconds[name] / count / max(wall_seconds, 1e-9) for name, count in threads.items()}
        name = max(shares, key=lambda stage: shares[stage])
        return name, min(shares[name], 1.0)


class ProgressBar:
    """A tqdm bar on stderr that counts committed rows, of `total` where that is known. Silent where `enabled` is
    false."""

    def __init__(self, total: int | None, *, initial: int, enabled: bool) -> None:
        self._bar: tqdm[None] = tqdm(
            total=total,
            initial=initial,
            disable=not enabled,
            smoothing=0,
            dynamic_ncols=True,
            bar_format="{n_fmt} rows [{elapsed}{postfix}]"
            if total is None
            else "{n_fmt}/{total_fmt} rows [{elapsed}<{remaining}{postfix}] {bar}",
        )

    def committed(self, num_rows: int) -> None:
        """Advance by the rows of a part."""
        self._bar.update(num_rows)

    def note(self, *, num_encoded: int, num_tokens: int, seconds: float, slowest: str) -> None:
        """Show rates, in images and tokens per second, and the slowest stage."""
        rates = f"{num_encoded / seconds:.1f} img/s, {tqdm.format_sizeof(num_tokens / seconds)} tok/s"
        self._bar.set_postfix_str(f"{slowest}-bound, {rates}, {num_encoded} encoded", refresh=False)
        self._bar.update(0)

    def close(self) -> None:
        """Leave the bar as it is and end its line."""
        self._bar.close()
