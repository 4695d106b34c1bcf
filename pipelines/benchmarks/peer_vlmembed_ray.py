"""vlmembed's engine for clusters, as a side of ``ray_peers.py``: runs on a Ray of this machine, start-up taken off.

By the rule of ``peer_ray.py``: seconds begin when the tower has its model, and feeding tasks wait until then. They end
when the last part is committed, so with the vectors on the disk, where the peers have them in memory. Nothing is
deduplicated (``dedup="none"``), as the peers do not: the pass over the whole input that looks for duplicates would come
before the tower's start, and would be taken off with it.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import vlmembed  # before torch: what it sets for threads is read when torch is loaded

import numpy as np  # isort: skip
import pyarrow.parquet as pq  # isort: skip
import ray  # isort: skip
from peer_child import serve  # isort: skip

from vlmembed.engines.tasks import feed_task  # isort: skip
from vlmembed.engines.tower import Tower  # isort: skip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyarrow as pa

MOST_SECONDS_TO_WAIT = 120.0


def marking(marker: Path) -> type[Tower]:
    """Towers that leave the time in a file, once they have their model."""

    class Marking(Tower):
        def __init__(self, *arguments: Any) -> None:  # noqa: ANN401  as the tower's
            super().__init__(*arguments)
            unfinished = marker.with_suffix(".unfinished")
            unfinished.write_text(repr(time.time()))
            unfinished.rename(marker)

    return Marking


def waiting(marker: Path) -> Callable[..., Iterator[pa.Table]]:
    """Feeding tasks that begin once that file is there."""

    def wait_and_feed(*arguments: Any) -> Iterator[pa.Table]:  # noqa: ANN401  as `feed_task`
        give_up = time.time() + MOST_SECONDS_TO_WAIT
        while not marker.exists() and time.time() < give_up:
            time.sleep(0.01)
        yield from feed_task(*arguments)

    return wait_and_feed


class VlmembedRay:
    """Ways differ in ``rows_per_part``."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._scratch = Path(tempfile.mkdtemp(dir=settings["scratch"]))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

    def run(self, paths: Sequence[str], way: Mapping[str, Any]) -> tuple[dict[str, Any], np.ndarray]:
        """Seconds in the steady state, and the vectors."""
        with tempfile.TemporaryDirectory(dir=self._scratch) as name:
            scratch = Path(name)
            folder, output, marker = scratch / "pictures", scratch / "out.parquet", scratch / "ready"
            folder.mkdir()
            for number, path in enumerate(paths):
                shutil.copyfile(path, folder / f"{number:06d}{Path(path).suffix}")
            config = vlmembed.EncodeConfig(
                inputs=(str(folder),),
                output=str(output),
                engine="ray",
                dtype=self._settings["dtype"],
                runtime=self._settings["runtime"],
                resize="official",
                dedup="none",
                rows_per_part=way["rows_per_part"],
            )
            figures = self._measured(config, marker)
            assert figures["num_encoded"] == len(paths), figures
            vectors = pq.read_table(output)["embedding"].combine_chunks().flatten().to_numpy()
        return figures, vectors.reshape(len(paths), -1).astype(np.float32)

    def _measured(self, config: vlmembed.EncodeConfig, marker: Path) -> dict[str, Any]:
        times: list[float] = []
        replaced = {"Tower": marking(marker), "feed_task": waiting(marker)}
        began = time.time()
        ray.init(
            address="local",
            num_cpus=self._settings["threads"],
            include_dashboard=False,
            logging_level=logging.ERROR,
        )
        try:
            with mock.patch.multiple("vlmembed.engines.ray", **replaced):
                report = vlmembed.encode(
                    config, on_event=lambda event: times.append(time.time()) if event["event"] == "part" else None
                )
            ended = time.time()
        finally:
            ray.shutdown()
        ready = float(marker.read_text())
        return {
            "seconds": times[-1] - ready,
            "seconds until the file is finished": ended - ready,
            "start_seconds": ready - began,
            "num_encoded": report.num_encoded,
            "num_packs": report.num_packs,
            "packing_efficiency": round(report.packing_efficiency, 4),
        }


if __name__ == "__main__":
    serve(lambda settings: VlmembedRay(settings).run)
