"""`EncodeConfig`: every setting of a run, its default and its check."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tomli_w

from vlmembed.errors import ConfigError
from vlmembed.shards import parse_shard

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("auto", "bf16", "fp16", "fp32"),
    "attention": ("auto", "flash4", "flash3", "flash2", "torch", "sdpa", "cpu"),
    "runtime": ("auto", "torch", "openvino"),
    "compile": ("auto", "on", "off"),
    "cuda_graphs": ("auto", "on", "off"),
    "emit": ("pooled", "tokens"),
    "pool": ("auto", "cls", "mean", "head"),
    "embedding_dtype": ("auto", "float32", "float16"),
    "resize": ("auto", "native", "official"),
    "dedup": ("bytes", "pixels", "none"),
    "decode": ("threads", "processes"),
    "on_error": ("skip", "fail"),
    "format": ("auto", "parquet", "lance"),
    "engine": ("local", "ray"),
}
"""The values that a field of words can take."""

DEFAULT_MAX_SOURCE_PIXELS = 178_956_970
"""Where Pillow itself stops calling a picture plausible; as RGB it fills 0.5 GB."""

STALL_TIMEOUTS = 30
"""What has not moved for so many times `timeout` is given up: a device worker, or the run."""

DEFAULT_CACHE_BYTES = 64 * 2**30
"""About 40 million vectors of 384 float32 values."""

WHOLE_NUMBERS = (
    "min_pixels",
    "max_pixels",
    "max_source_pixels",
    "max_tokens_per_batch",
    "workers",
    "limit",
    "rows_per_part",
    "cache_max_bytes",
    "downloads",
    "downloads_per_host",
)
"""The fields that are 1 or more where they are given."""

REAL_NUMBERS = ("tower_gpus", "tower_cpus")
"""The fields that are more than 0 where they are given."""

FLAGS_ONLY = ("log-json", "no-progress", "progress", "verbose")
"""Flags of the commands that run, which are no settings."""

TEXTS = (
    "output",
    "model",
    "revision",
    "device",
    "image_column",
    "id_column",
    "shard",
    "cache",
    "work_dir",
    "ray_address",
    "towers",
)
"""The fields that are any text, or a path."""

OF_THE_ENGINE = ("engine", "ray_address", "towers", "tower_gpus", "tower_cpus")
"""The fields that say where the work is done, not what comes of it."""

_POOL = re.compile(r"([1-9]\d*)(?::([1-9]\d*))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeConfig:
    """Settings of one run. None, or ``"auto"``, is decided once when the run is set up and recorded in its output.

    Attributes:
        inputs: folders, pictures, globs, Parquet files, tars, zips, Hugging Face and Lance datasets, lists of paths or
            URLs, ``"-"`` for a list on standard input; each on disk or behind a URL (s3, gs, http, https, hf).
        output: the Parquet file, Lance dataset or folder of parts to write, on disk or on s3, gs; empty for what writes
            none (`vlmembed.stream`, `vlmembed.plan`).
        format: of the output; ``"auto"`` goes by its name.
        model: a built-in name, a local folder, or a Hugging Face id; `revision` is of the latter.
        device: ``"auto"`` and ``"cuda"`` are all visible GPUs, ``"cuda:0,1"`` some of them, ``"cpu"``; ``"cpu,cpu"`` is
            two workers on the CPU.
        dtype: of the layers; ``"auto"`` is bf16 where the processor multiplies it in hardware, else fp32.
        attention: what computes it; ``"auto"`` is the best that is installed for the device.
        runtime: what runs the layers: torch, or on a CPU OpenVINO. ``"auto"`` measures, in long runs.
        compile: the layers, by torch.compile. cuda_graphs: launch them as one. ``"auto"`` measures, in long runs.
        emit: ``"pooled"`` stores one vector per image; ``"tokens"`` all that a language model would be fed.
        deepstack: with tokens, the inner layers' features too (Qwen3-VL).
        pool: how an image's tokens become one vector.
        normalize: scale every embedding to length 1; tokens are stored as they are.
        embedding_dtype: of the stored values; ``"auto"`` is float32 for one vector and float16 for tokens.
        resize: ``"native"`` keeps the aspect ratio, ``"official"`` is the model's own image processor.
        min_pixels, max_pixels: area that a picture is resized into by ``"native"``, in pixels.
        max_source_pixels: a larger picture fails before it is decoded, in pixels.
        max_tokens_per_batch: budget of a pack, in tokens.
        workers: decoding threads or processes.
        decode: ``"processes"`` outlives a decoder that crashes, and stops one that hangs.
        fast_decode: decode JPEGs at a half, a quarter or an eighth where they are much larger than the tower wants:
            faster, and the pixels differ slightly.
        timeout: seconds that reading an image, or decoding one, may take; the run is given up when nothing at all has
            moved for 30 times as long.
        image_column, id_column, keep_columns: of inputs with columns; dots lead into structs. Of tars the extensions
            of a sample's other members.
        recursive: descend into subfolders.
        limit: read only the first rows.
        shard: ``"i/n"``: only piece i, from 0, of n equal ones, to be put together by `vlmembed merge`.
        downloads: URLs that are fetched at a time, downloads_per_host: from one host.
        allow_local_urls: let http URLs lead to this machine and to link-local addresses.
        dedup: hash the encoded ``"bytes"`` or the decoded ``"pixels"``.
        cache: folder of embeddings shared by runs, by content hash and encoder. cache_max_bytes: what it may grow to.
        reuse: outputs of earlier runs with the same encoder, whose embeddings are taken over.
        on_error: ``"fail"`` ends the run at the first failed row.
        max_error_rate: share of failed rows, 0 to 1, above which the command exits with 3.
        overwrite: replace an existing output, and the parts of another run; those of the same run are gone on with.
        retry_failed: read and encode the failed rows of a finished output again, and nothing else.
        deterministic: every image travels alone, so that its embedding does not depend on its neighbours.
        rows_per_part: input rows that are committed together.
        work_dir: local folder for the parts of a remote output; None is one in the user's cache.
        engine: ``"local"`` is this machine, ``"ray"`` a cluster. ray_address: of the cluster, which then is the engine;
            None is what RAY_ADDRESS names, a Ray that runs on this machine, or one that is started for the run.
        towers: models loaded at a time on the cluster, ``"N"`` or ``"MIN:MAX"``; None is from 1 to as many as fit.
        tower_gpus, tower_cpus: what each of them takes of a node, fractions allowed; None is one GPU, or on a cluster
            without any three quarters of a node's CPUs.
    """

    inputs: tuple[str | os.PathLike[str], ...]
    output: str | os.PathLike[str] = ""
    model: str | os.PathLike[str] = "dinov2-small"
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    runtime: str = "auto"
    compile: str = "auto"
    cuda_graphs: str = "auto"
    emit: str = "pooled"
    deepstack: bool = False
    pool: str = "auto"
    normalize: bool = True
    embedding_dtype: str = "auto"
    resize: str = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None
    max_source_pixels: int = DEFAULT_MAX_SOURCE_PIXELS
    max_tokens_per_batch: int | None = None
    workers: int | None = None
    decode: str = "threads"
    fast_decode: bool = False
    timeout: float = 120.0
    image_column: str | None = None
    id_column: str | None = None
    keep_columns: tuple[str, ...] = ()
    recursive: bool = True
    limit: int | None = None
    shard: str | None = None
    downloads: int = 32
    downloads_per_host: int = 16
    allow_local_urls: bool = False
    dedup: str = "bytes"
    cache: str | os.PathLike[str] | None = None
    cache_max_bytes: int = DEFAULT_CACHE_BYTES
    reuse: tuple[str | os.PathLike[str], ...] = ()
    on_error: str = "skip"
    max_error_rate: float = 0.01
    retry_failed: bool = False
    overwrite: bool = False
    deterministic: bool = False
    rows_per_part: int | None = None
    format: str = "auto"
    work_dir: str | os.PathLike[str] | None = None
    engine: str = "local"
    ray_address: str | None = None
    towers: str | None = None
    tower_gpus: float | None = None
    tower_cpus: float | None = None

    def __post_init__(self) -> None:
        self._check_lists()
        self._check_types()
        for name, allowed in CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                msg = f"{name} is {value!r}; it can be {', '.join(allowed)}"
                raise ConfigError(msg)
        for name in WHOLE_NUMBERS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                msg = f"{name} is {value!r}; it is a whole number"
                raise ConfigError(msg)
            if value is not None and value < 1:
                msg = f"{name} is {value}; it must be 1 or more"
                raise ConfigError(msg)
        if not (_is_number(self.max_error_rate) and 0 <= self.max_error_rate <= 1):
            msg = f"max_error_rate is {self.max_error_rate!r}; it is a share, 0 to 1"
            raise ConfigError(msg)
        if not (_is_number(self.timeout) and 0 < self.timeout < float("inf")):
            msg = f"timeout is {self.timeout!r}; it is a number of seconds, more than 0"
            raise ConfigError(msg)
        if self.shard is not None:
            parse_shard(self.shard)
        self._check_towers()
        self._check_combinations()

    def _check_towers(self) -> None:
        for name in REAL_NUMBERS:
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < float("inf")):
                msg = f"{name} is {value!r}; it is a number of more than 0, such as 0.5"
                raise ConfigError(msg)
        if self.tower_gpus is not None and self.tower_gpus > 1 and self.tower_gpus != int(self.tower_gpus):
            msg = f"tower_gpus is {self.tower_gpus}; Ray divides one GPU, or gives whole ones"
            raise ConfigError(msg)
        if self.towers is not None:
            bounds = self.num_towers
            if bounds is None or bounds[0] > (bounds[1] or bounds[0]):
                msg = f"towers is {self.towers!r}; it is a number such as 4, or bounds such as 1:8"
                raise ConfigError(msg)
        given = [name for name in OF_THE_ENGINE[2:] if getattr(self, name) is not None]
        if given and not self.on_ray:
            msg = f"{given[0]} is about a cluster: add engine ray, or leave it out"
            raise ConfigError(msg)

    @property
    def on_ray(self) -> bool:
        """A cluster does the work."""
        return self.engine == "ray" or self.ray_address is not None

    @property
    def num_towers(self) -> tuple[int, int] | None:
        """The bounds that `towers` gives, or None."""
        match = _POOL.fullmatch(self.towers or "")
        return (int(match[1]), int(match[2] or match[1])) if match else None

    def _check_combinations(self) -> None:
        if self.retry_failed and self.on_ray:
            msg = "retry_failed is for few rows, and runs on this machine: leave engine ray out"
            raise ConfigError(msg)
        if self.retry_failed and self.overwrite:
            msg = "retry_failed keeps what is embedded, and overwrite starts anew: leave one out"
            raise ConfigError(msg)
        if self.deterministic and self.cuda_graphs == "on":
            msg = "deterministic runs no CUDA graphs, which fill packs up to other shapes: leave cuda_graphs on out"
            raise ConfigError(msg)
        if self.fast_decode and self.dedup == "pixels":
            msg = "dedup pixels compares whole pictures, and fast_decode decodes less of them: leave one out"
            raise ConfigError(msg)
        is_lance = os.fspath(self.output).rstrip("/").endswith(".lance")
        if self.format != "auto" and is_lance != (self.format == "lance"):
            msg = f"format is {self.format}, the output's name says another: only a Lance dataset ends in .lance"
            raise ConfigError(msg)

    def _check_lists(self) -> None:
        for name in ("inputs", "keep_columns", "reuse"):
            if isinstance(value := getattr(self, name), (str, os.PathLike)):
                msg = f"{name} is {value!r}; it is a tuple of them: ({value!r},)"
                raise ConfigError(msg)
            if not (isinstance(value, (tuple, list)) and all(isinstance(each, (str, os.PathLike)) for each in value)):
                msg = f"{name} is {value!r}; it is a list of texts"
                raise ConfigError(msg)
        if not self.inputs:
            msg = "no input given: name at least one folder, picture or Parquet file"
            raise ConfigError(msg)
        if repeated := [name for name in self.keep_columns if self.keep_columns.count(name) > 1]:
            msg = f"keep_columns names {repeated[0]!r} more than once"
            raise ConfigError(msg)

    def _check_types(self) -> None:
        """What Python would take for something else: ``normalize="no"`` is true."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                msg = f"{field.name} is {value!r}; it is true or false"
                raise ConfigError(msg)
            if field.name in TEXTS and not (value is None or isinstance(value, (str, os.PathLike))):
                msg = f"{field.name} is {value!r}; it is text"
                raise ConfigError(msg)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a config from plain values by the names of its fields or of their flags (``max-pixels``); lists become
        tuples.

        Raises:
            ConfigError: an unknown key, or one that comes in both spellings.
        """
        settings: dict[str, Any] = {}
        for key, value in values.items():
            name = setting_name(key)
            if name in settings:
                msg = f"{key!r} is there twice, as {key.replace('_', '-')} and {name}: leave one out"
                raise ConfigError(msg)
            settings[name] = tuple(value) if isinstance(value, list) else value
        if "inputs" not in settings:
            msg = "no input given: name at least one folder, picture or Parquet file as inputs"
            raise ConfigError(msg)
        return cls(**settings)

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Read what `to_toml` wrote.

        Raises:
            ConfigError: not TOML, or an unknown key.
        """
        try:
            return cls.from_dict(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            msg = f"not valid TOML: {error}"
            raise ConfigError(msg) from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the fields that are None, and without an output that is none."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            key: _plain(value) for key, value in values.items() if value is not None and (key, value) != ("output", "")
        }

    def to_toml(self) -> str:
        """The config as a recipe: one ``key = value`` a line."""
        return tomli_w.dumps(self.to_dict())


FIELDS = {field.name: field for field in dataclasses.fields(EncodeConfig)}


def setting_name(key: str, *, as_flags: bool = False) -> str:
    """The field that a key stands for: its name, or that of its flag without the dashes in front.

    Raises:
        ConfigError: there is none; the message suggests what may be meant.
    """
    known = [field.name for field in dataclasses.fields(EncodeConfig)]
    if (name := key.replace("-", "_")) in known:
        return name
    if (flag := name.replace("_", "-")) in FLAGS_ONLY:
        msg = f"{key!r} changes nothing in an output, so it is no setting: give --{flag} to the command"
        raise ConfigError(msg)
    between = "-" if as_flags or "-" in key else "_"  # as the caller writes them
    if name.startswith("no_") and name[3:] in known:
        msg = f"unknown setting {key!r}: is {name[3:].replace('_', between)} = false meant?"
        raise ConfigError(msg)
    near = difflib.get_close_matches(name, known, n=1)
    listed = ", ".join(sorted(each.replace("_", between) for each in known))
    meant = f": is {near[0].replace('_', between)!r} meant?" if near else f"; known are {listed}"
    msg = f"unknown setting {key!r}{meant}"
    raise ConfigError(msg)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain(value: Any) -> Any:  # noqa: ANN401  whatever a setting can be
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
