"""The parts of the GPU benchmark: each yields the rows that it has measured."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import nullcontext
from itertools import cycle, islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from gpu_cases import (
    attending,
    built_in_model,
    by_longest,
    graph_attention,
    noise_images,
    noise_pack,
    one_by_one,
    pooling_encoder,
    random_tower,
    save_dinov2,
    write_photos,
)
from gpu_clocks import LaneClock, count_syncs, round_seconds
from gpu_numerics import numerics
from gpu_table import Floor, Row

import vlmembed
from vlmembed.attention.metadata import DevicePack
from vlmembed.batch import make_batch
from vlmembed.calibration import MAX_PACK_TOKENS
from vlmembed.devices import name_of
from vlmembed.packer import PackingStats, pack
from vlmembed.variants import Variants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from gpu_cases import Bench

    from vlmembed.encoder import Encoder
    from vlmembed.types import PackedBatch, PatchedImage

FLASH_3_AND_4 = ("flash3", "flash4")
MOONVIT_MS = dict.fromkeys(FLASH_3_AND_4, 26.0) | {"torch": 31.0}
MATMUL_SHARE = dict.fromkeys(FLASH_3_AND_4, 60.0) | {"torch": 45.0}
"""Floors by backend."""

PEAK_SHARE = "% of the matmul peak"
BUSY = "% GPU busy"
TIMES = "times as fast"

WAYS = {
    "packed, eager": {"compiled": False, "graphs": False},
    "packed, compiled": {"compiled": True, "graphs": False},
    "packed, graph": {"compiled": False, "graphs": True},
    "packed, compiled, graph": {"compiled": True, "graphs": True},
}


def moonvit(bench: Bench) -> Iterator[Row]:
    """One forward of a full-size MoonViT, projector included, as its published timings are taken."""
    tower = random_tower("kimi_k25", bench.sizes.moonvit, bench.device)
    batch = noise_pack({bench.sizes.moonvit_grid: 2}, tower.layout)
    device_pack = DevicePack.of(batch, bench.device)

    @torch.inference_mode()
    def forward() -> list[torch.Tensor]:
        return tower.features(device_pack.patches, device_pack.metadata)

    height, width = bench.sizes.moonvit_grid
    flops = tower.cost.of(batch.lengths)
    for backend in bench.attention:
        tower.use_attention(backend)
        case = f"{backend}: MoonViT, 2 images of {height}x{width} patches"
        limit = MOONVIT_MS.get(backend)
        floor = None if limit is None else Floor(unit="ms", limit=limit, at_most=True)

        def measure(way: str, *, floor: Floor | None = floor, note: str = "", case: str = case) -> Row:
            seconds = bench.forward_seconds(forward)
            figures = {"ms": seconds * 1e3, "TFLOP/s": flops / seconds / 1e12}
            return Row(part="a", case=f"{case}{way}", figures=figures, floor=floor, note=note)

        yield measure("")
        with attending(tower, by_longest):
            yield measure(", max_seqlen by .item() in every block", floor=None)
        try:
            with bench.compiler():
                tower.use_compiled(True)  # noqa: FBT003  it is the whole question
            yield measure(", compiled", note="not on a CPU: stand-ins" if bench.device.type == "cpu" else "")
        except RuntimeError as error:  # there is no compiler, say
            yield Row(part="a", case=f"{case}, compiled", note=f"failed: {str(error).strip()[:100]}")
        tower.use_compiled(False)  # noqa: FBT003  the same


def resolutions(bench: Bench) -> Iterator[Row]:
    """Packs of one resolution and of several, and their images one at a time."""
    yield Row(part="b", case="bf16 matmul peak", figures={"TFLOP/s": bench.peak_flops / 1e12})
    for number, backend in enumerate(bench.attention):
        bench.qwen.use_attention(backend)
        for case in bench.sizes.packs if number == 0 else ("mixed",):
            yield from one_resolution(bench, backend, case)
    bench.qwen.use_compiled(False)  # noqa: FBT003  it is the whole question


def one_resolution(bench: Bench, backend: str, name: str) -> Iterator[Row]:
    """One pack, every way; of the mixed one, also the best of them."""
    sizes, encoder = bench.sizes, pooling_encoder(bench.qwen)
    batch = noise_pack(sizes.packs[name], bench.qwen.layout)
    case = f"{backend}: {name} x {len(batch.rows)}"
    variants = Variants(encoder, batch, budget=len(batch.patches), graph_api=bench.graph_api)
    shares: dict[str, float] = {}

    def measure(way: str, batches: list[PackedBatch], note: str = "") -> Row:
        seconds = round_seconds(encoder, batches, warm_ups=sizes.warm_ups, repeats=-(-sizes.repeats // 2))
        if encoder.graphs is not None and not encoder.graphs.num_captured:
            return Row(part="b", case=f"{case}, {way}", note="no graph: the capture failed")
        flops = bench.qwen.cost.of(batch.lengths) / seconds
        shares[way] = 100 * flops / bench.peak_flops
        figures = {"patches/s": len(batch.patches) / seconds, "TFLOP/s": flops / 1e12, PEAK_SHARE: shares[way]}
        return Row(part="b", case=f"{case}, {way}", figures=figures, note=note)

    yield measure("per-image loop", one_by_one(batch, bench))
    shares.clear()
    for way, switches in WAYS.items():
        note = "not on a CPU: stand-ins" if bench.device.type == "cpu" and any(switches.values()) else ""
        try:
            with bench.compiler():
                variants.use(**switches)
            with graph_attention(bench) if switches["graphs"] else nullcontext():
                yield measure(way, [batch], note)
        except RuntimeError as error:  # there is no compiler, say
            yield Row(part="b", case=f"{case}, {way}", note=f"failed: {str(error).strip()[:100]}")
    if name == "mixed":
        best = max(shares, key=lambda way: shares[way], default="none")
        limit = MATMUL_SHARE.get(backend)
        yield Row(
            part="b",
            case=f"{case}, the best of them ({best})",
            figures={PEAK_SHARE: shares[best]} if shares else {},
            floor=None if limit is None else Floor(unit=PEAK_SHARE, limit=limit),
        )


def syncs(bench: Bench) -> Iterator[Row]:
    """Host syncs in the streaming loop, over packs of all sizes."""
    backend = bench.attention[0]
    bench.qwen.use_attention(backend)
    encoder = pooling_encoder(bench.qwen)
    different = [noise_pack(images, bench.qwen.layout) for images in bench.sizes.packs.values()]
    packs = list(islice(cycle(different), bench.sizes.num_packs))
    largest = max(different, key=lambda batch: len(batch.patches))
    variants = Variants(encoder, largest, budget=len(largest.patches), graph_api=bench.graph_api)
    for way in ("packed, eager", "packed, graph"):
        variants.use(**WAYS[way])
        warm_up = different * bench.sizes.warm_ups
        if WAYS[way]["graphs"] and bench.device.type == "cpu":
            yield Row(part="c", case=f"{backend}: {way}", note="not on a CPU")
            continue
        run_all(encoder, warm_up)
        count = count_syncs(lambda: run_all(encoder, packs), bench.device)
        yield Row(
            part="c",
            case=f"{backend}: {way}, over {len(packs)} packs",
            figures={"syncs per pack": count / len(packs)},
            note="not on a CPU: counted among the operations" if bench.device.type == "cpu" else "",
            floor=Floor(unit="syncs per pack", limit=0, at_most=True),
        )


def run_all(encoder: Encoder, packs: Sequence[PackedBatch]) -> None:
    """Encode packs and drop what comes."""
    for _ in encoder.stream(packs):
        pass


def end_to_end(bench: Bench) -> Iterator[Row]:
    """From JPEG files to a Parquet file."""
    sizes = bench.sizes
    photos = write_photos(bench.scratch / "photos", sizes.num_photos)
    title, folder = built_in_model(bench)
    yield one_job(bench, photos, folder, f"{title}, {sizes.photo_sides[0]} px", side=sizes.photo_sides[0])
    folder = save_dinov2(bench.scratch / "vit-l", sizes.vit_l)
    for side in sizes.photo_sides:
        yield one_job(bench, photos, folder, f"ViT-L/14, {side} px", side=side, floor=Floor(unit=BUSY, limit=90.0))


def one_job(bench: Bench, photos: Path, model: Path, case: str, *, side: int, floor: Floor | None = None) -> Row:
    """A whole run. Its files have just been written, so they come from the system's cache rather than from a disk."""
    config = vlmembed.EncodeConfig(
        inputs=(photos,),
        output=bench.scratch / "embedded.parquet",
        model=model,
        device=name_of((bench.device,)),
        dtype="bf16",
        attention=bench.attention[0],
        resize="native",
        max_pixels=side**2,
        overwrite=True,
    )
    clock = LaneClock()
    with clock.watching():
        report = vlmembed.encode(config)
    ended = time.perf_counter()
    assert report.num_encoded == bench.sizes.num_photos
    figures, note = {"images/s": report.num_encoded / report.seconds}, ""
    if bench.device.type == "cuda":
        figures[BUSY] = 100 * clock.busy_seconds(ended - report.seconds) / report.seconds
    else:
        note = "GPU busy: not on a CPU; "
    note += f"bottleneck {report.slowest_stage} ({report.slowest_share:.0%} of its time)"
    return Row(part="d", case=f"{case}, {report.num_encoded} JPEGs", figures=figures, note=note, floor=floor)


def small_images(bench: Bench) -> Iterator[Row]:
    """Small images of mixed sizes: one by one, in batches of one size, and packed."""
    backend, layout = bench.attention[0], bench.qwen.layout
    bench.qwen.use_attention(backend)
    encoder = pooling_encoder(bench.qwen)
    shape = (bench.sizes.num_small, 2)
    grids = 2 * np.random.default_rng(0).integers(1, bench.sizes.max_small_side // 2, shape, endpoint=True)
    images = noise_images([(height, width) for height, width in grids.tolist()], layout)
    ways: dict[str, Callable[[], list[PackedBatch]]] = {
        "one by one": lambda: [make_batch([image], layout) for image in images],
        "batches bucketed by size": lambda: bucketed(images, bench),
        "packed": lambda: list(pack(images, layout, PackingStats(MAX_PACK_TOKENS))),
    }
    seconds = {}
    for way, make in ways.items():
        batches = make()
        repeats = 1 if way == "one by one" else min(3, bench.sizes.repeats)
        seconds[way] = round_seconds(encoder, batches, warm_ups=1, repeats=repeats)
        yield Row(
            part="e",
            case=f"{backend}: {len(images)} small images, {way}",
            figures={"images/s": len(images) / seconds[way]},
            note=f"{len(batches)} forwards",
        )
    for way, least in (("one by one", 8.0), ("batches bucketed by size", 1.2)):
        yield Row(
            part="e",
            case=f"{backend}: packed beside {way}",
            figures={TIMES: seconds[way] / seconds["packed"]},
            floor=Floor(unit=TIMES, limit=least),
        )


def bucketed(images: Sequence[PatchedImage], bench: Bench) -> list[PackedBatch]:
    """Batches of images of one size, within the budget that packs have."""
    layout = bench.qwen.layout
    buckets = defaultdict(list)
    for image in images:
        buckets[image.grid_hw].append(image)
    batches = []
    for grid_hw, same in buckets.items():
        most = max(1, MAX_PACK_TOKENS // layout.num_tokens(grid_hw))
        batches += [make_batch(same[start : start + most], layout) for start in range(0, len(same), most)]
    return batches


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "numerics": numerics,
    "a": moonvit,
    "b": resolutions,
    "c": syncs,
    "d": end_to_end,
    "e": small_images,
}
"""By the name that ``--only`` takes."""
