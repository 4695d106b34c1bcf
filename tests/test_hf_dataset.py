"""Hugging Face datasets on disk, as `datasets` itself writes them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest
from conftest import SAMPLES
from datasets import Dataset, DatasetDict, Features, Image, List, Value, disable_progress_bars
from PIL import Image as Pillow

from vlmembed.errors import FailureCode, ImageError, InputError
from vlmembed.remote.retries import Retries, TransientError
from vlmembed.sources.arrow import HFDatasetSource
from vlmembed.sources.hfstate import is_hf_dataset
from vlmembed.sources.messages import Kind, read_messages
from vlmembed.sources.parquet import ParquetSource
from vlmembed.sources.readahead import ReadAhead

if TYPE_CHECKING:
    from vlmembed.remote.remotes import Remotes
    from vlmembed.sources.base import Source
    from vlmembed.types import EncodedImage

PNG = (SAMPLES / "drawings/one-pixel.png").read_bytes()


@pytest.fixture(autouse=True)
def _silence() -> None:
    disable_progress_bars()


def picture(row: int) -> bytes:
    file = io.BytesIO()
    Pillow.new("RGB", (3, 2), (row % 256, row // 256, 0)).save(file, "PNG")
    return file.getvalue()


def dataset_of(rows: range) -> Dataset:
    columns: dict[str, list[Any]] = {
        "image": [{"bytes": picture(row), "path": None} for row in rows],
        "n": list(rows),
        "meta": [{"caption": f"c{row}", "uid": f"u{row}"} for row in rows],
    }
    features = Features(
        {"image": Image(), "n": Value("int64"), "meta": {"caption": Value("string"), "uid": Value("string")}}
    )
    return Dataset.from_dict(columns, features=features)


def source_of(*splits: Path, **settings: Any) -> HFDatasetSource:  # noqa: ANN401  of the source
    columns = {"image_column": None, "id_column": None, "keep_columns": (), **settings}
    reader = ReadAhead(timeout_seconds=10, max_source_pixels=10**6)
    return HFDatasetSource([(str(folder), folder.name) for folder in splits], reader=reader, **columns)


def rows_of(source: Source, start: int = 0) -> list[EncodedImage]:
    rows = list(source.read(start))
    assert [image.row for image in rows] == list(range(start, source.num_rows or 0))
    assert len({image.key for image in rows}) == len(rows)
    return rows


def failures(rows: list[EncodedImage]) -> dict[str, tuple[str, str]]:
    """Code and message of what failed, by id."""
    return {
        image.key: (image.content.code, str(image.content)) for image in rows if isinstance(image.content, ImageError)
    }


def kept(rows: list[EncodedImage]) -> list[dict[str, Any]]:
    return [row for image in rows if image.columns is not None for row in image.columns.to_pylist()]


def test_rows_are_numbered_through_a_split_whatever_its_files_are(tmp_path: Path) -> None:
    digests = set()
    for num_shards in (1, 4):
        folder = tmp_path / str(num_shards) / "pets"
        dataset_of(range(50)).save_to_disk(folder, num_shards=num_shards)
        source = source_of(folder, keep_columns=("n", "meta.caption"))
        rows = rows_of(source)
        assert [image.key for image in rows] == [f"pets#{row}" for row in range(50)]
        assert [image.content for image in rows] == [picture(row) for row in range(50)]
        assert kept(rows) == [{"n": row, "meta.caption": f"c{row}"} for row in range(50)]
        assert source.kept_schema == pa.schema([("n", pa.int64()), ("meta.caption", pa.string())])
        assert [image.key for image in rows_of(source, 37)][:2] == ["pets#37", "pets#38"]
        chosen = list(source.read_rows([0, 13, 14, 49]))
        assert [image.content for image in chosen] == [picture(row) for row in (0, 13, 14, 49)]
        digests.add(source.keys_digest)
    assert len(digests) == 1


def test_splits_and_what_is_no_dataset(tmp_path: Path) -> None:
    dataset_of(range(5)).save_to_disk(tmp_path / "one")
    DatasetDict({"train": dataset_of(range(5)), "test": dataset_of(range(5, 8))}).save_to_disk(tmp_path / "both")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "state.json").write_text('{"other": 1}')
    (tmp_path / "pictures" / "dataset_dict.json").write_text("no JSON")
    assert is_hf_dataset(str(tmp_path / "one")) == [""]
    assert is_hf_dataset(str(tmp_path / "both")) == ["train", "test"]
    assert is_hf_dataset(str(tmp_path / "pictures")) is None
    assert is_hf_dataset(str(tmp_path / "nowhere")) is None
    rows = rows_of(source_of(tmp_path / "both" / "train", tmp_path / "both" / "test"))
    assert [image.key for image in rows] == [f"train#{row}" for row in range(5)] + [f"test#{row}" for row in range(3)]
    assert [image.content for image in rows] == [picture(row) for row in range(8)]


def test_a_selection_by_indices_is_refused_with_the_remedy(tmp_path: Path) -> None:
    dataset_of(range(5)).save_to_disk(tmp_path / "d")
    state = json.loads((tmp_path / "d" / "state.json").read_text())
    state["_format_columns"] = ["n"]  # a view for Python: no row is less for it
    (tmp_path / "d" / "state.json").write_text(json.dumps(state))
    assert len(rows_of(source_of(tmp_path / "d"))) == 5
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (tmp_path / "d" / "state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match=r"d' holds a selection .* by indices: call flatten_indices\(\) and save it"):
        source_of(tmp_path / "d")
    for wrong in ({}, {"_data_files": [{"filename": "../x.arrow"}]}, {"_data_files": [1]}, {"_data_files": 1}):
        (tmp_path / "d" / "state.json").write_text(json.dumps(wrong))
        with pytest.raises(InputError, match=r"state.json' does not say which files beside it hold the rows: save the"):
            source_of(tmp_path / "d")


def test_a_shuffled_selection_is_saved_as_rows(tmp_path: Path) -> None:
    dataset = dataset_of(range(20)).shuffle(seed=1).select(range(7))
    dataset.save_to_disk(tmp_path / "d")
    assert kept(rows_of(source_of(tmp_path / "d", keep_columns=("n",)))) == [{"n": number} for number in dataset["n"]]


def test_ids_of_a_column(tmp_path: Path) -> None:
    dataset_of(range(20)).save_to_disk(tmp_path / "d", num_shards=2)
    rows = rows_of(source_of(tmp_path / "d", id_column="meta.uid"))
    assert [image.key for image in rows] == [f"u{row}" for row in range(20)]
    dataset_of(range(3)).map(lambda row: {"n": row["n"] // 2}).save_to_disk(tmp_path / "d")
    with pytest.raises(InputError, match=r"--id-column 'n' repeats an id, in d/data-00000-of-00001.arrow"):
        source_of(tmp_path / "d", id_column="n")
    with pytest.raises(InputError, match=r"data-.*arrow has no column 'meta.x'; .*'meta' has meta.caption, meta.uid"):
        source_of(tmp_path / "d", keep_columns=("meta.x",))


def test_images_without_bytes_are_read_by_their_path(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.png").write_bytes(PNG)
    values = [str(tmp_path / "d" / "a.png"), "a.png", "gone.png", "http://nowhere.invalid/a.png", None]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = pa.array([{"bytes": None, "path": value} for value in values], kind)
    write_stream(tmp_path / "d", pa.table({"image": images}))
    contents = [image.content for image in rows_of(source_of(tmp_path / "d"))]
    found = [content.code if isinstance(content, ImageError) else content for content in contents]
    assert found == [PNG, PNG, "missing", "unreadable", "null"]


def write_stream(folder: Path, *tables: pa.Table, rows: int = 10, **options: Any) -> None:  # noqa: ANN401  pyarrow's
    """A dataset of these files, in batches of so many rows."""
    folder.mkdir(exist_ok=True)
    names = [f"data-{number}.arrow" for number in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        settings = pa.ipc.IpcWriteOptions(**options)
        with pa.ipc.new_stream(str(folder / name), table.schema, options=settings) as stream:
            stream.write_table(table, max_chunksize=rows)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))


def table_of(rows: range) -> pa.Table:
    return pa.table({"image": [PNG + bytes([row]) for row in rows], "n": list(rows)})


def test_a_file_that_was_cut_costs_its_batch_and_one_row_for_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    write_stream(folder, table_of(range(30)), table_of(range(30, 60)))
    path = folder / "data-0.arrow"
    whole = path.read_bytes()
    with pa.OSFile(str(path)) as file:
        _, first, second, third = read_messages(file, len(whole))
    assert (first.kind, first.num_rows, third.end) == (Kind.BATCH, 10, len(whole) - 8)
    for cut in (second.end - 1, second.start + 200):  # in its body, in its head
        path.write_bytes(whole[:cut])
        rows = rows_of(source_of(folder))
        lost = failures(rows)
        promised = [] if cut == second.start + 200 else [f"d#{row}" for row in range(10, 20)]
        assert list(lost) == [*promised, "d/data-0.arrow!"]
        assert {code for code, _ in lost.values()} == {"unreadable"}
        assert [image.content for image in rows[:10]] == [PNG + bytes([row]) for row in range(10)]
        assert [image.content for image in rows[-30:]] == [PNG + bytes([row]) for row in range(30, 60)]
    for cut, message in ((second.start, "without the mark that ends a stream"), (10, "without the mark that ends")):
        path.write_bytes(whole[:cut])
        lost = failures(rows_of(source_of(folder)))
        assert list(lost) == ["d/data-0.arrow!"]
        assert message in lost["d/data-0.arrow!"][1]
    path.write_bytes(b"")
    assert list(failures(rows_of(source_of(folder)))) == ["d/data-0.arrow!"]
    path.unlink()
    assert failures(rows_of(source_of(folder))) == {"d/data-0.arrow!": ("missing", "d/data-0.arrow is not there")}
    with pytest.raises(InputError, match=r"--id-column 'n' of d/data-0.arrow cannot be read .*: leave it out, or"):
        source_of(folder, id_column="n")
    (folder / "data-1.arrow").unlink()
    with pytest.raises(InputError, match=r"no file of d can be read \(d/data-0.arrow: .* is not there\): save the"):
        source_of(folder)


def test_a_batch_that_lies_costs_its_own_rows(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    write_stream(folder, table_of(range(30)))
    path = folder / "data-0.arrow"
    content = bytearray(path.read_bytes())
    at = content.index(PNG + bytes([10]))
    begin = content.rindex(bytes([len(PNG) + 1, 0, 0, 0]), 0, at) - 4  # the offsets of the second batch
    content[begin + 8 : begin + 12] = (2**31 - 1).to_bytes(4, "little")
    path.write_bytes(content)
    lost = failures(rows_of(source_of(folder)))
    assert list(lost) == [f"d#{row}" for row in range(10, 20)]
    assert "data-0.arrow, batch at byte" in lost["d#10"][1]


def test_heads_that_promise_too_much_are_not_believed(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    write_stream(folder, table_of(range(30)), rows=30)
    path = folder / "data-0.arrow"
    content = path.read_bytes()
    for number in (2**40, 31):
        lie = content.replace((30).to_bytes(8, "little"), number.to_bytes(8, "little"), 1)
        assert lie != content
        path.write_bytes(lie)
        lost = failures(rows_of(source_of(folder)))
        if number == 31:
            assert list(lost) == [f"d#{row}" for row in range(31)]
        else:
            assert list(lost) == ["d/data-0.arrow!"]
            assert "too many for a file of" in lost["d/data-0.arrow!"][1]
    path.write_bytes(b"something else entirely, and long enough")
    with pytest.raises(InputError, match=r"no file of d can be read .*no message at byte 0"):
        source_of(folder)


def test_compressed_batches_are_refused_row_by_row(tmp_path: Path) -> None:
    write_stream(tmp_path / "d", table_of(range(3)), compression="zstd")
    lost = failures(rows_of(source_of(tmp_path / "d")))
    assert list(lost) == ["d#0", "d#1", "d#2"]
    assert "the batch is compressed" in lost["d#0"][1]


def test_columns_with_dictionaries_are_read(tmp_path: Path) -> None:
    labels = pa.array([f"l{row % 7}" for row in range(30)])
    chunks = pa.chunked_array([labels[begin : begin + 10].dictionary_encode() for begin in (0, 10, 20)])
    table = table_of(range(30)).append_column("label", chunks)
    write_stream(tmp_path / "d", table)
    source = source_of(tmp_path / "d", keep_columns=("label",))
    assert kept(rows_of(source)) == [{"label": label} for label in labels.to_pylist()]
    assert kept(list(source.read_rows([25]))) == [{"label": "l4"}]


def test_a_file_that_changes_after_it_was_listed_costs_its_rows(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    path = folder / "data-0.arrow"
    for how, code in (("gone", "missing"), ("cut", "unreadable"), ("touched", "unreadable"), ("pipe", "unreadable")):
        write_stream(folder, table_of(range(20)), table_of(range(20, 25)))
        source = source_of(folder)
        if how == "cut":
            os.truncate(path, 2000)
        elif how == "touched":
            os.utime(path, ns=(1, 1))
        else:
            path.unlink()
        if how == "pipe":
            os.mkfifo(path)
        rows = rows_of(source)
        assert {found for found, _ in failures(rows).values()} == {code}, how
        assert list(failures(rows)) == [f"d#{row}" for row in range(20)]
        path.unlink(missing_ok=True)


def test_a_file_cut_while_it_is_read_does_not_end_the_process(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    content = os.urandom(200_000)
    write_stream(folder, pa.table({"image": [content] * 60}), rows=20)
    rows = []
    for image in source_of(folder).read(0):
        rows.append(image)
        if image.row == 4:
            os.truncate(folder / "data-0.arrow", 500_000)
    lost = [image.row for image in rows if isinstance(image.content, ImageError)]
    assert [image.row for image in rows] == list(range(60))
    assert lost == list(range(lost[0], 60))
    assert lost[0] < 20
    assert isinstance(rows[lost[0]].content, ImageError)
    assert "it has been cut while it was read" in str(rows[lost[0]].content)


def test_the_parquet_files_of_datasets_are_read_too(tmp_path: Path) -> None:
    """The layout of the hub: ``data/train-00000-of-00002.parquet``."""
    (tmp_path / "data").mkdir()
    features = Features(
        {"data": {"image": Image(decode=False), "tags": List(Value("string"))}, "labels": List({"x": Value("int8")})}
    )
    for shard in range(2):
        values = [
            {"data": {"image": {"bytes": picture(row), "path": f"{row}.png"}, "tags": ["a"]}, "labels": [{"x": 1}]}
            for row in range(shard * 5, shard * 5 + 5)
        ]
        Dataset.from_list(values, features=features).to_parquet(
            tmp_path / "data" / f"train-{shard:05}-of-00002.parquet"
        )
    reader = ReadAhead(timeout_seconds=10, max_source_pixels=10**6)
    source = ParquetSource(
        [(str(path), path.name) for path in sorted((tmp_path / "data").iterdir())],
        reader=reader,
        image_column="data.image",
        id_column=None,
        keep_columns=("data.tags", "labels"),
    )
    rows = rows_of(source)
    assert [image.content for image in rows] == [picture(row) for row in range(10)]
    assert rows[7].key == "train-00001-of-00002.parquet#2"
    assert kept(rows)[3] == {"data.tags": ["a"], "labels": [{"x": 1}]}


def test_files_with_other_columns_are_refused(tmp_path: Path) -> None:
    write_stream(tmp_path / "d", table_of(range(3)), pa.table({"image": ["a.png"], "n": [1]}))
    with pytest.raises(InputError, match=r"d/data-1.arrow: column 'image' is string, and binary in d/data-0.arrow"):
        source_of(tmp_path / "d")


def test_the_digest_tells_what_has_changed(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    write_stream(folder, table_of(range(5)))
    first = source_of(folder)
    assert (source_of(folder).digest, source_of(folder).keys_digest) == (first.digest, first.keys_digest)
    os.utime(folder / "data-0.arrow", ns=(1, 1))
    assert source_of(folder).digest != first.digest
    assert source_of(folder).keys_digest == first.keys_digest
    write_stream(folder, table_of(range(6)))
    assert source_of(folder).keys_digest != first.keys_digest


MEASURE = """
import sys
from vlmembed.sources.arrow import HFDatasetSource
from vlmembed.sources.readahead import ReadAhead

def peak():
    with open("/proc/self/status") as status:  # what getrusage tells is the parent's too
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

reader = ReadAhead(timeout_seconds=10, max_source_pixels=10**6)
columns = {"image_column": None, "id_column": None, "keep_columns": ("n",)}
before = peak()
source = HFDatasetSource([(sys.argv[1], "d")], reader=reader, **columns)
listed = peak() - before
kept = [image.columns for image in source.read(0) if len(image.content) == 500_000]
print(len(kept), listed, peak() - before)
"""


def test_rows_are_counted_and_read_without_filling_the_memory(tmp_path: Path) -> None:
    """Of 100 MB in batches of 5 MB, with the kept columns of all rows held."""
    folder = tmp_path / "d"
    table = pa.table({"image": [os.urandom(500_000)] * 200, "n": range(200)})
    write_stream(folder, table, rows=10)
    command = [sys.executable, "-c", MEASURE, str(folder)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    num_rows, listed, grown = map(int, output.split())
    assert num_rows == 200
    assert listed < 5 * 10**6
    assert grown < 50 * 10**6


def test_null_images_are_told_apart(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    values = pa.array([None, {"bytes": b"", "path": None}, {"bytes": PNG, "path": None}], kind)
    write_stream(tmp_path / "d", pa.table({"image": values}))
    rows = rows_of(source_of(tmp_path / "d"))
    assert isinstance(rows[0].content, ImageError)
    assert rows[0].content.code is FailureCode.NULL
    assert [image.content for image in rows[1:]] == [b"", PNG]


def test_splits_and_files_that_are_named_twice_or_lie_elsewhere_are_refused(tmp_path: Path) -> None:
    for names in (["train", "train"], [".."], ["."], [""], ["a/b"], ["a\0b"]):
        (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": names}))
        with pytest.raises(InputError, match=r"names splits that are no folders in it, or one of them twice: save the"):
            is_hf_dataset(str(tmp_path))
    folder = tmp_path / "d"
    write_stream(folder, table_of(range(3)))
    for name in ("data-0.arrow", ".."):
        files = [{"filename": "data-0.arrow"}, {"filename": name}]
        (folder / "state.json").write_text(json.dumps({"_data_files": files}))
        with pytest.raises(InputError, match=r"state.json' does not say which files beside it hold the rows"):
            source_of(folder)


def test_json_that_is_nested_too_deep_is_no_dataset(tmp_path: Path) -> None:
    for name in ("dataset_dict.json", "state.json"):
        (tmp_path / name).write_text("[" * 100_000)
    assert is_hf_dataset(str(tmp_path)) is None
    with pytest.raises(InputError, match=r"state.json' does not say which files"):
        source_of(tmp_path)


class UnsteadyFile(io.FileIO):
    """A file as a server gives it, until that is broken."""

    def __init__(self, path: Path, server: UnsteadyServer) -> None:
        super().__init__(path)
        self.num_bytes = path.stat().st_size
        self.version = ""
        self._server = server

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401  bytes that can be written
        """Read, or fail as a request does that was made again."""
        return self._server.retries.run(lambda _: self._read(buffer))

    def _read(self, buffer: Any) -> int:  # noqa: ANN401  see above
        if self._server.is_broken:
            msg = f"{self.name!s}: the connection broke"
            raise TransientError(msg)
        return super().readinto(buffer) or 0


class UnsteadyServer:
    """Stands for `Remotes`: what a URL names lies in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.retries = Retries(0.0)
        self.is_broken = False

    def read(self, url: str, _: int) -> bytes:
        """A whole file."""
        return (self._folder / Path(url).name).read_bytes()

    def open(self, url: str) -> UnsteadyFile:
        """A file to be read."""
        return UnsteadyFile(self._folder / Path(url).name, self)

    def source(self) -> HFDatasetSource:
        """Of the dataset in that folder."""
        reader = ReadAhead(timeout_seconds=10, max_source_pixels=10**6, remotes=cast("Remotes", self))
        columns: dict[str, Any] = {"image_column": None, "id_column": None, "keep_columns": ()}
        return HFDatasetSource([("https://host/d", "d")], reader=reader, **columns)


def test_a_server_that_does_not_answer_when_a_dataset_is_listed_ends_the_start(tmp_path: Path) -> None:
    write_stream(tmp_path, table_of(range(30)), table_of(range(30, 60)))
    server = UnsteadyServer(tmp_path)
    whole = server.source().digest
    server.is_broken = True
    with pytest.raises(
        InputError, match=r"https://host/d/data-0.arrow cannot be read .*connection broke.* again later"
    ):
        server.source()
    server.is_broken = False
    assert server.source().digest == whole
    (tmp_path / "data-1.arrow").unlink()
    assert failures(rows_of(server.source())) == {"d/data-1.arrow!": ("missing", "d/data-1.arrow is not there")}


def test_bytes_from_a_server_that_are_no_schema_cost_their_file(tmp_path: Path) -> None:
    write_stream(tmp_path, table_of(range(30)), table_of(range(30, 60)))
    path = tmp_path / "data-1.arrow"
    content = bytearray(path.read_bytes())
    at = content.index(b"image")
    content[at - 100 : at + 60] = b"\xff" * 160
    path.write_bytes(content)
    with pa.OSFile(str(path)) as file:
        assert next(read_messages(file, len(content))).kind is Kind.SCHEMA  # its head is whole
    assert {code for code, _ in failures(rows_of(UnsteadyServer(tmp_path).source())).values()} == {"unreadable"}


def test_how_long_tries_took_is_not_in_the_messages_of_rows(tmp_path: Path) -> None:
    write_stream(tmp_path, table_of(range(3)))
    server = UnsteadyServer(tmp_path)
    source = server.source()
    server.is_broken = True
    messages = {message for _, message in failures(rows_of(source)).values()}
    assert messages == {f"d/data-0.arrow: {tmp_path}/data-0.arrow: the connection broke"}


def test_the_digest_does_not_hold_the_words_for_a_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stream(tmp_path / "d", table_of(range(30)), table_of(range(30, 60)))
    path = tmp_path / "d" / "data-1.arrow"
    os.truncate(path, path.stat().st_size - 500)
    digests = []
    for words in ("4 tries in 12.3 seconds", "4 tries in 12.4 seconds"):
        with monkeypatch.context() as patch:
            patch.setattr(ImageError, "__str__", lambda _, words=words: words)
            digests.append(source_of(tmp_path / "d").digest)
    assert digests[0] == digests[1]
