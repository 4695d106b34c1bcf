"""What the engine for clusters does without a cluster: sizing, blocks, first rows, feeding, and parts from blocks."""

from __future__ import annotations

import importlib.util
import io
import json
import pickle
import random
import shutil
import subprocess
import sys
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import make_rule, noise
from outputs import kept_values
from test_cache import HALVES, POOLED, TOKENS, embedded, hash_of
from test_writer import EMPTY, VECTORS, batch, broken, ref

from vlmembed.assembly import assemble
from vlmembed.batch import make_batch, split_batch
from vlmembed.config import OF_THE_ENGINE, EncodeConfig
from vlmembed.decode import own_pillow_settings
from vlmembed.dedup import HashIndex
from vlmembed.engines import blocks
from vlmembed.engines.attempts import MAX_ATTEMPTS, attempt, clear_attempts
from vlmembed.engines.blocks import Kind, PartEnd, end_of, end_row, events_of, events_row, open_pack, pack_row
from vlmembed.engines.collecting import Gatherer, write_part
from vlmembed.engines.driving import Driver
from vlmembed.engines.feeding import Nothing, feed_part, hash_piece
from vlmembed.engines.firsts import (
    FirstRows,
    FirstsIndex,
    hashed_table,
    read_index,
    repeated_rows,
    write_index,
    write_stretch,
)
from vlmembed.engines.orders import RunOrder
from vlmembed.engines.sizing import Node, size_towers
from vlmembed.engines.tower import Tower
from vlmembed.errors import (
    AccountingError,
    ClusterError,
    ConfigError,
    FailureCode,
    InputError,
    RowFailedError,
    StorageError,
    WorkerError,
)
from vlmembed.feed import Feed
from vlmembed.layout import TowerLayout
from vlmembed.output import OutputPaths, write_manifest
from vlmembed.partfiles import file_sha256
from vlmembed.parts import FIRSTS, PartStore
from vlmembed.planning import _recipe
from vlmembed.preprocess import preprocess
from vlmembed.progress import StageClock
from vlmembed.resize import AreaResize
from vlmembed.schema import output_schema
from vlmembed.sources import open_source
from vlmembed.stages import decoders_of
from vlmembed.types import Embedded, EmbeddingBatch, Failure, ImageRef
from vlmembed.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from PIL import Image

    from vlmembed.feed import Event
    from vlmembed.layout import ResizeRule
    from vlmembed.partfiles import PartRecord
    from vlmembed.types import PackedBatch

SMALL = TowerLayout(
    patch_size=4,
    native=AreaResize(patch_size=4, min_pixels=8 * 8, max_pixels=24 * 24),
    official=None,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
    num_prefix_tokens=1,
)
WINDOWED = TowerLayout(
    patch_size=4,
    native=AreaResize(patch_size=8, min_pixels=8 * 8, max_pixels=48 * 48),
    official=None,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
    merge_size=2,
    block_order=True,
    rope="index",
    window_size=2,
)


def on_ray(**settings: Any) -> EncodeConfig:  # noqa: ANN401  of `EncodeConfig`
    return EncodeConfig(inputs=("in",), output="out.parquet", engine="ray", **settings)


def nodes(*sizes: tuple[float, float]) -> list[Node]:
    """Of their CPUs and GPUs."""
    return [Node(num_cpus=num_cpus, num_gpus=num_gpus) for num_cpus, num_gpus in sizes]


FOUR = ((64.0, 8.0),) * 4


@pytest.mark.parametrize(
    ("settings", "sizes", "bounds", "each"),
    [
        ({}, FOUR, (1, 32), (1, 1)),
        ({"tower_gpus": 0.5}, FOUR, (1, 64), (0.5, 1)),
        ({"tower_gpus": 0.25}, FOUR, (1, 128), (0.25, 1)),
        ({"tower_gpus": 0.3}, FOUR, (1, 96), (0.3, 1)),  # three share a GPU, and none has parts of two
        ({"tower_gpus": 0.1}, [(64, 1)], (1, 10), (0.1, 1)),
        ({"tower_gpus": 2.0}, FOUR, (1, 16), (2, 1)),
        ({"tower_gpus": 3}, FOUR, (1, 8), (3, 1)),
        ({"tower_cpus": 16}, FOUR, (1, 15), (1, 16)),  # one is left for feeding
        ({"tower_cpus": 0.5}, FOUR, (1, 32), (1, 0.5)),
        ({"workers": 4}, [(8, 8)], (1, 4), (1, 1)),
        ({}, [(4, 8)], (1, 3), (1, 1)),
        ({}, [(64, 0), (8, 8)], (1, 8), (1, 1)),  # fed by the node without GPUs
        ({"device": "cuda", "towers": "3"}, FOUR, (3, 3), (1, 1)),
        ({"towers": "2:8"}, FOUR, (2, 8), (1, 1)),
        ({"towers": "2:80"}, FOUR, (2, 80), (1, 1)),  # more nodes may come
    ],
)
def test_towers_on_gpus(
    settings: dict[str, Any], sizes: Sequence[tuple[float, float]], bounds: tuple[int, int], each: tuple[float, float]
) -> None:
    pool = size_towers(on_ray(**settings), nodes(*sizes))
    assert (pool.min_size, pool.max_size) == bounds
    assert (pool.num_gpus, pool.num_cpus) == each
    assert (pool.num_threads, pool.device) == (None, "cuda:0")


@pytest.mark.parametrize(
    ("settings", "sizes", "bounds", "num_cpus", "num_threads"),
    [
        ({}, [(2, 0)], (1, 1), 1, 2),
        ({}, [(4, 0)], (1, 1), 3, 4),
        ({}, [(16, 0)], (1, 1), 12, 16),
        ({}, [(64, 0)], (1, 1), 48, 64),
        ({}, [(1, 0), (1, 0)], (1, 1), 1, 1),
        ({}, [(1, 0)] * 5, (1, 4), 1, 1),
        ({}, [(16, 0), (64, 0), (0, 0)], (1, 2), 12, 16),  # the smallest; a head node that gives nothing is none
        ({"device": "cpu"}, FOUR, (1, 4), 48, 64),
        ({"tower_cpus": 4}, [(16, 0), (6, 0)], (1, 5), 4, 4),
        ({"tower_cpus": 4}, [(16, 0)], (1, 3), 4, 4),
        ({"tower_cpus": 0.5, "towers": "2"}, [(2, 0)], (2, 2), 0.5, 1),
        ({"towers": "3"}, [(4, 0)] * 3, (3, 3), 3, 4),
        ({"towers": "2:8"}, [(4, 0)] * 3, (2, 8), 3, 4),
        ({"workers": 4}, [(16, 0)] * 2, (1, 2), 12, 16),
    ],
)
def test_towers_on_cpus(
    settings: dict[str, Any],
    sizes: Sequence[tuple[float, float]],
    bounds: tuple[int, int],
    num_cpus: float,
    num_threads: int,
) -> None:
    pool = size_towers(on_ray(**settings), nodes(*sizes))
    assert (pool.min_size, pool.max_size) == bounds
    assert (pool.num_gpus, pool.num_cpus, pool.num_threads) == (0, num_cpus, num_threads)
    assert pool.device == "cpu"


@pytest.mark.parametrize(
    ("settings", "sizes", "message"),
    [
        ({"towers": "33"}, FOUR, "33 towers with 1 GPUs and 1 CPUs each .* room for 32 .* 64 CPUs and 8 GPUs"),
        ({"towers": "9:12", "tower_gpus": 4}, FOUR, "9 towers with 4 GPUs and 1 CPUs each .* room for 8 .*lower"),
        ({"tower_gpus": 2}, [(64, 1)] * 8, "1 towers with 2 GPUs and 1 CPUs each .* room for 0 .*--tower-gpus"),
        ({"device": "cuda"}, [(16, 0)], "1 towers with 1 GPUs and 1 CPUs each .* room for 0 .* 16 CPUs and 0 GPUs"),
        ({"tower_gpus": 0.5}, [(16, 0)], "1 towers with 0.5 GPUs and 1 CPUs each .* room for 0 .* 16 CPUs and 0 GPUs"),
        ({}, [(1, 1)], "1 towers with 1 GPUs and 1 CPUs each .* 1 CPUs to feed them; .* room for 0"),
        ({}, [(1, 0)], "1 towers with 1 CPUs each .* 1 CPUs to feed them; .* room for 0 .* add nodes"),
        ({}, [(0, 0)], "room for 0 .*0 CPUs and 0 GPUs"),
        ({}, [], "room for 0"),
        ({"towers": "4"}, [(4, 0)] * 3, "4 towers with 3 CPUs each .* room for 3"),
        ({"tower_cpus": 16}, [(16, 0)], "1 towers with 16 CPUs each .* room for 0 .*--tower-cpus"),
        ({"workers": 8}, [(16, 0)], "8 CPUs to feed them; .* room for 0 .*--workers"),
        ({"workers": 4}, [(2, 0)] * 8, "4 CPUs to feed them; .* room for 0 "),  # no node has so many
        ({"workers": 4, "tower_cpus": 1, "towers": "4"}, [(4, 0)] * 4, "4 towers with 1 CPUs each .* room for 3 "),
        ({"tower_cpus": 0.5, "towers": "2"}, [(1, 0)] * 2, "2 towers with 0.5 CPUs each .* room for 1 "),
    ],
)
def test_a_cluster_that_has_too_little(
    settings: dict[str, Any], sizes: Sequence[tuple[float, float]], message: str
) -> None:
    with pytest.raises(ClusterError, match=message):
        size_towers(on_ray(**settings), nodes(*sizes))


@pytest.mark.parametrize("device", ["cpu,cpu", "cuda:0", "cuda:0,cuda:1", "mps"])
def test_devices_that_a_cluster_has_no_use_for(device: str) -> None:
    with pytest.raises(ConfigError, match="on a cluster it is auto, cuda or cpu, and --towers says how many"):
        size_towers(on_ray(device=device), nodes(*FOUR))
    with pytest.raises(ConfigError, match="tower_gpus is given, and device is cpu: leave one out"):
        size_towers(on_ray(device="cpu", tower_gpus=1.0), nodes(*FOUR))


def worst_room(sizes: Sequence[Node], num_cpus: float, num_gpus: float, num_towers: int, workers: int) -> bool:
    """Whether a feeding task fits, however the towers are spread. A node is closed to it by the fewest towers that
    leave it no room; where these are more than the node takes, it cannot be closed."""
    closing_them = 0
    for node in sizes:
        if node.num_cpus < workers:
            continue
        fit = int(node.num_cpus / num_cpus)
        if num_gpus:
            fit = min(fit, int(node.num_gpus) * int(1 / num_gpus) if num_gpus < 1 else int(node.num_gpus // num_gpus))
        needed = int((node.num_cpus - workers) / num_cpus) + 1
        if needed > fit:
            return True
        closing_them += needed
    return num_towers < closing_them


def test_a_feeding_task_has_room_beside_all_towers_wherever_they_are() -> None:
    generator = random.Random(0)  # noqa: S311  sizes of nodes
    num_sized = 0
    for _ in range(3000):
        sizes = [
            (generator.choice([0, 1, 2, 4, 8, 16]), generator.choice([0, 0, 1, 2, 8]))
            for _ in range(generator.randint(1, 4))
        ]
        workers = generator.choice([1, 1, 2, 4, 8])
        least = generator.randint(1, 6)
        settings = {
            "workers": workers,
            "towers": generator.choice([None, str(least), f"{least}:12"]),
            "tower_gpus": generator.choice([None, None, 0.5, 0.25, 2.0]),
            "tower_cpus": generator.choice([None, None, 0.5, 1.0, 2.0, 3.0]),
        }
        try:
            pool = size_towers(on_ray(**settings), nodes(*sizes))
        except ClusterError:
            continue
        num_sized += 1
        assert 1 <= pool.min_size <= pool.max_size
        for num_towers in {pool.min_size, pool.max_size} if settings["towers"] is None else {pool.min_size}:
            told = f"{settings} on {sizes}: {pool}"
            assert worst_room(nodes(*sizes), pool.num_cpus, pool.num_gpus, num_towers, workers), told
    assert num_sized > 500


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"towers": "0"}, "towers is '0'; it is a number such as 4, or bounds such as 1:8"),
        ({"towers": "4:2"}, "towers is '4:2'"),
        ({"towers": "1:"}, "towers is '1:'"),
        ({"towers": "-1"}, "towers is '-1'"),
        ({"towers": " 3"}, "towers is ' 3'"),
        ({"towers": "3\n"}, "towers is '3"),
        ({"towers": ""}, "towers is ''"),
        ({"towers": 3}, "towers is 3; it is text"),
        ({"tower_gpus": 0}, "tower_gpus is 0; it is a number of more than 0"),
        ({"tower_gpus": 1.5}, "tower_gpus is 1.5; Ray divides one GPU, or gives whole ones"),
        ({"tower_gpus": True}, "tower_gpus is True; it is a number"),
        ({"tower_gpus": float("inf")}, "tower_gpus is inf; it is a number"),
        ({"tower_cpus": -0.5}, "tower_cpus is -0.5; it is a number of more than 0"),
        ({"tower_cpus": float("nan")}, "tower_cpus is nan; it is a number"),
        ({"tower_cpus": "2"}, "tower_cpus is '2'; it is a number"),
        ({"engine": "spark"}, "engine is 'spark'; it can be local, ray"),
        ({"ray_address": 6379}, "ray_address is 6379; it is text"),
        ({"retry_failed": True}, "retry_failed is for few rows, and runs on this machine: leave engine ray out"),
    ],
)
def test_settings_of_a_cluster_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EncodeConfig(inputs=("in",), output="out.parquet", **{"engine": "ray", **settings})


def test_settings_of_a_cluster_are_for_a_cluster() -> None:
    for name, value in (("towers", "2"), ("tower_gpus", 0.5), ("tower_cpus", 2)):
        with pytest.raises(ConfigError, match=f"{name} is about a cluster: add engine ray, or leave it out"):
            EncodeConfig(inputs=("in",), output="out.parquet", **{name: value})  # type: ignore[arg-type]
    assert not EncodeConfig(inputs=("in",), output="out.parquet").on_ray
    by_address = EncodeConfig(inputs=("in",), output="out.parquet", ray_address="auto", towers="2", tower_gpus=2)
    assert by_address.on_ray
    assert on_ray().on_ray
    assert on_ray().num_towers is None
    assert on_ray(towers="3").num_towers == (3, 3)
    assert on_ray(towers="2:8").num_towers == (2, 8)


def test_a_recipe_does_not_say_where_the_work_was_done() -> None:
    config = on_ray(ray_address="ray://head", towers="2:8", tower_gpus=0.5, tower_cpus=2.0, max_tokens_per_batch=4096)
    recipe = _recipe(config, make_rule(SMALL), config)
    assert recipe == _recipe(here := replace(config, **OFF), make_rule(SMALL), here)
    assert {name: getattr(recipe, name) for name in OF_THE_ENGINE} == OFF
    assert not any(name in recipe.to_toml() for name in ("ray", "tower"))


OFF: dict[str, Any] = {
    "engine": "local",
    "ray_address": None,
    "towers": None,
    "tower_gpus": None,
    "tower_cpus": None,
}


def travelled(table: pa.Table) -> pa.Table:
    """A table as it arrives: its rows among others', chosen by a filter, and sent as an Arrow stream."""
    others = events_row(99, 0, [ref(7)])
    mixed = pa.concat_tables([others, table, others, others]).slice(1)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, mixed.schema) as stream:
        stream.write_table(mixed)
    arrived = pa.ipc.open_stream(sink.getvalue()).read_all()
    assert arrived.schema == blocks.SCHEMA
    return arrived.filter(arrived["part"].to_numpy() != 99)


def the_bytes(table: pa.Table) -> tuple[pa.Scalar, pa.Scalar]:
    assert table.num_rows == 1
    return table["header"][0], table["payload"][0]


@pytest.mark.parametrize("layout", [SMALL, WINDOWED], ids=["plain", "windows"])
def test_a_pack_arrives_as_it_was(
    layout: TowerLayout, pack_images: Callable[[Sequence[Image.Image], ResizeRule], PackedBatch]
) -> None:
    pictures = [noise(20 + 7 * seed, 30, seed) for seed in range(3)]
    sent = pack_images(pictures, make_rule(layout))
    row = pack_row(5, 2, sent)
    assert (row["part"][0].as_py(), row["place"][0].as_py(), row["kind"][0].as_py()) == (5, 2, Kind.PACK)
    assert row["payload"].chunk(0).buffers()[2].address == sent.block.ctypes.data  # no copy
    for arrived in (row, travelled(row)):
        found = open_pack(*the_bytes(arrived))
        assert found.header == sent.header
        assert found.block.flags.writeable
        assert not np.shares_memory(found.block, sent.block)
        ours, theirs = (each.header.layout.views(each.block) for each in (found, sent))
        assert ours.keys() == theirs.keys()
        for name, array in ours.items():
            np.testing.assert_array_equal(array, theirs[name])
            assert array.dtype == theirs[name].dtype
            assert array.flags.aligned
        assert (found.metadata.windows is None) == (layout.window_size is None)
        assert found.metadata.segments.runs == sent.metadata.segments.runs
        assert found.patches.ctypes.data % found.patches.dtype.alignment == 0


def plain(value: Any) -> Any:  # noqa: ANN401  an event, or what is in one
    """Something comparable that is equal for equal events."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (ImageRef, Embedded, EmbeddingBatch)):
        return type(value).__name__, [plain(getattr(value, name)) for name in type(value).__slots__]
    if isinstance(value, pa.RecordBatch):
        return str(value.schema), value.to_pylist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value


def plainly(events: Iterable[Event]) -> list[Any]:
    return [plain(event) for event in events]


def test_events_without_columns_arrive_as_they_were() -> None:
    tokens = EmbeddingBatch(
        rows=np.array([3, 4], np.int64),
        grid_hw=np.array([[1, 2], [3, 1]], np.int32),
        size_hw=np.array([[5, 6], [7, 8]], np.int32),
        vectors={"tokens": np.arange(10, dtype=np.float16).reshape(5, 2)},
        offsets=np.array([0, 2, 5], np.int64),
    )
    events: list[Event] = [
        *(ref(0), replace(ref(1), content_hash=None), ref(2, 0)),
        Failure(row=1, stage="read", code=FailureCode.MISSING, message="päng\n"),
        *(embedded(8, POOLED), embedded(9, HALVES), embedded(10, TOKENS)),
        *(batch(5, 6), tokens),
    ]
    for sent in (events, events[3:], []):
        row = events_row(4, 1, sent)
        assert row["kind"].to_pylist() == [Kind.EVENTS]
        assert plainly(events_of(*the_bytes(row))) == plainly(events_of(*the_bytes(travelled(row)))) == plainly(sent)
    results: list[EmbeddingBatch | Failure] = [batch(5, 6), broken(7), tokens]
    row = blocks.results_row(4, 1, results, seconds=1.5, num_splits=2)
    assert row.select(["kind", "seconds", "num_splits"]).to_pylist() == [
        {"kind": Kind.RESULTS, "seconds": 1.5, "num_splits": 2}
    ]
    assert plainly(events_of(*the_bytes(travelled(row)))) == plainly(results)


KEPT = pa.schema(
    [
        ("number", pa.int64()),
        ("text", pa.string()),
        ("long", pa.large_string()),
        ("lists", pa.list_(pa.string())),
        ("word", pa.dictionary(pa.int32(), pa.string())),
        ("struct", pa.struct([("label", pa.int64()), ("names", pa.list_(pa.string()))])),
        ("fixed", pa.list_(pa.float32(), 2)),
        ("flag", pa.bool_()),
        ("nothing", pa.null()),
        ("map", pa.map_(pa.string(), pa.int32())),
    ]
)


def kept_batch(rows: range) -> pa.RecordBatch:
    """Some rows' kept columns; some are null, and each batch has a dictionary of its own."""
    columns = {
        "number": pa.array(rows, pa.int64()),
        "text": kept_values(pa.string(), rows),
        "long": pa.array(["x" * (row % 50) for row in rows], pa.large_string()),
        "lists": pa.array([None if row % 4 == 3 else [str(row)] * (row % 4) for row in rows], pa.list_(pa.string())),
        "word": kept_values(pa.dictionary(pa.int32(), pa.string()), rows),
        "struct": kept_values(KEPT.field("struct").type, rows),
        "fixed": pa.array([[row, 0.5] for row in rows], pa.list_(pa.float32(), 2)),
        "flag": pa.array([row % 3 == 0 for row in rows]),
        "nothing": pa.nulls(len(rows)),
        "map": pa.array([[(str(row), row)] for row in rows], pa.map_(pa.string(), pa.int32())),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in KEPT.names], schema=KEPT)


def with_columns(columns: pa.RecordBatch, rows: Sequence[int], first_row: int = 0) -> list[ImageRef]:
    return [replace(ref(row, 0), columns=columns.slice(row - first_row, 1)) for row in rows]


def test_kept_columns_arrive_as_they_were() -> None:
    first, second = kept_batch(range(9)), kept_batch(range(9, 20))
    failed = broken(3)
    told: list[list[Event]] = [
        [*with_columns(first, [0, 1, 3, 4, 8]), failed, *with_columns(second, range(9, 20), 9), batch(0, 1)],
        [*with_columns(second, [14], 9)],
        [failed],
        [*with_columns(first, [0, 1]), ref(2, 0), *with_columns(first, [3]), ref(4, 0)],  # some could not be read
    ]
    for sent in told:
        for row in (events_row(0, 0, sent), travelled(events_row(0, 0, sent))):
            found = events_of(*the_bytes(row))
            assert plainly(found) == plainly(sent)
            schemas = {event.columns.schema for event in found if isinstance(event, ImageRef) and event.columns}
            assert schemas <= {KEPT}


def test_slices_of_huge_columns_travel_alone() -> None:
    huge = kept_batch(range(12_000))
    assert huge.nbytes > 2**20
    row = events_row(0, 0, with_columns(huge, range(6_000, 6_004)))
    header, payload = the_bytes(row)
    assert header.as_buffer().size + payload.as_buffer().size < 10_000
    assert [
        event.columns["number"][0].as_py()
        for event in events_of(header, payload)
        if isinstance(event, ImageRef) and event.columns
    ] == [6_000, 6_001, 6_002, 6_003]
    assert events_row(0, 0, with_columns(huge, [11_999])).nbytes < 10_000


def test_the_end_of_a_part_arrives_as_it_was() -> None:
    end = end_with(7, {1, 4})
    row = travelled(end_row(3, 6, end))
    assert row.select(["part", "place", "kind"]).to_pylist() == [{"part": 3, "place": 6, "kind": Kind.END}]
    assert end_of(the_bytes(row)[1]) == end


def end_with(num_places: int, needs: Iterable[int] = ()) -> PartEnd:
    return PartEnd(
        num_places=num_places,
        needs=frozenset(needs),
        seconds={"decode": 0.5},
        num_packs=1,
        num_images=2,
        num_tokens=3,
        num_found=4,
        num_malformed_exif=5,
        num_replaced=6,
    )


def plain_firsts(hashes: Sequence[bytes]) -> dict[int, int]:
    """The first row of each row that repeats an earlier one."""
    first: dict[bytes, int] = {}
    return {
        row: first[content_hash]
        for row, content_hash in enumerate(hashes)
        if first.setdefault(content_hash, row) != row
    }


def store_firsts(
    folder: Path, pairs: list[tuple[int, bytes]], *, buckets: int, stretch_rows: int, seed: int = 0
) -> FirstsIndex:
    """Pass 1 without its shuffles: hashes come in no order, those of a bucket together."""
    random.Random(seed).shuffle(pairs)  # noqa: S311  the order of a test
    hashed = pa.concat_tables([hashed_table(pairs[::2], buckets), hashed_table(pairs[1::2], buckets)])
    numbers = hashed["bucket"].to_numpy()
    repeated = pa.concat_tables(
        repeated_rows(hashed.filter(numbers == bucket), stretch_rows) for bucket in range(buckets)
    )
    stretches = sorted(set(repeated["stretch"].to_pylist()))
    of_row = repeated["stretch"].to_numpy()
    written = [write_stretch(folder, repeated.filter(of_row == stretch)) for stretch in stretches]
    assert written == stretches
    found = FirstsIndex(stretch_rows=stretch_rows, stretches=stretches, num_repeated=repeated.num_rows)
    write_index(folder, found)
    return found


def test_first_rows_are_those_of_a_dictionary(tmp_path: Path) -> None:
    generator = random.Random(1)  # noqa: S311  contents
    contents = [generator.randbytes(32) for _ in range(300)]
    contents += [content[:31] + b"x" for content in contents[:50]]  # hashes that begin alike
    hashes = [generator.choice(contents) for _ in range(2000)]
    expected = plain_firsts(hashes)
    found = store_firsts(tmp_path, list(enumerate(hashes)), buckets=3, stretch_rows=512)
    assert found == FirstsIndex(stretch_rows=512, stretches=[0, 1, 2, 3], num_repeated=len(expected))
    assert read_index(tmp_path) == found
    for rows in (range(2000), range(510, 515), range(512, 1024), range(1023, 1024), range(1999, 2000)):
        index = FirstRows(tmp_path, found, rows)
        assert {row: index.first_row(hashes[row], row) for row in rows} == {row: expected.get(row, row) for row in rows}
        assert index.firsts == {expected[row] for row in rows if row in expected}
    elsewhere = next(row for row in expected if row >= 512)
    assert index.first_row(hashes[elsewhere], elsewhere) == elsewhere  # a row of another part is not known


def test_a_row_that_holds_something_else_now_stands_for_itself(tmp_path: Path) -> None:
    hashes = [hash_of(0), hash_of(1), hash_of(0), hash_of(1)]
    index = FirstRows(tmp_path, store_firsts(tmp_path, list(enumerate(hashes)), buckets=1, stretch_rows=4), range(4))
    assert index.first_row(hash_of(0), 2) == 0
    assert index.first_row(hash_of(1), 2) == 2
    assert index.first_row(hash_of(7), 3) == 3
    assert index.first_row(hash_of(1), 0) == 0


def test_nothing_repeated_is_no_file(tmp_path: Path) -> None:
    empty = repeated_rows(hashed_table([], 4), 8)
    assert empty.num_rows == 0
    found = store_firsts(tmp_path, [(row, hash_of(row)) for row in range(20)], buckets=2, stretch_rows=8)
    assert found == FirstsIndex(stretch_rows=8, stretches=[], num_repeated=0)
    assert [path.name for path in tmp_path.iterdir()] == [FIRSTS]
    index = FirstRows(tmp_path, found, range(4, 20))
    assert (index.first_row(hash_of(5), 5), index.firsts) == (5, frozenset())


def test_first_rows_that_cannot_be_read(tmp_path: Path) -> None:
    assert read_index(tmp_path) is None
    hashes = [hash_of(row % 3) for row in range(16)]
    found = store_firsts(tmp_path, list(enumerate(hashes)), buckets=1, stretch_rows=8)
    [_, path] = sorted(tmp_path.glob("firsts-*.parquet"))
    content = path.read_bytes()
    for damaged in (content[:-20], b"", content[:40] + bytes(60) + content[100:]):
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match=r"firsts-000001.parquet cannot be read .*: delete .*firsts.json, and"):
            FirstRows(tmp_path, found, range(6, 10))
        assert FirstRows(tmp_path, found, range(8)).firsts == {0, 1, 2}
    path.unlink()
    with pytest.raises(StorageError, match=r"firsts-000001.parquet cannot be read"):
        FirstRows(tmp_path, found, range(15, 16))
    for text in ("{", "[]", '{"stretch_rows": 8}', '{"stretch_rows": 8, "stretches": [], "num_repeated": 0, "x": 1}'):
        (tmp_path / FIRSTS).write_text(text)
        with pytest.raises(StorageError, match=r"firsts.json cannot be read .*: delete it, and the same command finds"):
            read_index(tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(StorageError, match=r"cannot write .*firsts.json"):
        write_index(tmp_path, found)


ROWS_PER_PART = 6


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a run has told of its rows: packs by their rows, what else there was, and blocks of one row by part."""

    packs: list[tuple[list[int], bytes]]
    events: list[Any]
    blocks: dict[int, list[pa.Table]]
    ends: dict[int, PartEnd]


def png(seed: int, level: int = 6) -> bytes:
    stream = io.BytesIO()
    noise(14 + seed, 20, seed).save(stream, "PNG", compress_level=level)
    return stream.getvalue()


def make_inputs(folder: Path) -> tuple[str, str]:
    """20 rows, of which the first 9 are files. Row 4 is broken, row 15 cannot be read, rows 5, 7, 13, 14, 16 and 18
    repeat others byte for byte, and row 10 a picture in other bytes."""
    folder.mkdir()
    contents: list[bytes | None] = [png(number) for number in range(20)]
    contents[4] = b"\x89PNG\r\n\x1a\n and no more"
    for row, first_row in {5: 1, 7: 6, 13: 1, 14: 12, 16: 4, 18: 12}.items():
        contents[row] = contents[first_row]
    contents[10] = png(8, 1)
    contents[15] = None
    (folder / "pictures").mkdir()
    for row, content in enumerate(contents[:9]):
        assert content is not None
        (folder / "pictures" / f"{row:02}.png").write_bytes(content)
    pq.write_table(pa.table({"image": pa.array(contents[9:], pa.binary())}), folder / "rest.parquet", row_group_size=4)
    return "pictures", "rest.parquet"


REPEATED = {
    "bytes": {5: 1, 7: 6, 13: 1, 14: 12, 16: 4, 18: 12},
    "pixels": {5: 1, 7: 6, 10: 8, 13: 1, 14: 12, 18: 12},
    "none": {},
}


class Input:
    """Pictures, and a run over them whose parts go to a partial folder."""

    def __init__(self, folder: Path, inputs: tuple[str, str], **settings: Any) -> None:  # noqa: ANN401  of the config
        self.config = EncodeConfig(
            inputs=inputs,
            output="out.parquet",
            engine="ray",
            rows_per_part=ROWS_PER_PART,
            workers=2,
            max_tokens_per_batch=64,
            **settings,
        )
        self.paths = OutputPaths(output=folder / "out.parquet")
        self.rule = make_rule(SMALL)
        with closing(open_source(self.config)) as source:
            assert source.num_rows == 20
            self.pieces = list(source.pieces(range(20), ROWS_PER_PART))
        self.paths.partial.mkdir()
        write_manifest(self.paths.partial, {"a": 1})
        clear_attempts(self.paths.partial)
        self.order = RunOrder(
            config=self.config,
            rule=self.rule,
            vectors=VECTORS,
            schema=output_schema(VECTORS, EMPTY),
            kept=EMPTY,
            folder=self.paths.partial,
            working_folder=str(folder),
            run_id=file_sha256(self.paths.partial / "manifest.json"),
            max_row_bytes=100,
            num_rows=20,
        )

    def with_firsts(self) -> RunOrder:
        """The order after the first pass, which took place in other processes."""
        order = elsewhere(self.order)
        assert isinstance(order, RunOrder)
        tables = [table for piece in self.pieces for table in hash_piece(order, elsewhere(piece), 3)]
        pairs = [
            (row, content_hash)
            for table in tables
            for row, content_hash in zip(table["row"].to_pylist(), table["content_hash"].to_pylist(), strict=True)
        ]
        return replace(order, firsts=store_firsts(order.folder, pairs, buckets=3, stretch_rows=8))

    def told_by_tasks(self, order: RunOrder) -> Told:
        """Packs and events of all parts."""
        told = Told(packs=[], events=[], blocks={}, ends={})
        for part, piece in enumerate(self.pieces):
            told.blocks[part] = [
                travelled(row) for row in feed_part(elsewhere(order), part, elsewhere(piece), Nothing())
            ]
            assert [row["place"][0].as_py() for row in told.blocks[part]] == list(range(len(told.blocks[part])))
            assert {row["part"][0].as_py() for row in told.blocks[part]} == {part}
            for kind, header, payload in ((row["kind"][0].as_py(), *the_bytes(row)) for row in told.blocks[part]):
                if kind == Kind.PACK:
                    pack = open_pack(header, payload)
                    told.packs.append((pack.rows.tolist(), used_bytes(pack)))
                elif kind == Kind.EVENTS:
                    told.events.extend(events_of(header, payload))
                else:
                    told.ends[part] = end_of(payload)
            assert told.ends[part].num_places == len(told.blocks[part])
        return told

    def told_here(self) -> tuple[list[PackedBatch], list[Event]]:
        """The same by the stages of one machine, in one go."""
        events: list[Event] = []
        config = self.config
        with ExitStack() as stack:
            stack.enter_context(own_pillow_settings(config.max_source_pixels))
            index = None
            if config.dedup != "none":
                index = stack.enter_context(HashIndex(self.paths.partial / "index"))
            feed = Feed(
                config,
                index=index,
                known=Nothing(),
                decoders=stack.enter_context(decoders_of(config, self.rule)),
                layout=self.rule.layout,
                clock=StageClock(),
                tell=events.extend,
            )
            source = stack.enter_context(closing(open_source(config)))
            packs = list(feed.packs(source.read(0)))
        return packs, events


def used_bytes(pack: PackedBatch) -> bytes:
    """All arrays of a pack; what lies between them is whatever was in memory."""
    views = pack.header.layout.views(pack.block)
    return b"".join(views[field.name].tobytes() for field in pack.header.layout.fields)


def by_row(events: Iterable[Event]) -> list[Any]:
    """Events, comparable; chunks of rows are as large as time has made them, so their order is not."""
    return sorted(plainly(events), key=repr)


def elsewhere(value: Any) -> Any:  # noqa: ANN401  whatever is sent
    """What arrives in another process."""
    return pickle.loads(pickle.dumps(value, 5))  # noqa: S301  written right here


@pytest.fixture
def make_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Input]:
    """Makes inputs in the working folder; tasks go there, from wherever they are."""

    def make(**settings: Any) -> Input:  # noqa: ANN401  of `EncodeConfig`
        inputs = make_inputs(tmp_path / "work")
        monkeypatch.chdir(tmp_path / "work")
        made = Input(tmp_path / "work", inputs, **settings)
        monkeypatch.chdir(tmp_path)
        return made

    return make


@pytest.mark.parametrize("dedup", ["bytes", "pixels", "none"])
def test_parts_are_fed_as_one_machine_feeds_them(dedup: str, make_input: Callable[..., Input]) -> None:
    given = make_input(dedup=dedup)
    order = given.order if dedup == "none" else given.with_firsts()
    told = given.told_by_tasks(order)
    packs, events = given.told_here()
    assert told.packs == [(pack.rows.tolist(), used_bytes(pack)) for pack in packs]
    assert len(packs) > 4
    assert by_row(told.events) == by_row(events)
    refs = [event for event in told.events if isinstance(event, ImageRef)]
    assert [each.row for each in refs] == list(range(20))
    assert {each.row: each.first_row for each in refs if each.first_row != each.row} == REPEATED[dedup]
    failed = {event.row: event.stage for event in told.events if isinstance(event, Failure)}
    assert failed == {4: "decode", 15: "read"} | ({} if dedup == "bytes" else {16: "decode"})
    firsts = REPEATED[dedup].items()
    for part, end in told.ends.items():
        rows = order.rows_of(part)
        assert end.needs == {first // ROWS_PER_PART for row, first in firsts if row in rows and first not in rows}
        of_part = [rows_of_pack for rows_of_pack, _ in told.packs if rows_of_pack[0] in rows]
        assert (end.num_packs, end.num_images) == (len(of_part), sum(map(len, of_part)))
        assert end.num_tokens == sum(pack.num_tokens for pack in packs if int(pack.rows[0]) in rows)
        assert (end.num_found, end.num_malformed_exif, end.num_replaced) == (0, 0, 0)
        assert {"read", "pack", "decode"} <= set(end.seconds)


class Knowing:
    """A `vlmembed.feed.Finder` that has some rows' embeddings."""

    def __init__(self, rows: Iterable[int]) -> None:
        self._rows = frozenset(rows)

    def find_all(self, images: Sequence[tuple[bytes, int]]) -> dict[int, Embedded]:
        """As in `vlmembed.feed.Finder`."""
        return {row: batch(row).of_image(0) for _, row in images if row in self._rows}


def test_what_is_known_is_told_and_not_packed(make_input: Callable[..., Input]) -> None:
    given = make_input()
    order = given.with_firsts()
    *tables, end = list(feed_part(order, 0, given.pieces[0], Knowing([0, 2])))
    packed = [open_pack(*the_bytes(table)).rows.tolist() for table in tables if table["kind"][0].as_py() == Kind.PACK]
    assert sorted(chain.from_iterable(packed)) == [1, 3]
    events = [event for table in tables[-1:] for event in events_of(*the_bytes(table))]
    assert {event.row for event in events if isinstance(event, Embedded)} == {0, 2}
    assert (end_of(the_bytes(end)[1]).num_found, end_of(the_bytes(end)[1]).num_images) == (2, 2)


def test_events_come_behind_the_packs_a_few_at_a_time(
    make_input: Callable[..., Input], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = make_input()
    monkeypatch.setattr("vlmembed.engines.feeding.EVENTS_AT_ONCE", 1)
    monkeypatch.setattr("vlmembed.engines.feeding.HASHES_AT_ONCE", 2)
    order = given.with_firsts()
    told = given.told_by_tasks(order)
    kinds = [table["kind"][0].as_py() for table in told.blocks[0]]
    num_events = kinds.count(Kind.EVENTS)
    assert num_events > 4
    assert kinds == [Kind.PACK] * (len(kinds) - num_events - 1) + [Kind.EVENTS] * num_events + [Kind.END]
    assert by_row(told.events) == by_row(given.told_here()[1])


def test_a_machine_that_does_not_see_the_files_says_so(make_input: Callable[..., Input]) -> None:
    given = make_input()
    lost = replace(given.order, config=replace(given.config, inputs=("pictures", "gone")))
    for task in (hash_piece(lost, given.pieces[0], 1), feed_part(lost, 0, given.pieces[0], Nothing())):
        with pytest.raises(ClusterError, match="does not see the input gone: put it on storage that all nodes have"):
            next(task)
    assert given.order.files().folder == given.paths.partial
    (given.paths.partial / "manifest.json").unlink()
    with pytest.raises(ClusterError, match=r"does not see .*, where the parts are written: put the output"):
        given.order.files()


def test_tasks_do_not_load_torch() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("the extra `ray` is not installed")
    code = (
        "import sys, vlmembed.engines.tasks; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def embed(pack: PackedBatch) -> EmbeddingBatch:
    """Vectors that depend on the picture alone."""
    ends = np.cumsum(pack.grid_hw.astype(np.int64).prod(axis=1))
    vectors = np.stack([pack.patches[end - 1, :4] for end in ends]).astype(np.float32)
    return EmbeddingBatch(rows=pack.rows, grid_hw=pack.grid_hw, size_hw=pack.size_hw, vectors={"embedding": vectors})


def encoded(block: pa.Table) -> pa.Table:
    """What a tower makes of a block of one row."""
    if block["kind"][0].as_py() != Kind.PACK:
        return block
    pack = open_pack(*the_bytes(block))
    part, place = block["part"][0].as_py(), block["place"][0].as_py()
    results: list[EmbeddingBatch | Failure] = [embed(pack)]
    return blocks.results_row(part, place, results, seconds=0.1, num_splits=0)


@pytest.mark.parametrize("dedup", ["bytes", "pixels", "none"])
def test_parts_are_written_as_one_machine_writes_them(dedup: str, make_input: Callable[..., Input]) -> None:
    given = make_input(dedup=dedup)
    order = given.order if dedup == "none" else given.with_firsts()
    told = given.told_by_tasks(order)
    tables = [encoded(table) for part in told.blocks.values() for table in part]
    random.Random(3).shuffle(tables)  # noqa: S311  blocks come in any order
    gatherer, whole = Gatherer(lambda table: table), {}
    for begin in range(0, len(tables), 3):
        for number, held, end in gatherer.add(pa.concat_tables(tables[begin : begin + 3])):
            assert number not in whole
            assert end == told.ends[number]
            whole[number] = held
    assert (sorted(whole), gatherer.num_open) == ([0, 1, 2, 3], 0)

    packs, events = given.told_here()
    paths = OutputPaths(output=Path.cwd() / "local.parquet")
    paths.partial.mkdir()
    local = PartStore(paths.partial, order.schema, vectors=VECTORS, rows_per_part=ROWS_PER_PART, max_row_bytes=100)
    computed_here: list[tuple[bytes, Embedded]] = []
    writer = Writer(
        local,
        num_rows=20,
        rows_per_part=ROWS_PER_PART,
        kept=EMPTY,
        on_error="skip",
        on_commit=lambda _: None,
        on_computed=computed_here.extend,
    )
    for event in [*sorted(events, key=lambda event: not isinstance(event, ImageRef)), *map(embed, packs)]:
        writer.add(event)
    writer.finish(20)

    computed: list[tuple[bytes, Embedded]] = []
    records: dict[int, PartRecord] = {}
    waiting = sorted(whole, reverse=True)
    while waiting:
        number = next(each for each in waiting if told.ends[each].needs <= records.keys())
        waiting.remove(number)
        records[number], found = write_part(elsewhere(order), number, whole[number])
        computed += found
    assert [records[number] for number in range(4)] == local.records
    for name in (path.name for path in paths.partial.glob("part-*")):
        assert (order.folder / name).read_bytes() == (paths.partial / name).read_bytes()
    assert sorted(plain(list(map(plain, pair))) for pair in computed) == sorted(
        plain(list(map(plain, pair))) for pair in computed_here
    )

    store = PartStore(order.folder, order.schema, vectors=VECTORS, rows_per_part=ROWS_PER_PART, max_row_bytes=100)
    assert store.noted() == records
    for number in range(4):
        store.add(store.noted()[number])
        assert sorted(store.noted()) == list(range(number + 1, 4))
    assert (store.next_row, store.check()) == (20, 0)
    assemble(local, paths, {})
    assemble(store, given.paths, {})
    assert given.paths.output.read_bytes() == paths.output.read_bytes()
    assert given.paths.errors.read_bytes() == paths.errors.read_bytes()
    assert not given.paths.partial.exists()


class Parts:
    """Parts of rows that are told by hand, as blocks."""

    def __init__(self, folder: Path, num_rows: int, *, kept: pa.Schema = EMPTY, on_error: str = "skip") -> None:
        write_manifest(folder, {"a": 1})
        self.store = PartStore(folder, output_schema(VECTORS, kept), vectors=VECTORS, rows_per_part=4)
        self.order = RunOrder(
            config=EncodeConfig(inputs=("in",), output="out.parquet", engine="ray", rows_per_part=4, on_error=on_error),
            rule=make_rule(SMALL),
            vectors=VECTORS,
            schema=self.store.schema,
            kept=kept,
            folder=folder,
            working_folder=str(folder),
            run_id=file_sha256(folder / "manifest.json"),
            max_row_bytes=0,
            num_rows=num_rows,
        )

    def write(self, number: int, *told: Sequence[Event]) -> PartRecord:
        """Write a part of which these rows of events have come, packs' results among them; in no order."""
        tables = [
            events_row(number, place, events)
            if any(isinstance(event, (ImageRef, Embedded)) for event in events)
            else blocks.results_row(number, place, events, seconds=0, num_splits=0)  # type: ignore[arg-type]
            for place, events in enumerate(told)
        ]
        tables.append(end_row(number, len(tables), end_with(len(tables) + 1)))
        tables.reverse()
        record, computed = write_part(self.order, number, [pa.concat_tables(tables[::2]), *tables[1::2]])
        self.computed = [image.row for _, image in computed]
        return record

    def table(self, number: int) -> Any:  # noqa: ANN401  rows
        """Rows of a part with vectors."""
        return pq.read_table(self.order.folder / f"part-{number:06}.parquet").to_pylist()

    def errors(self, number: int) -> Any:  # noqa: ANN401  rows
        """Rows of a part that failed."""
        return pq.read_table(self.order.folder / f"part-{number:06}.errors.parquet").to_pylist()


def test_blocks_of_several_parts_in_any_order_become_parts() -> None:
    held: list[pa.Table] = []

    def hold(table: pa.Table) -> int:
        held.append(table)
        return len(held) - 1

    gatherer = Gatherer(hold)
    rows = {(part, place): events_row(part, place, [ref(10 * part + place)]) for part in range(3) for place in range(3)}
    ends = {part: end_row(part, 3, end_with(4, [9])) for part in range(3)}
    assert not list(gatherer.add(pa.concat_tables([ends[1], rows[2, 0], rows[0, 2], rows[1, 1]])))
    assert gatherer.num_open == 3
    assert not list(gatherer.add(pa.concat_tables([rows[1, 0], rows[0, 0]])))
    found = list(gatherer.add(pa.concat_tables([rows[2, 2], rows[1, 2], rows[0, 1], ends[0]])))
    assert [number for number, _, _ in found] == [0, 1]
    assert gatherer.num_open == 1
    for number, references, end in found:
        tables = [held[each] for each in references]
        assert {part for table in tables for part in table["part"].to_pylist()} == {number}
        assert sorted(place for table in tables for place in table["place"].to_pylist()) == [0, 1, 2, 3]
        assert end == end_with(4, [9])
    assert not list(gatherer.add(pa.concat_tables([rows[2, 1]])))
    assert [number for number, _, _ in gatherer.add(ends[2])] == [2]
    assert gatherer.num_open == 0
    assert not list(gatherer.add(blocks.SCHEMA.empty_table()))


def test_a_part_takes_vectors_and_failures_from_the_files_of_earlier_ones(tmp_path: Path) -> None:
    parts = Parts(tmp_path, 11)
    first = parts.write(0, [ref(0), ref(1)], [batch(0)], [ref(2), broken(1)], [ref(3)], [batch(2, 3)])
    assert (first.num_embedded, first.num_duplicates, first.num_failed) == (3, 0, 1)
    assert parts.computed == [0, 2, 3]
    late = parts.write(2, [ref(8, 3), ref(9), ref(10, 1)], [broken(9)])  # before part 1
    assert (late.number, late.first_row, late.num_rows, late.num_duplicates, late.num_failed) == (2, 8, 3, 1, 2)
    assert parts.computed == []
    [row] = parts.table(2)
    assert (row["id"], row["duplicate_of"], row["embedding"], row["width"]) == ("k8", "k3", [3, 0.5, 1, 2], 3)
    assert [(each["id"], each["message"]) for each in parts.errors(2)] == [
        ("k9", "bad"),
        ("k10", "same content as 'k1': bad"),
    ]
    found = [batch(4).of_image(0), batch(6).of_image(0)]
    parts.write(1, [ref(4), ref(5, 0), ref(6), *found], [ref(7, 6)])
    assert parts.computed == []  # it was found
    assert [each["duplicate_of"] for each in parts.table(1)] == [None, "k0", None, "k6"]
    store = parts.store
    assert store.records == []
    for number in range(3):
        store.add(store.noted()[number])
    assert (store.next_row, store.check(), store.codes()["corrupt"]) == (11, 0, 3)
    assert list(store.hashes()) == [
        (row, bytes([first_row]) * 32) for row, first_row in enumerate([0, 1, 2, 3, 4, 0, 6, 6, 3, 9, 1])
    ]


def test_kept_columns_are_in_the_part(tmp_path: Path) -> None:
    kept = kept_batch(range(4))
    parts = Parts(tmp_path, 4, kept=KEPT)
    told = [replace(ref(row), columns=kept.slice(row, 1)) for row in range(4)]
    parts.write(0, told[:2], told[2:3], told[3:], [batch(3, 0)], [broken(1)], [batch(2)])
    table = pq.read_table(tmp_path / "part-000000.parquet").select(KEPT.names)
    expected = kept.to_pylist()
    assert table.to_pylist() == [expected[row] for row in (0, 2, 3)]


def test_a_row_that_fails_ends_the_run_where_it_shall(tmp_path: Path) -> None:
    parts = Parts(tmp_path, 8, on_error="fail")
    with pytest.raises(RowFailedError, match=r"k2: corrupt \(bad\); --on-error skip would record the row"):
        parts.write(0, [ref(0)], [ref(1), ref(2), broken(2), ref(3)], [batch(0, 1)], [batch(3)])
    with pytest.raises(RowFailedError, match=r"k3: corrupt \(bad\)"):
        parts.write(0, [ref(0), ref(1), ref(2), ref(3)], [batch(0, 1)], [broken(3)], [batch(2)])
    assert list(tmp_path.glob("part*")) == []


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_a_part_that_lacks_a_block_is_not_written(lost: int, tmp_path: Path) -> None:
    told: list[list[Event]] = [[ref(0), ref(1)], [batch(0, 1)], [ref(2), ref(3, 0)], [batch(2)]]
    parts = Parts(tmp_path, 4)
    with pytest.raises(AccountingError, match=r"part 0 was told of [24] of its 4 rows, or of what became of fewer"):
        parts.write(0, *told[:lost], *told[lost + 1 :])
    assert list(tmp_path.glob("part*")) == []


def other(row: int, first_row: int | None = None) -> ImageRef:
    return replace(ref(row, first_row), content_hash=b"o" * 32)


def test_inputs_that_have_changed_since_they_were_hashed_stop_the_run(tmp_path: Path) -> None:
    parts = Parts(tmp_path, 12)
    message = r"row 1 held the same as row {} \(k{}\) when duplicates .* start anew with --overwrite"
    with pytest.raises(InputError, match=message.format(3, 3)):
        parts.write(0, [ref(0), other(1), ref(2), ref(3, 1)], [batch(0, 1, 2)])
    parts.write(0, [ref(0), other(1), ref(2), replace(ref(3), content_hash=None)], [batch(0, 1, 2)], [broken(3)])
    with pytest.raises(InputError, match=message.format(6, 6)):
        parts.write(1, [ref(4), ref(5), ref(6, 1), ref(7)], [batch(4, 5, 7)])
    assert not (tmp_path / "part-000001.json").exists()
    told = [ref(8, 0), other(9, 1), ref(10, 3), ref(11, 2)]  # what cannot be read any more fails
    assert parts.write(2, told).num_failed == 1
    assert parts.errors(2)[0]["message"] == "same content as 'k3': bad"


def test_hashes_of_committed_rows_are_looked_up(tmp_path: Path) -> None:
    parts = Parts(tmp_path, 7)
    unreadable = replace(ref(2), content_hash=None)
    parts.write(0, [ref(0), ref(1), unreadable, ref(3)], [broken(1), broken(2)], [batch(0, 3)])
    parts.write(1, [ref(4, 1), ref(5), ref(6, 5)], [batch(5)])
    files = parts.order.files()
    expected = [bytes([first_row]) * 32 for first_row in (0, 1, 2, 3, 1, 5, 5)]
    assert [files.content_hash(row) for row in range(7)] == [None if row == 2 else expected[row] for row in range(7)]
    (tmp_path / "part-000000.errors.parquet").unlink()
    (tmp_path / "part-000001.parquet").write_bytes(b"PAR1 and no more")
    files = parts.order.files()
    for row in (0, 5):
        for look_up in (files.find, files.content_hash):
            with pytest.raises(StorageError, match=f"part-00000{row // 4}.parquet cannot be read any more"):
                look_up(row)


def test_notes_count_where_their_files_are_as_they_were_written(tmp_path: Path) -> None:
    parts = Parts(tmp_path, 24)
    for number in range(6):
        rows = range(4 * number, 4 * number + 4)
        parts.write(number, list(map(ref, rows)), [batch(*rows)])
    store = parts.store
    assert sorted(store.noted()) == list(range(6))
    store.add(store.noted()[0])
    content = bytearray((tmp_path / "part-000002.parquet").read_bytes())
    content[50] ^= 1
    (tmp_path / "part-000002.parquet").write_bytes(content)
    (tmp_path / "part-000003.errors.parquet").unlink()
    (tmp_path / "part-000004.json").write_text('{"run": "a", "part": {"number": 4, "first')
    assert sorted(store.noted()) == [1, 5]
    note = json.loads((tmp_path / "part-000005.json").read_bytes())
    for other in ({"run": note["run"], "part": {"number": 5, "colour": "red"}}, note | {"run": "another's"}):
        (tmp_path / "part-000005.json").write_text(json.dumps(other))
        assert sorted(store.noted()) == [1]
    again = PartStore(tmp_path, store.schema, vectors=VECTORS, rows_per_part=4)
    assert [record.number for record in again.records] == [0]
    again.add(again.noted()[1])
    assert again.noted() == {}
    with pytest.raises(AssertionError):
        again.add(again.records[0])
    again.commit(replace(again.records[1], number=2, first_row=8), *columns_of(tmp_path, 1))  # by one machine
    assert [
        record.number for record in PartStore(tmp_path, store.schema, vectors=VECTORS, rows_per_part=4).records
    ] == [
        0,
        1,
        2,
    ]


def columns_of(folder: Path, number: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What the files of a part hold, by name."""
    tables = (pq.read_table(folder / f"part-{number:06}{kind}.parquet") for kind in ("", ".errors"))
    vectors, errors = ({name: table[name] for name in table.column_names} for table in tables)
    return vectors, errors


WHY = "memory, perhaps"


def test_work_that_takes_its_process_along_is_given_up(tmp_path: Path) -> None:
    class Died(BaseException):
        """The process is gone."""

    def noted() -> list[str]:
        return [path.name for path in tmp_path.rglob("*") if path.is_file()]

    clear_attempts(tmp_path)
    for number in range(MAX_ATTEMPTS):
        with pytest.raises(Died), attempt(tmp_path, "encode-3-7", WHY):
            raise Died
        assert len(noted()) == number + 1
    with attempt(tmp_path, "encode-3-8", WHY), attempt(tmp_path, "encode-30-7", WHY):
        assert len(noted()) == MAX_ATTEMPTS + 2
    with (
        pytest.raises(
            WorkerError, match=f"^encode-3-7 was begun {MAX_ATTEMPTS} times, and is not begun again; memory, perhaps[.]"
        ),
        attempt(tmp_path, "encode-3-7", WHY),
    ):
        pytest.fail("it was begun")
    (tmp_path / "part-000000.parquet").touch()
    clear_attempts(tmp_path)
    assert noted() == ["part-000000.parquet"]
    for _ in range(MAX_ATTEMPTS - 1):
        with pytest.raises(Died), attempt(tmp_path, "encode-3-7", WHY):
            raise Died
    with attempt(tmp_path, "encode-3-7", WHY):
        pass
    assert noted() == ["part-000000.parquet"]  # it has come through
    with pytest.raises(StorageError, match=r"cannot write .*encode-1-2"), attempt(tmp_path / "no", "encode-1-2", WHY):
        pytest.fail("it was begun")


class Noting:
    """Stands in for the committer: parts that lie there are committed when it is told to go on."""

    def __init__(self, num_noted: int) -> None:
        self.num_noted = num_noted
        self.added: list[int] = []
        self.is_busy = False

    def add(self, number: int, *_: object) -> None:
        """As the committer's."""
        self.added.append(number)

    def go_on(self, seconds: float) -> bool:
        """As the committer's."""
        del seconds
        moved, self.num_noted = self.num_noted > 0, 0
        return moved


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_parts_that_an_earlier_start_has_written_are_committed_whatever_else_comes(num_blocks: int) -> None:
    committer = Noting(2)
    shown: list[Any] = []
    work = SimpleNamespace(take_block=lambda _: None, show=shown.append)
    driver = Driver(
        Gatherer(lambda table: table),
        committer,  # type: ignore[arg-type]
        work,  # type: ignore[arg-type]
        "bar",  # type: ignore[arg-type]
        timeout_seconds=60,
        hung=lambda: None,
    )
    driver.run(lambda: iter([end_row(5, 0, end_with(1))] * num_blocks))
    assert committer.added == [5] * num_blocks
    assert (committer.num_noted, shown) == (0, ["bar"])


def test_what_ends_the_results_ends_the_driver() -> None:
    def results() -> Iterator[pa.Table]:
        yield end_row(0, 0, end_with(1))
        msg = "gone"
        raise InputError(msg)

    work = SimpleNamespace(take_block=lambda _: None, show=lambda _: None)
    driver = Driver(
        Gatherer(lambda table: table),
        Noting(0),  # type: ignore[arg-type]
        work,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        timeout_seconds=60,
        hung=lambda: None,
    )
    with pytest.raises(InputError, match="gone"):
        driver.run(results)


class HalfEncoder:
    """Stands in for a tower's encoder: packs of several images do not fit whole, and row 3 fits not at all. Results are
    a pack late, as a device's are."""

    num_splits = 0

    def stream(self, packs: Iterable[PackedBatch]) -> Iterator[EmbeddingBatch | Failure]:
        """As `vlmembed.encoder.Encoder`."""
        late: list[EmbeddingBatch | Failure] = []
        for pack in packs:
            yield from late
            halves = split_batch(pack, SMALL) if len(pack.rows) > 1 else (pack,)
            self.num_splits += len(halves) - 1
            late = [broken(3) if half.rows.tolist() == [3] else embed(half) for half in halves]
        yield from late


def test_a_tower_encodes_the_packs_of_a_block_and_passes_the_rest_on(tmp_path: Path) -> None:
    clear_attempts(tmp_path)
    tower = object.__new__(Tower)
    tower._folder, tower._encoder = tmp_path, HalfEncoder()  # type: ignore[assignment]
    images = [preprocess(noise(16 + row, 20, row), row, make_rule(SMALL)) for row in range(6)]
    packs = [make_batch(images[at], SMALL) for at in (slice(2), slice(2, 3), slice(3, 4), slice(4, 6))]
    others = pa.concat_tables([events_row(0, 1, [ref(0)]), end_row(0, 4, end_with(5))])
    places = [(0, 0), (0, 2), (0, 3), (1, 0)]
    rows = [pack_row(part, place, pack) for (part, place), pack in zip(places, packs, strict=True)]
    found = tower(pa.concat_tables([rows[0], others.slice(0, 1), *rows[1:], others.slice(1)]))
    results = found.filter(found["kind"].to_numpy() == Kind.RESULTS)
    assert list(zip(results["part"].to_pylist(), results["place"].to_pylist(), strict=True)) == places
    assert results["num_splits"].to_pylist() == [2, 0, 0, 0]
    assert [second > 0 for second in results["seconds"].to_pylist()] == [True, False, False, False]
    expected: list[list[Event]] = [[*map(embed, split_batch(packs[0], SMALL))], [embed(packs[1])], [broken(3)]]
    expected.append([*map(embed, split_batch(packs[3], SMALL))])
    for number, outcomes in enumerate(expected):
        assert plainly(events_of(*the_bytes(results.slice(number, 1)))) == plainly(outcomes)
    assert found.filter(found["kind"].to_numpy() != Kind.RESULTS).equals(others)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert tower(others).equals(others)
