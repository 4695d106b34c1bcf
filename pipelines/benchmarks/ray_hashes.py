"""The aggregate by hash over rows that are not there: hashes made of row numbers, one in five of them repeated."""

from __future__ import annotations

import hashlib
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_memory import ClusterMemory
from row_contents import REPEATED_EVERY, contents

from vlmembed.engines.cluster import quiet_data
from vlmembed.engines.feeding import HASHES_AT_ONCE
from vlmembed.engines.firsts import hashed_table
from vlmembed.engines.ray import BLOCK_BYTES, dataset_of, write_repeated
from vlmembed.engines.tasks import unpacked

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

TASK_ROWS = 2**17


def hash_rows(buckets: int, block: pa.Table) -> Iterator[pa.Table]:
    """As the engine's task hashes pieces, in tables of as many rows."""
    for rows in unpacked(block):
        for start in range(rows.start, rows.stop, HASHES_AT_ONCE):
            part = range(start, min(start + HASHES_AT_ONCE, rows.stop))
            shown = contents(part).tolist()
            pairs = [
                (row, hashlib.sha256(content.to_bytes(8, "big")).digest())
                for row, content in zip(part, shown, strict=True)
            ]
            yield hashed_table(pairs, buckets)


def aggregate(num_rows: int, bucket_rows: int) -> dict[str, Any]:
    """Seconds, bytes and memory, on the Ray that is connected. The hashes are made before, and lie in its object store
    meanwhile."""
    buckets = -(-num_rows // bucket_rows)
    stretches = [range(start, min(start + TASK_ROWS, num_rows)) for start in range(0, num_rows, TASK_ROWS)]
    with quiet_data(BLOCK_BYTES), tempfile.TemporaryDirectory() as name, ClusterMemory() as memory:
        folder = Path(name)
        (folder / "manifest.json").touch()  # what tasks know the folder of a run by
        began = time.perf_counter()
        rows = dataset_of(stretches)
        hashed = rows.map_batches(
            partial(hash_rows, buckets), batch_size=None, batch_format="pyarrow", num_cpus=1
        ).materialize()
        made = time.perf_counter()
        found = write_repeated(hashed, folder, num_rows=num_rows, buckets=buckets)
        ended = time.perf_counter()
        written = sum(path.stat().st_size for path in folder.glob("*.parquet"))
    assert found.num_repeated == num_rows // REPEATED_EVERY, found
    return {
        "rows": num_rows,
        "buckets": buckets,
        "seconds": ended - made,
        "seconds, hashes made": made - began,
        "bytes a row, hashes": hashed.size_bytes() / num_rows,
        "bytes a repeated row, written": written / found.num_repeated,
        "repeated rows": found.num_repeated,
        **memory.told(),
    }
