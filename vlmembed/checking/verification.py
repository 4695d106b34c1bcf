"""Does an output still hold what this installation makes of its inputs? Rows are read, hashed and encoded again."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vlmembed.checking.deviation import TOLERANCES, deviation_of, version_differences
from vlmembed.checking.whole import count_problems, open_whole
from vlmembed.config import EncodeConfig
from vlmembed.decode import own_pillow_settings
from vlmembed.decoders import ThreadDecoders, decode_in_order
from vlmembed.errors import ConfigError, InputError
from vlmembed.finished import FinishedOutput, input_rows
from vlmembed.mirror.localcopy import local_copy
from vlmembed.mirror.remoterun import is_remote
from vlmembed.output import OutputPaths, is_folder_output
from vlmembed.packer import PackingStats, pack
from vlmembed.patcher import Patcher
from vlmembed.planning import Earlier, make_plan
from vlmembed.provenance import difference, encoder_fingerprint
from vlmembed.sources import open_source
from vlmembed.types import EmbeddingBatch, Failure

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa

    from vlmembed.decoders import DecodePool
    from vlmembed.planning import Plan
    from vlmembed.schema import VectorColumn
    from vlmembed.sources.base import Source
    from vlmembed.types import Embedded, EncodedImage, Int64Array, PatchedImage

CHUNK_ROWS = 1024
"""Rows that are compared at a time."""

MAX_ITEMS = 8
MAX_DECODE_BYTES = 64 * 2**20
"""Images, and their encoded bytes, that are in decoding at a time."""


@dataclass(slots=True)
class Verification:
    """What was found.

    Attributes:
        num_rows: of the output. num_checked: rows that were read again.
        changed: ids whose bytes (with ``--dedup pixels``, pixels) are not those that were encoded.
        failed: ids that cannot be read or encoded any more, with the reason.
        worst: the largest deviation, |now - stored| / |stored|; of the row `worst_id`.
        tolerance: what it may be.
        differences: settings and versions in which this installation differs from the one that made the output.
        problems: what is wrong with the files themselves.
    """

    path: Path | str
    num_rows: int
    tolerance: float
    num_checked: int = 0
    changed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    worst: float = 0.0
    worst_id: str = ""
    differences: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Nothing is beyond the tolerance, changed, lost or wrong."""
        return not (self.changed or self.failed or self.problems) and self.worst <= self.tolerance


def verify(
    path: str | os.PathLike[str],
    *,
    num_rows: int | None = 100,
    seed: int = 0,
    tolerance: float | None = None,
    inputs: Sequence[str] = (),
    device: str = "auto",
) -> Verification:
    """Read, hash and encode `num_rows` random rows of an output, a path or a URL, again, or all (None), and compare.

    `seed` chooses the rows. `inputs` stand for those that are recorded, where the pictures have moved; `device` is as
    in `EncodeConfig`. `tolerance` is of |now - stored| / |stored| per row; None goes by the dtype of the layers (0.002
    for fp32, 0.05 for bf16 and fp16).

    Raises:
        InputError: the output cannot be read, or the inputs do not have the same ids any more.
        ConfigError: `num_rows` or `tolerance` is out of range. ModelError: the model is not there.
    """
    with local_copy(path) as copy:
        found = _verify(copy, num_rows=num_rows, seed=seed, tolerance=tolerance, inputs=inputs, device=device)
    found.path = str(path) if is_remote(path) else Path(path)
    return found


def _verify(
    path: Path, *, num_rows: int | None, seed: int, tolerance: float | None, inputs: Sequence[str], device: str
) -> Verification:
    output = open_whole(path)
    facts = output.provenance
    config = _as_recorded(facts["recipe"], inputs, device)
    found = Verification(
        path=path, num_rows=output.num_rows, tolerance=TOLERANCES[config.dtype] if tolerance is None else tolerance
    )
    if (num_rows is not None and num_rows < 1) or not found.tolerance >= 0:
        msg = f"rows is {num_rows} and tolerance {tolerance}; the one must be 1 or more, the other 0 or more"
        raise ConfigError(msg)
    found.problems += count_problems(output)
    if not found.num_rows:
        found.problems.append(f"{path} holds no rows, so there is nothing to check")
    count = found.num_rows if num_rows is None else min(num_rows, found.num_rows)
    positions = np.sort(np.random.default_rng(seed).choice(found.num_rows, count, replace=False)).astype(np.int64)
    paths = OutputPaths(output=path, is_folder=is_folder_output(path))
    with ExitStack() as stack:
        source = stack.enter_context(closing(_open_inputs(config, paths)))
        if source.keys_digest != facts["fingerprint"]["keys_sha256"]:
            given = ", ".join(inputs)
            what = f"{given} does not have the ids" if inputs else f"the inputs of {path} do not have the ids any more"
            msg = f"{what} that they had: name all of them behind it as they are now, with the same files in them"
            raise InputError(msg)
        plan, _ = make_plan(config, paths, source, Earlier(output=None, partial=None))
        stack.enter_context(closing(plan.encoder))
        stack.enter_context(own_pillow_settings(config.max_source_pixels))
        patcher = Patcher(
            rule=plan.rule,
            max_source_pixels=config.max_source_pixels,
            hash_pixels=config.dedup == "pixels",
            fast_decode=config.fast_decode,
        )
        workers = plan.config.workers or 1
        decoders = stack.enter_context(ThreadDecoders(patcher, num_threads=workers, timeout_seconds=config.timeout))
        then, now = (encoder_fingerprint(each) for each in (facts["fingerprint"], plan.facts["fingerprint"]))
        found.differences = difference(then, now) + version_differences(facts["versions"], plan.facts["versions"])
        failed = output.failed_rows()
        for start in range(0, count, CHUNK_ROWS):
            some = positions[start : start + CHUNK_ROWS]
            _compare(_Chunk.of(output, some, input_rows(failed, some).tolist(), found), plan, decoders)
            found.num_checked += len(some)
    return found


def _open_inputs(config: EncodeConfig, paths: OutputPaths) -> Source:
    try:
        return open_source(config, paths.all())
    except InputError as error:
        msg = f"{error}; if the pictures have moved, name them behind {paths.output} as they are now"
        raise InputError(msg) from error


def _as_recorded(recipe: str, inputs: Sequence[str], device: str) -> EncodeConfig:
    """The config that made an output, for this machine."""
    config = EncodeConfig.from_toml(recipe)
    return replace(
        config,
        inputs=tuple(inputs) or config.inputs,
        device=device,
        attention="auto",
        runtime="torch",
        compile="off",
        cuda_graphs="off",
        cache=None,
        reuse=(),
        workers=None,
        max_tokens_per_batch=None,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Chunk:
    """Some rows of the output, as they are stored: ids, hashes and the place in `table`, by input row."""

    table: pa.Table
    ids: dict[int, str]
    hashes: dict[int, bytes]
    places: dict[int, int]
    found: Verification

    @classmethod
    def of(cls, output: FinishedOutput, positions: Int64Array, rows: list[int], found: Verification) -> _Chunk:
        table = output.take(positions, ["id", "content_hash", *output.vectors])
        return cls(
            table=table,
            ids=dict(zip(rows, table["id"].to_pylist(), strict=True)),
            hashes=dict(zip(rows, table["content_hash"].to_pylist(), strict=True)),
            places={row: index for index, row in enumerate(rows)},
            found=found,
        )

    def fail(self, failure: Failure) -> None:
        self.found.failed[self.ids[failure.row]] = f"{failure.code}: {failure.message}"

    def in_place(self, images: Iterable[EncodedImage]) -> Iterator[EncodedImage]:
        """Pass on the images that still have their ids, note the others."""
        left = dict(self.ids)
        for image in images:
            key = left.pop(image.row)
            if image.key == key:
                yield image
            else:
                self.found.failed[key] = f"in its place is {image.key!r}"
        self.found.failed.update(dict.fromkeys(left.values(), "the inputs do not have it any more"))

    def unchanged(
        self, images: Iterable[tuple[EncodedImage, bytes | None, PatchedImage | Failure]]
    ) -> Iterator[PatchedImage]:
        """Pass on what is to be encoded, note the rest."""
        for image, content_hash, result in images:
            if content_hash is not None and content_hash != self.hashes[image.row]:
                self.found.changed.append(self.ids[image.row])
            elif isinstance(result, Failure):
                self.fail(result)
            else:
                yield result

    def compare(self, image: Embedded, columns: Sequence[VectorColumn]) -> None:
        for column in columns:
            stored = column.from_arrow(self.table[column.name][self.places[image.row]])
            deviation = deviation_of(image.vectors[column.name], stored)
            if not deviation <= self.found.worst:  # NaN too
                self.found.worst, self.found.worst_id = deviation, self.ids[image.row]


def _compare(chunk: _Chunk, plan: Plan, decoders: DecodePool) -> None:
    budget = plan.config.max_tokens_per_batch
    assert budget is not None
    images = _read_again(
        chunk.in_place(plan.source.read_rows(list(chunk.ids))), decoders, pixels=plan.config.dedup == "pixels"
    )
    layout, alone = plan.rule.layout, plan.config.deterministic
    for result in plan.encoder.stream(pack(chunk.unchanged(images), layout, PackingStats(budget), alone=alone)):
        if isinstance(result, Failure):
            chunk.fail(result)
        elif isinstance(result, EmbeddingBatch):
            for index in range(len(result.rows)):
                chunk.compare(result.of_image(index), plan.vectors)


def _read_again(
    images: Iterator[EncodedImage], decoders: DecodePool, *, pixels: bool
) -> Iterator[tuple[EncodedImage, bytes | None, PatchedImage | Failure]]:
    """Each image with its content hash and what can be made of it."""
    for image, patched in decode_in_order(decoders, images, max_items=MAX_ITEMS, max_bytes=MAX_DECODE_BYTES):
        content_hash = patched.pixel_hash
        if not pixels and isinstance(image.content, bytes):
            content_hash = hashlib.sha256(image.content).digest()
        yield image, content_hash, patched.result
