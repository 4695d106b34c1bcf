"""`vlmembed.read_tokens`: single images' tokens, and how little of an output is read for them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from outputs import KINDS, Rows, key_of
from servers import http_server, put_s3, s3_server, use_s3
from test_cache import POOLED, TOKENS, embedded, hash_of
from test_reuse import write_output

from vlmembed.errors import InputError
from vlmembed.finished import FinishedOutput
from vlmembed.schema import VectorColumn
from vlmembed.tokens import TokenFeatures, read_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LEVELS = (TOKENS[0], *(VectorColumn(name=f"deepstack_{level}", width=4, per_token=True) for level in (0, 1, 2)))
WIDE = VectorColumn(name="tokens", width=1536, dtype="float16", per_token=True)
REPEATS = {15: 2, 41: 40}


def check(features: TokenFeatures, number: int, columns: Sequence[VectorColumn]) -> None:
    """They are those of content `number`, bit for bit."""
    image = embedded(number, tuple(columns))
    for column, found in zip(columns, [features.tokens, *features.deepstack], strict=True):
        assert found.dtype == column.dtype
        np.testing.assert_array_equal(found, image.vectors[column.name])
        assert found.base is None
    assert features.size_hw == image.size_hw
    assert features.grid_hw == image.grid_hw
    assert features.content_hash == hash_of(number)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_found_by_id(kind: str, tmp_path: Path) -> None:
    rows = Rows(f"{tmp_path}/{kind}", 50, LEVELS, failed=[0, 13, 29], duplicates=REPEATS)
    path = rows.assemble()
    wanted = [44, 15, 3, 2, 49, 28]  # several parts, a duplicate, a line break in an id, no tokens at all (28)
    found = read_tokens(str(path), (key_of(row) for row in [*wanted, 3]))
    assert list(found) == [key_of(row) for row in wanted]
    for row, features in zip(wanted, found.values(), strict=True):
        check(features, rows.content_of(row), LEVELS)
    assert found[key_of(28)].tokens.shape == (0, 8)
    everything = read_tokens(path, [key_of(row) for row in rows.kept_rows])
    for row in rows.kept_rows:
        check(everything[key_of(row)], rows.content_of(row), LEVELS)
    assert read_tokens(path, []) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_without_tokens_is_named_with_the_reason(kind: str, tmp_path: Path) -> None:
    path = Rows(f"{tmp_path}/{kind}", 50, TOKENS, failed=[0, 13, 29]).assemble()
    with pytest.raises(
        InputError, match=r"no tokens of '00029.jpg' \(failed: corrupt, bad\): leave them out"
    ) as caught:
        read_tokens(path, [key_of(1), key_of(29)])
    assert str(path) in str(caught.value)
    asked = ["a", key_of(0), "zzz", *(f"more {number}" for number in range(7)), key_of(5)]
    expected = (
        r"'a' \(no row of that id\), '00000.jpg' \(failed: corrupt, bad\), 'zzz' \(no row of that id\) and 7 more"
    )
    with pytest.raises(InputError, match=expected):
        read_tokens(path, asked)
    for errors in tmp_path.rglob("*errors.parquet"):
        errors.unlink()
    with pytest.raises(InputError, match=r"'00029.jpg' \(no row of that id\)"):
        read_tokens(path, [key_of(29)])


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_without_tokens_says_so(kind: str, tmp_path: Path) -> None:
    path = Rows(f"{tmp_path}/{kind}", 5, POOLED).assemble()
    with pytest.raises(
        InputError, match=r"one vector per image and no tokens: .* or make an output with --emit tokens"
    ):
        read_tokens(path, [key_of(1)])
    with pytest.raises(InputError, match="it does not exist"):
        read_tokens(tmp_path / "absent.parquet", ["a"])


def test_a_damaged_output_is_named(tmp_path: Path) -> None:
    path = Rows(f"{tmp_path}/out.parquet", 50, TOKENS).assemble()
    content = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(0).column(1).data_page_offset
    content[start + 60 : start + 90] = bytes(30)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"out.parquet is damaged, or gone"):
        read_tokens(path, [key_of(1)])


class CountingFile(io.FileIO):
    """A file that notes what is read of it.

    Attributes:
        ranges: (offset, bytes) of every read.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.ranges: list[tuple[int, int]] = []

    def read(self, size: int | None = -1, /) -> bytes:
        """Read and note."""
        offset = self.tell()
        content = super().read(-1 if size is None else size)
        assert content is not None
        self.ranges.append((offset, len(content)))
        return content


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, CountingFile]]:
    """The files that `read_tokens` opens for their rows, by name."""
    files: dict[str, CountingFile] = {}

    def open_rows(path: Path | str) -> pq.ParquetFile:
        path = Path(path)
        files[path.name] = CountingFile(path)
        return pq.ParquetFile(pa.PythonFile(files[path.name], mode="r"), page_checksum_verification=True)

    monkeypatch.setattr(FinishedOutput, "opened", staticmethod(open_rows))
    yield files
    for file in files.values():
        file.close()


def large_output(name: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Rows:  # noqa: ANN401  of `Rows`
    """400 pictures, some megabytes of tokens, row groups of 10 to 60 kB."""
    monkeypatch.setattr("vlmembed.assembly.MAX_TOKEN_GROUP_BYTES", 60_000)
    monkeypatch.setattr("vlmembed.partfiles.PART_GROUP_ROWS", 10)
    return Rows(name, 400, (WIDE,), rows_per_part=100, **settings)


def touched(path: Path, ranges: list[tuple[int, int]], column: str) -> list[int]:
    """The row groups of whose `column` something was read, but by the first read, of the file's last 64 KiB."""
    metadata = pq.read_metadata(path)
    found = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunk = next(group.column(at) for at in range(11) if group.column(at).path_in_schema.startswith(column))
        start, stop = chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size
        if any(offset < stop and start < offset + count for offset, count in ranges[1:]):
            found.append(number)
    return found


def test_one_image_costs_one_row_group_not_a_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: dict[str, CountingFile]
) -> None:
    path = large_output(f"{tmp_path}/out.parquet", monkeypatch).assemble()
    metadata = pq.read_metadata(path)
    assert metadata.num_row_groups > 50
    check(read_tokens(path, [key_of(237)])[key_of(237)], 237, (WIDE,))
    ranges = opened["out.parquet"].ranges
    num_bytes = sum(count for _, count in ranges)
    size = path.stat().st_size
    largest = max(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    assert len(touched(path, ranges, "id")) == len(touched(path, ranges, "tokens")) == 1
    assert num_bytes < 64 * 1024 + metadata.serialized_size + 2 * largest  # the footer is read 64 KiB at least
    assert num_bytes < size / 10


def test_ids_of_one_row_group_are_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: dict[str, CountingFile]
) -> None:
    path = large_output(f"{tmp_path}/out.parquet", monkeypatch).assemble()
    keys = pq.read_table(path, columns=["id"])["id"].to_pylist()
    metadata, bounds = pq.read_metadata(path), [0]
    for number in range(metadata.num_row_groups):
        bounds.append(bounds[-1] + metadata.row_group(number).num_rows)
    wanted = keys[bounds[3] : bounds[5]] + keys[bounds[20] : bounds[21]]
    assert list(read_tokens(path, wanted)) == wanted
    ranges = opened["out.parquet"].ranges
    assert touched(path, ranges, "tokens") == [3, 4, 20]
    assert len([1 for offset, _ in ranges if offset == metadata.row_group(20).column(1).data_page_offset]) <= 1


def test_of_a_folder_only_the_part_with_the_image_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: dict[str, CountingFile]
) -> None:
    folder = large_output(f"{tmp_path}/out/", monkeypatch).assemble()
    assert list(read_tokens(folder, [key_of(150)])) == [key_of(150)]
    assert [touched(folder / name, file.ranges, "tokens") for name, file in opened.items()] == [[], [5]]
    assert len(opened) == 2  # it was found in the second of four


def test_ids_in_no_order_are_found_by_reading_ids_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: dict[str, CountingFile]
) -> None:
    """``file.parquet#9`` comes after ``#10``: statistics rule little out, and the id columns are read."""
    monkeypatch.setattr("outputs.key_of", lambda row: f"p.parquet#{row * 7919 % 400}")
    path = large_output(f"{tmp_path}/out.parquet", monkeypatch).assemble()
    assert list(read_tokens(path, ["p.parquet#253"])) == ["p.parquet#253"]  # row 387
    assert len(touched(path, opened["out.parquet"].ranges, "tokens")) == 1
    assert len(touched(path, opened["out.parquet"].ranges, "id")) > 10


def test_files_without_statistics_are_read_too(tmp_path: Path) -> None:
    path = write_output(tmp_path / "out.parquet", range(35), TOKENS, write_statistics=False)
    check(read_tokens(path, ["17.jpg"])["17.jpg"], 17, TOKENS)
    long = "x" * 5000  # longer than pyarrow keeps statistics of
    path = write_output(tmp_path / "long.parquet", range(35), TOKENS, prefix=long)
    check(read_tokens(path, [f"{long}17.jpg"])[f"{long}17.jpg"], 17, TOKENS)
    with pytest.raises(InputError, match="no row of that id"):
        read_tokens(path, ["17.jpg"])


def test_of_rows_with_one_id_the_first_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An `--id-column` may repeat itself."""
    monkeypatch.setattr("outputs.key_of", lambda row: str(row % 10))
    for kind in KINDS:
        path = Rows(f"{tmp_path}/{kind.replace('out', kind[-3:].strip('/'))}", 30, TOKENS).assemble()
        check(read_tokens(path, ["7"])["7"], 7, TOKENS)


def test_row_groups_of_tokens_are_small_and_have_page_indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmembed.assembly.MAX_TOKEN_GROUP_BYTES", 1000)
    rows = Rows(f"{tmp_path}/out.parquet", 60, TOKENS)
    path = rows.assemble()
    metadata = pq.read_metadata(path)
    assert metadata.num_row_groups > 5
    column = metadata.row_group(0).column(0)
    assert column.has_column_index
    assert column.has_offset_index
    counts = [len(values) for values in rows.vectors("tokens")]
    assert pl.read_parquet(path)["tokens"].list.len().to_list() == counts
    query = duckdb.read_parquet(str(path)).filter("id = '00044.jpg'").project("len(tokens)")
    assert query.fetchall() == [(counts[44],)]
    pooled = Rows(f"{tmp_path}/pooled.parquet", 60, POOLED).assemble()
    assert pq.read_metadata(pooled).num_row_groups == 1


def test_tokens_behind_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {name: Rows(f"{tmp_path}/{name}", 50, LEVELS, failed=[0, 29]) for name in ("out.parquet", "out/")}
    for each in rows.values():
        each.assemble()
    files = {f"/{path.relative_to(tmp_path)}": path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with s3_server() as endpoint, http_server(files) as server:
        put_s3(endpoint, {f"bucket{name}": content for name, content in files.items()})
        use_s3(endpoint, monkeypatch)
        for name, each in rows.items():
            found = read_tokens(f"s3://bucket/{name}", [key_of(44), key_of(3)])
            assert list(found) == [key_of(44), key_of(3)]
            check(found[key_of(44)], each.content_of(44), LEVELS)
            with pytest.raises(InputError, match=r"no tokens of '00029.jpg' \(failed: corrupt, bad\)"):
                read_tokens(f"s3://bucket/{name}", [key_of(29)])
        with pytest.raises(InputError, match=r"s3://bucket/none\.parquet does not exist"):
            read_tokens("s3://bucket/none.parquet", ["a"])
        with pytest.raises(InputError, match="allow-local-urls"):
            read_tokens(f"{server.url}/out.parquet", [key_of(44)])
        found = read_tokens(f"{server.url}/out.parquet", [key_of(44)], allow_local_urls=True)
        check(found[key_of(44)], rows["out.parquet"].content_of(44), LEVELS)
