"""Stages of a run that are set up in the same way wherever its rows go."""

from __future__ import annotations

from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING

from vlmembed.decode_processes import ProcessDecoders
from vlmembed.decoders import ThreadDecoders
from vlmembed.parts import storing
from vlmembed.patcher import Patcher
from vlmembed.suspects import SuspectRows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from vlmembed.decoders import DecodePool
    from vlmembed.planning import Plan


@contextmanager
def decoders_of(plan: Plan, suspects: Path | None) -> Iterator[DecodePool]:
    """The decoding threads or processes of a run. Threads note the rows that they are at in the file `suspects`, where
    one is given.

    Raises:
        StorageError: that file cannot be made.
    """
    config = plan.config
    assert config.workers is not None
    patcher = Patcher(rule=plan.rule, max_source_pixels=config.max_source_pixels, hash_pixels=config.dedup == "pixels")
    if config.decode == "processes":
        with ProcessDecoders(patcher, num_processes=config.workers, timeout_seconds=config.timeout) as processes:
            yield processes
        return
    rows = None
    if suspects is not None:
        with storing(suspects):
            rows = SuspectRows(suspects, 4 * config.workers)
    with (
        closing(rows) if rows is not None else nullcontext(),
        ThreadDecoders(patcher, num_threads=config.workers, timeout_seconds=config.timeout, suspects=rows) as threads,
    ):
        yield threads
