"""Fuzz target: Parquet files with damaged bytes and lying metadata.

A file either is refused when it is opened, or gives exactly the rows it promises, each with its bytes or its error.
"""

from __future__ import annotations

import io
import logging
import resource
import tempfile
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fuzzing
import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
import thrift

from vlmembed.config import EncodeConfig
from vlmembed.errors import ImageError, VlmembedError
from vlmembed.sources import open_source

if TYPE_CHECKING:
    from vlmembed.types import EncodedImage

MAX_ROWS = 20_000
"""Of a file that promises more, the first."""

MAX_MEMORY_BYTES = 300 * 2**20

_LENGTHS = st.sampled_from([0, 1, 2, 3, 5, 8, 8, 20, 20, 200])
_NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 7, 127, 128, 1000, 2**31 - 1, -(2**31), 2**31, 2**32, 2**62, 2**63 - 1, -(2**63)]),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 300),
)


def _images(rows: int, kind: str, values: list[bytes | None]) -> pa.Array:
    contents = [values[row % len(values)] for row in range(rows)]
    texts = [None if content is None else content.hex() for content in contents]
    if kind == "struct":
        parts = [{"bytes": content, "path": text} for content, text in zip(contents, texts, strict=True)]
        return pa.array(parts, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    if kind == "path":
        return pa.array([{"path": text} for text in texts], pa.struct([("path", pa.string())]))
    if kind == "string":
        return pa.array(texts, pa.string())
    array = pa.array(contents, pa.large_binary() if kind == "large_binary" else pa.binary())
    return array.dictionary_encode() if kind == "dictionary" else array


@st.composite
def parquet_files(draw: st.DrawFn) -> bytes:
    """A valid file of a few rows."""
    rows = draw(_LENGTHS)
    kind = draw(st.sampled_from(["struct", "binary", "large_binary", "string", "path", "dictionary"]))
    values = draw(st.lists(st.one_of(st.none(), st.binary(max_size=40)), min_size=1, max_size=6))
    table = pa.table(
        {
            "image": _images(rows, kind, values),
            "uid": [f"id{row}" for row in range(rows)] if draw(st.booleans()) else range(rows),
            "n": pa.array([None if row % 3 else [row] * (row % 5) for row in range(rows)], pa.list_(pa.int64())),
            "s": pa.array([f"s{row % 4}" for row in range(rows)]).dictionary_encode(),
        }
    )
    file = io.BytesIO()
    pq.write_table(
        table,
        file,
        row_group_size=draw(st.sampled_from([1, 2, 7, 1000])),
        compression=draw(st.sampled_from(["none", "zstd", "snappy", "gzip"])),
        use_dictionary=draw(st.booleans()),
        data_page_size=draw(st.sampled_from([1, 100, 2**20])),
        write_batch_size=draw(st.sampled_from([1, 3, 1024])),
        data_page_version=draw(st.sampled_from(["1.0", "2.0"])),
        store_schema=draw(st.booleans()),
        write_page_checksum=draw(st.booleans()),
        write_statistics=draw(st.booleans()),
    )
    return file.getvalue()


def _places(fields: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:  # noqa: ANN401  any thrift value
    """Every number in a thrift value, as a container and the index in it."""
    if isinstance(fields, dict):
        for entry in fields.values():
            if isinstance(entry[1], int) and not isinstance(entry[1], bool):
                found.append((entry, 1))
            else:
                _places(entry[1], found)
    elif isinstance(fields, list):
        for index, value in enumerate(fields[1]):
            if isinstance(value, int):
                found.append((fields[1], index))
            else:
                _places(value, found)
    return found


def _lists(fields: Any, found: list[list[Any]]) -> list[list[Any]]:  # noqa: ANN401  any thrift value
    """Every list in a thrift value."""
    if isinstance(fields, dict):
        for entry in fields.values():
            _lists(entry[1], found)
    elif isinstance(fields, list):
        found.append(fields[1])
        for value in fields[1]:
            _lists(value, found)
    return found


def _change_number(draw: st.DrawFn, fields: thrift.Fields) -> None:
    container, index = draw(st.sampled_from(_places(fields, [])))
    number = container[index]
    near = st.sampled_from([number - 1, number + 1, number * 2, number // 2, -number])
    container[index] = max(-(2**63), min(2**63 - 1, draw(st.one_of(_NUMBERS, near))))


def _lie(draw: st.DrawFn, data: bytes) -> bytes:
    """Other numbers in the footer, or elements of its lists that come twice or not at all."""
    pages, footer = thrift.split(data)
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.integers(0, 4)):
            _change_number(draw, footer)
            continue
        values = draw(st.sampled_from([each for each in _lists(footer, []) if each]))
        index = draw(st.integers(0, len(values) - 1))
        if draw(st.booleans()):
            values.insert(index, values[index])
        else:
            del values[index]
    return thrift.join(pages, footer)


def _lie_in_page(draw: st.DrawFn, data: bytes) -> bytes:
    """Another number in the header of a page; all else stays in its place."""
    pages, footer = thrift.split(data)
    num_groups = len(footer[4][1][1])
    if not footer[3][1]:  # no rows, no pages
        return data
    group = draw(st.integers(0, num_groups - 1))
    num_chunks = len(thrift.row_group(footer, group)[1][1][1])
    place = thrift.chunk(footer, group, draw(st.integers(0, num_chunks - 1)))
    begin, end, header = draw(st.sampled_from(thrift.page_headers(data, place)))
    _change_number(draw, header)
    written = thrift.dump(header)
    longer = len(written) - (end - begin)
    place[7][1] += longer
    for other in range(num_groups):
        for column in range(num_chunks):
            chunk = thrift.chunk(footer, other, column)
            for offset in (9, 11):
                if offset in chunk and chunk[offset][1] > begin:
                    chunk[offset][1] += longer
    return thrift.join(pages[:begin] + written + pages[end:], footer)


def _damage(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes changed, dropped, added or moved, in the whole file or in its footer."""
    low = 0
    if draw(st.booleans()) and len(data) > 8:  # the last 8 bytes tell the length of the footer
        low = max(0, len(data) - 8 - int.from_bytes(data[-8:-4], "little"))
    if low >= len(data):
        return data
    begin = draw(st.integers(low, len(data) - 1))
    end = min(len(data), begin + draw(st.sampled_from([1, 1, 2, 4, 20, 500])))
    how = draw(st.sampled_from(["flip", "overwrite", "zero", "delete", "insert", "splice", "truncate"]))
    if how == "truncate":
        return data[:begin]
    replacement = b""
    if how == "flip":
        replacement = bytes([data[begin] ^ 1 << draw(st.integers(0, 7))]) + data[begin + 1 : end]
    elif how == "overwrite":
        replacement = draw(st.binary(min_size=end - begin, max_size=end - begin))
    elif how == "zero":
        replacement = bytes(end - begin)
    elif how == "insert":
        replacement = draw(st.binary(min_size=1, max_size=20)) + data[begin:end]
    elif how == "splice":
        start = draw(st.integers(0, len(data) - 1))
        replacement = data[start : start + end - begin]
    return data[:begin] + replacement + data[end:]


@st.composite
def hostile_files(draw: st.DrawFn) -> bytes:
    """A valid file, made worse in up to three ways; lies come first, as they take a footer that can be read."""
    data = draw(parquet_files())
    first = draw(st.sampled_from([_lie, _lie_in_page, _damage, None]))
    if first:
        data = first(draw, data)
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
            data = _damage(draw, data)
    return data


EXAMPLES = hostile_files()


def check(data: bytes) -> None:
    """Open and read; see the module."""
    logging.disable(logging.WARNING)
    before = _peak_bytes()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "t.parquet").write_bytes(data)
        plain = EncodeConfig(inputs=(f"{folder}/t.parquet",), output="o.parquet")
        for config in (plain, replace(plain, image_column="image", id_column="uid", keep_columns=("n", "s"))):
            try:
                source = open_source(config)
            except VlmembedError:
                continue
            with closing(source):
                images = list(islice(source.read(0), MAX_ROWS))
                num_rows = min(source.num_rows or 0, MAX_ROWS)
                assert [image.row for image in images] == list(range(num_rows))
                assert len({image.key for image in images}) == num_rows
                assert all(isinstance(image.content, (bytes, ImageError)) for image in images)
                some = range(num_rows // 3, num_rows, 2)
                assert list(map(_seen, source.read_rows(some))) == [_seen(images[row]) for row in some]
                for image in images:
                    if image.columns is not None:
                        image.columns.validate(full=True)
    grown = _peak_bytes() - before
    assert grown <= MAX_MEMORY_BYTES, f"{grown} bytes for a file of {len(data)}"


def _seen(image: EncodedImage) -> tuple[int, str, bytes | str]:
    content = image.content if isinstance(image.content, bytes) else f"{image.content.code}: {image.content}"
    return image.row, image.key, content


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzz(seconds: float, seed: int) -> fuzzing.FuzzReport:
    """Fuzz for so long."""
    return fuzzing.fuzz("fuzz_parquet", seconds, seed)
