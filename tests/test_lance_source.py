"""Lance datasets, as pylance writes them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import SAMPLES
from datasets import Dataset, Features, Image, Value, disable_progress_bars

from vlmembed.errors import ImageError, InputError, MissingExtraError
from vlmembed.sources.arrow import HFDatasetSource
from vlmembed.sources.folder import FolderSource
from vlmembed.sources.lance import LanceSource, storage_options
from vlmembed.sources.parquet import ParquetSource
from vlmembed.sources.readahead import ReadAhead

if TYPE_CHECKING:
    from pathlib import Path

    from vlmembed.sources.base import Source
    from vlmembed.types import EncodedImage

PNG = (SAMPLES / "drawings/one-pixel.png").read_bytes()
COLUMNS: dict[str, Any] = {"image_column": None, "id_column": None, "keep_columns": ()}


def reader() -> ReadAhead:
    return ReadAhead(timeout_seconds=10, max_source_pixels=10**6)


def source_of(*paths: Path, **settings: Any) -> LanceSource:  # noqa: ANN401  of the source
    return LanceSource([(str(path), path.name) for path in paths], reader=reader(), **{**COLUMNS, **settings})


def rows_of(source: Source, start: int = 0) -> list[EncodedImage]:
    rows = list(source.read(start))
    assert [image.row for image in rows] == list(range(start, source.num_rows or 0))
    assert len({image.key for image in rows}) == len(rows)
    return rows


def kept(rows: list[EncodedImage]) -> list[dict[str, Any]]:
    return [row for image in rows if image.columns is not None for row in image.columns.to_pylist()]


def failed(rows: list[EncodedImage]) -> list[int]:
    return [image.row for image in rows if isinstance(image.content, ImageError)]


def picture(row: int) -> bytes:
    return PNG + bytes([row])


def write(path: Path, rows: range, **options: Any) -> lance.LanceDataset:  # noqa: ANN401  of Lance
    columns = {
        "image": [picture(row) for row in rows],
        "n": list(rows),
        "meta": [{"caption": f"c{row}", "inner": {"picture": picture(row)}} if row % 5 else None for row in rows],
    }
    return lance.write_dataset(pa.table(columns), str(path), **options)


def test_rows_of_every_fragment_come_in_order(tmp_path: Path) -> None:
    write(tmp_path / "a.lance", range(50), max_rows_per_file=20)
    source = source_of(tmp_path / "a.lance", image_column="image", keep_columns=("n", "meta.caption"))
    rows = rows_of(source)
    assert source.num_rows == 50
    assert [image.key for image in rows] == [f"a.lance#{row}" for row in range(50)]
    assert [image.content for image in rows] == [picture(row) for row in range(50)]
    assert kept(rows) == [{"n": row, "meta.caption": f"c{row}" if row % 5 else None} for row in range(50)]
    assert source.kept_schema == pa.schema([("n", pa.int64()), ("meta.caption", pa.string())])
    assert [image.content for image in rows_of(source, 37)] == [picture(row) for row in range(37, 50)]
    for wanted in ([], [0], [19, 20, 21], [3, 4, 39, 40, 49], range(5, 45)):
        chosen = list(source.read_rows(wanted))
        assert [(image.row, image.content) for image in chosen] == [(row, picture(row)) for row in wanted]
    assert all(image.columns.get_total_buffer_size() < 200 for image in rows if image.columns is not None)


def test_images_and_ids_within_structs(tmp_path: Path) -> None:
    write(tmp_path / "a.lance", range(12))
    source = source_of(tmp_path / "a.lance", image_column="meta.inner.picture", id_column="n")
    rows = rows_of(source)
    assert [image.key for image in rows] == [str(row) for row in range(12)]
    assert failed(rows) == [0, 5, 10]
    assert rows[11].content == picture(11)
    with pytest.raises(InputError, match=r"a.lance has no column 'meta.x'; .*'meta' has meta.caption, meta.inner"):
        source_of(tmp_path / "a.lance", image_column="image", keep_columns=("meta.x",))
    write(tmp_path / "b.lance", range(11, 13))
    with pytest.raises(InputError, match=r"--id-column 'n' repeats an id, in b.lance; the first is '11'"):
        source_of(tmp_path / "a.lance", tmp_path / "b.lance", image_column="image", id_column="n")


def test_a_source_stays_with_its_version(tmp_path: Path) -> None:
    dataset = write(tmp_path / "a.lance", range(30), max_rows_per_file=10)
    before = source_of(tmp_path / "a.lance", image_column="image")
    assert source_of(tmp_path / "a.lance", image_column="image").digest == before.digest
    dataset.delete("n in (3, 14)")
    write(tmp_path / "a.lance", range(30, 33), mode="append")
    assert [image.content for image in rows_of(before)] == [picture(row) for row in range(30)]
    after = source_of(tmp_path / "a.lance", image_column="image", keep_columns=("n",))
    assert (after.num_rows, after.digest == before.digest, after.keys_digest == before.keys_digest) == (
        31,
        False,
        False,
    )
    left = [row for row in range(33) if row not in {3, 14}]
    assert [image.content for image in rows_of(after)] == [picture(row) for row in left]
    assert [image.content for image in after.read_rows([2, 3, 12, 13, 30])] == [
        picture(row) for row in (2, 4, 13, 15, 32)
    ]
    assert rows_of(after)[3].key == "a.lance#3"


@pytest.mark.parametrize("version", ["2.0", "2.1", "2.2"])
def test_columns_encoded_as_blobs_are_read_like_any_other(version: Any, tmp_path: Path) -> None:  # noqa: ANN401  a literal of Lance's
    field = pa.field("image", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    images = [os.urandom(100_000) for _ in range(10)]
    table = pa.table({"image": [*images, None, b""], "n": range(12)}, pa.schema([field, ("n", pa.int64())]))
    lance.write_dataset(table, str(tmp_path / "a.lance"), data_storage_version=version)
    source = source_of(tmp_path / "a.lance", keep_columns=("n",))
    rows = rows_of(source)
    assert [image.content for image in rows[:10]] == images
    assert failed(rows) == [10]
    assert rows[11].content == b""
    assert kept(rows) == [{"n": row} for row in range(12)]
    assert [image.content for image in source.read_rows([4, 9])] == [images[4], images[9]]


def test_paths_are_relative_to_the_dataset(tmp_path: Path) -> None:
    paths = ["in.png", "../beside.png", str(tmp_path / "beside.png"), "gone.png"]
    lance.write_dataset(pa.table({"image": paths}), str(tmp_path / "a.lance"))
    for name in ("beside.png", "a.lance/in.png"):
        (tmp_path / name).write_bytes(PNG)
    rows = rows_of(source_of(tmp_path / "a.lance"))
    assert [image.content for image in rows[:3]] == [PNG] * 3
    assert failed(rows) == [3]


@pytest.mark.parametrize("how", ["gone", "cut", "empty", "zeroed"])
def test_a_damaged_file_costs_the_rows_of_its_fragment(how: str, tmp_path: Path) -> None:
    dataset = write(tmp_path / "a.lance", range(30), max_rows_per_file=10)
    (file,) = dataset.get_fragments()[1].data_files()
    path = tmp_path / "a.lance" / "data" / file.path
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        half = len(content) // 2
        path.write_bytes({"cut": content[:half], "empty": b"", "zeroed": bytes(half * 2) + content[half * 2 :]}[how])
    rows = rows_of(source_of(tmp_path / "a.lance", image_column="image"))
    assert failed(rows) == list(range(10, 20))
    assert {image.content.code for image in rows if isinstance(image.content, ImageError)} == {"unreadable"}
    assert str(rows[10].content).startswith("a.lance, fragment 1: ")
    assert rows[20].content == picture(20)


def test_what_is_no_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.lance").mkdir()
    with pytest.raises(InputError, match=r"a.lance' cannot be read as a Lance dataset .*: write it again, or leave it"):
        source_of(tmp_path / "a.lance")
    with pytest.raises(InputError, match=r"https://host/a.lance'?: Lance datasets are read from disks, s3:// and gs"):
        LanceSource([("https://host/a.lance", "a")], reader=reader(), **COLUMNS)
    with pytest.raises(
        InputError, match=r"s3://b/a.lance'?: Lance takes no options behind a URL: give them by the env"
    ):
        LanceSource([("s3://b/a.lance?endpoint_override=host", "a")], reader=reader(), **COLUMNS)
    write(tmp_path / "b.lance", range(3))
    lance.write_dataset(pa.table({"image": ["a.png"], "n": [1]}), str(tmp_path / "c.lance"))
    with pytest.raises(InputError, match=r"c.lance: column 'image' is string, and binary in b.lance"):
        source_of(tmp_path / "b.lance", tmp_path / "c.lance", image_column="image")


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(MissingExtraError, match=r"a.lance' is a Lance dataset: pip install 'vlmembed\[lance\]'"):
        source_of(tmp_path / "a.lance")


def test_another_server_for_s3_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    assert storage_options("s3://bucket/a.lance") is None
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:9000")
    options = {"aws_endpoint": "http://localhost:9000", "allow_http": "true"}
    assert storage_options("s3://bucket/a.lance") == options
    assert storage_options("gs://bucket/a.lance") is None
    assert storage_options("/data/a.lance") is None
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://s3.example.org")
    assert storage_options("s3://b/a.lance") == {"aws_endpoint": "https://s3.example.org", "allow_http": "false"}


MEASURE = """
import sys
from vlmembed.sources.lance import LanceSource
from vlmembed.sources.readahead import ReadAhead
import lance

def peak():
    with open("/proc/self/status") as status:  # what getrusage tells is the parent's too
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

reader = ReadAhead(timeout_seconds=10, max_source_pixels=10**6)
columns = {"image_column": "image", "id_column": None, "keep_columns": ("n",)}
lance.dataset(sys.argv[1])
before = peak()
source = LanceSource([(sys.argv[1], "d")], reader=reader, **columns)
kept = [image.columns for image in source.read(0) if len(image.content) == int(sys.argv[2])]
print(len(kept), peak() - before)
"""


def grown(path: Path, num_bytes: int) -> tuple[int, int]:
    """Rows with pictures of so many bytes, and by how many bytes a process grows that reads them."""
    command = [sys.executable, "-c", MEASURE, str(path), str(num_bytes)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    num_rows, num_grown = map(int, output.split())
    return num_rows, num_grown


def write_many(path: Path, num_rows: int) -> None:
    """Pictures of a megabyte, in one fragment."""
    schema = pa.schema([("image", pa.binary()), ("n", pa.int64())])
    batches = (
        pa.record_batch([[os.urandom(10**6) for _ in range(20)], range(first, first + 20)], schema)
        for first in range(0, num_rows, 20)
    )
    lance.write_dataset(pa.RecordBatchReader.from_batches(schema, batches), str(path))


@pytest.mark.slow
def test_a_large_dataset_does_not_fill_the_memory(tmp_path: Path) -> None:
    write_many(tmp_path / "a.lance", 2300)
    num_rows, num_grown = grown(tmp_path / "a.lance", 10**6)
    assert num_rows == 2300
    assert num_grown < 600 * 10**6  # 330 to 425 MB were seen, with 0.6 GB as with 2.3: Lance's own buffers


def test_the_same_pictures_in_every_kind_of_input_are_the_same(tmp_path: Path) -> None:
    disable_progress_bars()
    images = [path.read_bytes() for path in sorted((SAMPLES / "photos").iterdir()) if path.suffix == ".jpg"][:5]
    folder = FolderSource(reader())
    (tmp_path / "folder").mkdir()
    for number, content in enumerate(images):
        path = tmp_path / "folder" / f"{number}.jpg"
        path.write_bytes(content)
        folder.add(str(path), path.name)
    folder.seal()
    structs = [{"bytes": content, "path": None} for content in images]
    dataset = Dataset.from_dict(
        {"image": structs, "n": list(range(5))}, features=Features({"image": Image(), "n": Value("int64")})
    )
    dataset.save_to_disk(tmp_path / "hf", num_shards=2)
    dataset.to_parquet(tmp_path / "t.parquet")
    pq.write_table(pa.table({"image": images}), tmp_path / "u.parquet")
    lance.write_dataset(pa.table({"image": images}), str(tmp_path / "a.lance"))
    sources: list[Source] = [
        folder,
        HFDatasetSource([(str(tmp_path / "hf"), "hf")], reader=reader(), **COLUMNS),
        ParquetSource([(str(tmp_path / "t.parquet"), "t")], reader=reader(), **COLUMNS),
        ParquetSource([(str(tmp_path / "u.parquet"), "u")], reader=reader(), **COLUMNS),
        source_of(tmp_path / "a.lance"),
    ]
    for source in sources:
        assert [image.content for image in rows_of(source)] == images
        source.close()
