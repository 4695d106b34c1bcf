"""What the process that starts a run on a cluster can take: parts of results that no tower has made, gathered, written
by tasks and committed."""

from __future__ import annotations

import hashlib
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from cluster_memory import ClusterMemory

import vlmembed
from vlmembed.engines.blocks import PartEnd, end_row, events_row, results_row
from vlmembed.engines.cluster import quiet_data
from vlmembed.engines.clusterwork import ClusterWork
from vlmembed.engines.collecting import Gatherer, write_part
from vlmembed.engines.committing import Committer
from vlmembed.engines.driving import Driver
from vlmembed.engines.orders import RunOrder
from vlmembed.engines.ray import BLOCK_BYTES, MAX_TRIES, WRITES_PER_NODE, dataset_of
from vlmembed.engines.tasks import unpacked
from vlmembed.parts import PartStore
from vlmembed.progress import ProgressBar
from vlmembed.schema import VectorColumn, output_schema
from vlmembed.types import EmbeddingBatch, ImageRef

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 384
ROWS_PER_PART = 8192
"""The default beside a GPU."""

PACK_ROWS = 64
"""Pictures of 257 tokens in a pack of 16,384 tokens and a little."""

PACKS_PER_BLOCK = 4
"""As many as a block of `BLOCK_BYTES` holds, at 588 bytes a patch."""

TOKENS = 257
BLOCKS_PER_PART = ROWS_PER_PART // (PACK_ROWS * PACKS_PER_BLOCK)


def order_of(folder: Path, num_rows: int) -> RunOrder:
    """Of a run that has never been planned; what is written is like any."""
    config: Any = vlmembed.EncodeConfig(inputs=("-",), output="out.parquet", rows_per_part=ROWS_PER_PART)
    vectors = (VectorColumn(name="embedding", width=WIDTH),)
    rule: Any = None  # towers and feeding tasks know it
    return RunOrder(
        config=config,
        rule=rule,
        vectors=vectors,
        schema=output_schema(vectors, pa.schema([])),
        kept=pa.schema([]),
        folder=folder,
        working_folder=str(folder),
        run_id=hashlib.sha256(b"").hexdigest(),  # of a manifest with nothing in it
        max_row_bytes=4 * WIDTH,
        num_rows=num_rows,
    )


def results_of(rows: range) -> EmbeddingBatch:
    """What a tower makes of a pack of pictures of 224x224."""
    vectors = np.random.default_rng(rows.start).standard_normal((len(rows), WIDTH), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return EmbeddingBatch(
        rows=np.arange(rows.start, rows.stop, dtype=np.int64),
        grid_hw=np.full((len(rows), 2), 16, np.int32),
        size_hw=np.full((len(rows), 2), 224, np.int32),
        vectors={"embedding": vectors},
    )


def ref_of(row: int) -> ImageRef:
    """A row with a content of its own."""
    content_hash = hashlib.sha256(row.to_bytes(8, "big")).digest()
    return ImageRef(row=row, key=f"pictures/{row:012}.jpg", content_hash=content_hash, first_row=row)


def block_of(part: int, number: int) -> pa.Table:
    """A block of a part, of `BLOCKS_PER_PART`: its packs' results, and what was told of their rows. The last one has
    the part's end."""
    num_places = BLOCKS_PER_PART * (PACKS_PER_BLOCK + 1) + 1
    place = number * (PACKS_PER_BLOCK + 1)
    first_row = part * ROWS_PER_PART + number * PACKS_PER_BLOCK * PACK_ROWS
    tables = []
    for start in range(first_row, first_row + PACKS_PER_BLOCK * PACK_ROWS, PACK_ROWS):
        batch = results_of(range(start, start + PACK_ROWS))
        tables.append(results_row(part, place, [batch], seconds=0.0, num_splits=0))
        place += 1
    refs = [ref_of(row) for row in range(first_row, first_row + PACKS_PER_BLOCK * PACK_ROWS)]
    tables.append(events_row(part, place, refs))
    if number == BLOCKS_PER_PART - 1:
        end = PartEnd(
            num_places=num_places,
            needs=frozenset(),
            seconds={},
            num_packs=BLOCKS_PER_PART * PACKS_PER_BLOCK,
            num_images=ROWS_PER_PART,
            num_tokens=TOKENS * ROWS_PER_PART,
            num_found=0,
            num_malformed_exif=0,
            num_replaced=0,
        )
        tables.append(end_row(part, place + 1, end))
    return pa.concat_tables(tables)


class NoTower:
    """In a tower's place: makes the block that it is told to."""

    def __call__(self, block: pa.Table) -> pa.Table:
        """Blocks of results for numbers of parts and blocks."""
        return pa.concat_tables(block_of(*numbers) for numbers in unpacked(block))


def results(num_parts: int) -> Iterator[pa.Table]:
    """Block by block, as a run's come, from one actor."""
    numbers = [(part, number) for part in range(num_parts) for number in range(BLOCKS_PER_PART)]
    data = dataset_of(numbers).map_batches(
        NoTower, compute=ray.data.ActorPoolStrategy(size=1), batch_size=None, batch_format="pyarrow", num_cpus=1
    )
    return iter(data.iter_batches(batch_size=None, batch_format="pyarrow"))


def cpu_seconds_to_write() -> float:
    """CPU seconds of one part, written by the function of the writing task, in this process."""
    with tempfile.TemporaryDirectory() as name:
        order = order_of(Path(name), ROWS_PER_PART)
        (order.folder / "manifest.json").touch()
        blocks = [block_of(0, number) for number in range(BLOCKS_PER_PART)]
        began = time.process_time()
        write_part(order, 0, blocks)
        return time.process_time() - began


def drive(num_parts: int) -> dict[str, Any]:
    """Seconds, this process's own CPU seconds (without those of looking at memory), and memory, on the Ray that is
    connected."""
    cpu_seconds_to_write()  # warms up
    write_seconds = cpu_seconds_to_write()
    with tempfile.TemporaryDirectory() as name, quiet_data(BLOCK_BYTES), ClusterMemory() as memory:
        order = order_of(Path(name), num_parts * ROWS_PER_PART)
        (order.folder / "manifest.json").touch()
        store = PartStore(order.folder, order.schema, vectors=order.vectors, rows_per_part=ROWS_PER_PART)
        work = ClusterWork(num_feeds=1, num_towers=1, max_tokens_per_batch=TOKENS * PACK_ROWS)
        times: list[float] = []
        committer = Committer(
            order,
            store,
            None,
            work,
            lambda _: times.append(time.perf_counter()),
            max_running=WRITES_PER_NODE,
            max_tries=MAX_TRIES,
        )
        bar = ProgressBar(order.num_rows, initial=0, enabled=False)
        driver = Driver(Gatherer(ray.put), committer, work, bar, timeout_seconds=60.0, hung=lambda: None)
        began, cpu_began = time.perf_counter(), time.process_time()
        driver.run(lambda: results(num_parts))
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    assert store.next_row == order.num_rows == work.counts["embedded"], (store.next_row, work.counts)
    return {
        "parts": num_parts,
        "rows": order.num_rows,
        "seconds": seconds,
        "seconds to the first commit": times[0] - began,
        "rows/s": order.num_rows / seconds,
        "rows/s after the first commit": ROWS_PER_PART * (num_parts - 1) / (times[-1] - times[0]),
        "CPU seconds of the driver": cpu_seconds - memory.cpu_seconds,
        "CPU seconds to write a part, alone": write_seconds,
        **memory.told(),
    }
