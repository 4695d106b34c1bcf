"""Parquet files and Hugging Face datasets behind URLs: read by ranges, with what a server does to them."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from servers import http_server
from test_hf_dataset import picture, table_of, write_stream

from vlmembed.errors import ImageError, InputError
from vlmembed.remote import remote_file
from vlmembed.remote.remotes import Remotes
from vlmembed.sources import ipcfile
from vlmembed.sources.arrow import HFDatasetSource
from vlmembed.sources.hfstate import inside, is_hf_dataset
from vlmembed.sources.parquet import ParquetSource
from vlmembed.sources.readahead import ReadAhead
from vlmembed.types import EncodedImage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from servers import HttpServer

    from vlmembed.sources.base import Source

COLUMNS: dict[str, Any] = {"image_column": None, "id_column": None, "keep_columns": ()}


@contextmanager
def reading() -> Iterator[ReadAhead]:
    """A reader that may reach servers on this machine."""
    with Remotes(timeout_seconds=2, allow_local=True) as remotes:
        yield ReadAhead(timeout_seconds=10, max_source_pixels=10**6, remotes=remotes)


def rows_of(source: Source, start: int = 0) -> list[EncodedImage]:
    rows = list(source.read(start))
    assert [image.row for image in rows] == list(range(start, source.num_rows or 0))
    return rows


def failed(rows: list[EncodedImage]) -> dict[int, str]:
    return {image.row: str(image.content.code) for image in rows if isinstance(image.content, ImageError)}


def parquet_of(path: Path, contents: list[bytes], **options: Any) -> None:  # noqa: ANN401  of pyarrow
    table = pa.table({"n": range(len(contents)), "image": contents})
    pq.write_table(table, path, compression="none", use_dictionary=False, **options)


def num_bytes_asked(server: HttpServer) -> int:
    """By all requests for ranges."""
    total = 0
    for _, _, asked, _ in server.requests:
        if asked:
            first, last = asked.removeprefix("bytes=").split("-")
            total += int(last) - int(first) + 1 if last else 0
    return total


def test_rows_are_those_of_the_file_on_disk(tmp_path: Path) -> None:
    contents = [picture(row) for row in range(100)]
    parquet_of(tmp_path / "t.parquet", contents, row_group_size=15)
    settings = {**COLUMNS, "keep_columns": ("n",)}
    with http_server(tmp_path) as server, reading() as reader:
        source = ParquetSource([(f"{server.url}/t.parquet", "t.parquet")], reader=reader, **settings)
        rows = rows_of(source)
        assert [image.key for image in rows] == [f"t.parquet#{row}" for row in range(100)]
        assert [image.content for image in rows] == contents
        assert [image.columns.to_pylist() for image in rows if image.columns] == [[{"n": row}] for row in range(100)]
        assert [image.content for image in source.read_rows([3, 50, 99])] == [contents[row] for row in (3, 50, 99)]
        again = ParquetSource([(f"{server.url}/t.parquet", "t.parquet")], reader=reader, **settings)
        assert again.digest == source.digest
        local = ParquetSource([(str(tmp_path / "t.parquet"), "t.parquet")], reader=reader, **settings)
        assert (local.keys_digest, local.digest == source.digest) == (source.keys_digest, False)
        parquet_of(tmp_path / "t.parquet", contents[::-1], row_group_size=15)
        server.files["/t.parquet"] = (tmp_path / "t.parquet").read_bytes()
        changed = ParquetSource([(f"{server.url}/t.parquet", "t.parquet")], reader=reader, **settings)
        assert changed.digest != source.digest
        assert set(failed(rows_of(source)).values()) == {"unreadable"}  # no longer what was listed


@pytest.mark.parametrize("rows_per_page", [1, 20])
def test_a_file_is_asked_for_in_few_large_ranges(rows_per_page: int, tmp_path: Path) -> None:
    """Rows of 500 kB in two row groups: 20 MB. The heads of small pages cost as much as the pages themselves."""
    contents = [os.urandom(500_000) for _ in range(40)]
    options = {"write_batch_size": rows_per_page, "data_page_size": 1}
    parquet_of(tmp_path / "t.parquet", contents, row_group_size=20, **options)
    with http_server(tmp_path) as server, reading() as reader:
        settings = {**COLUMNS, "keep_columns": ("n",)}
        source = ParquetSource([(f"{server.url}/t.parquet", "t")], reader=reader, **settings)
        assert len(server.requests) <= 4
        server.requests.clear()
        assert [image.content for image in rows_of(source)] == contents
        assert len(server.requests) < 40
        assert num_bytes_asked(server) < (35 if rows_per_page > 1 else 60) * 10**6
        server.requests.clear()
        assert [image.row for image in source.read_rows([39])] == [39]
        assert num_bytes_asked(server) < (15 if rows_per_page > 1 else 25) * 10**6


def test_a_row_group_that_cannot_be_fetched_costs_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_file, "BLOCK_BYTES", 2**16)  # what is read ahead ends within the row group
    contents = [os.urandom(30_000) for _ in range(120)]
    parquet_of(tmp_path / "t.parquet", contents, row_group_size=40)
    with http_server(tmp_path) as server, reading() as reader:
        source = ParquetSource([(f"{server.url}/t.parquet", "t")], reader=reader, **COLUMNS)
        content = server.files["/t.parquet"]
        rows = []
        for image in source._rows(range(120)):  # without the rows that `read` has in flight
            assert isinstance(image, EncodedImage)
            rows.append(image)
            if image.row == 4:
                del server.files["/t.parquet"]
            if isinstance(image.content, ImageError):
                server.files["/t.parquet"] = content
        lost = failed(rows)
        assert [image.row for image in rows] == list(range(120))
        assert list(lost) == list(range(40, 80))
        assert set(lost.values()) == {"unreadable"}
        assert f"row group 1 of t: {server.url}/t.parquet" in str(rows[40].content)
        assert [image.content for image in rows[80:]] == contents[80:]


def test_a_connection_that_breaks_is_taken_up_again(tmp_path: Path) -> None:
    contents = [os.urandom(300_000) for _ in range(20)]
    parquet_of(tmp_path / "t.parquet", contents)
    with http_server(tmp_path) as server, reading() as reader:
        server.drop_after_bytes, server.drops = 100_000, 3
        source = ParquetSource([(f"{server.url}/t.parquet", "t")], reader=reader, **COLUMNS)
        assert [image.content for image in rows_of(source)] == contents


def test_files_that_cannot_be_listed_are_named(tmp_path: Path) -> None:
    parquet_of(tmp_path / "t.parquet", [os.urandom(10**6)] * 3, write_statistics=False)
    with http_server(tmp_path) as server, reading() as reader:
        with pytest.raises(InputError, match=rf"{server.url}/gone.parquet cannot be read as Parquet"):
            ParquetSource([(f"{server.url}/gone.parquet?token=secret", "t")], reader=reader, **COLUMNS)
        server.takes_ranges = False  # the end of the file is read first
        rows = rows_of(ParquetSource([(f"{server.url}/t.parquet", "t")], reader=reader, **COLUMNS))
        assert failed(rows) == dict.fromkeys(range(3), "unreadable")
        assert "the server takes no ranges" in str(rows[0].content)
    without = ReadAhead(timeout_seconds=10, max_source_pixels=10**6)
    with pytest.raises(InputError, match="is a URL: not read here"):
        ParquetSource([("http://nowhere.invalid/t.parquet", "t")], reader=without, **COLUMNS)


def test_paths_in_a_remote_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    paths = ["a.png", "../b.png", "/etc/passwd", "gone.png"]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = pa.array([{"bytes": None, "path": path} for path in paths], kind)
    pq.write_table(pa.table({"image": images}), tmp_path / "sub" / "t.parquet")
    (tmp_path / "sub" / "a.png").write_bytes(picture(1))
    (tmp_path / "b.png").write_bytes(picture(2))
    with http_server(tmp_path) as server, reading() as reader:
        rows = rows_of(ParquetSource([(f"{server.url}/sub/t.parquet", "t")], reader=reader, **COLUMNS))
        assert [image.content for image in rows[:2]] == [picture(1), picture(2)]
        assert failed(rows) == {2: "unreadable", 3: "missing"}


@pytest.mark.parametrize("held_bytes", [0, 10**9])
def test_datasets_are_counted_by_their_heads_and_read_batch_by_batch(
    held_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that are held in memory, and ones that are mapped."""
    monkeypatch.setattr(ipcfile, "MAX_HELD_BYTES", held_bytes)
    folder = tmp_path / "d"
    contents = [os.urandom(100_000) for _ in range(120)]
    write_stream(folder, pa.table({"image": contents[:100]}), pa.table({"image": contents[100:]}), rows=50)
    with http_server(tmp_path) as server, reading() as reader:
        url = f"{server.url}/d"
        assert is_hf_dataset(url, reader.remotes) == [""]
        assert is_hf_dataset(f"{server.url}/other", reader.remotes) is None
        source = HFDatasetSource([(url, "d")], reader=reader, **COLUMNS)
        assert source.num_rows == 120
        assert num_bytes_asked(server) < 6 * 10**6
        assert [image.content for image in rows_of(source)] == contents
        server.requests.clear()
        assert [image.content for image in source.read_rows([110])] == [contents[110]]
        assert not [path for path in server.paths() if path.endswith("data-0.arrow")]


def test_a_dataset_behind_a_url_that_was_cut(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    write_stream(folder, table_of(range(30)), table_of(range(30, 40)))
    path = folder / "data-0.arrow"
    path.write_bytes(path.read_bytes()[:-500])
    with http_server(tmp_path) as server, reading() as reader:
        rows = rows_of(HFDatasetSource([(f"{server.url}/d", "d")], reader=reader, **COLUMNS))
        assert failed(rows) == dict.fromkeys(range(20, 31), "unreadable")
        assert rows[30].key == "d/data-0.arrow!"
        assert len(rows) == 41


def test_names_below_a_url_come_before_its_options() -> None:
    assert inside("s3://b/d/?endpoint_override=h", "state.json") == "s3://b/d/state.json?endpoint_override=h"
    assert inside("https://h/d", "state.json") == "https://h/d/state.json"
    assert inside("/d", "state.json") == "/d/state.json"
