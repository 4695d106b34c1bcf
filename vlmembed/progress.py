"""Where a run's time goes, and the bar a person watches."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")


class StageClock:
    """Busy seconds of every stage, each stage's waiting for another one left out; and what each thread is at.

    Blocks may nest: what an inner block takes is not counted for the outer one. Used by many threads.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._doing: dict[str, str] = {}  # by thread
        self._lock = threading.Lock()
        self._local = threading.local()

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Count the block's time for `stage`."""
        inner_before = getattr(self._local, "inner", 0.0)
        self._local.inner = 0.0
        thread, start = threading.current_thread().name, time.perf_counter()
        around = self._doing.get(thread, "")
        self._doing[thread] = stage
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self._doing[thread] = around
            self.add(stage, elapsed - self._local.inner)
            self._local.inner = inner_before + elapsed

    def add(self, stage: str, seconds: float) -> None:
        """Count time that was measured elsewhere."""
        with self._lock:
            self.seconds[stage] += seconds

    def doing(self) -> dict[str, str]:
        """The stage that each thread is in, by its name."""
        return {thread: stage for thread, stage in dict(self._doing).items() if stage}

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
