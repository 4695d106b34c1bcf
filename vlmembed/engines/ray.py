"""The engine for many machines: the project's stages as transforms of Ray Data.

    pieces ─▶ hash (tasks) ─▶ aggregate by hash ─▶ first rows                 1st pass, where duplicates are looked for
    pieces ─▶ read, decode, pack (tasks) ─▶ towers (actors) ─▶ gather ─▶ write a part (tasks) ─▶ commit, in order

A piece is what a part needs of the source. Packs are those that one machine makes, so the output is too.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.data
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vlmembed.engines.attempts import clear_attempts
from vlmembed.engines.base import Outcome
from vlmembed.engines.cluster import check_machines, connected, machines, quiet_data, raise_own
from vlmembed.engines.clusterwork import ClusterWork
from vlmembed.engines.collecting import Gatherer
from vlmembed.engines.committing import Committer
from vlmembed.engines.driving import Driver
from vlmembed.engines.firsts import BUCKET_ROWS, STRETCH_ROWS, FirstsIndex, read_index, write_index
from vlmembed.engines.orders import RunOrder
from vlmembed.engines.raysite import RaySite
from vlmembed.engines.sizing import size_towers
from vlmembed.engines.tasks import (
    Keeper,
    RemoteKnown,
    count_task,
    feed_task,
    hash_task,
    packed,
    repeated_task,
    stretch_task,
    unpacked,
    whole_task,
)
from vlmembed.engines.tower import Tower
from vlmembed.errors import AccountingError
from vlmembed.partfiles import file_sha256
from vlmembed.planning import max_row_bytes
from vlmembed.sources.base import read_after

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self

    import pyarrow as pa

    from vlmembed.config import EncodeConfig
    from vlmembed.engines.base import Work
    from vlmembed.engines.sizing import TowerPool
    from vlmembed.partfiles import PartRecord
    from vlmembed.parts import PartStore
    from vlmembed.planning import Plan
    from vlmembed.progress import ProgressBar
    from vlmembed.reuse import EarlierOutputs
    from vlmembed.sources.pieces import Divisible

logger = logging.getLogger(__name__)

BLOCK_BYTES = 32 * 2**20
"""What a block of packs is filled to: what travels at a time, and what a tower gets at once."""

FEED_BYTES = 2**29
"""Memory that is held for a feeding task. That it differs from what a tower asks for also keeps Ray Data from joining
both in the tower's process, where feeding and encoding would take turns."""

MAX_TRIES = 4
"""How often a part is written again, and the cache opened, when a process or machine went away; and how often parts are
fed that did not come whole. (What Ray starts again by itself is counted by `vlmembed.engines.attempts`.)"""

WRITES_PER_NODE = 2


class RayEngine:
    """A cluster: a `vlmembed.engines.base.Engine`."""

    def __init__(self, pool: TowerPool, num_nodes: int, num_cpus: float) -> None:
        self._pool = pool
        self._num_nodes = num_nodes
        self._num_cpus = num_cpus
        self.site = RaySite(pool)

    @classmethod
    @contextmanager
    def connected(cls, config: EncodeConfig) -> Iterator[Self]:
        """The engine, while the block runs.

        Raises:
            ClusterError: there is no cluster, or it has too little. ConfigError: a device that it has no use for.
        """
        with connected(config.ray_address):
            nodes = machines()
            pool = size_towers(config, nodes)
            logger.info("%d nodes; %s", len(nodes), pool)
            with closing(cls(pool, len(nodes), sum(node.num_cpus for node in nodes))) as engine:
                yield engine

    def close(self) -> None:
        """End what was started for the plan."""
        self.site.close()

    def embed(
        self,
        plan: Plan,
        store: PartStore,
        *,
        more: tuple[EarlierOutputs, ...],
        bar: ProgressBar,
        on_commit: Callable[[PartRecord, Work], None],
        hung: Callable[[], None],
    ) -> Outcome:
        """As in `vlmembed.engines.base.Engine`."""
        assert not more, "failed rows are tried again on one machine"
        source: Any = plan.source
        try:
            check_machines(plan.config, plan.paths.partial)
            with quiet_data(BLOCK_BYTES), ExitStack() as stack:
                clear_attempts(plan.paths.partial)
                self._count(plan, source)
                _check_last(plan, store)
                order = _order(plan, source.num_rows)
                known = stack.enter_context(_known(plan))
                if plan.config.dedup != "none" and order.num_rows:
                    order = replace(order, firsts=self._find_firsts(order, source))
                work = self._work(plan)
                committer = Committer(
                    order,
                    store,
                    known,
                    work,
                    lambda record: on_commit(record, work),
                    max_running=WRITES_PER_NODE * self._num_nodes,
                    max_tries=MAX_TRIES,
                )
                stack.callback(committer.close)
                for _ in range(MAX_TRIES):
                    gatherer = Gatherer(ray.put)
                    driver = Driver(gatherer, committer, work, bar, timeout_seconds=plan.config.timeout, hung=hung)
                    driver.run(partial(self._results, order, source, store.next_row, known, committer))
                    if store.next_row == order.num_rows:
                        break
                    logger.error("parts did not come whole, from row %d on: they are fed again", store.next_row)
        except RayError as error:
            raise_own(error)
        _check_all_committed(store, order.num_rows)
        return Outcome(num_rows=order.num_rows, counts=work.counts, figures=work.figures)

    def _work(self, plan: Plan) -> ClusterWork:
        assert plan.config.max_tokens_per_batch is not None
        assert plan.config.workers is not None
        feeding_cpus = self._num_cpus - self._pool.min_size * self._pool.num_cpus
        return ClusterWork(
            num_feeds=max(1, int(feeding_cpus // plan.config.workers)),
            num_towers=self._pool.max_size,
            max_tokens_per_batch=plan.config.max_tokens_per_batch,
        )

    def _count(self, plan: Plan, source: Any) -> None:  # noqa: ANN401  a source of any kind
        """Let files be counted that tell their rows only when they are read."""
        if source.num_rows is not None:
            return
        pieces = list(enumerate(source.uncounted()))
        counted = dataset_of(pieces).map_batches(
            partial(count_task, plan.config, str(Path.cwd())), **_per_block(num_cpus=1)
        )
        found = dict(pair for block in _blocks(counted) for pair in unpacked(block))
        source.counted([found[number] for number in range(len(pieces))])

    def _find_firsts(self, order: RunOrder, source: Divisible) -> FirstsIndex:
        """Where each content comes first: read all, hash, aggregate by hash. An earlier start may have done it."""
        if (found := read_index(order.folder)) is not None:
            return found
        buckets = -(-order.num_rows // BUCKET_ROWS)
        pieces = source.pieces(range(order.num_rows), order.rows_per_part)
        hashed = dataset_of(pieces).map_batches(
            partial(hash_task, order, buckets), **_per_block(num_cpus=order.config.workers)
        )
        found = write_repeated(hashed, order.folder, num_rows=order.num_rows, buckets=buckets)
        logger.info("%d rows, %d of them are duplicates", order.num_rows, found.num_repeated)
        return found

    def _results(
        self, order: RunOrder, source: Divisible, start: int, known: RemoteKnown | None, committer: Committer
    ) -> Iterator[pa.Table]:
        """What becomes of the parts that are not written, block by block."""
        rows = range(start, order.num_rows)
        pieces = (
            piece
            for piece in source.pieces(rows, order.rows_per_part)
            if not committer.is_written(piece.rows.start // order.rows_per_part)
        )
        if (first := next(pieces, None)) is None:
            return iter(())
        parts = dataset_of(chain([first], pieces))
        task = partial(feed_task, order, known)
        fed = parts.map_batches(task, **_per_block(num_cpus=order.config.workers, memory=FEED_BYTES))
        pool = self._pool
        encoded = fed.map_batches(
            Tower,
            fn_constructor_args=(self.site.order, self.site.weights_sha256, order.working_folder, order.folder),
            compute=ray.data.ActorPoolStrategy(min_size=pool.min_size, max_size=pool.max_size),
            num_gpus=pool.num_gpus,
            **_per_block(num_cpus=pool.num_cpus),
        )
        return _blocks(encoded)


def dataset_of(items: Iterable[Any]) -> ray.data.Dataset:
    """A block for each, of which there must be one."""
    rows = packed(items)
    return ray.data.from_items(rows, override_num_blocks=len(rows))


def write_repeated(hashed: ray.data.Dataset, folder: Path, *, num_rows: int, buckets: int) -> FirstsIndex:
    """Aggregate the tables of `hash_piece` over so many rows by hash; what is repeated is written to `folder`."""
    by_hash = hashed.groupby("bucket", num_partitions=buckets)
    num_stretches = -(-num_rows // STRETCH_ROWS)
    if buckets == num_stretches == 1:
        written = by_hash.map_groups(partial(whole_task, STRETCH_ROWS, folder), batch_format="pyarrow")
    else:
        repeated = by_hash.map_groups(partial(repeated_task, STRETCH_ROWS), batch_format="pyarrow")
        by_row = repeated.groupby("stretch", num_partitions=min(num_stretches, buckets))
        written = by_row.map_groups(partial(stretch_task, folder), batch_format="pyarrow")
    stretches, num_repeated = [], 0
    for block in _blocks(written):
        stretches += block["stretch"].to_pylist()
        num_repeated += sum(block["num_repeated"].to_pylist())
    found = FirstsIndex(stretch_rows=STRETCH_ROWS, stretches=sorted(stretches), num_repeated=num_repeated)
    write_index(folder, found)
    return found


def _per_block(*, num_cpus: float | None, memory: int | None = None) -> dict[str, Any]:
    """How stages are mapped: whole blocks, as Arrow tables."""
    return {"batch_size": None, "batch_format": "pyarrow", "num_cpus": num_cpus, "memory": memory}


def _blocks(data: ray.data.Dataset) -> Iterator[pa.Table]:
    """Run it; blocks come in no order. Raises as `raise_own`."""
    try:
        yield from data.iter_batches(batch_size=None, batch_format="pyarrow")
    except Exception as error:  # noqa: BLE001  Ray Data's own are of no common kind
        raise_own(error)


def _order(plan: Plan, num_rows: int) -> RunOrder:
    """What the tasks of a plan are told."""
    return RunOrder(
        config=plan.config,
        rule=plan.rule,
        vectors=plan.vectors,
        schema=plan.schema,
        kept=plan.source.kept_schema,
        folder=plan.paths.partial.absolute(),
        working_folder=str(Path.cwd()),
        run_id=file_sha256(plan.paths.partial / "manifest.json"),
        max_row_bytes=max_row_bytes(plan.vectors, plan.rule),
        num_rows=num_rows if plan.config.limit is None else min(num_rows, plan.config.limit),
    )


@contextmanager
def _known(plan: Plan) -> Iterator[RemoteKnown | None]:
    """The embeddings that need not be computed. One process of the cluster has them open, on this machine: SQLite can
    be shared by processes of one machine alone."""
    config = plan.config
    if config.cache is None and not config.reuse:
        yield None
        return
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    keeper: Any = ray.remote(num_cpus=0, max_restarts=MAX_TRIES, max_task_retries=MAX_TRIES, scheduling_strategy=here)(
        Keeper
    )
    cache = None if config.cache is None else Path(config.cache).absolute()
    named = replace(config, reuse=tuple(Path(name).absolute() for name in config.reuse), cache=cache)
    actor = keeper.remote(named, plan.facts["fingerprint"], plan.vectors, plan.paths.partial.absolute())
    try:
        ray.get(actor.check.remote())
        yield RemoteKnown(actor)
        ray.get(actor.close.remote())
    finally:
        ray.kill(actor)


def _check_last(plan: Plan, store: PartStore) -> None:
    """Rows that are counted by reading must be what they were when they were committed.

    Raises:
        InputError: the last one is another.
    """
    after = store.last_key() if plan.num_rows is None else None
    if after is not None:
        read_after(plan.source, store.next_row, after)


def _check_all_committed(store: PartStore, num_rows: int) -> None:
    """Raises:
    AccountingError: rows are missing.
    """
    if store.next_row != num_rows:
        msg = (
            f"rows do not add up: {num_rows} in the input, {store.next_row} in the parts. The committed parts are "
            "kept; please report this"
        )
        raise AccountingError(msg)
