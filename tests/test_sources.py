"""Folders, files, globs and Parquet: which rows there are, what they are called, what they hold."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import SAMPLES

from vlmembed.config import EncodeConfig
from vlmembed.errors import ConfigError, FailureCode, ImageError, InputError
from vlmembed.sources import open_source
from vlmembed.sources.columns import find_image_column
from vlmembed.sources.ids import escape_name
from vlmembed.sources.readahead import read_content

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from vlmembed.sources.base import Source
    from vlmembed.types import EncodedImage

PNG = (SAMPLES / "drawings/one-pixel.png").read_bytes()
JPEG = (SAMPLES / "photos/cat.jpg").read_bytes()


_open_sources: list[Source] = []


@pytest.fixture(autouse=True)
def _close_sources() -> Iterator[None]:
    yield
    while _open_sources:
        _open_sources.pop().close()


def opened(*inputs: object, **settings: Any) -> Source:  # noqa: ANN401
    source = open_source(EncodeConfig(inputs=tuple(map(str, inputs)), output="out.parquet", **settings))
    _open_sources.append(source)
    return source


def rows_of(source: Source, start: int = 0) -> list[EncodedImage]:
    rows = list(source.read(start))
    assert [image.row for image in rows] == list(range(start, source.num_rows or 0))
    assert len({image.key for image in rows}) == len(rows)
    return rows


def keys_of(source: Source) -> list[str]:
    return [image.key for image in rows_of(source)]


def write(folder: Path, *names: str, content: bytes = PNG) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def test_a_folder_is_read_by_bytes_and_by_name(tmp_path: Path) -> None:
    write(tmp_path, "b/a.jpg", "b/a.png", "c", "UPPER.JPG", "x.jfif", "y.tif", ".hidden.png", ".git/z.png")
    write(tmp_path, "not-an-image.jpg", "readme.txt", "data.JSON", "LICENSE", content=b"Python is no PPM")
    source = opened(tmp_path)
    assert keys_of(source) == ["UPPER.JPG", "b/a.jpg", "b/a.png", "c", "not-an-image.jpg", "x.jfif", "y.tif"]
    assert source.skipped == {"hidden": 2, ".txt": 1, ".json": 1, "no extension": 1}
    assert keys_of(opened(tmp_path, recursive=False)) == ["UPPER.JPG", "c", "not-an-image.jpg", "x.jfif", "y.tif"]


def test_contents_and_a_later_start(tmp_path: Path) -> None:
    for index in range(50):
        write(tmp_path, f"{index:02}.png", content=PNG + bytes([index]))
    source = opened(tmp_path)
    assert [image.content for image in rows_of(source)] == [PNG + bytes([index]) for index in range(50)]
    assert [image.content for image in rows_of(source, start=47)] == [PNG + bytes([index]) for index in (47, 48, 49)]


def test_links_pipes_and_locked_folders(tmp_path: Path) -> None:
    write(tmp_path, "sub/a.png")
    (tmp_path / "sub" / "up").symlink_to(tmp_path)
    (tmp_path / "sub" / "self").symlink_to(tmp_path / "sub")
    (tmp_path / "other").symlink_to(tmp_path / "sub")
    (tmp_path / "broken.png").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.png")
    source = opened(tmp_path)
    rows = {image.key: image.content for image in rows_of(source)}
    assert set(rows) == {"broken.png", "other/a.png", "sub/a.png"}
    assert isinstance(rows["broken.png"], ImageError)
    assert rows["broken.png"].code is FailureCode.MISSING
    assert source.skipped["special file"] == 1
    assert source.skipped["symlink loop"] == 4


def test_a_file_that_goes_away_or_turns_into_a_pipe(tmp_path: Path) -> None:
    write(tmp_path, "a.png", "b.png", "c.png")
    source = opened(tmp_path)
    (tmp_path / "a.png").unlink()
    (tmp_path / "b.png").unlink()
    os.mkfifo(tmp_path / "b.png")
    contents = [image.content for image in rows_of(source)]
    assert [each.code for each in contents[:2] if isinstance(each, ImageError)] == ["missing", "unreadable"]
    assert contents[2] == PNG


def rewrite(path: Path, content: bytes) -> None:
    """Another file of the same name."""
    path.unlink()
    path.write_bytes(content)


def test_files_that_change_or_go_after_they_were_listed(tmp_path: Path) -> None:
    write(tmp_path, "cut.png", "folder.png", "gone.png", "grown.png", "link.png", "loop.png", "shut.png", "sound.png")
    source = opened(tmp_path)
    (tmp_path / "gone.png").unlink()
    rewrite(tmp_path / "cut.png", PNG[:9])
    rewrite(tmp_path / "grown.png", PNG + bytes(3 * 2**20))
    (tmp_path / "folder.png").unlink()
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "link.png").unlink()
    (tmp_path / "link.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop.png").unlink()
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    (tmp_path / "shut.png").chmod(0)
    rows = {image.key: image.content for image in rows_of(source)}
    codes = {key: content.code for key, content in rows.items() if isinstance(content, ImageError)}
    shut = {} if os.access(tmp_path / "shut.png", os.R_OK) else {"shut.png": "unreadable"}
    gone = {"gone.png": "missing", "link.png": "missing"}
    assert codes == {**gone, "folder.png": "unreadable", "loop.png": "unreadable", **shut}
    assert rows["cut.png"] == PNG[:9]
    assert rows["grown.png"] == PNG + bytes(3 * 2**20)


def test_a_file_that_hangs_costs_its_own_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, *(f"{number:02}.png" for number in range(40)))
    pq.write_table(table(image=[f"{number:02}.png" for number in range(40)]), tmp_path / "t.parquet")
    release = threading.Event()

    def read(path: str, max_bytes: int) -> bytes | ImageError:
        if path.endswith(("03.png", "20.png", "39.png")):
            release.wait(60)
        return read_content(path, max_bytes)

    monkeypatch.setattr("vlmembed.sources.readahead.read_content", read)
    for given in (tmp_path, tmp_path / "t.parquet"):
        rows = rows_of(opened(given, timeout=0.2))
        late = {image.row: image.content for image in rows if isinstance(image.content, ImageError)}
        assert list(late) == [3, 20, 39]
        assert {content.code for content in late.values()} == {"timeout"}
        assert str(late[3]).startswith("reading took longer than 0.2 seconds: look after the disk or network")
        assert str(late[3]).endswith("or give --timeout more")
        assert all(image.content == PNG for image in rows if image.row not in late)
    release.set()


def test_large_files_are_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(12):
        write(tmp_path, f"{number:02}.png", content=PNG)
        os.truncate(tmp_path / f"{number:02}.png", (40 if number != 5 else 1) * 2**20)
    held: list[str] = []
    most = 0

    def read(path: str, max_bytes: int) -> bytes | ImageError:
        nonlocal most
        held.append(path)
        most = max(most, sum(os.stat(path).st_size for path in held))  # noqa: PTH116  as the product has it
        return read_content(path, max_bytes)[:10]  # type: ignore[index]  # they are all there

    monkeypatch.setattr("vlmembed.sources.readahead.read_content", read)
    for image in opened(tmp_path).read(0):
        held.remove(str(tmp_path / image.key))
        assert image.content == PNG[:10]
    assert 80 * 2**20 <= most <= 128 * 2**20


def test_a_file_beyond_any_picture_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, "a.png", "b.png")
    os.truncate(tmp_path / "a.png", 2**40)  # without a byte on the disk
    first, second = rows_of(opened(tmp_path, max_source_pixels=1000))
    assert isinstance(first.content, ImageError)
    assert first.content.code is FailureCode.TOO_LARGE
    assert "1099511627776 bytes, and a picture within --max-source-pixels 268443456 at most" in str(first.content)
    assert second.content == PNG


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs Linux's /proc")  # noqa: PTH110  a decorator
def test_files_of_no_size_and_special_files(tmp_path: Path) -> None:
    write(tmp_path, "a.png", "dir.png/b.png")
    for name, target in (("status.png", "/proc/self/status"), ("zero.png", "/dev/zero"), ("kcore.png", "/proc/kcore")):
        (tmp_path / name).symlink_to(target)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket.png"))
        source = opened(tmp_path, max_source_pixels=1000)
        rows = {image.key: image.content for image in rows_of(source)}
        assert set(rows) == {"a.png", "dir.png/b.png", "kcore.png", "status.png"}
        assert source.skipped == {"special file": 2}
        assert isinstance(rows["kcore.png"], ImageError)
        assert rows["kcore.png"].code in {"too_large", "unreadable", "missing"}
        assert b"Threads:" in rows["status.png"]  # type: ignore[operator]  # it is bytes
        for name in ("/dev/zero", "socket.png"):
            (image,) = rows_of(opened(tmp_path / name))
            assert isinstance(image.content, ImageError)
            assert image.content.code is FailureCode.UNREADABLE


def test_rows_by_number(tmp_path: Path) -> None:
    for number in range(30):
        write(tmp_path, f"pictures/{number:02}.png", content=PNG + bytes([number]))
    for name in ("a", "b"):
        images = [{"bytes": PNG if row % 2 else None, "path": f"pictures/{row:02}.png"} for row in range(10)]
        pq.write_table(table(image=images), tmp_path / f"{name}.parquet", row_group_size=3)
    mixed = opened(tmp_path / "a.parquet", tmp_path / "pictures", tmp_path / "b.parquet")
    every = rows_of(mixed)
    assert len(every) == 50
    for wanted in ([], [0], [49], [9, 10, 39, 40], list(range(0, 50, 7)), range(3, 45), range(50)):
        chosen = list(mixed.read_rows(wanted))
        assert [(image.row, image.key, image.content) for image in chosen] == [
            (every[row].row, every[row].key, every[row].content) for row in wanted
        ]


def test_rows_that_are_not_wanted_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, *(f"{number:03}.png" for number in range(100)))
    source = opened(tmp_path)
    seen: list[str] = []

    def read(path: str, max_bytes: int) -> bytes | ImageError:
        seen.append(path[-7:])
        return read_content(path, max_bytes)

    monkeypatch.setattr("vlmembed.sources.readahead.read_content", read)
    assert [image.key for image in source.read_rows([7, 50])] == ["007.png", "050.png"]
    assert sorted(seen) == ["007.png", "050.png"]


def test_the_digest_of_the_ids_is_of_the_ids_alone(tmp_path: Path) -> None:
    write(tmp_path, "one/a.png", "one/b.png")
    write(tmp_path, "two/a.png", "two/b.png", content=JPEG)
    assert opened(tmp_path / "one").keys_digest == opened(tmp_path / "two").keys_digest
    assert opened(tmp_path / "one").digest != opened(tmp_path / "two").digest
    write(tmp_path, "two/c.png")
    assert opened(tmp_path / "one").keys_digest != opened(tmp_path / "two").keys_digest

    def digest(name: str, ids: list[Any], images: list[bytes], **options: Any) -> tuple[str, str]:  # noqa: ANN401
        pq.write_table(table(image=images, uid=ids), tmp_path / name / "t.parquet", **options)
        path = tmp_path / name / "t.parquet"
        return opened(path).keys_digest, opened(path, id_column="uid").keys_digest

    for name in ("x", "y"):
        (tmp_path / name).mkdir()
    by_row, by_id = digest("x", ["1", "2"], [PNG, JPEG])
    assert digest("y", [1, 2], [JPEG, JPEG], row_group_size=1) == (by_row, by_id)
    assert digest("y", [2, 1], [PNG, JPEG]) == (by_row, opened(tmp_path / "y", id_column="uid").keys_digest)
    assert digest("y", [2, 1], [PNG, JPEG])[1] != by_id
    assert digest("y", ["1", "2", "3"], [PNG, JPEG, PNG])[0] != by_row
    mixed = [opened(tmp_path / "one", tmp_path / name / "t.parquet").keys_digest for name in ("x", "y")]
    assert mixed[0] != mixed[1]


NAMES = [b"caf\xc3\xa9.png", b"caf\xe9.png", b"a\\xe9.png", b"a\xe9.png", b"new\nline.png", b"q\"uote'.png", b"%41.png"]


def test_any_name_makes_a_different_valid_id(tmp_path: Path) -> None:
    for name in NAMES:
        with open(os.path.join(os.fsencode(tmp_path), name), "wb") as file:  # noqa: PTH118, PTH123  bytes
            file.write(PNG)
    rows = rows_of(opened(tmp_path))
    assert len(rows) == len(NAMES)
    assert all(image.content == PNG for image in rows)
    keys = pa.array([image.key for image in rows], pa.string())
    keys.validate(full=True)
    assert {"café.png", "caf\\xe9.png", "a\\\\xe9.png", "a\\xe9.png", "new\nline.png", "%41.png"} < set(
        keys.to_pylist()
    )
    assert escape_name("plain/日本.png") == "plain/日本.png"


def test_several_inputs_are_prefixed_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a/x.png", "b/x.png", "b/sub/y.png", "z.png")
    assert keys_of(opened("a", "b", "z.png")) == ["a/x.png", "b/sub/y.png", "b/x.png", "z.png"]
    assert keys_of(opened("a/x.png")) == ["x.png"]
    assert keys_of(opened("*/x.png")) == ["a/x.png", "b/x.png"]
    assert keys_of(opened("**/*.png")) == ["a/x.png", "b/sub/y.png", "b/x.png", "z.png"]


def test_inputs_that_overlap_or_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a/x.png")
    write(tmp_path, "empty/notes.txt", content=b"text")
    with pytest.raises(InputError, match=r"input 'a/x.png' lies inside input 'a'"):
        opened("a", "a/x.png")
    with pytest.raises(InputError, match=r"inputs 'a' and './a/' are the same"):
        opened("a", "./a/")
    with pytest.raises(InputError, match="'nope' does not exist"):
        opened("nope")
    with pytest.raises(InputError, match=r"no file matches '\*.gif'"):
        opened("*.gif")
    with pytest.raises(InputError, match=r"no pictures in empty \(found and skipped: 1 .txt\)"):
        opened("empty")


def test_the_digest_changes_with_the_list(tmp_path: Path) -> None:
    write(tmp_path, "a.png", "b.png")
    first = opened(tmp_path).digest
    assert opened(tmp_path).digest == first
    write(tmp_path, "c.png")
    grown = opened(tmp_path).digest
    assert grown != first
    os.utime(tmp_path / "c.png", ns=(1, 1))
    assert opened(tmp_path).digest != grown


def table(**columns: Any) -> pa.Table:  # noqa: ANN401
    return pa.table(columns)


COLUMNS = {
    "bytes first": pa.array(
        [{"bytes": PNG, "path": None}, {"bytes": JPEG, "path": "x"}, None],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    ),
    "path first": pa.array(
        [{"path": None, "bytes": PNG}, {"path": "x", "bytes": JPEG}, {"path": None, "bytes": None}],
        pa.struct([("path", pa.string()), ("bytes", pa.large_binary())]),
    ),
    "binary": pa.array([PNG, JPEG, None], pa.binary()),
    "large_binary": pa.array([PNG, JPEG, None], pa.large_binary()),
    "dictionary": pa.array([PNG, JPEG, None], pa.binary()).dictionary_encode(),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_image_columns_of_every_type(kind: str, tmp_path: Path) -> None:
    pq.write_table(table(label=["a", "b", "c"], picture=COLUMNS[kind]), tmp_path / "t.parquet")
    rows = rows_of(opened(tmp_path / "t.parquet"))
    assert [image.key for image in rows] == ["t.parquet#0", "t.parquet#1", "t.parquet#2"]
    assert [image.content for image in rows[:2]] == [PNG, JPEG]
    assert isinstance(rows[2].content, ImageError)
    assert rows[2].content.code is FailureCode.NULL


def test_paths_are_relative_to_the_parquet_file(tmp_path: Path) -> None:
    write(tmp_path, "sub/a.png")
    for column in (pa.array(["a.png", "gone.png"]), pa.array([{"path": "a.png"}, {"path": "gone.png"}])):
        pq.write_table(table(image=column), tmp_path / "sub" / "t.parquet")
        first, second = rows_of(opened(tmp_path / "sub/t.parquet"))
        assert first.content == PNG
        assert isinstance(second.content, ImageError)
        assert second.content.code is FailureCode.MISSING


def test_a_folder_of_parquet_and_row_groups(tmp_path: Path) -> None:
    for name, first in (("a.parquet", 0), ("sub/b.parquet", 7)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        images = [PNG + bytes([first + index]) for index in range(7)]
        pq.write_table(table(image=images, n=range(first, first + 7)), tmp_path / name, row_group_size=3)
    write(tmp_path, "_metadata.parquet", content=b"PAR1 no row of ours")
    source = opened(tmp_path, keep_columns=("n",))
    rows = rows_of(source)
    assert [image.content for image in rows] == [PNG + bytes([index]) for index in range(14)]
    assert rows[8].key == "sub/b.parquet#1"
    assert [image.columns.to_pylist() for image in rows if image.columns] == [[{"n": index}] for index in range(14)]
    assert [image.row for image in source.read(9)] == [9, 10, 11, 12, 13]
    assert source.kept_schema.names == ["n"]


def test_parquet_beside_pictures_is_counted_not_read(tmp_path: Path) -> None:
    write(tmp_path, "a.png")
    pq.write_table(table(image=[PNG]), tmp_path / "t.parquet")
    source = opened(tmp_path)
    assert keys_of(source) == ["a.png"]
    assert source.skipped == {".parquet": 1}
    mixed = opened(tmp_path / "t.parquet", tmp_path / "a.png", SAMPLES / "drawings")
    assert [image.row for image in mixed.read(1)] == list(range(1, mixed.num_rows or 0))
    assert rows_of(mixed)[0].key.endswith("t.parquet#0")


def test_id_columns(tmp_path: Path) -> None:
    pq.write_table(table(image=[PNG, JPEG], uid=[7, 8], same=["x", "x"], holes=["a", None]), tmp_path / "t.parquet")
    assert keys_of(opened(tmp_path / "t.parquet", id_column="uid")) == ["7", "8"]
    with pytest.raises(InputError, match=r"--id-column 'same' repeats an id.*the first is 'x'"):
        opened(tmp_path / "t.parquet", id_column="same")
    with pytest.raises(InputError, match=r"--id-column 'holes' of t.parquet holds nulls"):
        opened(tmp_path / "t.parquet", id_column="holes")
    pq.write_table(table(image=[PNG], uid=[8]), tmp_path / "u.parquet")
    with pytest.raises(InputError, match=r"repeats an id, in u.parquet; the first is '8'"):
        opened(tmp_path, id_column="uid")


def test_columns_that_cannot_be_found(tmp_path: Path) -> None:
    both = table(left=[PNG], right=[PNG])
    with pytest.raises(InputError, match=r"t has 2 columns that could hold images \(left, right\)"):
        find_image_column(both.schema, "t")
    assert find_image_column(table(thumb=[PNG], image=[PNG]).schema, "t") == "image"
    with pytest.raises(InputError, match="no image column among n"):
        find_image_column(table(n=[1]).schema, "t")
    pq.write_table(table(image=[PNG], n=[1]), tmp_path / "t.parquet")
    with pytest.raises(InputError, match=r"t.parquet has no column 'x'; it has image, n"):
        opened(tmp_path / "t.parquet", keep_columns=("x",))
    with pytest.raises(InputError, match=r"column 'n' of t.parquet has type int64"):
        opened(tmp_path / "t.parquet", image_column="n")
    pq.write_table(table(image=["path.png"], n=[1]), tmp_path / "u.parquet")
    with pytest.raises(InputError, match=r"u.parquet: column 'image' is string, and binary in t.parquet"):
        opened(tmp_path)
    with pytest.raises(ConfigError, match="--id-column is for inputs with columns only"):
        opened(SAMPLES, id_column="n")


def test_patterns_are_told_and_counted_like_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "in/a.png", "in/sub/b.png")
    write(tmp_path, "in/notes.txt", content=b"text")
    source = opened("in/*")
    assert keys_of(source) == ["in/a.png", "in/sub/b.png"]
    assert source.skipped == {".txt": 1}
    assert keys_of(opened("in/**")) == ["in/a.png", "in/sub/b.png"]
    assert keys_of(opened("in/a*")) == ["in/a.png"]
    (tmp_path / "in" / "latest.png").symlink_to(tmp_path / "in" / "a.png")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    source = opened("in/*.png")
    assert keys_of(source) == ["in/a.png"]
    assert source.skipped == {"matched twice": 1}
    assert keys_of(opened("in/**/*.png")) == ["in/a.png", "in/sub/b.png"]
    assert keys_of(opened("in/**/*.png")) == ["in/a.png", "in/sub/b.png"]


def test_the_output_is_never_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "in/a.png")
    for name in ("t.parquet", "in/out.parquet"):
        pq.write_table(table(image=[PNG]), tmp_path / name)
    config = EncodeConfig(inputs=("t.parquet",), output="t.parquet", overwrite=True)
    with pytest.raises(InputError, match=r"'t.parquet' is input and output of the same run"):
        open_source(config, [tmp_path / "t.parquet"])
    own = [tmp_path / "in" / "out.parquet"]
    for given in ("in", "in/*"):
        source = open_source(EncodeConfig(inputs=(given,), output="in/out.parquet"), own)
        _open_sources.append(source)
        assert source.num_rows == 1
        assert not source.skipped  # so that a resumed run records what an undisturbed one does


def test_a_pipe_named_as_input_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (image,) = rows_of(opened(tmp_path / "pipe"))
    assert isinstance(image.content, ImageError)
    assert image.content.code is FailureCode.UNREADABLE


def test_several_folders_of_parquet_are_one_table(tmp_path: Path) -> None:
    for folder, first in (("a", 0), ("b", 2)):
        (tmp_path / folder).mkdir()
        columns = {"image": [PNG, JPEG], "uid": [f"u{first}", f"u{first + 1}"], "n": [first, first + 1]}
        pq.write_table(table(**columns), tmp_path / folder / "t.parquet")
    inputs = (tmp_path / "a", tmp_path / "b")
    rows = rows_of(opened(*inputs, keep_columns=("n",), id_column="uid"))
    assert [image.key for image in rows] == ["u0", "u1", "u2", "u3"]
    assert [image.columns.to_pylist() for image in rows if image.columns] == [[{"n": n}] for n in range(4)]
    pq.write_table(table(image=[PNG], uid=["u1"], n=[9]), tmp_path / "b" / "u.parquet")
    with pytest.raises(InputError, match=r"repeats an id.*the first is 'u1'"):
        opened(*inputs, id_column="uid")


def test_ids_that_are_no_text(tmp_path: Path) -> None:
    ids = pa.array([b"a\xff"], pa.binary()).view(pa.string())
    pq.write_table(table(image=[PNG], uid=ids), tmp_path / "t.parquet")
    with pytest.raises(InputError, match=r"--id-column 'uid' of t.parquet cannot be read"):
        opened(tmp_path / "t.parquet", id_column="uid")


def test_rows_whose_path_is_no_text(tmp_path: Path) -> None:
    paths = pa.array([b"a\xff.png", b"b.png"], pa.binary()).view(pa.string())
    pq.write_table(table(image=paths), tmp_path / "t.parquet")
    first, second = rows_of(opened(tmp_path / "t.parquet"))
    assert isinstance(first.content, ImageError)
    assert first.content.code is FailureCode.UNREADABLE
    assert isinstance(second.content, ImageError)
    assert second.content.code is FailureCode.MISSING


def test_columns_of_the_wrong_kind(tmp_path: Path) -> None:
    numbers = pa.array([{"path": 1}], pa.struct([("path", pa.int64())]))
    pq.write_table(table(image=numbers), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="no image column among image"):
        opened(tmp_path / "a.parquet")
    pq.write_table(table(image=[PNG], uid=[b"x"], lists=[[1]]), tmp_path / "b.parquet")
    for column, kind in (("uid", "binary"), ("lists", "list")):
        with pytest.raises(
            InputError, match=f"--id-column '{column}' of b.parquet has type {kind}.*strings or integers"
        ):
            opened(tmp_path / "b.parquet", image_column="image", id_column=column)
    twice = pa.Table.from_arrays([pa.array([PNG]), pa.array([1]), pa.array([2])], names=["image", "n", "n"])
    pq.write_table(twice, tmp_path / "c.parquet")
    with pytest.raises(InputError, match=r"c.parquet has more than one column 'n'"):
        opened(tmp_path / "c.parquet", keep_columns=("n",))
    write(tmp_path, "empty.parquet", content=b"")
    with pytest.raises(InputError, match=r"empty.parquet' cannot be read as Parquet"):
        opened(tmp_path / "empty.parquet")


def test_a_large_row_group_is_not_read_whole(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    images = [generator.bytes(100_000) for _ in range(2000)]  # 200 MB in one row group, in pages of about 1.6 MB
    options = {"row_group_size": 10_000, "compression": "none", "use_dictionary": False, "write_batch_size": 16}
    pq.write_table(table(image=images), tmp_path / "t.parquet", **options)
    del images
    script = """
import sys, pyarrow
from vlmembed.config import EncodeConfig
from vlmembed.sources import open_source
for image in open_source(EncodeConfig(inputs=(sys.argv[1],), output="o.parquet")).read(0):
    pass
print(image.row, pyarrow.default_memory_pool().max_memory())
"""
    command = [sys.executable, "-c", script, str(tmp_path / "t.parquet")]
    row, peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(row) == 1999
    assert int(peak) < 60e6


def test_broken_parquet(tmp_path: Path) -> None:
    pq.write_table(table(image=[PNG * 3000 + bytes([n]) for n in range(40)]), tmp_path / "t.parquet", row_group_size=10)
    content = bytearray((tmp_path / "t.parquet").read_bytes())
    (tmp_path / "cut.parquet").write_bytes(content[:-100])
    with pytest.raises(InputError, match=r"cut.parquet' cannot be read as Parquet"):
        opened(tmp_path / "cut.parquet")
    column = pq.read_metadata(tmp_path / "t.parquet").row_group(1).column(0)
    begin = column.dictionary_page_offset or column.data_page_offset
    content[begin : begin + 200] = bytes(200)
    (tmp_path / "t.parquet").write_bytes(content)
    rows = rows_of(opened(tmp_path / "t.parquet"))
    failed = [image.row for image in rows if isinstance(image.content, ImageError)]
    assert failed == list(range(10, 20))
    assert {image.content.code for image in rows if isinstance(image.content, ImageError)} == {"unreadable"}
