"""Pieces of a source: read by others, they hold the rows that the source itself reads."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from servers import http_server

from vlmembed.config import EncodeConfig
from vlmembed.errors import FailureCode, ImageError, InputError, StorageError
from vlmembed.sources import count_piece, open_piece, open_source
from vlmembed.sources.shard import ShardSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from vlmembed.sources.chained import ChainedSource
    from vlmembed.sources.pieces import Counted, CountPiece, Piece
    from vlmembed.types import EncodedImage


def elsewhere(value: Any) -> Any:  # noqa: ANN401  whatever is sent
    """What arrives in another process."""
    return pickle.loads(pickle.dumps(value, 5))  # noqa: S301  written right here


def picture(number: int) -> bytes:
    """Bytes that begin as a PNG: no source looks further."""
    return b"\x89PNG\r\n\x1a\n" + number.to_bytes(4, "big")


@pytest.fixture
def listed() -> Iterator[Callable[..., Any]]:
    """Opens sources, and closes them in the end."""
    with ExitStack() as stack:

        def open_inputs(*inputs: Path | str, **settings: Any) -> Any:  # noqa: ANN401  of `EncodeConfig`
            config = EncodeConfig(inputs=tuple(map(str, inputs)), output="out.parquet", **settings)
            return config, stack.enter_context(closing(open_source(config)))

        yield open_inputs


def outcome(image: EncodedImage) -> tuple[Any, ...]:
    """All that there is of a row, comparable."""
    content = image.content
    held = (content.code, str(content)) if isinstance(content, ImageError) else content
    return (
        image.row,
        image.key,
        held,
        image.columns and image.columns.schema,
        image.columns and image.columns.to_pylist(),
    )


def outcomes(images: Iterator[EncodedImage]) -> list[tuple[Any, ...]]:
    return [outcome(image) for image in images]


def pieces_of(source: ChainedSource | ShardSource, rows: range, size: int) -> list[Piece]:
    """Pieces as they arrive elsewhere."""
    pieces = [elsewhere(piece) for piece in source.pieces(rows, size)]
    bounds = [piece.rows for piece in pieces]
    first = rows.start // size * size
    assert bounds == [
        range(max(begin, rows.start), min(begin + size, rows.stop)) for begin in range(first, rows.stop, size)
    ]
    return pieces


def read_pieces(config: EncodeConfig, pieces: Sequence[Piece]) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for piece in pieces:
        with open_piece(config, piece) as images:
            found += outcomes(images)
    return found


def check(config: EncodeConfig, source: ChainedSource | ShardSource, num_rows: int, size: int = 3) -> list[Any]:
    """Read the source by itself and in pieces; returns its rows."""
    expected = outcomes(source.read(0))
    assert [row for row, *_ in expected] == list(range(num_rows))
    for rows in (range(num_rows), range(num_rows // 2, num_rows - 1), range(1, 2), range(0)):
        for each in (size, 1, num_rows + 5):
            assert read_pieces(config, pieces_of(source, rows, each)) == expected[rows.start : rows.stop]
    return expected


def folder_of(folder: Path, count: int, first: int = 0) -> Path:
    folder.mkdir()
    for number in range(first, first + count):
        (folder / f"{number:03}.png").write_bytes(picture(number))
    return folder


def tar_of(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def zip_of(path: Path, rows: range) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for row in rows:
            archive.writestr(f"z{row}.png", picture(row))
        archive.writestr("notes.txt", "none")
    return path


def table_of(rows: range) -> pa.Table:
    schema = pa.schema([("image", pa.binary()), ("uid", pa.string()), ("n", pa.int64())])
    columns = {"image": [picture(row) for row in rows], "uid": [f"u{row}" for row in rows], "n": list(rows)}
    return pa.table(columns, schema=schema)


def code_of(row: tuple[Any, ...]) -> str | None:
    return row[2][0] if isinstance(row[2], tuple) else None


def test_a_folder_with_a_missing_and_an_unreadable_file(tmp_path: Path, listed: Callable[..., Any]) -> None:
    folder = folder_of(tmp_path / "in", 7)
    (folder / "005b.png").symlink_to(tmp_path / "nowhere")
    (folder / "\udcff.png").write_bytes(picture(9))
    (folder / "loop.png").symlink_to("loop.png")
    config, source = listed(folder)
    rows = check(config, source, 10)
    assert sorted(filter(None, map(code_of, rows))) == [FailureCode.MISSING, FailureCode.UNREADABLE]
    assert rows[0] == (0, "000.png", picture(0), None, None)


def test_several_inputs_one_behind_the_other(tmp_path: Path, listed: Callable[..., Any]) -> None:
    inputs = [
        folder_of(tmp_path / "a", 4),
        zip_of(tmp_path / "b.zip", range(4, 9)),
        folder_of(tmp_path / "c", 1, 9),
        zip_of(tmp_path / "d.zip", range(10, 14)),
    ]
    config, source = listed(*inputs)
    rows = check(config, source, 14)
    assert [row[2] for row in rows] == [picture(number) for number in range(14)]
    config, shard = listed(*inputs, shard="1/3")
    assert isinstance(shard, ShardSource)
    rows = check(config, shard, 5)
    assert [row[2] for row in rows] == [picture(number) for number in range(4, 9)]


def test_zips(tmp_path: Path, listed: Callable[..., Any]) -> None:
    archives = [zip_of(tmp_path / f"{number}.zip", range(5 * number, 5 * number + 5)) for number in range(3)]
    zip_of(tmp_path / "empty.zip", range(0))
    config, source = listed(archives[0], tmp_path / "empty.zip", *archives[1:])
    pieces = pieces_of(source, range(15), 4)
    check(config, source, 15, 4)
    archives[1].write_bytes(archives[1].read_bytes() + b" ")
    rows = read_pieces(config, pieces)
    assert [code_of(row) for row in rows] == [None] * 5 + [FailureCode.UNREADABLE] * 5 + [None] * 5
    assert rows == outcomes(source.read(0))


def test_a_list_of_paths(tmp_path: Path, listed: Callable[..., Any]) -> None:
    folder_of(tmp_path / "in", 5)
    lines = [*(f"in/{number:03}.png" for number in range(5)), "in/none.png", "in/001.png", "ftp://host/a.png"]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    config, source = listed(tmp_path / "list.txt")
    rows = check(config, source, 8)
    assert rows[6][1] == "in/001.png#2"
    assert [code_of(row) for row in rows[4:]] == [None, FailureCode.MISSING, None, FailureCode.UNREADABLE]


def test_a_list_with_columns_and_a_line_that_cannot_be_read(tmp_path: Path, listed: Callable[..., Any]) -> None:
    folder_of(tmp_path / "in", 7)
    lines = [
        json.dumps({"path": f"in/{number:03}.png", "uid": f"u{number}", "text": "x" * number}) for number in range(7)
    ]
    lines[3:3] = ["{broken"]
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    config, source = listed(tmp_path / "list.jsonl", image_column="path", id_column="uid", keep_columns=("text",))
    rows = check(config, source, 8)
    assert [row[1] for row in rows[2:5]] == ["u2", "list.jsonl#line4", "u3"]
    assert rows[4][4] == [{"text": "xxx"}]
    assert code_of(rows[3]) == FailureCode.UNREADABLE


def test_standard_input(tmp_path: Path, listed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "in", 5)
    text = "\n".join(str(folder / f"{number:03}.png") for number in range(5))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    config, source = listed("-")
    assert [row[2] for row in check(config, source, 5, 2)] == [picture(number) for number in range(5)]


def parquet_files(folder: Path) -> list[Path]:
    """Eleven rows in four files, one of them without rows."""
    paths = []
    for number, rows in enumerate((range(5), range(5, 5), range(5, 6), range(6, 11))):
        paths.append(folder / f"{number}.parquet")
        pq.write_table(table_of(rows), paths[-1], row_group_size=2)
    return paths


@pytest.mark.parametrize("id_column", [None, "uid"])
def test_parquet_files(id_column: str | None, tmp_path: Path, listed: Callable[..., Any]) -> None:
    config, source = listed(*parquet_files(tmp_path), id_column=id_column, keep_columns=("n", "uid"))
    rows = check(config, source, 11)
    assert [row[2] for row in rows] == [picture(number) for number in range(11)]
    assert rows[7][1] == ("u7" if id_column else f"{tmp_path}/3.parquet#1")
    assert rows[7][4] == [{"n": 7, "uid": "u7"}]


def test_a_parquet_file_that_was_changed_fails_row_by_row(tmp_path: Path, listed: Callable[..., Any]) -> None:
    paths = parquet_files(tmp_path)
    config, source = listed(*paths, keep_columns=("n",))
    pieces = pieces_of(source, range(11), 4)
    pq.write_table(table_of(range(100, 105)), paths[0])
    paths[2].unlink()
    rows = read_pieces(config, pieces)
    assert [code_of(row) for row in rows] == [FailureCode.UNREADABLE] * 5 + [FailureCode.MISSING] + [None] * 5
    assert "has changed since it was listed" in str(rows[0])
    assert rows == outcomes(source.read(0))


def counted_elsewhere(config: EncodeConfig, pieces: Sequence[CountPiece]) -> list[Counted]:
    return [elsewhere(count_piece(config, elsewhere(piece))) for piece in pieces]


def shards_of(folder: Path) -> list[Path]:
    """Tars of five and two samples, an empty one, and one that ends within its third picture."""
    members = {
        f"{row:03}.{kind}": text for row in range(7) for kind, text in (("png", picture(row)), ("txt", b"%d" % row))
    }
    split = list(members.items())
    tars = [
        tar_of(folder / "0.tar", {**dict(split[:10]), "notes.md": b"", ".hidden.png": picture(0)}),
        tar_of(folder / "1.tar", {}),
        tar_of(folder / "2.tar", {**dict(split[10:]), "more.md": b""}),
        tar_of(folder / "3.tar", {f"{row:03}.png": picture(row) + bytes(600) for row in range(7, 11)}),
    ]
    tars[3].write_bytes(tars[3].read_bytes()[: 2 * 1536 + 700])
    return tars


def test_tars_are_counted_elsewhere(tmp_path: Path, listed: Callable[..., Any]) -> None:
    tars = shards_of(tmp_path)
    config, source = listed(*tars, keep_columns=("txt",))
    _, other = listed(*tars, keep_columns=("txt",))
    assert source.num_rows is None
    counts = counted_elsewhere(config, source.uncounted())
    assert [count.num_rows for count in counts] == [5, 0, 2, 3]
    source.counted(counts)
    assert source.uncounted() == []
    expected = outcomes(other.read(0))
    assert (source.num_rows, source.skipped) == (other.num_rows, other.skipped) == (10, {".md": 2, "hidden": 1})
    rows = check(config, source, 10)
    assert rows == expected
    assert rows[6][4] == [{"txt": "6"}]
    assert code_of(rows[9]) == FailureCode.TRUNCATED
    assert source.skipped == other.skipped
    with pytest.raises(AssertionError):
        source.counted(counts)


def test_what_was_counted_here_is_not_counted_elsewhere(tmp_path: Path, listed: Callable[..., Any]) -> None:
    pictures = folder_of(tmp_path / "in", 4)
    tars = shards_of(tmp_path)
    config, source = listed(pictures, tars[0], tars[2])
    assert len(source.uncounted()) == 2
    list(source.read_rows(range(10)))  # one row of the second tar, which is not read to its end
    assert len(source.uncounted()) == 1
    source.counted(counted_elsewhere(config, source.uncounted()))
    assert source.num_rows == 11
    assert source.skipped == {".md": 2, ".txt": 7, "hidden": 1}
    check(config, source, 11)
    config, folder = listed(pictures)
    assert folder.uncounted() == []
    folder.counted([])


def test_a_shard_of_tars_counts_its_own(tmp_path: Path, listed: Callable[..., Any]) -> None:
    tars = shards_of(tmp_path)[::2]
    _, whole = listed(*tars)
    expected = [row[1:] for row in outcomes(whole.read(0))]
    for index, rows in enumerate((expected[:5], expected[5:])):
        config, shard = listed(*tars, shard=f"{index}/2")
        assert len(shard.uncounted()) == 1
        shard.counted(counted_elsewhere(config, shard.uncounted()))
        assert [row[1:] for row in check(config, shard, len(rows))] == rows


def test_a_dataset_of_hugging_face_with_a_file_that_is_lost(tmp_path: Path, listed: Callable[..., Any]) -> None:
    files = []
    for number, numbers in enumerate((range(4), range(4, 6), range(6, 11))):
        table = table_of(numbers)
        with (
            pa.OSFile(str(tmp_path / f"data-{number}.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as stream,
        ):
            stream.write_table(table, max_chunksize=2)
        files.append({"filename": f"data-{number}.arrow"})
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": files, "_indices_data_files": None}))
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "data-1.arrow").unlink()
    config, source = listed(tmp_path, keep_columns=("n",))
    rows = check(config, source, 10)
    assert [code_of(row) for row in rows] == [None] * 4 + [FailureCode.MISSING] + [None] * 5
    assert rows[5][1] == f"{tmp_path.name}#5"  # the lost file's row is numbered too
    assert rows[5][4] == [{"n": 6}]


def test_lance_datasets_are_read_in_the_version_that_was_listed(tmp_path: Path, listed: Callable[..., Any]) -> None:
    lance = pytest.importorskip("lance")
    inputs = [tmp_path / "a.lance", tmp_path / "b.lance"]
    for path, numbers in zip(inputs, (range(7), range(7, 12)), strict=True):
        lance.write_dataset(table_of(numbers), str(path), max_rows_per_file=3)
    config, source = listed(*inputs, id_column="uid", keep_columns=("n",))
    pieces = pieces_of(source, range(12), 5)
    rows = check(config, source, 12, 5)
    assert [row[2] for row in rows] == [picture(number) for number in range(12)]
    lance.dataset(str(inputs[0])).delete("n < 5")
    assert read_pieces(config, pieces) == rows
    for path in inputs[1].glob("data/*"):
        path.unlink()
    assert [code_of(row) for row in read_pieces(config, pieces)] == [None] * 7 + [FailureCode.UNREADABLE] * 5
    shutil.rmtree(inputs[0])
    assert {code_of(row) for row in read_pieces(config, pieces)} == {FailureCode.UNREADABLE}


def test_a_piece_is_as_small_as_its_rows(tmp_path: Path, listed: Callable[..., Any]) -> None:
    names = [f"/some/folder/picture-{number:06}.jpg" for number in range(5000)]
    (tmp_path / "list.txt").write_text("\n".join(names))
    _, source = listed(tmp_path / "list.txt")
    sizes = [len(pickle.dumps(piece, 5)) for piece in source.pieces(range(5000), 10)]
    assert len(sizes) == 500
    assert max(sizes) < 2000
    for number in range(200):
        pq.write_table(table_of(range(3)), tmp_path / f"{number:03}.parquet")
    _, source = listed(*sorted(tmp_path.glob("*.parquet")))
    assert max(len(pickle.dumps(piece, 5)) for piece in source.pieces(range(600), 10)) < 5000


def test_pieces_are_cut_lazily_and_other_reads_may_come_between(tmp_path: Path, listed: Callable[..., Any]) -> None:
    config, source = listed(folder_of(tmp_path / "in", 9))
    pieces = source.pieces(range(9), 2)
    found: list[tuple[Any, ...]] = []
    for _ in range(5):
        found += read_pieces(config, [next(pieces)])
        assert [image.row for image in source.read_rows([3, 4])] == [3, 4]
    assert found == outcomes(source.read(0))
    assert list(pieces) == []


def test_a_reader_that_stops_early_leaves_nothing_open(tmp_path: Path, listed: Callable[..., Any]) -> None:
    config, source = listed(folder_of(tmp_path / "in", 9), zip_of(tmp_path / "a.zip", range(9)))
    [piece] = source.pieces(range(18), 18)
    before = set(threading.enumerate())
    for num_read in (1, 10):
        with open_piece(config, piece) as images:
            assert [image.row for image, _ in zip(images, range(num_read), strict=False)] == list(range(num_read))
            assert num_read > 1 or set(threading.enumerate()) > before
        assert list(images) == []
        for thread in set(threading.enumerate()) - before:
            thread.join(10.0)  # it has been told to end
        assert set(threading.enumerate()) <= before


def test_urls(tmp_path: Path, listed: Callable[..., Any]) -> None:
    folder_of(tmp_path / "in", 3)
    (tmp_path / "in" / "list.txt").write_text("000.png\n001.png\n002.png\nnone.png")
    zip_of(tmp_path / "in" / "a.zip", range(5))
    tar_of(tmp_path / "in" / "a.tar", {f"{row}.png": picture(row) for row in range(4)})
    pq.write_table(table_of(range(7)), tmp_path / "in" / "a.parquet", row_group_size=3)
    with http_server(tmp_path / "in") as server:
        for name, num_rows in (("list.txt", 4), ("a.zip", 5), ("a.tar", 4), ("a.parquet", 7)):
            config, source = listed(f"http://127.0.0.1:{server.port}/{name}", allow_local_urls=True)
            source.counted(counted_elsewhere(config, source.uncounted()))
            rows = read_pieces(config, pieces_of(source, range(num_rows), 3))
            assert rows == outcomes(source.read(0))
            assert [row[2] for row in rows[:3]] == [picture(number) for number in range(3)]


ELSEWHERE = """
import pickle, sys
config, piece = pickle.load(sys.stdin.buffer)
from vlmembed.sources import open_piece
with open_piece(config, piece) as images:
    found = [(image.row, image.key, image.content) for image in images]
assert "torch" not in sys.modules
pickle.dump(found, sys.stdout.buffer)
"""


def test_another_process_reads_a_piece_without_torch(tmp_path: Path, listed: Callable[..., Any]) -> None:
    config, source = listed(folder_of(tmp_path / "in", 4), zip_of(tmp_path / "a.zip", range(4, 9)))
    [_, piece, _] = source.pieces(range(9), 3)
    command = [sys.executable, "-c", ELSEWHERE]
    done = subprocess.run(command, input=pickle.dumps((config, piece), 5), capture_output=True, check=True)
    keys = [f"{tmp_path}/in/003.png", f"{tmp_path}/a.zip!/z4.png", f"{tmp_path}/a.zip!/z5.png"]
    assert pickle.loads(done.stdout) == [  # noqa: S301  written right there
        (row, key, picture(row)) for row, key in enumerate(keys, start=3)
    ]


def test_a_tar_that_has_changed_since_it_was_counted_stops_the_run(tmp_path: Path, listed: Callable[..., Any]) -> None:
    tar = tar_of(tmp_path / "a.tar", {f"{row}.png": picture(row) for row in range(4)})
    config, source = listed(folder_of(tmp_path / "in", 1), tar)
    source.counted(counted_elsewhere(config, source.uncounted()))
    pieces = pieces_of(source, range(5), 5)
    tar.write_bytes(tar.read_bytes() + bytes(512))
    with pytest.raises(InputError, match=r"of the rows 1 to 4, which were counted, 1 are there: .* --overwrite"):
        read_pieces(config, pieces)


def test_a_tar_whose_server_fails_stops_the_run(
    tmp_path: Path, listed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, source = listed(tar_of(tmp_path / "a.tar", {"a.png": picture(1)}))
    [count] = source.uncounted()
    source.counted([count_piece(config, count)])
    [piece] = source.pieces(range(1), 1)

    def fail(*_: object, **__: object) -> None:
        msg = "a.tar cannot be read"
        raise StorageError(msg)

    monkeypatch.setattr("vlmembed.sources.tarpass.open_archive", fail)
    with pytest.raises(StorageError):
        count_piece(config, count)
    with open_piece(config, piece) as images, pytest.raises(StorageError):
        next(images)
