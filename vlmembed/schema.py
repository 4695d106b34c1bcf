"""Arrow schemas of the output and errors files, and the provenance in their metadata."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from vlmembed.errors import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from vlmembed.types import FloatArray

PROVENANCE_KEY = b"vlmembed"
"""Key of the JSON provenance in the Parquet key-value metadata."""

HASH_BYTES = 32

VECTORS = re.compile(r"embedding|tokens|deepstack_\d+")
"""Names of the output's columns of vectors."""

ERRORS_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("stage", pa.string(), nullable=False),
        pa.field("code", pa.string(), nullable=False),
        pa.field("message", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorColumn:
    """A column of vectors of `width` values, ``"float32"`` or ``"float16"``: one per image, or one per token."""

    name: str
    width: int
    dtype: str = "float32"
    per_token: bool = False

    @property
    def bytes_per_vector(self) -> int:
        """Size of one vector."""
        return self.width * (2 if self.dtype == "float16" else 4)

    @property
    def arrow_type(self) -> pa.DataType:
        """fixed_size_list, or a list of them."""
        vector = pa.list_(pa.float16() if self.dtype == "float16" else pa.float32(), self.width)
        return pa.list_(vector) if self.per_token else vector

    def to_arrow(self, images: Sequence[FloatArray]) -> pa.Array:
        """The column of these images, each (D,) or (tokens, D)."""
        values = np.concatenate(images, axis=None) if images else np.empty(0, self.dtype)
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.astype(self.dtype, copy=False)), self.width)
        if not self.per_token:
            return vectors
        offsets = np.concatenate([[0], np.cumsum([len(image) for image in images])])
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), vectors)

    def from_arrow(self, value: pa.Scalar) -> FloatArray:
        """One image's vectors, (D,) or (tokens, D), of one value of the column."""
        vectors = value.values.flatten() if self.per_token else value.values
        values: FloatArray = vectors.to_numpy(zero_copy_only=False)
        return values.reshape(-1, self.width) if self.per_token else values


def output_schema(vectors: Sequence[VectorColumn], kept: pa.Schema) -> pa.Schema:
    """Schema of the output with these columns of vectors, and with the `kept` source columns behind.

    Raises:
        ConfigError: a kept column has a name of the output's own.
    """
    own = [
        pa.field("id", pa.string(), nullable=False),
        *(pa.field(column.name, column.arrow_type, nullable=False) for column in vectors),
        pa.field("content_hash", pa.binary(HASH_BYTES), nullable=False),
        pa.field("duplicate_of", pa.string()),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("grid_h", pa.int32(), nullable=False),
        pa.field("grid_w", pa.int32(), nullable=False),
    ]
    names = {field.name for field in own}
    if clash := sorted(names & set(kept.names)):
        msg = f"--keep-columns {clash[0]}: the output has a column of that name itself; rename it in the source"
        raise ConfigError(msg)
    return pa.schema([*own, *kept])


def with_provenance(schema: pa.Schema, provenance: Mapping[str, Any]) -> pa.Schema:
    """`schema` with `provenance` as JSON under `PROVENANCE_KEY`."""
    metadata = {PROVENANCE_KEY: json.dumps(provenance, sort_keys=True).encode()}
    return schema.with_metadata(metadata)


def read_provenance(schema: pa.Schema, name: str) -> dict[str, Any]:
    """The provenance in a file's schema; `name` is for the message.

    Raises:
        InputError: the file was not written by vlmembed.
    """
    try:
        content = json.loads((schema.metadata or {})[PROVENANCE_KEY])
    except (KeyError, ValueError) as error:
        msg = f"{name} holds no vlmembed provenance: it was not written by vlmembed encode"
        raise InputError(msg) from error
    assert isinstance(content, dict)
    return content


def read_success(path: Path) -> dict[str, Any]:
    """The provenance of a folder output, from its ``_SUCCESS`` file.

    Raises:
        InputError: the file was not written by vlmembed.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["fingerprint"]
    except (ValueError, TypeError, KeyError) as error:
        msg = f"{path} holds no vlmembed provenance: it was not written by vlmembed encode"
        raise InputError(msg) from error
    assert isinstance(content, dict)
    return content
