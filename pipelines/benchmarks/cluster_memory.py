"""What a Ray on this machine takes of memory while a block runs: its processes, the driver, and the object store."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

PERIOD_SECONDS = 0.2
_FIELD = re.compile(r"^(PPid|RssAnon|RssShmem):\s+(\d+)", re.MULTILINE)


def _family() -> dict[int, dict[str, int]]:
    """Memory in kB of the own process and all that come of it, by number."""
    found: dict[int, dict[str, int]] = {}
    for path in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has ended
            fields = {name: int(value) for name, value in _FIELD.findall(path.read_text())}
            if "RssAnon" in fields:  # no thread of the kernel
                found[int(path.parent.name)] = fields
    children = defaultdict(list)
    for number, fields in found.items():
        children[fields["PPid"]].append(number)
    waiting, family = [os.getpid()], {}
    while waiting:
        number = waiting.pop()
        if number in found:
            family[number] = found[number]
            waiting += children[number]
    return family


class ClusterMemory:
    """Looks five times a second. What processes share is the object store, and is counted once.

    Attributes:
        idle_mb: at the beginning. peak_mb: at most, in all. store_mb: the object store's, at most.
        largest_mb: of one process beside this one, at most.
        cpu_seconds: of looking, which are this process's own; there once the block has ended.
    """

    def __init__(self) -> None:
        self.idle_mb = self.peak_mb = self.store_mb = self.largest_mb = 0.0
        self.cpu_seconds = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory")

    def __enter__(self) -> Self:
        self._look()
        self.idle_mb = self.peak_mb
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD_SECONDS):
            self._look()
        self.cpu_seconds = time.thread_time()

    def _look(self) -> None:
        family = _family()
        store = max(fields["RssShmem"] for fields in family.values()) / 1e3
        self.store_mb = max(self.store_mb, store)
        self.peak_mb = max(self.peak_mb, sum(fields["RssAnon"] for fields in family.values()) / 1e3 + store)
        others = [fields["RssAnon"] / 1e3 for number, fields in family.items() if number != os.getpid()]
        self.largest_mb = max([self.largest_mb, *others])

    def told(self) -> dict[str, float]:
        """For a result file."""
        return {
            "peak MB, all processes and the object store": self.peak_mb,
            "MB before": self.idle_mb,
            "peak MB, object store": self.store_mb,
            "peak MB, the largest process beside the driver": self.largest_mb,
        }
