"""Arrow schemas of the output and errors files, and the provenance in their metadata."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vlmembed.errors import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

PROVENANCE_KEY = b"vlmembed"
"""Key of the JSON provenance in the Parquet key-value metadata."""

HASH_BYTES = 32

ERRORS_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("stage", pa.string(), nullable=False),
        pa.field("code", pa.string(), nullable=False),
        pa.field("message", pa.string(), nullable=False),
    ]
)


def output_schema(width: int, kept: pa.Schema) -> pa.Schema:
    """Schema of the output for embeddings of `width` values, with the `kept` source columns behind.

    Raises:
        ConfigError: a kept column has a name of the output's own.
    """
    own = [
        pa.field("id", pa.string(), nullable=False),
        pa.field("embedding", pa.list_(pa.float32(), width), nullable=False),
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
