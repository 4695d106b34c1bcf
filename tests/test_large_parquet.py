"""Parquet files beyond two gigabytes: what a process that reads them grows by."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MEGABYTE = 10**6
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])

MEASURE = """
import sys
from vlmembed.sources.parquet import ParquetSource
from vlmembed.sources.readahead import ReadAhead

def peak():
    with open("/proc/self/status") as status:  # what getrusage tells is the parent's too
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

reader = ReadAhead(timeout_seconds=10, max_source_pixels=10**6)
before = peak()
source = ParquetSource([(sys.argv[1], "t")], reader=reader, image_column=None, id_column=None, keep_columns=())
print(sum(len(image.content) == 10**6 for image in source.read(0)), peak() - before)
"""


@pytest.fixture(params=["binary", "struct"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """3.1 GB in one row group, in pages as pyarrow makes them by itself."""
    image = np.random.default_rng(0).bytes(MEGABYTE)
    row = pa.array([image]) if request.param == "binary" else pa.array([{"bytes": image, "path": None}], IMAGE)
    path = tmp_path / "t.parquet"
    options = {"use_dictionary": False, "compression": "none", "write_statistics": False}
    try:
        pq.write_table(pa.table({"image": pa.chunked_array([row] * 3100)}), path, row_group_size=3100, **options)
        yield path
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.slow
def test_a_row_group_of_three_gigabytes_is_streamed(path: Path) -> None:
    assert pq.read_metadata(path).num_row_groups == 1
    assert path.stat().st_size > 3 * 10**9
    printed = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    num_rows, num_grown = map(int, printed.stdout.split())
    assert num_rows == 3100
    assert num_grown < 200 * MEGABYTE
