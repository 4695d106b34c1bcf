"""Parquet files that lie about themselves, are damaged, or would fill the memory: rows fail, runs do not."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import fuzzing
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import thrift
from test_sources import PNG, opened, rows_of, table

from vlmembed.errors import FailureCode, ImageError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vlmembed.types import EncodedImage

IMAGES = [PNG + bytes([row]) for row in range(20)]

STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])

MEGABYTE = 10**6


def write_images(path: Path, **options: Any) -> None:  # noqa: ANN401  pyarrow's own
    """Twenty rows in two row groups, with an id and a number each."""
    columns = {"image": IMAGES, "uid": [f"id{row}" for row in range(20)], "n": range(20)}
    pq.write_table(table(**columns), path, row_group_size=10, **options)


def lie(path: Path, change: Callable[[thrift.Fields], None]) -> None:
    """Change a file's footer, and nothing else."""
    pages, footer = thrift.split(path.read_bytes())
    change(footer)
    path.write_bytes(thrift.join(pages, footer))


def failures(rows: list[EncodedImage]) -> dict[int, str]:
    """Code and message of the rows that failed."""
    return {
        image.row: f"{image.content.code}: {image.content}" for image in rows if isinstance(image.content, ImageError)
    }


def claim_rows(footer: thrift.Fields, group: int, num_rows: int) -> None:
    footer[3][1] += num_rows - thrift.row_group(footer, group)[3][1]
    thrift.row_group(footer, group)[3][1] = num_rows


def test_the_thrift_of_these_tests_writes_what_it_reads(tmp_path: Path) -> None:
    write_images(tmp_path / "t.parquet")
    before = (tmp_path / "t.parquet").read_bytes()
    lie(tmp_path / "t.parquet", lambda _: None)
    assert (tmp_path / "t.parquet").read_bytes() == before


def test_rows_that_are_promised_and_not_there_fail_one_by_one(tmp_path: Path) -> None:
    write_images(tmp_path / "t.parquet")
    lie(tmp_path / "t.parquet", lambda footer: claim_rows(footer, 0, 15))
    rows = rows_of(opened(tmp_path / "t.parquet"))
    missing = "unreadable: row group 0 of t.parquet: the footer promises 15 rows, and its pages hold 10"
    assert failures(rows) == dict.fromkeys(range(10, 15), missing)
    assert [image.content for image in rows if isinstance(image.content, bytes)] == IMAGES
    assert rows[15].key == "t.parquet#15"
    with pytest.raises(InputError, match=r"--id-column 'uid' of t.parquet cannot be read.*promises 15 rows.*hold 10"):
        opened(tmp_path / "t.parquet", image_column="image", id_column="uid")


def test_rows_that_are_there_and_not_promised_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_images(tmp_path / "t.parquet")
    lie(tmp_path / "t.parquet", lambda footer: claim_rows(footer, 0, 6))
    rows = rows_of(opened(tmp_path / "t.parquet"))
    assert [image.content for image in rows] == IMAGES[:6] + IMAGES[10:]
    assert caplog.messages == [
        "row group 0 of t.parquet holds 10 rows, and the file's footer promises 6: the others are no rows"
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda footer: footer[3].__setitem__(1, 21), "21 rows, and 20 in its row groups"),
        (lambda footer: footer[3].__setitem__(1, -1), "-1 rows, and 20 in its row groups"),
        (lambda footer: claim_rows(footer, 1, -10), "0 rows, and 0 in its row groups"),
        (lambda footer: claim_rows(footer, 1, 2**62), f"promises {2**62 + 10} rows, too many for a file of"),
    ],
)
def test_a_footer_that_contradicts_itself_is_refused(
    change: Callable[[thrift.Fields], None], reason: str, tmp_path: Path
) -> None:
    write_images(tmp_path / "t.parquet")
    lie(tmp_path / "t.parquet", change)
    with pytest.raises(
        InputError, match=rf"t.parquet' cannot be read as Parquet .*{reason}.*: write it again, or leave"
    ):
        opened(tmp_path / "t.parquet")


def test_lies_about_a_column_chunk_cost_its_row_group_at_most(tmp_path: Path) -> None:
    for field in (5, 6, 7, 9):
        for value in (0, -1, 1, 100, 2**31, 2**62):
            write_images(tmp_path / "t.parquet")

            def change(footer: thrift.Fields, field: int = field, value: int = value) -> None:
                thrift.chunk(footer, 0, 0)[field][1] = value

            lie(tmp_path / "t.parquet", change)
            rows = rows_of(opened(tmp_path / "t.parquet", keep_columns=("n",), id_column="uid"))
            assert [image.key for image in rows] == [f"id{row}" for row in range(20)]
            assert [image.content for image in rows[10:]] == IMAGES[10:]
            for image in rows[:10]:
                assert image.content == IMAGES[image.row] or getattr(image.content, "code", "") == "unreadable"


def test_a_chunk_whose_metadata_pyarrow_dies_of_is_unreadable(tmp_path: Path) -> None:
    write_images(tmp_path / "t.parquet")

    def change(footer: thrift.Fields) -> None:
        sizes = thrift.chunk(footer, 0, 0)[16][1]  # SizeStatistics: 3 is the histogram of definition levels
        sizes[3][1][1].append(7)

    try:
        lie(tmp_path / "t.parquet", change)
    except KeyError:
        pytest.skip("this pyarrow writes no size statistics")
    rows = rows_of(opened(tmp_path / "t.parquet"))
    assert list(failures(rows)) == list(range(10))


def test_pages_that_lie_about_their_size_or_number_are_unreadable(tmp_path: Path) -> None:
    write_images(tmp_path / "t.parquet", compression="zstd", use_dictionary=False)
    content = (tmp_path / "t.parquet").read_bytes()
    pages, footer = thrift.split(content)
    ((begin, end, header),) = thrift.page_headers(content, thrift.chunk(footer, 1, 0))
    for change in ({2: 2**31 - 1}, {2: -1}, {3: -1}, {3: 2**31 - 1}, {1: 9}):
        lying = {number: [entry[0], change.get(number, entry[1])] for number, entry in header.items()}
        written = thrift.dump(lying)
        longer = len(written) - (end - begin)
        pages, footer = thrift.split(content)
        for column in range(3):
            chunk = thrift.chunk(footer, 1, column)
            chunk[7][1] += longer if column == 0 else 0
            chunk[9][1] += longer if column else 0
        (tmp_path / "t.parquet").write_bytes(thrift.join(pages[:begin] + written + pages[end:], footer))
        rows = rows_of(opened(tmp_path / "t.parquet", keep_columns=("n",), image_column="image"))
        assert list(failures(rows)) == list(range(10, 20)), change


def test_bit_rot_under_a_checksum_is_not_another_image(tmp_path: Path) -> None:
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True, "write_statistics": False}
    write_images(tmp_path / "t.parquet", **options)
    content = bytearray((tmp_path / "t.parquet").read_bytes())
    content[content.index(IMAGES[3]) + 20] ^= 1
    (tmp_path / "t.parquet").write_bytes(content)
    lost = failures(rows_of(opened(tmp_path / "t.parquet", id_column="uid", image_column="image")))
    assert list(lost) == list(range(10))
    assert "CRC checksum verification failed" in lost[0]


def test_ids_survive_the_images_beside_them(tmp_path: Path) -> None:
    write_images(tmp_path / "t.parquet", compression="none")
    content = bytearray((tmp_path / "t.parquet").read_bytes())
    _, footer = thrift.split(bytes(content))
    begin, _, _ = thrift.page_headers(bytes(content), thrift.chunk(footer, 1, 0))[0]
    content[begin : begin + 100] = bytes(100)
    (tmp_path / "t.parquet").write_bytes(content)
    rows = rows_of(opened(tmp_path / "t.parquet", image_column="image", id_column="uid"))
    assert [image.key for image in rows] == [f"id{row}" for row in range(20)]
    assert list(failures(rows)) == list(range(10, 20))


def test_a_file_cut_short_or_hollowed_out(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_images(path, compression="none", use_dictionary=False)
    content = path.read_bytes()
    for cut in (3, 8, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.raises(InputError, match=r"t.parquet' cannot be read as Parquet .*: write it again, or"):
            opened(path)
    path.write_bytes(content[:4] + bytes(len(IMAGES[0]) * 5) + content[4 + len(IMAGES[0]) * 5 :])
    assert list(failures(rows_of(opened(path)))) == list(range(10))


def test_a_file_that_changes_or_goes_after_it_was_listed(tmp_path: Path) -> None:
    path = tmp_path / "b.parquet"
    for name in ("a", "b", "c"):
        write_images(tmp_path / f"{name}.parquet")
    content = path.read_bytes()
    pq.write_table(table(image=IMAGES[:5]), tmp_path.parent / "other.parquet")

    def piped() -> None:
        path.unlink()
        os.mkfifo(path)

    def folder() -> None:
        path.unlink()
        path.mkdir()

    def replaced() -> None:
        (tmp_path.parent / "other.parquet").rename(path)

    def cut() -> None:
        os.truncate(path, len(content) - 30)

    ends: dict[Callable[[], None], tuple[str, str]] = {
        path.unlink: ("missing", "b.parquet was there when the run began, and is gone"),
        piped: ("unreadable", "b.parquet: not a regular file"),
        folder: ("unreadable", "b.parquet: not a regular file"),
        cut: ("unreadable", "b.parquet: Parquet magic bytes not found"),
        replaced: ("unreadable", "b.parquet: it has changed since it was listed"),
    }
    for change, (code, message) in ends.items():
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        source = opened(tmp_path)
        change()
        rows = rows_of(source)
        assert list(failures(rows)) == list(range(20, 40)), message
        assert all(text.startswith(f"{code}: {message}") for text in failures(rows).values()), failures(rows)[20]


def test_a_file_cut_while_it_is_read(tmp_path: Path) -> None:
    images = [np.random.default_rng(row).bytes(300_000) for row in range(40)]
    options = {"row_group_size": 10, "compression": "none", "use_dictionary": False}
    pq.write_table(table(image=images), tmp_path / "t.parquet", **options)
    source = opened(tmp_path / "t.parquet")
    rows = []
    for image in source.read(0):
        rows.append(image)
        if image.row == 4:
            os.truncate(tmp_path / "t.parquet", 4_000_000)
    assert [image.row for image in rows] == list(range(40))
    lost = [image.row for image in rows if isinstance(image.content, ImageError)]
    assert lost == list(range(lost[0], 40))
    assert 5 <= lost[0] <= 20


def test_ids_and_paths_of_every_kind(tmp_path: Path) -> None:
    ids = ["a\nb", "q\"'", "\x00", "\x1b[31m", "é", "e\u0301", "", " ", "x" * 100_000, "t.parquet#0"]
    paths = ["../up.png", str(tmp_path / "sub" / "here.png"), "nul\x00.png", "new\nline.png", "\x1b.png"]
    paths += ["x" * 100_000, "sub", "", ".", "/dev/zero"]
    (tmp_path / "sub").mkdir()
    for name in ("up.png", "sub/here.png", "sub/new\nline.png", "sub/\x1b.png"):
        (tmp_path / name).write_bytes(PNG)
    pq.write_table(table(image=paths, uid=ids), tmp_path / "sub" / "t.parquet")
    rows = rows_of(opened(tmp_path / "sub" / "t.parquet", id_column="uid"))
    assert [image.key for image in rows] == ids
    assert [image.content == PNG for image in rows] == [True, True, False, True, True] + [False] * 5
    codes = {row: text.partition(":")[0] for row, text in failures(rows).items()}
    assert codes == {2: "unreadable", 5: "unreadable", 6: "missing", **dict.fromkeys((7, 8, 9), "unreadable")}
    assert max(map(len, failures(rows).values())) < 1100


def test_nulls_and_empties_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    values = [None, {"bytes": None, "path": None}, {"bytes": b"", "path": "a.png"}, {"bytes": None, "path": "a.png"}]
    values += [{"bytes": PNG, "path": "gone.png"}]
    for kind in (STRUCT, pa.struct([("path", pa.large_string()), ("bytes", pa.large_binary())])):
        pq.write_table(table(image=pa.array(values, kind)), tmp_path / "t.parquet")
        rows = rows_of(opened(tmp_path / "t.parquet"))
        assert failures(rows) == dict.fromkeys((0, 1), "null: the row's image is null")
        assert [image.content for image in rows[2:]] == [b"", PNG, PNG]


class Wrapped(pa.ExtensionType):  # type: ignore[misc]  # pyarrow has no types here
    """Bytes under another name."""

    def __init__(self) -> None:
        super().__init__(pa.binary(), "tests.wrapped")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Wrapped:
        del storage_type, serialized
        return cls()


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([[PNG, PNG]], pa.list_(pa.binary())), r"list<element: binary>"),
        (pa.array([[{"bytes": PNG, "path": None}]], pa.list_(STRUCT)), r"list<element: struct<bytes: binary, path"),
        (pa.array([{"inner": {"bytes": PNG, "path": None}}]), r"struct<inner: struct<bytes: binary"),
        (pa.array([{"bytes": [PNG]}]), r"struct<bytes: list<element: binary"),
        (pa.array([[("a", PNG)]], pa.map_(pa.string(), pa.binary())), r"map<string, binary"),
    ],
)
def test_nested_images_are_refused_with_their_type(column: pa.Array, kind: str, tmp_path: Path) -> None:
    pq.write_table(table(pictures=column), tmp_path / "t.parquet")
    remedy = rf"'pictures' .*has type {kind}.*; an image column is .*write lists and other structs as one image a row"
    with pytest.raises(InputError, match=rf"no image column among pictures: .*{remedy}"):
        opened(tmp_path / "t.parquet")
    with pytest.raises(InputError, match=rf"column {remedy}"):
        opened(tmp_path / "t.parquet", image_column="pictures")


def test_extension_types_are_refused_where_pyarrow_knows_them(tmp_path: Path) -> None:
    column = pa.ExtensionArray.from_storage(Wrapped(), pa.array([PNG]))
    pq.write_table(table(image=column), tmp_path / "t.parquet")
    assert rows_of(opened(tmp_path / "t.parquet"))[0].content == PNG
    pa.register_extension_type(Wrapped())
    try:
        with pytest.raises(InputError, match=r"column 'image' of t.parquet has type extension<tests.wrapped"):
            opened(tmp_path / "t.parquet", image_column="image")
    finally:
        pa.unregister_extension_type("tests.wrapped")


def test_indices_beyond_a_dictionary_are_no_images(tmp_path: Path) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array(list(range(16)) * 4, pa.int32()), pa.array(IMAGES[:16]))
    for store_schema in (True, False):
        pq.write_table(table(image=column), tmp_path / "t.parquet", store_schema=store_schema, compression="none")
        content = bytearray((tmp_path / "t.parquet").read_bytes())
        _, footer = thrift.split(bytes(content))
        _, begin, _ = thrift.page_headers(bytes(content), thrift.chunk(footer, 0, 0))[1]
        begin += 4 + int.from_bytes(content[begin : begin + 4], "little")  # behind the definition levels
        content[begin : begin + 7] = bytes([32, 0x80, 0x01, 0xFF, 0xFF, 0xFF, 0xFF])  # 32 bits an index; 64 times -1
        (tmp_path / "t.parquet").write_bytes(content)
        assert list(failures(rows_of(opened(tmp_path / "t.parquet")))) == list(range(64))


PEAK_SCRIPT = """
import sys
from itertools import islice
from vlmembed.config import EncodeConfig
from vlmembed.sources import open_source
import pyarrow.parquet

def peak():
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) * 1024

before = peak()
for path in sys.argv[2:]:
    source = open_source(EncodeConfig(inputs=(path,), output="o.parquet", image_column="image"))
    lengths = [len(image.content) if isinstance(image.content, bytes) else -1
               for image in islice(source.read(0), int(sys.argv[1]))]
    print(len(lengths), min(lengths), max(lengths))
print(peak() - before)
"""


def read_in_child(paths: list[Path], max_rows: int) -> tuple[list[list[int]], int]:
    """Rows, shortest and longest content (-1: failed) of each file, and by how many bytes the process has grown."""
    command = [sys.executable, "-c", PEAK_SCRIPT, str(max_rows), *map(str, paths)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    return [list(map(int, line.split())) for line in output[: len(paths)]], int(output[len(paths)])


def test_files_that_would_fill_the_memory_do_not(tmp_path: Path) -> None:
    image = np.random.default_rng(0).bytes(MEGABYTE)
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), pa.array([image]))
    in_struct = pa.StructArray.from_arrays(
        [repeated, pa.nulls(100_000, pa.string())], fields=None, names=list(STRUCT.names)
    )
    for name, column in (("flat", repeated), ("struct", in_struct)):
        for schema in (True, False):
            pq.write_table(table(image=column), tmp_path / f"{name}{schema}.parquet", store_schema=schema)
    zeros = pa.array([bytes(MEGABYTE)] * 400)
    pages = {"use_dictionary": False, "compression": "zstd"}
    pq.write_table(table(image=zeros), tmp_path / "lie.parquet", **pages, write_batch_size=1, data_page_size=1)

    def claim_little(footer: thrift.Fields) -> None:
        thrift.row_group(footer, 0)[2][1] = thrift.chunk(footer, 0, 0)[6][1] = 1

    lie(tmp_path / "lie.parquet", claim_little)
    pq.write_table(table(image=zeros.slice(0, 140)), tmp_path / "page.parquet", **pages)
    pq.write_table(table(image=[bytes(140 * MEGABYTE)]), tmp_path / "value.parquet", compression="zstd")
    deltas = {"use_dictionary": False, "column_encoding": {"image": "DELTA_BYTE_ARRAY"}, "write_batch_size": 400}
    pq.write_table(table(image=[image] * 400), tmp_path / "delta.parquet", **deltas, data_page_size=2 * MEGABYTE)
    names = ["flatTrue", "flatFalse", "structTrue", "structFalse", "lie", "page", "value", "delta"]
    facts, grown = read_in_child([tmp_path / f"{name}.parquet" for name in names], 400)
    whole = [MEGABYTE, MEGABYTE]
    assert facts == [*[[400, *whole]] * 5, [140, -1, -1], [1, -1, -1], [400, *whole]]
    assert grown < 300 * MEGABYTE
    total = sum((tmp_path / f"{name}.parquet").stat().st_size for name in names)
    assert total < 12 * MEGABYTE


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "struct"])
def test_a_row_group_of_more_than_two_gigabytes(kind: str, tmp_path: Path) -> None:
    image = np.random.default_rng(0).bytes(MEGABYTE)
    row = pa.array([image], pa.binary()) if kind == "flat" else pa.array([{"bytes": image, "path": None}], STRUCT)
    path = tmp_path / "t.parquet"
    options = {"use_dictionary": False, "compression": "none", "write_statistics": False}
    try:
        pq.write_table(table(image=pa.chunked_array([row] * 2300)), path, row_group_size=2300, **options)
        assert pq.read_metadata(path).num_row_groups == 1
        assert path.stat().st_size > 2**31
        facts, grown = read_in_child([path], 10**9)
    finally:
        path.unlink(missing_ok=True)
    assert facts == [[2300, MEGABYTE, MEGABYTE]]
    assert grown < 300 * MEGABYTE


def test_a_row_beyond_what_a_page_can_say_is_unreadable(tmp_path: Path) -> None:
    pq.write_table(table(image=pa.array([PNG], pa.large_binary())), tmp_path / "t.parquet", compression="none")
    content = bytearray((tmp_path / "t.parquet").read_bytes())
    at = content.index(PNG) - 4
    content[at : at + 4] = (2**32 - 1).to_bytes(4, "little")  # a length of 4 GB
    (tmp_path / "t.parquet").write_bytes(content)
    assert list(failures(rows_of(opened(tmp_path / "t.parquet")))) == [0]


def test_only_the_row_groups_that_hold_a_wanted_row_are_read(tmp_path: Path) -> None:
    write_images(tmp_path / "t.parquet", compression="none", use_dictionary=False)
    content = bytearray((tmp_path / "t.parquet").read_bytes())
    content[4:200] = bytes(196)  # of the first row group
    (tmp_path / "t.parquet").write_bytes(content)
    source = opened(tmp_path / "t.parquet", image_column="image", keep_columns=("n",))
    rows = list(source.read_rows([11, 12, 19]))
    assert [(image.row, image.key, image.content) for image in rows] == [
        (row, f"t.parquet#{row}", IMAGES[row]) for row in (11, 12, 19)
    ]
    assert [image.columns.to_pylist() for image in rows if image.columns] == [[{"n": row}] for row in (11, 12, 19)]
    assert [getattr(image.content, "code", None) for image in source.read_rows([3])] == [FailureCode.UNREADABLE]
    assert list(source.read_rows([])) == []


TARGETS = {
    "raised": "raise ValueError(data)",
    "SIGSEGV": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "SIGALRM": "import time; time.sleep(10)",
    "Unable to allocate": "import numpy; numpy.ones(3 * 2**30, numpy.uint8)",
}


@pytest.mark.parametrize("how", TARGETS)
def test_the_fuzzer_reports_what_ends_the_child(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target.py").write_text(f"""
import hypothesis.strategies as st

EXAMPLES = st.just(b"poison")

def check(data):
    {TARGETS[how]}
""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (crash,) = fuzzing.fuzz("target", 0.01, seed=5, example_seconds=1).crashes
    assert how in crash.reason
    assert (crash.seed, crash.example) == (5, b"poison")
