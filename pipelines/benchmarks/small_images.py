"""Small pictures by the million: 32x32 JPEGs, all different, made as fast as they are read."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

if TYPE_CHECKING:
    from pathlib import Path

SIDE = 32
NUM_PICTURES = 4096
"""Different pictures; a content is one of them with its number behind its end, which decoders pass over."""

GROUP_ROWS = 10_000


@lru_cache(maxsize=NUM_PICTURES)
def _encoded(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BILINEAR).save(file, "JPEG")
    return file.getvalue()


def small_picture(number: int) -> bytes:
    """An encoded picture; another number is another content."""
    return _encoded(number % NUM_PICTURES) + number.to_bytes(8, "big")


def write_pictures(path: Path, num_rows: int) -> None:
    """A Parquet file of so many, in row groups of `GROUP_ROWS`."""
    schema = pa.schema([("image", pa.binary())])
    with pq.ParquetWriter(path, schema, use_dictionary=False, compression="none") as writer:
        for first in range(0, num_rows, GROUP_ROWS):
            contents = [small_picture(number) for number in range(first, min(first + GROUP_ROWS, num_rows))]
            writer.write_table(pa.table({"image": contents}, schema=schema))
