"""Flags that commands share: one per field of `EncodeConfig`, and logging."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import click

from vlmembed.config import CHOICES, REAL_NUMBERS, WHOLE_NUMBERS, EncodeConfig

if TYPE_CHECKING:
    from collections.abc import Callable

_HELP = {
    "model": "Built-in name, local folder, or Hugging Face id (see `vlmembed models`).",
    "revision": "Branch, tag or commit of a Hugging Face id.",
    "device": "auto and cuda take all GPUs, cuda:0,1 some; cpu; cpu,cpu is two workers.",
    "dtype": "Of the layers; auto is bf16 where the processor has it, else fp32.",
    "attention": "What computes it; auto is the best that is installed (see `vlmembed models`).",
    "runtime": "What runs the layers; openvino is an extra, for CPUs; auto measures, in runs of 10 minutes and more.",
    "compile": "The layers, by torch.compile; auto measures, in runs of half an hour and more.",
    "cuda_graphs": "Launch the layers as one; auto is off until a GPU has confirmed it.",
    "emit": "One vector per image, or every token that a language model would be fed.",
    "deepstack": "With --emit tokens: the inner layers' features too (Qwen3-VL).",
    "pool": "How an image's tokens become one vector; auto is the tower's own way.",
    "normalize": "Scale every embedding to length 1 (never tokens).",
    "embedding_dtype": "Of stored values; auto is float32 for one vector, float16 for tokens.",
    "resize": "native keeps the aspect ratio, official is the model's own processor.",
    "min_pixels": "Area a smaller picture is filled up to (native).",
    "max_pixels": "Area a larger picture is reduced to (native).",
    "max_source_pixels": "A larger picture fails before it is decoded.",
    "max_tokens_per_batch": "Token budget of a pack.",
    "workers": "Decoding threads or processes.",
    "decode": "Processes outlive a decoder that crashes, and stop one that hangs.",
    "fast_decode": "Decode JPEGs at a half, a quarter or an eighth where they are much larger than the tower wants: "
    "faster, and the pixels differ slightly.",
    "timeout": "Seconds that reading an image, or decoding one, may take.",
    "image_column": "Column of pictures, paths or URLs; found where there is one candidate.",
    "id_column": "Column that holds unique ids.",
    "keep_columns": "Column (of tars: extension, or json.field) to carry into the output; repeatable, or a,b.",
    "recursive": "Descend into subfolders.",
    "limit": "Read only the first rows.",
    "shard": "i/n: only piece i (from 0) of n; see `vlmembed merge`.",
    "downloads": "URLs fetched at a time.",
    "downloads_per_host": "Of them from one host.",
    "allow_local_urls": "Let http URLs lead to this machine and link-local addresses.",
    "dedup": "What is hashed to find duplicates.",
    "cache": "Folder of embeddings that runs share: what is in it is not decoded or encoded again.",
    "cache_max_bytes": "What the cache may grow to.",
    "reuse": "Earlier output with the same model and settings: its embeddings are taken over. Repeatable.",
    "on_error": "What a failed row does to the run.",
    "max_error_rate": "Share of failed rows above which the exit code is 3.",
    "overwrite": "Replace an existing output, and the parts of another run.",
    "retry_failed": "Read and encode the failed rows of a finished OUTPUT again.",
    "deterministic": "Every image travels alone: its embedding depends on no other.",
    "rows_per_part": "Input rows committed together.",
    "format": "Of the output; auto goes by its name (.lance).",
    "work_dir": "Local folder for the parts of a remote output.  [default: in the user's cache]",
    "engine": "local is this machine; ray is a cluster, or a Ray started here (an extra).",
    "ray_address": "Of the cluster; implies --engine ray.  [default: RAY_ADDRESS, a Ray on this machine, or a new one]",
    "towers": "Models loaded at a time on the cluster: N, or MIN:MAX.  [default: 1 to as many as fit]",
    "tower_gpus": "GPUs that each takes, such as 1 or 0.5.  [default: 1, where there are any]",
    "tower_cpus": "CPUs that each takes.  [default: 1 beside a GPU, else three quarters of a node's]",
}
_SWITCHES = {"normalize": "--normalize/--no-normalize", "recursive": "--recursive/--no-recursive"}


def _split_at_commas(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for text in given for name in text.split(",") if name)


def config_options(command: Callable[..., None]) -> Callable[..., None]:
    """One option per `EncodeConfig` field; the defaults are the config's own."""
    for field in reversed(dataclasses.fields(EncodeConfig)):
        if field.name in ("inputs", "output"):
            continue
        flag = f"--{field.name.replace('_', '-')}"
        options: dict[str, Any] = {"help": _HELP[field.name], "default": field.default, "show_default": True}
        if field.name in _SWITCHES:
            flag = _SWITCHES[field.name]
        elif field.name in CHOICES:
            options["type"] = click.Choice(CHOICES[field.name])
        elif field.name in WHOLE_NUMBERS:
            options["type"] = int
            options["show_default"] = "auto" if field.default is None and field.name != "limit" else True
        elif field.name in ("keep_columns", "reuse"):
            options |= {"multiple": True, "show_default": False}
            if field.name == "keep_columns":
                options["callback"] = _split_at_commas
        elif field.name in REAL_NUMBERS:
            options["type"] = float
        elif field.default is False:
            options["is_flag"] = True
        command = click.option(flag, field.name, **options)(command)
    return command


def set_up_logging(*, verbose: bool) -> None:
    """Errors on stderr; with `verbose` what a run decides and does, too."""
    logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    logging.captureWarnings(capture=True)
