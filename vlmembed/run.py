"""A run from its config to its report: decide what is `auto`, find what exists, run the pipeline, finish the files."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from vlmembed.config import EncodeConfig
from vlmembed.decode import PIXEL_POLICY, own_pixel_limit
from vlmembed.dedup import HashIndex
from vlmembed.encoder import Encoder, pick_device, pick_dtype
from vlmembed.errors import ConfigError, NothingEmbeddedError, OutputError
from vlmembed.layout import ResizeRule
from vlmembed.output import OutputPaths, lock, read_manifest, write_manifest
from vlmembed.parts import PartStore, read_records
from vlmembed.pipeline import Pipeline
from vlmembed.preprocess import RESIZER
from vlmembed.progress import ProgressBar, StageClock
from vlmembed.provenance import difference, make_fingerprint, make_provenance
from vlmembed.report import RunReport
from vlmembed.schema import output_schema, read_provenance
from vlmembed.sources import open_source
from vlmembed.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vlmembed.layout import TowerLayout
    from vlmembed.sources.base import Source

PACK_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Aim of the token budget by device type; rounded up to whole images. On a CPU larger packs fall out of the cache."""

ROWS_PER_PART = {"cpu": 1024, "cuda": 8192}
"""Input rows committed together by device type: about a minute or two of work."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Plan:
    """A run with everything decided. `config` has no ``auto`` left."""

    config: EncodeConfig
    paths: OutputPaths
    source: Source
    encoder: Encoder
    rule: ResizeRule
    num_rows: int

    def provenance(self) -> dict[str, Any]:
        """What is recorded with the output, apart from its counts."""
        encoder = self.encoder
        fingerprint = make_fingerprint(
            self.config,
            model={"weights_sha256": encoder.weights_sha256, "config_sha256": encoder.config_sha256},
            preprocessing={**self.rule.describe(), "pixel_policy": PIXEL_POLICY, "resizer": RESIZER},
            pool=encoder.pool,
            source_sha256=self.source.digest,
            num_rows=self.num_rows,
        )
        return make_provenance(self.config, fingerprint, model=encoder.identity, backend=encoder.backend)


def encode(config: EncodeConfig, *, progress: bool = False) -> RunReport:
    """Embed every image of ``config.inputs`` into ``config.output``; go on where an earlier start stopped.

    `progress` draws a bar on stderr.

    Raises:
        UsageError: a setting, an input or the output must be changed; nothing was written.
        RunError: the run stopped. What it had committed stays in ``OUTPUT.partial`` and is used by the next start.
    """
    began = time.perf_counter()
    paths = OutputPaths(output=Path(config.output))
    with ExitStack() as stack:
        source = stack.enter_context(closing(open_source(config, paths.all())))
        earlier = None if config.overwrite else _earlier(paths)
        config, encoder, rule = _set_up(config, earlier)
        num_rows = min(source.num_rows, config.limit or source.num_rows)
        plan = _Plan(config=config, paths=paths, source=source, encoder=encoder, rule=rule, num_rows=num_rows)
        facts = plan.provenance()
        if earlier is not None:
            _check_same_run(paths, earlier, facts)
            if "counts" in earlier:
                return RunReport.of_complete(paths, earlier)
        stack.enter_context(lock(paths.partial))
        if earlier is None:
            if not config.overwrite and _earlier(paths) is not None:
                msg = f"another process has just written to {paths.output}: run the command again to see what it left"
                raise OutputError(msg)
            write_manifest(paths.partial, facts)
        return _run(plan, facts, began=began, progress=progress)


def _earlier(paths: OutputPaths) -> dict[str, Any] | None:
    """The provenance of a finished output (it has counts) or of an unfinished run, whichever is there."""
    if paths.output.exists():
        try:
            return read_provenance(pq.read_schema(paths.output), str(paths.output))
        except Exception as error:
            msg = f"{paths.output} exists and is no output of vlmembed ({error}): choose another name, or --overwrite"
            raise OutputError(msg) from error
    manifest = read_manifest(paths.partial)
    return manifest if read_records(paths.partial) else None  # a run that committed nothing binds nobody


def _check_same_run(paths: OutputPaths, earlier: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    lines = difference(earlier["fingerprint"], facts["fingerprint"])
    if "counts" not in earlier:  # the parts on disk fix their own shape
        keys = ("rows_per_part", "max_tokens_per_batch")
        before, after = EncodeConfig.from_toml(earlier["recipe"]), EncodeConfig.from_toml(facts["recipe"])
        lines += difference({key: getattr(before, key) for key in keys}, {key: getattr(after, key) for key in keys})
    if lines:
        where = paths.output if "counts" in earlier else paths.partial
        shown = "\n  ".join(lines)
        msg = f"{where} belongs to another run:\n  {shown}\nchoose another output, or start anew with --overwrite"
        raise OutputError(msg)


def _set_up(config: EncodeConfig, earlier: Mapping[str, Any] | None) -> tuple[EncodeConfig, Encoder, ResizeRule]:
    """Decide every ``auto``. What an earlier start of the run decided is kept, except device and workers."""
    decided = EncodeConfig.from_toml(earlier["recipe"]) if earlier is not None else None
    device = pick_device(config.device)
    dtype = decided.dtype if decided and config.dtype == "auto" else pick_dtype(config.dtype, device)
    config = replace(config, device=str(device), dtype=dtype)
    encoder = Encoder.load(config)
    mode = "native" if config.resize == "auto" else config.resize
    rule = _resize_rule(config, mode, encoder.layout)
    budget = config.max_tokens_per_batch or (decided.max_tokens_per_batch if decided else None)
    if budget is None:
        budget = rule.max_tokens_per_image * -(-PACK_TOKENS[device.type] // rule.max_tokens_per_image)
    if budget < rule.max_tokens_per_image:
        msg = (
            f"max_tokens_per_batch is {budget}, and one image can have {rule.max_tokens_per_image} tokens: "
            f"raise --max-tokens-per-batch to {rule.max_tokens_per_image} or more, or lower --max-pixels"
        )
        raise ConfigError(msg)
    config = replace(
        config,
        pool=encoder.pool,
        resize=mode,
        min_pixels=rule.min_pixels if mode == "native" else None,
        max_pixels=rule.max_pixels if mode == "native" else None,
        max_tokens_per_batch=budget,
        rows_per_part=config.rows_per_part or (decided and decided.rows_per_part) or ROWS_PER_PART[device.type],
        workers=config.workers or _auto_workers(device.type),
    )
    return config, encoder, rule


def _resize_rule(config: EncodeConfig, mode: str, layout: TowerLayout) -> ResizeRule:
    """A limit that is given moves the other one with it; none given means the area that the tower was made for."""
    if mode == "official" and (config.min_pixels or config.max_pixels):
        msg = "--min-pixels and --max-pixels belong to --resize native; --resize official has the model's own size"
        raise ConfigError(msg)
    max_pixels = config.max_pixels or max(layout.native_pixels, config.min_pixels or 0)
    return ResizeRule(
        mode=mode,
        layout=layout,
        min_pixels=config.min_pixels or max_pixels,
        max_pixels=max_pixels,
        max_source_pixels=config.max_source_pixels,
    )


def _auto_workers(device_type: str) -> int:
    """Decoding threads: on a CPU the model needs the cores, beside a GPU the decoders do."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, cores // 4) if device_type == "cpu" else max(1, cores - 1)


def _run(plan: _Plan, facts: dict[str, Any], *, began: float, progress: bool) -> RunReport:
    config, paths, source = plan.config, plan.paths, plan.source
    assert config.rows_per_part is not None
    schema = output_schema(plan.encoder.width, source.kept_schema)
    store = PartStore(paths, schema, rows_per_part=config.rows_per_part)
    start = store.next_row
    clock = StageClock()
    ready = time.perf_counter()
    with (
        own_pixel_limit(),
        _index(config, store, paths) as index,
        closing(ProgressBar(plan.num_rows, initial=start, enabled=progress)) as bar,
    ):
        writer = Writer(
            store,
            num_rows=plan.num_rows,
            rows_per_part=config.rows_per_part,
            kept=source.kept_schema,
            on_error=config.on_error,
            on_commit=lambda record: bar.committed(record.num_rows),
        )
        pipeline = Pipeline(
            config,
            source=source,
            index=index,
            rule=plan.rule,
            encoder=plan.encoder,
            writer=writer,
            clock=clock,
        )
        pipeline.run(start, plan.num_rows, bar)
    counts = writer.finish(pipeline.num_rows_read)
    codes = store.codes()
    facts["counts"] = {"rows": plan.num_rows, **counts, "codes": dict(codes), "skipped": dict(source.skipped)}
    store.assemble(facts)
    if not counts["embedded"]:
        shown = ", ".join(f"{count} {code}" for code, count in codes.most_common())
        msg = f"not one of {plan.num_rows} rows has an embedding ({shown}); the reasons are in {paths.errors}"
        raise NothingEmbeddedError(msg)
    seconds = time.perf_counter() - ready
    stage, share = clock.busiest(pipeline.stage_threads, seconds)
    return replace(
        RunReport.of_complete(paths, facts),
        already_complete=False,
        num_resumed=start,
        num_encoded=pipeline.num_encoded,
        num_tokens=pipeline.num_tokens,
        num_packs=pipeline.packing.num_packs,
        packing_efficiency=pipeline.packing.efficiency,
        setup_seconds=ready - began,
        seconds=seconds,
        slowest_stage=stage,
        slowest_share=share,
    )


@contextmanager
def _index(config: EncodeConfig, store: PartStore, paths: OutputPaths) -> Iterator[HashIndex | None]:
    """The dedup index, filled from the committed parts; None where nothing is deduplicated."""
    if config.dedup == "none":
        yield None
        return
    with HashIndex(paths.partial / "index.sqlite") as index:
        for row, content_hash in store.hashes():
            index.first_row(content_hash, row)
        yield index
