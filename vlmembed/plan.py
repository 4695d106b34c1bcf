"""Before a run: what lies at its output already, and what every `auto` means."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlmembed.config import EncodeConfig
from vlmembed.decode import PIXEL_POLICY
from vlmembed.encoder import Encoder, pick_device, pick_dtype
from vlmembed.errors import ConfigError, InputError, ModelError, OutputError
from vlmembed.layout import ResizeRule
from vlmembed.output import OutputPaths, read_manifest
from vlmembed.parts import read_records
from vlmembed.preprocess import RESIZER
from vlmembed.provenance import difference, make_fingerprint, make_provenance
from vlmembed.schema import output_schema, read_provenance
from vlmembed.towers import open_tower

if TYPE_CHECKING:
    from pathlib import Path

    from vlmembed.layout import TowerLayout
    from vlmembed.sources.base import Source

PACK_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Aim of the token budget by device type; rounded up to whole images. On a CPU larger packs fall out of the cache."""

ROWS_PER_PART = {"cpu": 1024, "cuda": 8192}
"""Input rows committed together by device type: about a minute or two of work."""

TOKEN_PART_BYTES = 2 * 2**30
MIN_TOKEN_ROWS = 16
"""A part of token-level output holds at most so many bytes, if every picture is as large as it may be, but never fewer
rows than that: packs do not cross parts."""

_SHAPE = ("rows_per_part", "max_tokens_per_batch")
"""What the parts on disk depend on, beside the fingerprint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Earlier:
    """The provenance of what lies at the output: a finished file, the parts of an unfinished run, either or neither."""

    output: dict[str, Any] | None
    partial: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """A run with everything decided. `config` has no ``auto`` left."""

    config: EncodeConfig
    paths: OutputPaths
    source: Source
    encoder: Encoder
    rule: ResizeRule
    num_rows: int
    schema: pa.Schema
    facts: dict[str, Any]


def find_earlier(paths: OutputPaths, *, overwrite: bool) -> Earlier:
    """What lies at the output. Under `overwrite` a finished file does not matter, whoever wrote it.

    Raises:
        OutputError: a file of another kind is in the way.
    """
    manifest = read_manifest(paths.partial, ignore_damage=overwrite)
    partial = manifest if read_records(paths.partial) else None  # a run that committed nothing binds nobody
    output = None
    if not overwrite:
        for path in (paths.errors, paths.output):
            if path.exists():
                output = _provenance_of(path)
        if not paths.output.exists():
            output = None  # errors alone: a run in which nothing was embedded, to be tried again
    return Earlier(output=output, partial=partial)


def _provenance_of(path: Path) -> dict[str, Any]:
    try:
        return read_provenance(pq.read_schema(path), str(path))
    except (OSError, pa.ArrowException, InputError) as error:
        msg = f"{path} exists and is no output of vlmembed ({error}): choose another name, or --overwrite"
        raise OutputError(msg) from error


def make_plan(config: EncodeConfig, paths: OutputPaths, source: Source, earlier: Earlier) -> tuple[Plan, bool]:
    """Decide every ``auto``; tell whether what lies at the output is of this very run.

    What an earlier start of the same run decided is kept, except device and workers.

    Raises:
        OutputError: it is of another run, and may not be replaced.
    """
    device = pick_device(config.device)
    before = earlier.output or earlier.partial
    inherited = EncodeConfig.from_toml(before["recipe"]) if before else None
    keep = before is not None and config.dtype == "auto" and "dtype" in before.get("decided", ())
    dtype = inherited.dtype if inherited and keep else pick_dtype(config.dtype, device)
    decided = replace(config, device=str(device), dtype=dtype)
    blueprint = open_tower(os.fspath(config.model), revision=config.revision)
    rule = _resize_rule(config, blueprint.layout)
    _check_budget(config.max_tokens_per_batch, rule)
    encoder = Encoder.load(decided, blueprint)
    schema = output_schema(encoder.vectors, source.kept_schema)
    num_rows = min(source.num_rows, config.limit or source.num_rows)
    fingerprint = _fingerprint(decided, encoder, rule, source, num_rows)
    lines = difference(before["fingerprint"], fingerprint) if before else []
    if lines and config.overwrite:
        return make_plan(config, paths, source, Earlier(output=None, partial=None))
    if lines:
        _refuse(paths.output if earlier.output else paths.partial, lines)
    if inherited is not None:
        decided = _inherit_shape(decided, inherited)
        if earlier.output is None and (lines := _difference_in_shape(decided, inherited)):
            if config.overwrite:
                return make_plan(config, paths, source, Earlier(output=None, partial=None))
            _refuse(paths.partial, lines)
    decided = _decide_sizes(decided, encoder, rule, device.type)
    facts = make_provenance(config, decided, fingerprint, model=encoder.identity, backend=encoder.backend)
    plan = Plan(
        config=decided,
        paths=paths,
        source=source,
        encoder=encoder,
        rule=rule,
        num_rows=num_rows,
        schema=schema,
        facts=facts,
    )
    return plan, before is not None


def _inherit_shape(config: EncodeConfig, inherited: EncodeConfig) -> EncodeConfig:
    """The parts on disk fix their own shape, unless another one is asked for."""
    return replace(config, **{name: getattr(config, name) or getattr(inherited, name) for name in _SHAPE})


def _difference_in_shape(config: EncodeConfig, inherited: EncodeConfig) -> list[str]:
    before, now = ({name: getattr(each, name) for name in _SHAPE} for each in (inherited, config))
    return difference(before, now)


def _refuse(where: Path, lines: list[str]) -> None:
    shown = "\n  ".join(lines)
    msg = f"{where} belongs to another run:\n  {shown}\nchoose another output, or start anew with --overwrite"
    raise OutputError(msg)


def _fingerprint(
    config: EncodeConfig, encoder: Encoder, rule: ResizeRule, source: Source, num_rows: int
) -> dict[str, Any]:
    return make_fingerprint(
        config,
        model={name: encoder.identity[name] for name in ("weights_sha256", "config_sha256")},
        preprocessing={**rule.describe(), "pixel_policy": PIXEL_POLICY, "resizer": RESIZER},
        pool=encoder.pool,
        normalize=encoder.normalize,
        vectors=[asdict(column) for column in encoder.vectors],
        source_sha256=source.digest,
        num_rows=num_rows,
    )


def _check_budget(budget: int | None, rule: ResizeRule) -> None:
    """A budget that is asked for is a promise. One that is not gives way to a picture that is longer by itself.

    Raises:
        ConfigError: one image could exceed it.
    """
    if budget is not None and budget < (tokens := rule.max_tokens_per_image):
        msg = (
            f"max_tokens_per_batch is {budget}, and one image can have {tokens} tokens: "
            f"raise --max-tokens-per-batch to {tokens} or more, or lower --max-pixels"
        )
        raise ConfigError(msg)


def _decide_sizes(config: EncodeConfig, encoder: Encoder, rule: ResizeRule, device_type: str) -> EncodeConfig:
    """Token budget, part size and threads."""
    tokens, aim = rule.max_tokens_per_image, PACK_TOKENS[device_type]
    min_pixels, max_pixels = rule.resize.limits if rule.mode == "native" else (None, None)
    return replace(
        config,
        pool=encoder.pool or "auto",
        normalize=encoder.normalize,
        embedding_dtype=encoder.vectors[0].dtype,
        resize=rule.mode,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        max_tokens_per_batch=config.max_tokens_per_batch or (tokens * -(-aim // tokens) if tokens <= aim else aim),
        rows_per_part=config.rows_per_part or _auto_rows_per_part(encoder, rule, device_type),
        workers=config.workers or _auto_workers(device_type),
    )


def max_row_bytes(encoder: Encoder, rule: ResizeRule) -> int:
    """The most bytes that the vectors of one row can have."""
    per_vector = sum(column.bytes_per_vector for column in encoder.vectors)
    return per_vector * (1 if encoder.pool else rule.max_tokens_per_image // rule.layout.merge_size**2)


def _auto_rows_per_part(encoder: Encoder, rule: ResizeRule, device_type: str) -> int:
    rows = ROWS_PER_PART[device_type]
    if encoder.pool is not None:
        return rows
    return max(MIN_TOKEN_ROWS, min(rows, TOKEN_PART_BYTES // max_row_bytes(encoder, rule)))


def _resize_rule(config: EncodeConfig, layout: TowerLayout) -> ResizeRule:
    """The native or the official rule with the limits that are given.

    Raises:
        ConfigError: the rule has no such limits.
        ModelError: the model's own processor is of a kind that is not known.
    """
    mode = layout.default_resize if config.resize == "auto" else config.resize
    if mode == "official" and layout.official is None:
        msg = f"--resize official is not possible with this model: {layout.official_problem}; use --resize native"
        raise ModelError(msg)
    if config.resize == "auto" and (config.min_pixels or config.max_pixels):
        mode = "native"
    if mode == "official" and (config.min_pixels or config.max_pixels):
        msg = "--min-pixels and --max-pixels belong to --resize native; --resize official has the model's own size"
        raise ConfigError(msg)
    resize = layout.official if mode == "official" else layout.native.with_limits(config.min_pixels, config.max_pixels)
    assert resize is not None
    return ResizeRule(mode=mode, resize=resize, layout=layout, max_source_pixels=config.max_source_pixels)


def _auto_workers(device_type: str) -> int:
    """Decoding threads: on a CPU the model needs the cores, beside a GPU the decoders do."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, cores // 4) if device_type == "cpu" else max(1, cores - 1)
