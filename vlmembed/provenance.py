"""Which run a file belongs to: the fingerprint that must agree, and the facts that are recorded beside it."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vlmembed.config import EncodeConfig

FORMAT = 3
"""Version of the output's layout."""

_PACKAGES = ("vlmembed", "torch", "transformers", "pillow", "pyarrow", "numpy")


def versions() -> dict[str, str]:
    """Versions of the packages that can change an embedding, and of Python."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def make_fingerprint(
    config: EncodeConfig,
    *,
    model: Mapping[str, str],
    preprocessing: Mapping[str, Any],
    pool: str | None,
    normalize: bool,
    vectors: Sequence[Mapping[str, Any]],
    source_sha256: str,
    keys_sha256: str,
    num_rows: int | None,
) -> dict[str, Any]:
    """What two runs must share for one to go on where the other stopped."""
    fingerprint = {
        "format": FORMAT,
        **model,
        **preprocessing,
        "pool": pool,
        "normalize": normalize,
        "dtype": config.dtype,
        "emit": config.emit,
        "vectors": list(vectors),
        "dedup": config.dedup,
        "image_column": config.image_column,
        "id_column": config.id_column,
        "keep_columns": list(config.keep_columns),
        "source_sha256": source_sha256,
        "keys_sha256": keys_sha256,
        "num_rows": num_rows,
        **({"limit": config.limit} if num_rows is None and config.limit else {}),
        **{name: True for name in ("deterministic", "retry_failed") if getattr(config, name)},
    }
    plain: dict[str, Any] = json.loads(json.dumps(fingerprint))  # as it will be read back: tuples are lists
    return plain


_OF_THE_RUN = (
    "dedup",
    "image_column",
    "id_column",
    "keep_columns",
    "source_sha256",
    "keys_sha256",
    "num_rows",
    "limit",
    "retry_failed",
    "shard",
    "whole",
)
"""Entries of a fingerprint that say which rows a run has, not what becomes of an image."""

FOLLOWS_SHARD = ("source_sha256", "keys_sha256", "num_rows", "whole")
"""Entries that differ from shard to shard of one run."""


def encoder_fingerprint(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs must share for the embedding of an image to be the same in both: weights, preprocessing, pooling,
    dtypes, format; not the inputs."""
    return {name: value for name, value in fingerprint.items() if name not in _OF_THE_RUN}


def difference(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line per entry in which two fingerprints disagree."""
    lines = []
    is_same_shard = earlier.get("shard") == now.get("shard")
    is_same_list = earlier.get("source_sha256") == now.get("source_sha256")
    for name in sorted(set(earlier) | set(now)):
        before, after = earlier.get(name), now.get(name)
        if before == after or (name in FOLLOWS_SHARD and not is_same_shard):
            continue
        if name == "source_sha256":
            lines.append("the list of inputs: names, sizes or change times are not what they were")
        elif name == "keys_sha256":
            lines += ["the list of inputs: other names"] * is_same_list
        elif name == "whole":  # else of other digests, which the lines on the list of inputs tell
            sizes = {f"{(whole or {}).get('num_rows')} rows": None for whole in (before, after)}
            lines += [f"the whole that it is a shard of: {' there, '.join(sizes)} now"] * (len(sizes) - 1)
        else:
            lines.append(f"{name}: {json.dumps(before)} there, {json.dumps(after)} now")
    return lines


def make_provenance(
    requested: EncodeConfig,
    config: EncodeConfig,
    fingerprint: Mapping[str, Any],
    *,
    recipe: EncodeConfig,
    model: Mapping[str, str],
    backend: Mapping[str, str],
    shape: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything recorded with an output, apart from its counts. No time and no machine name: a run that is repeated
    on the same machine writes the same file. `requested` is the config as given, `config` as decided; `recipe`
    makes the same file again, and `shape` is what parts on disk depend on."""
    asked, decided = requested.to_dict(), config.to_dict()
    return {
        "decided": sorted(name for name in decided if asked.get(name, "auto") == "auto"),
        "fingerprint": dict(fingerprint),
        "recipe": recipe.to_toml(),
        "shape": dict(shape),
        "model": dict(model),
        "backend": dict(backend),
        "versions": versions(),
    }
