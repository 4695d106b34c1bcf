"""An inspection as plain values, for machines: the object that `vlmembed inspect --json` prints."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vlmembed.shards import parse_shard

if TYPE_CHECKING:
    from vlmembed.inspection.reading import Inspection
    from vlmembed.inspection.unfinished import UnfinishedRun

VERSION = 1
"""Of the object's layout: keys may be added to it, none is taken away or changes its meaning."""


def to_plain(found: Inspection) -> dict[str, Any]:
    """Strict JSON's values only: what is not a finite number is None."""
    run = found.unfinished if found.kind == "unfinished" else None
    counts = found.provenance.get("counts", {})
    values = {
        "version": VERSION,
        "kind": found.kind,
        "path": os.fspath(found.path),
        "num_rows_read": counts.get("rows") if run is None else run.num_rows_done,
        "num_rows": found.num_rows,
        "num_embedded": found.num_rows - found.num_duplicates,
        "num_duplicates": found.num_duplicates,
        "num_failed": found.num_failed,
        "codes": found.codes,
        "failures": [asdict(group) for group in found.failures],
        "vectors": list(found.vectors),
        "width": found.width,
        "dtype": found.dtype,
        "num_tokens": found.num_tokens,
        "num_bytes": found.num_bytes,
        "bytes_per_row": found.bytes_per_row,
        "files": found.files,
        "shard": None if found.shard is None else dict(zip(("index", "count"), parse_shard(found.shard), strict=True)),
        "asked": found.asked,
        "decided": found.decided,
        "recipe": found.provenance.get("recipe"),
        "provenance": found.provenance,
        "num_compared": found.num_compared,
        "nearest": [asdict(pair) for pair in found.nearest],
        "unfinished": None if found.unfinished is None else _run(found.unfinished),
    }
    plain: dict[str, Any] = json.loads(json.dumps(values), parse_constant=lambda _: None)
    return plain


def _run(run: UnfinishedRun) -> dict[str, Any]:
    """Without the provenance, which is that of the inspection or another run's."""
    numbers = ("num_rows_total", "num_rows_done", "num_embedded", "num_duplicates", "num_failed")
    states = ("last_commit", "is_held", "is_retry", "is_assembled")
    return {
        "partial": os.fspath(run.partial),
        "output": os.fspath(run.output),
        "num_parts": len(run.records),
        **{name: getattr(run, name) for name in (*numbers, *states)},
    }
