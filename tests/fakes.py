"""Stand-ins for a GPU, on the CPU: lanes that put all work off, graphs that replay, and a flash kernel.

Each is as unkind as the real thing may be: memory comes full of garbage, work runs later than it was queued, and what a
graph wrote is gone when the next one runs. Packs and towers to run on them are here too.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import random
import sys
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from checkpoints import tiny_checkpoint

from vlmembed.attention.metadata import DevicePack
from vlmembed.attention.varlen import load_kernel
from vlmembed.batch import make_batch
from vlmembed.encoder import Encoder
from vlmembed.schema import VectorColumn
from vlmembed.towers import open_tower
from vlmembed.types import EmbeddingBatch, PatchedImage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from vlmembed.lanes import Link
    from vlmembed.layout import TowerLayout
    from vlmembed.towers.base import Tower
    from vlmembed.types import Failure, PackedBatch

CPU = torch.device("cpu")
GARBAGE = 255
"""Every byte of memory that nothing was written to: 255, -1 or NaN, by dtype."""

Grid = tuple[int, int]


def garbage(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory that nothing was written to."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.full((num_bytes,), GARBAGE, dtype=torch.uint8).view(dtype).view(*shape)


@dataclass(slots=True, eq=False)
class Job:
    """Queued work, which is also the event of its end."""

    lane: str
    work: Callable[[], None]
    needs: tuple[Job, ...]
    is_done: bool = False

    @property
    def is_ready(self) -> bool:
        """All that it needs has run."""
        return not self.is_done and all(each.is_done for each in self.needs)


class DeferredLanes:
    """Lanes whose work runs only when it must: what the host waits for, and what that depends on.

    With a `seed`, work runs at random times instead, in any order that lanes and events allow. `before` is called with
    a lane before work is queued in it, where CUDA's allocator would raise. Events of the lanes in `deaf_to` are not
    waited for: a broken device.

    Attributes:
        jobs: all that was queued.
        pinned_blocks, device_blocks: all memory that was handed out.
        num_make_room: calls of `make_room`.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        before: Callable[[str], None] = lambda _lane: None,
        deaf_to: Iterable[str] = (),
    ) -> None:
        self._random = None if seed is None else random.Random(seed)  # noqa: S311  the order of a test
        self._before = before
        self._deaf_to = frozenset(deaf_to)
        self._last: dict[str, Job] = {}
        self.jobs: list[Job] = []
        self.pinned_blocks: list[torch.Tensor] = []
        self.device_blocks: list[torch.Tensor] = []
        self.num_make_room = 0

    def run(self, lane: str, work: Callable[[], None], after: Sequence[Job] = ()) -> Job:
        """Note the work, and what it needs."""
        self._before(lane)
        needs = [each for each in after if each.lane not in self._deaf_to]
        if lane in self._last:
            needs.append(self._last[lane])
        job = self._last[lane] = Job(lane=lane, work=work, needs=tuple(needs))
        self.jobs.append(job)
        self._wander()
        return job

    def wait(self, event: Job) -> None:
        """Run what must have run before the host goes on."""
        self._wander()
        for each in event.needs:
            if not each.is_done:
                self.wait(each)
        if not event.is_done:
            self._finish(event)

    def pinned(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory, full of garbage."""
        self.pinned_blocks.append(garbage(shape, dtype))
        return self.pinned_blocks[-1]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """It lies in memory that `pinned` has handed out."""
        return any(
            block.data_ptr() <= tensor.data_ptr() < block.data_ptr() + block.nbytes for block in self.pinned_blocks
        )

    def on_device(self, num_bytes: int) -> torch.Tensor:
        """A block, full of garbage."""
        self.device_blocks.append(garbage((num_bytes,), torch.uint8))
        return self.device_blocks[-1]

    def make_room(self) -> None:
        """All that is queued ends before a device gives memory back."""
        self.num_make_room += 1
        for job in self.jobs:
            self.wait(job)

    def _wander(self) -> None:
        """With a seed: get on with some of what is ready."""
        while self._random is not None and self._random.random() < 0.6:
            ready = [job for job in self.jobs if job.is_ready]
            if not ready:
                return
            self._finish(self._random.choice(ready))

    def _finish(self, job: Job) -> None:
        job.work()
        job.is_done = True


class RecordedGraph:
    """What `FakeGraphs` has captured."""

    def __init__(self, graphs: FakeGraphs, work: Callable[[], list[torch.Tensor]]) -> None:
        self._graphs = graphs
        self._work = work
        self._addresses = addresses(work)
        self.outputs = work()

    def replay(self) -> None:
        """The same Python objects once more: what was read of the host is as it was; only tensors have changed."""
        self._graphs.num_replays += 1
        self._graphs.spoil()
        assert addresses(self._work) == self._addresses, "a graph's input has moved"
        for output, value in zip(self.outputs, self._work(), strict=True):
            output.copy_(value)

    def spoil(self) -> None:
        """Overwrite the outputs."""
        for output in self.outputs:
            output.fill_(torch.nan)


class FakeGraphs:
    """Graphs that share one pool of memory: whichever runs, all outputs of before are gone.

    Attributes:
        troubles: raised by the next captures, in that order; None lets one succeed.
        kept: the graphs that somebody still holds.
        num_captures, num_replays: how often. A capture that raises counts too.
    """

    def __init__(self) -> None:
        self.troubles: list[BaseException | None] = []
        self.kept: weakref.WeakSet[RecordedGraph] = weakref.WeakSet()
        self.num_captures = 0
        self.num_replays = 0

    def capture(self, work: Callable[[], list[torch.Tensor]]) -> tuple[Callable[[], None], list[torch.Tensor]]:
        """Record, and compute nothing that lasts."""
        self.num_captures += 1
        trouble = self.troubles.pop(0) if self.troubles else None
        if trouble is not None:
            raise trouble
        graph = RecordedGraph(self, work)
        self.kept.add(graph)
        self.spoil()
        return graph.replay, graph.outputs

    def spoil(self) -> None:
        """Overwrite what every graph has put out."""
        for graph in self.kept:
            graph.spoil()


def addresses(work: Callable[..., object]) -> list[int]:
    """Where the tensors are that a function has taken from around it."""
    packs = [value for value in inspect.getclosurevars(work).nonlocals.values() if isinstance(value, DevicePack)]
    assert packs, "a graph must read a pack"
    return [tensor.data_ptr() for pack in packs for tensor in tensors_of(pack)]


def tensors_of(value: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401  a dataclass, or what is in one
    """The tensors in a dataclass and in those inside it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))


def flash_attn_varlen_func(
    q_THd: torch.Tensor,
    k_THd: torch.Tensor,
    v_THd: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
) -> torch.Tensor:
    """FlashAttention's interface in float32: of each segment no more than `max_seqlen_q` rows, as its grid has no more
    blocks; what no segment covers is left as it was, garbage."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q is cu_seqlens_k or max_seqlen_q == 1
    out_THd = torch.full(q_THd.shape, torch.nan)
    of_queries, of_keys = (itertools.pairwise(each.tolist()) for each in (cu_seqlens_q, cu_seqlens_k))
    for (q_start, q_end), (start, end) in zip(of_queries, of_keys, strict=True):
        rows, keys = slice(q_start, min(q_end, q_start + max_seqlen_q)), slice(start, min(end, start + max_seqlen_k))
        if keys.start == keys.stop:
            continue
        q, k, v = (x_THd[each].float().transpose(0, 1) for x_THd, each in ((q_THd, rows), (k_THd, keys), (v_THd, keys)))
        weights = torch.softmax(softmax_scale * (q @ k.transpose(1, 2)), dim=-1)
        out_THd[rows] = (weights @ v).transpose(0, 1)
    return out_THd.to(q_THd.dtype)


@contextmanager
def flash_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`flash_attn_varlen_func` is what the backend ``flash2`` finds."""
    module = ModuleType("flash_attn.flash_attn_interface")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    load_kernel.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        yield
    load_kernel.cache_clear()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Towers this small gain nothing from threads, and where cores are shared they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tower_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tower]:
    """A family's tiny tower; it is made once."""
    known: dict[str, Tower] = {}

    def of(model_type: str) -> Tower:
        if model_type not in known:
            known[model_type] = tiny_tower(model_type, tmp_path_factory.mktemp(model_type))
        return known[model_type]

    return of


def tiny_tower(model_type: str, folder: Path) -> Tower:
    """A family's tower in float32, of a few narrow layers with random weights."""
    tiny_checkpoint(model_type, folder)
    return open_tower(str(folder)).load(dtype=torch.float32, device=CPU)


def random_image(row: int, grid_hw: Grid, layout: TowerLayout, dtype: npt.DTypeLike = np.uint8) -> PatchedImage:
    """An image of noise, which depends on its row alone."""
    shape = (grid_hw[0] * grid_hw[1], 3 * layout.patch_size**2)
    patches = np.random.default_rng(row).integers(0, 256, shape, dtype=np.uint8)
    shifted: Any = patches if dtype == np.uint8 else (patches + 0.25).astype(dtype)
    return PatchedImage(row=row, patches=shifted, grid_hw=grid_hw, size_hw=(7 * grid_hw[0], 9))


def random_pack(
    grids: Iterable[Grid],
    layout: TowerLayout,
    *,
    first_row: int = 0,
    dtype: npt.DTypeLike = np.uint8,
) -> PackedBatch:
    """A pack of such images; grids count in merge blocks."""
    side = layout.merge_size
    images = [
        random_image(row, (height * side, width * side), layout, dtype)
        for row, (height, width) in enumerate(grids, first_row)
    ]
    return make_batch(images, layout)


def random_packs(packs: Iterable[Iterable[Grid]], layout: TowerLayout) -> list[PackedBatch]:
    """Several, whose rows go on from one to the next."""
    batches: list[PackedBatch] = []
    for grids in packs:
        first_row = int(batches[-1].rows[-1]) + 1 if batches else 0
        batches.append(random_pack(grids, layout, first_row=first_row))
    return batches


def make_encoder(tower: Tower, pool: str | None = None, *, link: Link | None = None) -> Encoder:
    """An encoder of `pool`, unscaled, or of tokens and all that can be stored with them."""
    if pool is not None:
        columns = [VectorColumn(name="embedding", width=tower.pool_widths[pool])]
    else:
        names = ["tokens", *(f"deepstack_{level}" for level in range(tower.num_deepstack))]
        columns = [VectorColumn(name=name, width=tower.token_width, per_token=True) for name in names]
    return Encoder(tower, vectors=tuple(columns), pool=pool, normalize=False, link=link)


def encode_all(encoder: Encoder, batches: Iterable[PackedBatch | None]) -> list[EmbeddingBatch]:
    """All results; none is a failure."""
    results = list(encoder.stream(batches))
    embedded = [result for result in results if isinstance(result, EmbeddingBatch)]
    assert len(embedded) == len(results)
    return embedded


def by_row(results: Iterable[EmbeddingBatch | Failure]) -> dict[int, dict[str, np.ndarray]]:
    """The vectors of each image; no row comes twice."""
    found: dict[int, dict[str, np.ndarray]] = {}
    for result in results:
        if isinstance(result, EmbeddingBatch):
            for index, row in enumerate(result.rows.tolist()):
                assert row not in found
                found[row] = dict(result.of_image(index).vectors)
    return found


def are_equal(found: EmbeddingBatch, expected: EmbeddingBatch) -> bool:
    """Whether two results are the same in every bit, NaN being no value."""
    assert found.vectors.keys() == expected.vectors.keys()
    same = [np.array_equal(found.vectors[name], expected.vectors[name]) for name in expected.vectors]
    return all(same) and np.array_equal(found.rows, expected.rows) and np.array_equal(found.grid_hw, expected.grid_hw)
