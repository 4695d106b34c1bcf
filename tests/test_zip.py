"""Zips: which members are rows, and what damage, lies and encryption cost."""

from __future__ import annotations

import io
import os
import stat
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import http_server
from test_tar import JPEG, MEGABYTE, PNG, FakeFile, FakeRemotes, shown, write

from vlmembed.errors import ImageError, InputError
from vlmembed.remote.remotes import Remotes
from vlmembed.sources.zip import ZipSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from vlmembed.types import EncodedImage

_open_sources: list[ZipSource] = []


@pytest.fixture(autouse=True)
def _close_sources() -> Iterator[None]:
    yield
    while _open_sources:
        _open_sources.pop().close()


def pack(*members: tuple[str | zipfile.ZipInfo, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return file.getvalue()


def opened(*paths: Path, limit: int = 10 * MEGABYTE) -> ZipSource:
    return opened_from([(str(path), path.name) for path in paths], None, limit)


def opened_from(files: list[tuple[str, str]], remotes: object, limit: int = 10 * MEGABYTE) -> ZipSource:
    source = ZipSource(files, remotes=cast("Remotes", remotes), max_file_bytes=limit)
    _open_sources.append(source)
    return source


def rows_of(source: ZipSource, start: int = 0) -> list[EncodedImage]:
    rows = list(source.read(start))
    assert [image.row for image in rows] == list(range(start, source.num_rows))
    assert len({image.key for image in rows}) == len(rows)
    return rows


def outcomes(source: ZipSource) -> list[tuple[str, object]]:
    """Key and content, or code, of each row."""
    return [shown(image)[1:3] for image in rows_of(source)]


def entry(name: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.create_system = 3
    info.external_attr = mode << 16
    return info


DIRECTORY_SIGNATURE = b"PK\x01\x02"
FLAGS, METHOD, CHECKSUM, PACKED_BYTES, NUM_BYTES, BEGIN = (
    (8, "<H"),
    (10, "<H"),
    (16, "<I"),
    (20, "<I"),
    (24, "<I"),
    (42, "<I"),
)


def lie(content: bytes, number: int, field: tuple[int, str], value: int) -> bytes:
    """An archive whose directory says something else of its entry `number`."""
    at = -1
    for _ in range(number + 1):
        at = content.index(DIRECTORY_SIGNATURE, at + 1)
    changed = bytearray(content)
    struct.pack_into(field[1], changed, at + field[0], value)
    return bytes(changed)


def test_members_are_rows_by_name_or_by_bytes_and_the_rest_is_counted(tmp_path: Path) -> None:
    archive = pack(
        ("b.jpg", JPEG),
        ("a/no-extension", PNG),
        ("named.txt", PNG),
        ("text.txt", b"hello"),
        ("LICENSE", b"MIT"),
        ("folder/", b""),
        ("empty.webp", b""),
        (".hidden.jpg", JPEG),
        ("__MACOSX/._b.jpg", b"x"),
        (entry("link.jpg", stat.S_IFLNK | 0o777), b"b.jpg"),
        (entry("pipe.jpg", stat.S_IFIFO | 0o777), b""),
        (entry("plain.gif", stat.S_IFREG | 0o644), b"GIF89a"),
        ("../../ünï\\图.png", b"up"),
        ("/etc/absolute.jpg", b"abs"),
    )
    source = opened(write(tmp_path / "p.zip", archive))
    assert source.num_rows == 7
    assert outcomes(source) == [
        ("p.zip!/b.jpg", JPEG),
        ("p.zip!/a/no-extension", PNG),
        ("p.zip!/named.txt", PNG),
        ("p.zip!/empty.webp", b""),
        ("p.zip!/plain.gif", b"GIF89a"),
        ("p.zip!/../../ünï\\\\图.png", b"up"),
        ("p.zip!//etc/absolute.jpg", b"abs"),
    ]
    skipped = {".txt": 1, "no extension": 1, "folder": 1, "hidden": 2, "link": 1, "special member": 1}
    assert source.skipped == skipped
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["p.zip"]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_every_method_gives_the_same_contents(method: int, tmp_path: Path) -> None:
    contents = [b"", b"x", JPEG, os.urandom(MEGABYTE // 2), bytes(3 * MEGABYTE), PNG * 5000]
    archive = pack(
        *[(f"{number}.jpg", content) for number, content in enumerate(contents)], ("png", PNG), method=method
    )
    source = opened(write(tmp_path / "p.zip", archive))
    assert [content for _, content in outcomes(source)] == [*contents, PNG]


def test_archives_written_to_a_pipe_or_behind_other_bytes_are_read(tmp_path: Path) -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            """No: sizes then stand behind the members."""
            return False

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jpg", JPEG)
        with archive.open("b.jpg", "w", force_zip64=True) as member:
            member.write(PNG)
    expected = [("p.zip!/a.jpg", JPEG), ("p.zip!/b.jpg", PNG)]
    assert outcomes(opened(write(tmp_path / "p.zip", pipe.getvalue()))) == expected
    assert outcomes(opened(write(tmp_path / "p.zip", b"#!/bin/sh" * 999 + pipe.getvalue()))) == expected


def test_a_member_without_a_name_is_told_by_its_bytes(tmp_path: Path) -> None:
    source = opened(write(tmp_path / "p.zip", pack((zipfile.ZipInfo(""), PNG), ("a.jpg", JPEG))))
    assert outcomes(source) == [("p.zip!/", PNG), ("p.zip!/a.jpg", JPEG)]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_names_that_come_twice_are_numbered(tmp_path: Path) -> None:
    archive = pack(("a.jpg", b"1"), ("a.jpg#2", PNG), ("a.jpg", b"3"))
    paths = [write(tmp_path / name, archive) for name in ("p.zip", "q.zip")]
    expected = [("a.jpg", b"1"), ("a.jpg#2", PNG), ("a.jpg#3", b"3")]
    assert outcomes(opened(*paths)) == [
        (f"{zip_}!/{key}", content) for zip_ in ("p.zip", "q.zip") for key, content in expected
    ]


def test_reading_from_every_row_and_single_rows(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{name}.zip", pack(*[(f"{number}.jpg", JPEG[:number]) for number in range(count)]))
        for name, count in (("a", 3), ("b", 0), ("c", 5), ("d", 1))
    ]
    source = opened(*paths)
    rows = [shown(image) for image in rows_of(source)]
    assert len(rows) == source.num_rows == 9
    for start in range(11):
        assert [shown(image) for image in source.read(start)] == rows[start:]
    for wanted in ([], [0], [2, 3], [8], [0, 5, 8], range(9)):
        assert [shown(image) for image in source.read_rows(wanted)] == [rows[row] for row in wanted]


def damaged(name: str) -> bytes:
    """Three pictures, the second of which is not what the archive says."""
    content = pack(("a.jpg", JPEG), ("b.jpg", JPEG), ("c.jpg", PNG), method=zipfile.ZIP_STORED)
    packed = pack(("a.jpg", JPEG), ("b.jpg", JPEG), ("c.jpg", PNG))
    second = packed.index(b"b.jpg") - 30
    changes: dict[str, Callable[[], bytes]] = {
        "encrypted": lambda: lie(packed, 1, FLAGS, 1),
        "method": lambda: lie(packed, 1, METHOD, 99),
        "lzma": lambda: lie(packed, 1, METHOD, zipfile.ZIP_LZMA),
        "checksum": lambda: lie(packed, 1, CHECKSUM, 7),
        "huge": lambda: lie(packed, 1, NUM_BYTES, 2**31),
        "more": lambda: lie(packed, 1, NUM_BYTES, 100),
        "fewer": lambda: lie(packed, 1, NUM_BYTES, len(JPEG) + 1),
        "stored": lambda: lie(content, 1, METHOD, zipfile.ZIP_DEFLATED),
        "bzip2": lambda: lie(content, 1, METHOD, zipfile.ZIP_BZIP2),
        "short": lambda: lie(packed, 1, PACKED_BYTES, 100),
        "overlap": lambda: lie(packed, 1, PACKED_BYTES, 2**20),
        "place": lambda: lie(packed, 1, BEGIN, second + 1),
        "twice": lambda: lie(packed, 1, BEGIN, 0),
        "flipped": lambda: packed[: second + 200] + bytes(50) + packed[second + 250 :],
    }
    return changes[name]()


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("encrypted", "unreadable", "it is encrypted: unpack the archive, or leave it out"),
        ("method", "unreadable", "compression method 99 is not read"),
        ("lzma", "unreadable", "compression method 14 is not read"),
        ("checksum", "corrupt", "its checksum is not the one that the archive's directory tells"),
        (
            "huge",
            "too_large",
            "the file has 2147483648 bytes, and a picture within --max-source-pixels 10485760 at most",
        ),
        ("more", "corrupt", "the archive's directory promises 100 bytes, and it holds more"),
        ("fewer", "corrupt", f"promises {len(JPEG) + 1} bytes, and it holds {len(JPEG)} bytes"),
        ("stored", "corrupt", "error: Error -3 while decompressing data"),
        ("bzip2", "corrupt", "OSError: Invalid data stream"),
        ("short", "corrupt", f"promises {len(JPEG)} bytes, and it holds"),
        ("overlap", "unreadable", "it overlaps with another member of the archive"),
        ("place", "unreadable", "it is not where the archive's directory says"),
        ("flipped", "corrupt", ""),
    ],
)
def test_a_member_that_is_not_what_the_directory_says_is_a_failed_row(
    name: str, code: str, message: str, tmp_path: Path
) -> None:
    rows = rows_of(opened(write(tmp_path / "p.zip", damaged(name))))
    assert [shown(image)[1:3] for image in rows] == [
        ("p.zip!/a.jpg", JPEG),
        ("p.zip!/b.jpg", code),
        ("p.zip!/c.jpg", PNG),
    ]
    assert message in str(rows[1].content)


def test_two_entries_for_the_same_bytes_overlap(tmp_path: Path) -> None:
    source = opened(write(tmp_path / "p.zip", damaged("twice")))
    assert [content for _, content in outcomes(source)] == ["unreadable", "unreadable", PNG]


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_a_bomb_that_promises_a_small_picture_is_not_unpacked(
    method: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = pack(("bomb.jpg", bytes(10 * MEGABYTE)), ("bomb", PNG + bytes(10 * MEGABYTE)), method=method)
    archive = lie(lie(archive, 0, NUM_BYTES, 1000), 1, NUM_BYTES, 1000)
    unpacked = 0

    class Counting(io.BytesIO):
        def write(self, piece: Any) -> int:  # noqa: ANN401  any buffer
            nonlocal unpacked
            unpacked += len(piece)
            return super().write(piece)

    path = write(tmp_path / "p.zip", archive)
    monkeypatch.setattr("vlmembed.sources.zipmembers.io.BytesIO", Counting)
    source = opened(path)
    assert outcomes(source) == [("p.zip!/bomb.jpg", "corrupt"), ("p.zip!/bomb", "corrupt")]
    assert 3000 < unpacked < MEGABYTE


def test_a_directory_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    archive = pack(("a.jpg", JPEG), ("b.jpg", PNG))
    end = archive.rindex(b"PK\x05\x06")
    broken = [b"", b"PK\x03\x04", archive[: len(archive) // 2], archive[:-1], lie(archive, 1, (0, "<I"), 7)]
    broken += [
        archive[:end] + archive[end : end + 12] + struct.pack("<II", *fields) + b"\0\0"
        for fields in ((2**31, 0), (9, 9))
    ]
    for content in broken:
        with pytest.raises(
            InputError, match=r"'p.zip' cannot be read as a zip \(.*\): write it again, or leave it out"
        ):
            opened(write(tmp_path / "p.zip", content))
    with pytest.raises(InputError, match=r"'gone.zip' cannot be read .*No such file"):
        opened(tmp_path / "gone.zip")


def test_archives_that_went_or_changed_after_they_were_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [write(tmp_path / f"{name}.zip", pack((f"{name}.jpg", JPEG), ("x.jpg", PNG))) for name in "abc"]
    source = opened(*paths)
    paths[0].unlink()
    write(paths[1], pack(("b.jpg", JPEG)))
    rows = rows_of(source)
    codes = ["missing", "missing", "unreadable", "unreadable", JPEG, PNG]
    assert [shown(image)[2] for image in rows] == codes
    assert str(rows[2].content).startswith("it has changed since it was listed")
    assert [message.partition(":")[0] for message in caplog.messages] == ["a.zip", "b.zip"]


def test_digests_tell_other_contents_and_other_names(tmp_path: Path) -> None:
    path = write(tmp_path / "p.zip", pack(("a.jpg", JPEG)))

    def digests(content: bytes, mtime_ns: int) -> tuple[str, str]:
        write(path, content)
        os.utime(path, ns=(1, mtime_ns))
        source = opened(path)
        return source.digest, source.keys_digest

    first = digests(pack(("a.jpg", JPEG)), 1)
    assert digests(pack(("a.jpg", JPEG)), 1) == first
    later = digests(pack(("a.jpg", JPEG)), 2)
    other = digests(pack(("a.jpg", JPEG[::-1])), 1)
    renamed = digests(pack(("b.jpg", JPEG)), 1)
    assert len({first[0], later[0], other[0], renamed[0]}) == 4
    assert first[1] == later[1] == other[1] != renamed[1]


def test_zips_on_servers_are_read_in_parts(tmp_path: Path) -> None:
    archive = pack(("a.jpg", JPEG), ("b.bin", os.urandom(4 * MEGABYTE)), ("c.jpg", PNG))
    file = FakeFile(archive)
    remotes = FakeRemotes({"s3://bucket/p.zip": file, "s3://bucket/q.zip": FakeFile(archive)})
    source = opened_from([("s3://bucket/p.zip", "p.zip"), ("s3://bucket/q.zip", "q.zip")], remotes)
    remotes.files["s3://bucket/p.zip"].breaks = range(600, 20_000)
    rows = rows_of(source)
    assert [shown(image)[2] for image in rows] == ["unreadable", PNG, JPEG, PNG]
    assert "the connection broke 5 times" in str(rows[0].content)
    assert remotes.files["s3://bucket/q.zip"].num_read < MEGABYTE
    del remotes.files["s3://bucket/p.zip"]
    with pytest.raises(InputError, match=r"'p.zip' cannot be read \(s3://bucket/p.zip\)"):
        opened_from([("s3://bucket/p.zip", "p.zip")], remotes)
    assert list(tmp_path.iterdir()) == []


def test_zips_come_over_http() -> None:
    archive = pack(("a.jpg", JPEG), ("b.bin", os.urandom(MEGABYTE)), ("c", PNG))
    with http_server({"/p.zip": archive}) as server, Remotes(timeout_seconds=20, allow_local=True) as remotes:
        server.drop_after_bytes = 700_000
        source = opened_from([(f"{server.url}/p.zip", "p.zip")], remotes)
        assert outcomes(source) == [("p.zip!/a.jpg", JPEG), ("p.zip!/c", PNG)]


_BASE = pack(*[(f"{number}{extension}", PNG * 5) for number in range(4) for extension in (".jpg", "")])


@settings(max_examples=80, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 10_000), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_no_damage_is_more_than_failed_rows(
    flips: list[tuple[int, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(_BASE)
    for at, piece in flips:
        content[at % len(content) : at % len(content) + len(piece)] = piece
    path = write(tmp_path_factory.getbasetemp() / "fuzz.zip", bytes(content))
    try:
        source = ZipSource([(str(path), "fuzz.zip")], remotes=None, max_file_bytes=MEGABYTE)
    except InputError:
        return
    for image in rows_of(source):
        assert (
            isinstance(image.content, ImageError)
            or zlib.crc32(image.content) == zlib.crc32(PNG * 5)
            or not image.content
        )
    source.close()
