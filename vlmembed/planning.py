"""Before a run: what lies at its output already, and what every `auto` means."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vlmembed.config import FIELDS, OF_THE_ENGINE, EncodeConfig
from vlmembed.decode import pixel_policy
from vlmembed.devices import kind_of, name_of
from vlmembed.encoder import pick_pool, vector_columns
from vlmembed.errors import ConfigError, InputError, MissingExtraError, ModelError, OutputError
from vlmembed.finished import read_schema
from vlmembed.lance_output import check_lance_schema
from vlmembed.layout import ResizeRule
from vlmembed.output import SUCCESS, OutputPaths, read_manifest
from vlmembed.parts import has_work
from vlmembed.preprocess import RESIZER
from vlmembed.provenance import difference, make_fingerprint, make_provenance
from vlmembed.schema import output_schema, read_provenance, read_success, with_provenance
from vlmembed.site import Here
from vlmembed.sources.base import expected_rows
from vlmembed.sources.locations import public_url
from vlmembed.sources.shard import shard_entries
from vlmembed.towers import open_tower

if TYPE_CHECKING:
    from pathlib import Path

    from vlmembed.devices import Devices
    from vlmembed.layout import TowerLayout
    from vlmembed.schema import VectorColumn
    from vlmembed.site import AnyEncoder, Site
    from vlmembed.sources.base import Source
    from vlmembed.towers.blueprint import Blueprint

logger = logging.getLogger(__name__)

ROWS_PER_PART = {"cpu": 1024, "cuda": 8192}
"""Input rows committed together by device type: about a minute or two of work."""

TOKEN_PART_BYTES = 256 * 2**20
TYPICAL_PIXELS = 2**20
MIN_TOKEN_ROWS = 16
"""A part of token-level output holds so many bytes where pictures have a megapixel (or as much as they can, if that is
less), but never fewer rows than that: packs do not cross parts."""

_SHAPE = ("rows_per_part", "max_tokens_per_batch")
"""What the parts on disk depend on, beside the fingerprint."""

_TUNED = ("attention", "runtime", "compile", "cuda_graphs")
"""What an earlier start decided and a later one keeps, so that it makes the same bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Earlier:
    """The provenance of what lies at the output: a finished file, the parts of an unfinished run, either or neither."""

    output: dict[str, Any] | None
    partial: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """A run with everything decided. `config` has no ``auto`` left.

    `num_rows` is None where only reading the source will tell.
    """

    config: EncodeConfig
    paths: OutputPaths
    source: Source
    encoder: AnyEncoder
    rule: ResizeRule
    vectors: tuple[VectorColumn, ...]
    num_rows: int | None
    schema: pa.Schema
    facts: dict[str, Any]

    @property
    def end_row(self) -> int | None:
        """The row before which the run ends; None is the source's end."""
        return self.config.limit if self.num_rows is None else self.num_rows


def find_earlier(paths: OutputPaths, *, overwrite: bool) -> Earlier:
    """What lies at the output. Under `overwrite` a finished file does not matter, whoever wrote it.

    Raises:
        OutputError: a file of another kind is in the way.
    """
    manifest = read_manifest(paths.partial, ignore_damage=overwrite)
    partial = manifest if has_work(paths.partial) else None  # a run that has nothing yet binds nobody
    output = None
    if not overwrite:
        whole = paths.success if paths.is_folder else paths.output
        for path in (paths.errors, whole):
            if path.exists():
                output = _provenance_of(path)
        if not whole.exists() or (output is not None and not output.get("counts", {}).get("embedded", 1)):
            output = None  # a run in which nothing was embedded, to be tried again
    return Earlier(output=output, partial=partial)


def _provenance_of(path: Path) -> dict[str, Any]:
    try:
        if path.name == SUCCESS:
            return read_success(path)
        return read_provenance(read_schema(path), str(path))
    except (OSError, pa.ArrowException, InputError) as error:
        msg = f"{path} exists and is no output of vlmembed ({error}): choose another name, or --overwrite"
        raise OutputError(msg) from error


def make_plan(
    config: EncodeConfig,
    paths: OutputPaths,
    source: Source,
    earlier: Earlier,
    *,
    part_divisor: int = 1,
    site: Site | None = None,
) -> tuple[Plan, bool]:
    """Decide every ``auto``; tell whether what lies at the output is of this very run.

    What an earlier start of the same run decided is kept, except device and workers. All that the settings alone can
    tell is told before the weights are read. `part_divisor` makes parts, where their size is not given, so many times
    smaller. `site` has the devices: this machine, unless another is named.

    Raises:
        OutputError: it is of another run, and may not be replaced.
    """
    site = site or Here()
    devices = site.devices(config.device)
    blueprint = open_tower(os.fspath(config.model), revision=config.revision)
    rule = resize_rule(
        blueprint.layout,
        resize=config.resize,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
        max_source_pixels=config.max_source_pixels,
    )
    _check_budget(config.max_tokens_per_batch, rule)
    vectors = vector_columns(config, blueprint)
    schema = output_schema(vectors, source.kept_schema)
    if paths.format == "lance":
        check_lance_schema(schema)
    num_rows = None if source.num_rows is None else min(source.num_rows, config.limit or source.num_rows)
    expected = min(expected_rows(source), config.limit or sys.maxsize)

    def settle(before: dict[str, Any] | None) -> tuple[EncodeConfig, dict[str, Any]]:
        dtype = _inherited_dtype(config, before) or site.pick_dtype(config.dtype, devices[0])
        decided = replace(config, device=name_of(devices), dtype=dtype)
        return decided, _fingerprint(decided, blueprint, rule, source, vectors=vectors, num_rows=num_rows)

    before, where = earlier.output or earlier.partial, paths.output if earlier.output else paths.partial
    decided, fingerprint = settle(before)
    if before and (lines := difference(before["fingerprint"] | {"weights_sha256": ""}, fingerprint)):
        _check_may_replace(where, lines, config)
        before = None
        decided, fingerprint = settle(before)
    if before and earlier.output is None and (lines := _difference_in_shape(_inherit_shape(decided, before), before)):
        _check_may_replace(where, lines, config)
        before = None
    if before:
        decided = _inherit_tuning(_inherit_shape(decided, before), before, devices, site)
    site.check(decided, devices[0])
    encoder, settled = site.load(decided, devices, blueprint, vectors, rule=rule, num_rows=expected)
    fingerprint["weights_sha256"] = settled.model["weights_sha256"]
    if before and (lines := difference(before["fingerprint"], fingerprint)):
        encoder.close()
        _check_may_replace(where, lines, config)
        before = None
    decided = _decide_sizes(settled.config, blueprint, vectors, rule, devices[0].type, part_divisor=part_divisor)
    decided = replace(decided, workers=decided.workers or site.auto_workers(devices[0].type))
    facts = make_provenance(
        config,
        decided,
        fingerprint,
        recipe=_recipe(config, rule, decided),
        model=settled.model,
        backend=settled.backend,
        shape={name: getattr(decided, name) for name in _SHAPE},
    )
    plan = Plan(
        config=decided,
        paths=paths,
        source=source,
        encoder=encoder,
        rule=rule,
        vectors=vectors,
        num_rows=num_rows,
        schema=with_provenance(schema, facts) if paths.is_folder else schema,  # a folder's parts stay as they are
        facts=facts,
    )
    return plan, before is not None


def _check_may_replace(where: Path, lines: list[str], config: EncodeConfig) -> None:
    """What lies at `where` is of another run, as `lines` show.

    Raises:
        OutputError: it may not be replaced: no ``--overwrite``.
    """
    if not config.overwrite:
        shown = "\n  ".join(lines)
        msg = f"{where} belongs to another run:\n  {shown}\nchoose another output, or start anew with --overwrite"
        raise OutputError(msg)


def _inherited_dtype(config: EncodeConfig, before: dict[str, Any] | None) -> str | None:
    """An earlier start's decision is kept; a dtype that was asked for then binds only who asks for it."""
    if before is None or config.dtype != "auto" or "dtype" not in before.get("decided", ()):
        return None
    return str(before["fingerprint"]["dtype"])


def _recipe(config: EncodeConfig, rule: ResizeRule, decided: EncodeConfig) -> EncodeConfig:
    """How to make the file, not what was there before. As a demand, an automatic budget would refuse pictures that are
    longer by themselves, so it is left open. Logins and signatures of URLs stay out of it, and so does where the work
    was done: the file would be the same elsewhere."""
    budget = decided.max_tokens_per_batch
    if config.max_tokens_per_batch is None and budget is not None and budget < rule.max_tokens_per_image:
        budget = None
    elsewhere: dict[str, Any] = {name: FIELDS[name].default for name in OF_THE_ENGINE}
    inputs = tuple(public_url(os.fspath(name)) for name in decided.inputs)
    output = public_url(os.fspath(decided.output))
    return replace(
        decided,
        inputs=inputs,
        output=output,
        overwrite=False,
        retry_failed=False,
        work_dir=None,
        max_tokens_per_batch=budget,
        **elsewhere,
    )


def _inherit_shape(config: EncodeConfig, before: dict[str, Any]) -> EncodeConfig:
    """The parts on disk fix their own shape, unless another one is asked for."""
    return replace(config, **{name: getattr(config, name) or before["shape"][name] for name in _SHAPE})


def _inherit_tuning(config: EncodeConfig, before: dict[str, Any], devices: Devices, site: Site) -> EncodeConfig:
    """What an earlier start decided on a device of this kind is kept where the device can do it; what is asked for now
    is done."""
    earlier = EncodeConfig.from_toml(before["recipe"])
    if kind_of(earlier.device) != kind_of(config.device):
        return config
    names = [name for name in _TUNED if name in before["decided"] and getattr(config, name) == "auto"]
    inherited = replace(config, **{name: getattr(earlier, name) for name in names})
    try:
        site.check(inherited, devices[0])
    except (ConfigError, MissingExtraError) as error:
        logger.warning("what the earlier start decided is decided anew: %s", error)
        return config
    return inherited


def _difference_in_shape(config: EncodeConfig, before: dict[str, Any]) -> list[str]:
    return difference(before["shape"], {name: getattr(config, name) for name in _SHAPE})


def _fingerprint(
    config: EncodeConfig,
    blueprint: Blueprint,
    rule: ResizeRule,
    source: Source,
    *,
    vectors: tuple[VectorColumn, ...],
    num_rows: int | None,
) -> dict[str, Any]:
    """Without the weights' hash, which is known once they have been read."""
    pool = pick_pool(config, blueprint)
    fingerprint = make_fingerprint(
        config,
        model={"weights_sha256": "", "config_sha256": blueprint.files.config_sha256},
        preprocessing={
            **rule.describe(),
            "pixel_policy": pixel_policy(fast_decode=config.fast_decode),
            "resizer": RESIZER,
        },
        pool=pool,
        normalize=config.normalize and pool is not None,
        vectors=[asdict(column) for column in vectors],
        source_sha256=source.digest,
        keys_sha256=source.keys_digest,
        num_rows=num_rows,
    )
    return fingerprint | shard_entries(source)


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


def _decide_sizes(
    config: EncodeConfig,
    blueprint: Blueprint,
    vectors: tuple[VectorColumn, ...],
    rule: ResizeRule,
    device_type: str,
    *,
    part_divisor: int,
) -> EncodeConfig:
    """Output, limits and part size."""
    pool = pick_pool(config, blueprint)
    min_pixels, max_pixels = rule.resize.limits if rule.mode == "native" else (None, None)
    if rule.layout.native is rule.layout.official:  # the processor's own limits stay its own
        min_pixels, max_pixels = config.min_pixels, config.max_pixels
    return replace(
        config,
        pool=pool or "auto",
        normalize=config.normalize and pool is not None,
        embedding_dtype=vectors[0].dtype,
        resize=rule.mode,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        rows_per_part=config.rows_per_part or _auto_rows_per_part(vectors, rule, device_type, part_divisor),
    )


def max_row_bytes(vectors: tuple[VectorColumn, ...], rule: ResizeRule, max_pixels: int | None = None) -> int:
    """The most bytes that the vectors of one row can have, or, of a picture of at most `max_pixels`."""
    per_vector = sum(column.bytes_per_vector for column in vectors)
    if not vectors[0].per_token:
        return per_vector
    pixels = min(max_pixels or rule.resize.max_canvas_pixels, rule.resize.max_canvas_pixels)
    return per_vector * pixels // (rule.layout.patch_size * rule.layout.merge_size) ** 2


def _auto_rows_per_part(
    vectors: tuple[VectorColumn, ...], rule: ResizeRule, device_type: str, part_divisor: int
) -> int:
    rows = ROWS_PER_PART[device_type] // part_divisor
    if not vectors[0].per_token:
        return rows
    typical = max(1, max_row_bytes(vectors, rule, TYPICAL_PIXELS))
    return max(MIN_TOKEN_ROWS, min(rows, TOKEN_PART_BYTES // part_divisor // typical))


def resize_rule(
    layout: TowerLayout, *, resize: str, min_pixels: int | None, max_pixels: int | None, max_source_pixels: int
) -> ResizeRule:
    """The native or the official rule with the limits that are given, in pixels.

    Raises:
        ConfigError: the rule has no such limits.
        ModelError: the model's own processor is of a kind that is not known.
    """
    mode = layout.default_resize if resize == "auto" else resize
    if mode == "official" and layout.official is None:
        msg = f"--resize official is not possible with this model: {layout.official_problem}; use --resize native"
        raise ModelError(msg)
    if mode == "official" and (min_pixels or max_pixels):
        msg = (
            "--min-pixels and --max-pixels belong to --resize native; --resize official, which is this model's default "
            "where it has one size, has the model's own: add --resize native"
        )
        raise ConfigError(msg)
    chosen = layout.official if mode == "official" else layout.native.with_limits(min_pixels, max_pixels)
    assert chosen is not None
    return ResizeRule(mode=mode, resize=chosen, layout=layout, max_source_pixels=max_source_pixels)
