"""Parquet files that lie, are cut, change under the run or would fill the memory: every row has an end, none is lost"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import thrift

from vlmembed.config import EncodeConfig
from vlmembed.errors import FailureCode, ImageError, InputError
from vlmembed.sources import open_source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vlmembed.types import EncodedImage


def read(path: Path, **settings: Any) -> list[EncodedImage]:  # noqa: ANN401  of `EncodeConfig`
    with closing(open_source(EncodeConfig(inputs=(str(path),), output="o.parquet", **settings))) as source:
        images = list(source.read(0))
        assert [image.row for image in images] == list(range(source.num_rows or 0))
        return images


def codes(images: list[EncodedImage]) -> Counter[str]:
    return Counter(str(image.content.code) if isinstance(image.content, ImageError) else "read" for image in images)


def written(path: Path, count: int = 30, rows: int = 10, **options: Any) -> Path:  # noqa: ANN401  of pyarrow
    """`count` different contents in row groups of `rows`."""
    table = pa.table({"image": [b"picture %03d" % number * 20 for number in range(count)]})
    pq.write_table(table, path, row_group_size=rows, **options)
    return path


def lying(path: Path, change: Callable[[thrift.Fields], None]) -> Path:
    """The file with another footer."""
    pages, footer = thrift.split(path.read_bytes())
    change(footer)
    path.write_bytes(thrift.join(pages, footer))
    return path


def set_rows(footer: thrift.Fields, group: int, num_rows: int, *, of_file: bool = True) -> None:
    before = thrift.row_group(footer, group)[3][1]
    thrift.row_group(footer, group)[3][1] = num_rows
    if of_file:
        footer[3][1] += num_rows - before


def test_rows_that_the_footer_promises_and_the_pages_do_not_have_fail(tmp_path: Path) -> None:
    path = lying(written(tmp_path / "a.parquet"), lambda footer: set_rows(footer, 1, 14))
    images = read(path)
    assert codes(images) == {"read": 30, "unreadable": 4}
    assert str(images[20].content) == ("row group 1 of a.parquet: the footer promises 14 rows, and its pages hold 10")
    assert images[24].content == b"picture 020" * 20  # the next row group is where it was
    assert len({image.key for image in images}) == 34


def test_rows_beyond_what_the_footer_promises_are_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = lying(written(tmp_path / "a.parquet"), lambda footer: set_rows(footer, 1, 7))
    images = read(path)
    assert codes(images) == {"read": 27}
    assert images[17].content == b"picture 020" * 20
    assert "row group 1 of a.parquet holds 10 rows, and the file's footer promises 7" in caplog.text


@pytest.mark.parametrize(
    ("num_rows", "of_file", "message"),
    [
        (14, False, "30 rows, and 34 in its row groups"),
        (-5, True, "its footer contradicts itself|Invalid|negative"),
        (10**13, True, "too many for a file of"),
    ],
)
def test_counts_that_cannot_be_are_refused(num_rows: int, of_file: bool, message: str, tmp_path: Path) -> None:  # noqa: FBT001
    path = lying(written(tmp_path / "a.parquet"), lambda footer: set_rows(footer, 1, num_rows, of_file=of_file))
    with pytest.raises(InputError, match=message) as caught:
        read(path)
    assert "cannot be read as Parquet" in str(caught.value)
    assert "write it again, or leave it out" in str(caught.value)


def test_sizes_and_statistics_that_lie_change_nothing(tmp_path: Path) -> None:
    def lie(footer: thrift.Fields) -> None:
        for group in range(3):
            thrift.row_group(footer, group)[2][1] = 1
            thrift.chunk(footer, group, 0)[6][1] = 3

    assert codes(read(lying(written(tmp_path / "a.parquet"), lie))) == {"read": 30}


def test_a_body_that_is_zeroed_or_cut_costs_its_row_groups(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", compression="zstd")
    content = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    content[start : start + 40] = bytes(40)
    path.write_bytes(content)
    images = read(path)
    assert codes(images) == {"read": 20, "unreadable": 10}
    assert {image.row for image in images if isinstance(image.content, ImageError)} == set(range(10, 20))
    whole = written(tmp_path / "b.parquet").read_bytes()
    for end in (len(whole) // 3, len(whole) - 9):
        (tmp_path / "b.parquet").write_bytes(whole[:end])
        with pytest.raises(InputError, match=r"b.parquet' cannot be read as Parquet"):
            read(tmp_path / "b.parquet")


def test_a_bit_that_flipped_is_seen_where_pages_have_checksums(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", compression="none", use_dictionary=False, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[content.index(b"picture 015") + 3] ^= 1
    path.write_bytes(content)
    images = read(path)
    assert codes(images) == {"read": 20, "unreadable": 10}


@pytest.mark.parametrize("how", ["gone", "shorter", "longer", "a folder"])
def test_a_file_that_changes_after_it_was_listed_costs_its_rows(how: str, tmp_path: Path) -> None:
    for name in "ab":
        written(tmp_path / f"{name}.parquet")
    path = tmp_path / "a.parquet"
    inputs = (str(path), str(tmp_path / "b.parquet"))
    with closing(open_source(EncodeConfig(inputs=inputs, output="o.parquet"))) as source:
        path.unlink()
        if how == "a folder":
            path.mkdir()
        elif how != "gone":
            written(path, 20 if how == "shorter" else 40)
        images = list(source.read(0))
    assert [image.row for image in images] == list(range(60))
    assert codes(images) == {"read": 30, "missing" if how == "gone" else "unreadable": 30}
    assert images[30].content == b"picture 000" * 20


def test_paths_in_rows_never_end_a_run(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "outside.jpg").write_bytes(b"outside")
    (tmp_path / "data" / 'line\nbreak "quoted".jpg').write_bytes(b"odd name")
    os.mkfifo(tmp_path / "data" / "pipe.jpg")
    paths = {
        "../outside.jpg": b"outside",
        str(tmp_path / "outside.jpg"): b"outside",
        'line\nbreak "quoted".jpg': b"odd name",
        "nul\0.jpg": FailureCode.UNREADABLE,
        "x" * 5000: FailureCode.UNREADABLE,
        "\x01\x1b[31m.jpg": FailureCode.MISSING,
        "pipe.jpg": FailureCode.UNREADABLE,
        "": FailureCode.UNREADABLE,
        ".": FailureCode.UNREADABLE,
        "/proc/self/mem": FailureCode.UNREADABLE,
        "\\udcff.jpg": FailureCode.MISSING,
    }
    pq.write_table(pa.table({"path": list(paths)}), tmp_path / "data" / "t.parquet")
    images = read(tmp_path / "data" / "t.parquet")
    found = [each.content.code if isinstance(each.content, ImageError) else each.content for each in images]
    assert found == list(paths.values())
    assert all(len(str(each.content)) < 2000 for each in images)


def test_ids_keep_every_character(tmp_path: Path) -> None:
    ids = ["line\nbreak", "quote\"'`", "tab\t", "\x00\x07", "\u202eright to left", "", " ", "../../etc/passwd"]
    pq.write_table(pa.table({"image": [b"x"] * len(ids), "uid": ids}), tmp_path / "t.parquet")
    assert [image.key for image in read(tmp_path / "t.parquet", id_column="uid")] == ids


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.binary()),
        pa.struct([("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())]))]),
        pa.map_(pa.string(), pa.binary()),
        pa.struct([("bytes", pa.list_(pa.binary()))]),
    ],
)
def test_nested_image_columns_are_refused_by_their_type(kind: pa.DataType, tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": pa.nulls(3, kind)}), tmp_path / "t.parquet")
    for settings in ({}, {"image_column": "image"}):
        with pytest.raises(InputError, match=r"'image' (of t.parquet )?has type (list|struct|map)<"):
            read(tmp_path / "t.parquet", **settings)


def test_nulls_at_every_level(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    values = [None, {"bytes": None, "path": None}, {"bytes": b"", "path": None}, {"bytes": None, "path": "gone.jpg"}]
    pq.write_table(pa.table({"image": pa.array(values, kind)}), tmp_path / "t.parquet")
    contents = [image.content for image in read(tmp_path / "t.parquet")]
    assert [each.code if isinstance(each, ImageError) else each for each in contents] == [
        FailureCode.NULL,
        FailureCode.NULL,
        b"",
        FailureCode.MISSING,
    ]


MEASURE = """
import sys
from contextlib import closing
from vlmembed.config import EncodeConfig
from vlmembed.sources import open_source
import pyarrow.parquet
def peak():
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
before = peak()
config = EncodeConfig(inputs=(sys.argv[1],), output="o.parquet")
with closing(open_source(config)) as source:
    sizes = [len(image.content) if isinstance(image.content, bytes) else -1 for image in source.read(0)]
print(len(sizes), min(sizes), max(sizes), peak() - before)
"""


def measured(path: Path) -> tuple[int, int, int, int]:
    """Rows, smallest and largest content, and by how many KiB the memory grew."""
    command = [sys.executable, "-c", MEASURE, str(path)]
    environment = os.environ | {"MALLOC_ARENA_MAX": "2"}
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    rows, smallest, largest, grown = map(int, printed.split())
    return rows, smallest, largest, grown


@pytest.mark.parametrize("is_struct", [False, True])
def test_a_dictionary_of_one_large_image_does_not_fill_the_memory(is_struct: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """20,000 rows of 900 kB are 18 GB, in a file of 1 MB."""
    indices = pa.array([0] * 20_000, pa.int32())
    column = pa.DictionaryArray.from_arrays(indices, pa.array([os.urandom(900_000)], pa.binary()))
    if is_struct:
        column = pa.StructArray.from_arrays([column], ["bytes"])
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"image": column}), path, dictionary_pagesize_limit=2**21)
    assert path.stat().st_size < 2**21
    rows, smallest, largest, grown = measured(path)
    assert (rows, smallest, largest) == (20_000, 900_000, 900_000)
    assert grown < 300 * 1024
