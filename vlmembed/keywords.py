"""The settings of a run as keyword arguments, and the config that they make."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from vlmembed.config import EncodeConfig
from vlmembed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Name: TypeAlias = "str | os.PathLike[str]"
"""Of a file, a folder or a URL."""


class Settings(TypedDict, total=False):
    """Every field of `EncodeConfig` but `inputs` and `output`; it says what each means, in which unit, and what its
    default is. Where it has a tuple, a list will do."""

    model: str | os.PathLike[str]
    revision: str | None
    device: str
    dtype: str
    attention: str
    runtime: str
    compile: str
    cuda_graphs: str
    emit: str
    deepstack: bool
    pool: str
    normalize: bool
    embedding_dtype: str
    resize: str
    min_pixels: int | None
    max_pixels: int | None
    max_source_pixels: int
    max_tokens_per_batch: int | None
    workers: int | None
    decode: str
    fast_decode: bool
    timeout: float
    image_column: str | None
    id_column: str | None
    keep_columns: tuple[str, ...] | list[str]
    recursive: bool
    limit: int | None
    shard: str | None
    downloads: int
    downloads_per_host: int
    allow_local_urls: bool
    dedup: str
    cache: str | os.PathLike[str] | None
    cache_max_bytes: int
    reuse: tuple[str | os.PathLike[str], ...] | list[str] | list[Path]
    on_error: str
    max_error_rate: float
    retry_failed: bool
    overwrite: bool
    deterministic: bool
    rows_per_part: int | None
    format: str
    work_dir: str | os.PathLike[str] | None
    engine: str
    ray_address: str | None
    towers: str | None
    tower_gpus: float | None
    tower_cpus: float | None


def make_config(
    inputs: EncodeConfig | Name | Sequence[Name], output: Name | None, settings: Mapping[str, Any]
) -> EncodeConfig:
    """The config that the arguments of a call stand for: itself, or inputs, an output and settings by name.

    Raises:
        ConfigError: an unknown name (the message suggests what may be meant), a value that cannot be, or a config with
            other settings beside it.
    """
    if isinstance(inputs, EncodeConfig):
        if beside := [*(["output"] if output is not None else []), *settings]:
            msg = f"{', '.join(beside)} beside an EncodeConfig: put them into it, with dataclasses.replace"
            raise ConfigError(msg)
        return inputs
    names = [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs
    if isinstance(names, (bytes, dict)) or not isinstance(names, Iterable):
        msg = f"inputs is {inputs!r}; it is a path or URL, or a list of them"
        raise ConfigError(msg)
    values: dict[str, Any] = {"inputs": list(names), **settings}
    return EncodeConfig.from_dict(values if output is None else values | {"output": output})
