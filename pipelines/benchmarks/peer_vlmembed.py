"""vlmembed itself, as a side of ``peers.py``: whole runs from files to a Parquet file, and parts of them alone.

Ways: ``run`` (seconds of the report, so without listing and loading), ``forwards`` (the very packs of the first run
with the same pictures and resize, through the encoder it had, with nothing around them) and ``gemms`` (the bare matrix
products of those packs). ``flops`` are by the tower's own cost, or the products' own.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import vlmembed  # before torch: what it sets for threads is read when torch is loaded

import numpy as np  # isort: skip
import pyarrow.parquet as pq  # isort: skip
import torch  # isort: skip
from gemm import GemmChain  # isort: skip
from peer_child import serve  # isort: skip

from vlmembed.batch import open_batch  # isort: skip
from vlmembed.encoder import Encoder  # isort: skip

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from vlmembed.types import PackedBatch

HAS_RUNTIMES = "runtime" in {field.name for field in fields(vlmembed.EncodeConfig)}


class Seen:
    """What a run gave to its encoder, kept for the time after it."""

    def __init__(self) -> None:
        self.encoder: Encoder | None = None
        self.packs: list[PackedBatch] = []
        self._chains: list[GemmChain] = []

    def watch(self) -> Any:  # noqa: ANN401  a context manager
        """Keep what `Encoder.stream` is given meanwhile, the last time: what it is tried out with comes before that."""
        stream = Encoder.stream

        def watched(encoder: Encoder, batches: Iterable[PackedBatch | None]) -> Iterator[Any]:
            self.encoder, self.packs = encoder, []
            return stream(encoder, self._copied(batches))

        return mock.patch.object(Encoder, "stream", watched)

    def _copied(self, batches: Iterable[PackedBatch | None]) -> Iterator[PackedBatch | None]:
        for batch in batches:
            if batch is not None:
                self.packs.append(open_batch(batch.header, batch.block.copy()))
            yield batch

    @property
    def flops(self) -> float:
        """Of all packs."""
        assert self.encoder is not None
        return sum(self.encoder.tower.cost.of(pack.lengths) for pack in self.packs)

    def forwards(self) -> dict[str, float]:
        """The packs back to back."""
        assert self.encoder is not None
        began = time.perf_counter()
        for _ in self.encoder.stream(self.packs):
            pass
        return {"seconds": time.perf_counter() - began, "num_packs": len(self.packs)}

    def gemms(self) -> dict[str, float]:
        """Their matrix products back to back."""
        assert self.encoder is not None
        if not self._chains:
            tower = self.encoder.tower
            chains = {num: GemmChain(tower, num) for num in {pack.num_tokens for pack in self.packs}}
            self._chains = [chains[pack.num_tokens] for pack in self.packs]
        seconds = sum(chain.seconds() for chain in self._chains)
        return {"seconds": seconds, "flops": sum(chain.flops for chain in self._chains)}


class Vlmembed:
    """A folder for each list of pictures, and what was seen of the first run over each."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self._settings = settings
        self._scratch = Path(tempfile.mkdtemp(dir=settings["scratch"]))
        self._folders: dict[tuple[str, ...], Path] = {}
        self._seen: dict[tuple[Path, str], Seen] = {}

    def _folder(self, paths: Sequence[str]) -> Path:
        """The pictures copied into a folder, named so that the run takes them in the given order."""
        key = tuple(paths)
        if key not in self._folders:
            self._folders[key] = folder = self._scratch / str(len(self._folders))
            folder.mkdir()
            for number, path in enumerate(paths):
                shutil.copyfile(path, folder / f"{number:06d}{Path(path).suffix}")
        return self._folders[key]

    def run(self, paths: Sequence[str], way: Mapping[str, Any]) -> tuple[dict[str, Any], np.ndarray | None]:
        """Figures of the way, and the vectors of a whole run."""
        folder, resize = self._folder(paths), way["resize"]
        if way["do"] != "run":
            return getattr(self._seen[folder, resize], way["do"])(), None
        if (folder, resize) in self._seen:
            return self._whole_run(folder, resize, len(paths))
        self._seen[folder, resize] = seen = Seen()
        with seen.watch():
            figures, vectors = self._whole_run(folder, resize, len(paths))
        assert len(seen.packs) == figures["num_packs"], (len(seen.packs), figures)
        return figures, vectors

    def _whole_run(self, folder: Path, resize: str, num_pictures: int) -> tuple[dict[str, Any], np.ndarray]:
        output = self._scratch / "out.parquet"
        settings: dict[str, Any] = {"dtype": self._settings["dtype"], "resize": resize, "overwrite": True}
        if HAS_RUNTIMES:
            settings["runtime"] = self._settings["runtime"]
        report = vlmembed.encode(vlmembed.EncodeConfig(inputs=(str(folder),), output=str(output), **settings))
        assert report.num_encoded == num_pictures, report
        vectors = pq.read_table(output)["embedding"].combine_chunks().flatten().to_numpy()
        figures = {
            "seconds": report.seconds,
            "setup_seconds": report.setup_seconds,
            "slowest_stage": report.slowest_stage,
            "slowest_share": round(report.slowest_share, 4),
            "num_packs": report.num_packs,
            "packing_efficiency": round(report.packing_efficiency, 4),
            "flops": self._seen[folder, resize].flops,
        }
        return figures, vectors.reshape(num_pictures, -1).astype(np.float32)


if __name__ == "__main__":
    serve(lambda settings: Vlmembed(settings).run)
