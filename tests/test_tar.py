"""Tars and WebDataset shards: which members are rows, what they are called, and what damage costs."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import shutil
import subprocess
import tarfile
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest
from conftest import SAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import http_server

from vlmembed.errors import FailureCode, ImageError, InputError, StorageError
from vlmembed.remote.remotes import Remotes
from vlmembed.sources import samples, tarmembers
from vlmembed.sources.forward import ForwardFile
from vlmembed.sources.tar import TAR_HEAD_BYTES, TarSource, is_tar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from vlmembed.types import EncodedImage

PNG = (SAMPLES / "drawings/one-pixel.png").read_bytes()
JPEG = (SAMPLES / "photos/cat.jpg").read_bytes()
MEGABYTE = 2**20

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def pack(*members: tuple[str, bytes] | tarfile.TarInfo, kind: str = "pax") -> bytes:
    """A tar of files and of other things."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=FORMATS[kind], errors="surrogateescape") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            name, content = member
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


def header(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    """A header as no tool would write it, with a right checksum."""
    block = name.ljust(100, b"\0") + b"0000644\0" * 3 + size.ljust(12, b"\0") + b"0" * 11 + b"\0"
    block = (block + b" " * 8 + kind).ljust(257, b"\0") + b"ustar\x0000"
    block = block.ljust(512, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def opened(*shards: Path, keep: Sequence[str] = (), remotes: object = None, limit: int = 10 * MEGABYTE) -> TarSource:
    files = [(str(path), path.name) for path in shards]
    return TarSource(files, remotes=cast("Remotes", remotes), keep_columns=tuple(keep), max_file_bytes=limit)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def shown(image: EncodedImage) -> tuple[int, str, object, object]:
    """A row as something that can be compared."""
    content = str(image.content.code) if isinstance(image.content, ImageError) else image.content
    return image.row, image.key, content, None if image.columns is None else image.columns.to_pylist()[0]


def rows_of(source: TarSource, start: int = 0) -> list[EncodedImage]:
    rows = list(source.read(start))
    assert [image.row for image in rows] == list(range(start, start + len(rows)))
    assert len({image.key for image in rows}) == len(rows)
    return rows


def keys_of(source: TarSource) -> list[str]:
    return [image.key for image in rows_of(source)]


def outcomes(source: TarSource) -> list[tuple[str, object]]:
    """Key and content, or code, of each row."""
    return [shown(image)[1:3] for image in rows_of(source)]


def columns_of(source: TarSource) -> list[Any]:
    return [shown(image)[3] for image in rows_of(source)]


# Which members are rows


def test_members_are_rows_by_name_or_by_bytes_and_the_rest_is_counted(tmp_path: Path) -> None:
    tar = pack(
        ("a.jpg", JPEG),
        ("no-extension", PNG),
        ("b.TIFF", b"not one"),
        ("named.txt", PNG),
        ("text.txt", b"hello"),
        ("data.JSON", b"{}"),
        ("LICENSE", b"MIT"),
        ("empty.webp", b""),
        ("empty", b""),
        special("folder", tarfile.DIRTYPE),
        special("link.jpg", tarfile.SYMTYPE, "a.jpg"),
        special("hard.jpg", tarfile.LNKTYPE, "a.jpg"),
        special("pipe.jpg", tarfile.FIFOTYPE),
        special("disk.jpg", tarfile.BLKTYPE),
        (".hidden.jpg", JPEG),
        ("._a.jpg", b"AppleDouble"),
        (".git/b.jpg", JPEG),
        ("__MACOSX/a.jpg", JPEG),
        ("./deep/er/c.gif", b"GIF89a"),
    )
    source = opened(write(tmp_path / "t.tar", tar))
    assert source.num_rows is None
    assert source.expected_rows == 1
    assert outcomes(source) == [
        ("t.tar!/a.jpg", JPEG),
        ("t.tar!/no-extension", PNG),
        ("t.tar!/b.TIFF", b"not one"),
        ("t.tar!/named.txt", PNG),
        ("t.tar!/empty.webp", b""),
        ("t.tar!/./deep/er/c.gif", b"GIF89a"),
    ]
    skipped = {".txt": 1, ".json": 1, "no extension": 2, "folder": 1, "link": 2, "special member": 2, "hidden": 4}
    assert source.skipped == skipped
    assert source.num_rows == source.expected_rows == 6
    list(source.read(0))
    list(source.read_rows([5]))
    assert source.skipped == skipped


def test_kinds_of_members_do_not_fill_the_memory(tmp_path: Path) -> None:
    members = [(f"x.{number:06}", b"") for number in range(1500)]
    source = opened(write(tmp_path / "t.tar", pack(*members, ("y." + "e" * 90, b""), kind="ustar")))
    assert rows_of(source) == []
    assert len(source.skipped) == 1001
    assert source.skipped["other"] == 501
    assert source.num_rows == 0


@pytest.mark.parametrize("kind", FORMATS)
def test_names_of_all_kinds_come_back_from_every_format(kind: str, tmp_path: Path) -> None:
    names = ["a.jpg", "ünï/cødé 图.jpg", "bytes\udcff\udc80.jpg", "back\\slash.jpg", f"{'d' * 90}/{'n' * 90}.jpg"]
    if kind != "ustar":
        names += ["x" * 300 + ".jpg", "/".join(["é" * 50] * 40) + ".jpg"]
    tar = pack(*[(name, name.encode("utf-8", "surrogateescape")) for name in names], kind=kind)
    source = opened(write(tmp_path / "t.tar", tar))
    expected = [name.replace("\\", "\\\\").replace("\udcff\udc80", "\\xff\\x80") for name in names]
    assert outcomes(source) == [
        (f"t.tar!/{shown_name}", name.encode("utf-8", "surrogateescape"))
        for name, shown_name in zip(names, expected, strict=True)
    ]


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar here")
@pytest.mark.parametrize("kind", ["v7", "ustar", "gnu", "oldgnu", "pax"])
def test_what_the_tar_command_writes_is_read(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    names = ["a.jpg", "sub/b.png", "sub/ü.gif"] + ["n" * 150 + ".jpg"] * (kind in {"gnu", "oldgnu", "pax"})
    for name in names:
        write(folder / name, name.encode() * 100)
    (folder / "link.jpg").symlink_to("a.jpg")
    os.link(folder / "a.jpg", folder / "hard.jpg")
    command: list[str | Path] = [
        "tar",
        "-c",
        f"--format={kind}",
        "--sort=name",
        "-f",
        tmp_path / "t.tar",
        "-C",
        folder,
        ".",
    ]
    subprocess.run(command, check=True)
    source = opened(tmp_path / "t.tar")
    assert outcomes(source) == [(f"t.tar!/./{name}", name.encode() * 100) for name in sorted(names)]
    assert source.skipped == {"folder": 2, "link": 2}


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar here")
@pytest.mark.parametrize("options", [["--format=gnu"], ["--format=pax"], ["--format=pax", "--sparse-version=0.0"]])
def test_sparse_members_are_passed_over(options: list[str], tmp_path: Path) -> None:
    with (tmp_path / "holes.jpg").open("wb") as file:
        for number in range(40):  # more pieces than a GNU header holds
            file.seek(number * 100_000)
            file.write(b"x")
    write(tmp_path / "z.jpg", JPEG)
    command = ["tar", "-c", "-S", *options, "-f", "t.tar", "holes.jpg", "z.jpg"]
    subprocess.run(command, check=True, cwd=tmp_path)
    source = opened(tmp_path / "t.tar")
    assert outcomes(source) == [("t.tar!/z.jpg", JPEG)]
    assert source.skipped == {"special member": 1}


def test_names_that_lead_out_of_the_folder_are_ids_like_any_other(tmp_path: Path) -> None:
    names = ["../../up.jpg", "/etc/absolute.jpg", "a/../b.jpg", "//x.jpg"]
    inner = tmp_path / "inner"
    inner.mkdir()
    source = opened(write(inner / "t.tar", pack(*[(name, JPEG) for name in names])))
    assert keys_of(source) == [f"t.tar!/{name}" for name in names]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["inner", "t.tar"]


def test_names_that_come_twice_are_numbered(tmp_path: Path) -> None:
    tar = pack(("a.jpg", b"1"), ("a.jpg#2", JPEG), ("a.jpg", b"2"), ("a.jpg", b"3"), ("./a.jpg", b"4"))
    shards = [write(tmp_path / name, tar) for name in ("s.tar", "t.tar")]
    keys = ["a.jpg", "a.jpg#2", "a.jpg#3", "a.jpg#4", "./a.jpg"]
    assert keys_of(opened(*shards)) == [f"{shard}!/{key}" for shard in ("s.tar", "t.tar") for key in keys]


def test_pictures_above_the_limit_are_not_read(tmp_path: Path) -> None:
    source = opened(write(tmp_path / "t.tar", pack(("a.jpg", b"1" * 101), ("b.jpg", b"2" * 100))), limit=100)
    rows = rows_of(source)
    assert [shown(image)[2] for image in rows] == ["too_large", b"2" * 100]
    assert str(rows[0].content).startswith("the file has 101 bytes, and a picture within --max-source-pixels 100 at")


# Reading from any row, once or several times


def mixed_shards(folder: Path) -> list[Path]:
    """Three shards of samples, one of them cut and one compressed."""
    members: list[tuple[str, bytes]] = []
    for number in range(4):
        members += [(f"{number}.jpg", JPEG[: number * 3000]), (f"{number}.json", b'{"n": %d}' % number)]
        members += [(f"{number}.seg.png", PNG)] * (number % 2) + [(f"{number}", PNG)] * (number % 3)
    tar = pack(*members)
    return [
        write(folder / "a.tar", tar[: tar.index(b"3.jpg") + 5000]),
        write(folder / "b.tar.gz", gzip.compress(tar)),
        write(folder / "c.tar", pack(("x.txt", b"no picture"))),
        write(folder / "d.tar", tar.replace(b"3.json", b"3.JSON", 1)),
        write(folder / "e.tar", tar),
    ]


@pytest.mark.parametrize("keep", [(), ("json.n",)])
def test_reading_from_every_row_gives_the_same_rows(keep: tuple[str, ...], tmp_path: Path) -> None:
    shards = mixed_shards(tmp_path)
    source = opened(*shards, keep=keep)
    rows = [shown(image) for image in rows_of(source)]
    skipped = dict(source.skipped)
    assert len(rows) == source.num_rows == 35
    for start in range(len(rows) + 2):
        fresh = opened(*shards, keep=keep)
        assert [shown(image) for image in fresh.read(start)] == rows[start:]
        assert fresh.skipped == skipped
        assert fresh.num_rows == source.num_rows
        if start % 5 == 0:
            assert [shown(image) for image in source.read(start)] == rows[start:]
    assert source.skipped == skipped


def test_single_rows_are_read_alone(tmp_path: Path) -> None:
    shards = mixed_shards(tmp_path)
    source = opened(*shards, keep=("json.n",))
    rows = [shown(image) for image in rows_of(source)]
    for wanted in ([], [0], [3, 4, 17], list(range(1, 35, 5)), [34], list(range(35))):
        for reader in (source, opened(*shards, keep=("json.n",))):
            assert [shown(image) for image in reader.read_rows(wanted)] == [rows[row] for row in wanted]


def test_a_shard_is_left_behind_its_last_wanted_row(tmp_path: Path) -> None:
    tar = pack(("a.jpg", PNG), ("b.jpg", PNG), ("c.jpg", PNG))
    source = opened(write(tmp_path / "t.tar", tar))
    assert [image.key for image in source.read_rows([0])] == ["t.tar!/a.jpg"]
    assert source.num_rows is None
    assert source.skipped == {}


def test_members_that_are_not_wanted_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "t.tar"
    num_bytes = 10 * MEGABYTE
    with path.open("wb") as file:  # holes, so that no disk is needed
        for number in range(4):
            file.write(header(b"%d.jpg" % number, b"%o" % num_bytes))
            file.seek(num_bytes, os.SEEK_CUR)
        file.write(header(b"last.jpg", b"5") + b"hello".ljust(1536, b"\0"))
    raw = FakeFile(path.read_bytes())
    remotes = FakeRemotes({"s3://bucket/t.tar": raw})
    source = TarSource(
        [("s3://bucket/t.tar", "t.tar")],
        remotes=cast("Remotes", remotes),
        keep_columns=(),
        max_file_bytes=100 * MEGABYTE,
    )
    assert [shown(image) for image in source.read(4)] == [(4, "t.tar!/last.jpg", b"hello", None)]
    assert raw.num_read < MEGABYTE
    assert source.num_rows == 5


# Kept columns


def test_texts_of_a_sample_become_columns_wherever_they_stand(tmp_path: Path) -> None:
    tar = pack(
        ("d/1.json", b'{"caption": "caf\\u00e9", "size": {"w": 3, "h": null}, "tags": ["a", 1], "ok": true}'),
        ("d/1.jpg", JPEG),
        ("d/1.seg.png", PNG),
        ("d/1.txt", "Grüße".encode()),
        ("d/1.seg.json", b"[1]"),
        ("d/2.jpg", JPEG),
        ("d/2.CLS", b"7"),
        ("d/2.json", b"{broken"),
        ("e/2.txt", b"of another sample"),
        ("d/2.png", PNG),
        ("d/3.txt", b"\xff caf\xe9 \x00"),
        ("d/3.json", b'\xef\xbb\xbf{"caption": "caf\xe9 \\ud800", "size": 7}'),
        ("d/3.webp", b""),
    )
    keep = ("txt", "json.caption", "json.size.w", "json.size", "json.tags", "json.ok", "cls", "seg.json", "json")
    source = opened(write(tmp_path / "t.tar", tar), keep=keep)
    assert source.kept_schema == pa.schema([(name, pa.string()) for name in keep])
    rows = rows_of(source)
    assert all(image.columns is not None and image.columns.schema == source.kept_schema for image in rows)
    one = {
        "txt": "Grüße",
        "json.caption": "café",
        "json.size.w": "3",
        "json.size": '{"w": 3, "h": null}',
        "json.tags": '["a", 1]',
        "json.ok": "true",
        "cls": None,
        "seg.json": "[1]",
        "json": '{"caption": "caf\\u00e9", "size": {"w": 3, "h": null}, "tags": ["a", 1], "ok": true}',
    }
    nothing = dict.fromkeys(keep)
    columns = [shown(image)[3] for image in rows]
    assert columns[:2] == [one, one]
    assert columns[2:4] == [{**nothing, "cls": "7", "json": "{broken"}, nothing]
    assert columns[4] == {
        **nothing,
        "txt": "\\xff caf\\xe9 \x00",
        "json.caption": "caf\\udce9 \\ud800",
        "json.size": "7",
        "json": '\ufeff{"caption": "caf\\xe9 \\ud800", "size": 7}',
    }
    assert source.skipped == {}


def test_a_column_that_no_sample_has_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = opened(
        write(tmp_path / "t.tar", pack(("1.jpg", JPEG), ("1.txt", b"t"))), keep=("txt", "caption", "json.a")
    )
    assert columns_of(source) == [{"txt": "t", "caption": None, "json.a": None}]
    assert caplog.messages == [
        f"--keep-columns {name} is null in every row: no sample with a picture has it" for name in ("caption", "json.a")
    ]


def test_json_that_python_gives_up_on_is_null(tmp_path: Path) -> None:
    deep = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    tar = pack(("1.jpg", JPEG), ("1.json", deep), ("2.jpg", JPEG), ("2.json", b'{"a": ' + b"9" * 10_000 + b"}"))
    assert columns_of(opened(write(tmp_path / "t.tar", tar), keep=("json.a",))) == [{"json.a": None}, {"json.a": None}]


def test_large_texts_are_not_taken(tmp_path: Path) -> None:
    tar = pack(("1.jpg", JPEG), ("1.txt", b"x" * (16 * MEGABYTE + 1)), ("2.txt", b"x" * 1000), ("2.jpg", JPEG))
    source = opened(write(tmp_path / "t.tar", tar), keep=("txt",))
    assert columns_of(source) == [{"txt": None}, {"txt": "x" * 1000}]
    assert source.skipped == {".txt above 16 MiB": 1}


def test_a_huge_sample_is_not_held_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = [(f"1.{number}.jpg", b"x" * 100) for number in range(7)]
    tar = pack(("1.a", b"early"), *pictures, ("1.b", b"late"))
    path = write(tmp_path / "t.tar", tar)
    early, both = {"a": "early", "b": None}, {"a": "early", "b": "late"}
    for limit, value in (("MAX_SAMPLE_PICTURES", 3), ("MAX_SAMPLE_BYTES", 299)):
        with monkeypatch.context() as patch:
            patch.setattr(samples, limit, value)
            assert columns_of(opened(path, keep=("a", "b"))) == [early] * 6 + [both]
            for start in range(7):
                fresh = opened(path, keep=("a", "b"))
                assert [shown(image)[3] for image in fresh.read(start)] == ([early] * 6 + [both])[start:]


def test_webdatasets_own_writer_is_read(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "t.tar"), encoder=False) as writer:
        for number in range(3):
            writer.write({"__key__": f"sub/{number:03}", "jpg": JPEG, "json": b'{"n": %d}' % number, "txt": b"t"})
    source = opened(tmp_path / "t.tar", keep=("json.n", "txt"))
    assert [shown(image) for image in rows_of(source)] == [
        (number, f"t.tar!/sub/{number:03}.jpg", JPEG, {"json.n": str(number), "txt": "t"}) for number in range(3)
    ]


# Compressed tars

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".tar.gz": gzip.compress,
    ".tar.bz2": bz2.compress,
    ".tar.xz": lzma.compress,
    ".tar.zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_compressed_tars_are_read_and_may_be_of_several_pieces(suffix: str, tmp_path: Path) -> None:
    compress = COMPRESSORS[suffix]
    tar = pack(("a.jpg", JPEG), ("b.txt", b"text"), ("c.jpg", os.urandom(MEGABYTE)), ("d", PNG))
    path = write(tmp_path / f"t{suffix}", compress(tar[:5000]) + compress(tar[5000:]))
    plain = outcomes(opened(write(tmp_path / "t.tar", tar)))
    source = opened(path)
    assert outcomes(source) == [(key.replace("t.tar", path.name), content) for key, content in plain]
    assert source.skipped == {".txt": 1}


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_compressed_tars_that_are_cut_or_damaged_keep_what_is_before(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    noise = os.urandom(MEGABYTE // 8)
    tar = pack(("a.jpg", JPEG), ("b.jpg", noise), ("c.bin", os.urandom(MEGABYTE // 8)), ("d.jpg", JPEG))
    packed = COMPRESSORS[suffix](tar)
    whole = write(tmp_path / f"u{suffix}", packed)
    for cut, lost in ((len(packed) * 3 // 4, "!"), (len(packed) // 3, "!/b.jpg")):
        path = write(tmp_path / f"t{suffix}", packed[:cut])
        caplog.clear()
        rows = outcomes(opened(path, whole))
        before = [("!/a.jpg", JPEG), ("!/b.jpg", noise)][: 2 if lost == "!" else 1]
        # bzip2 unpacks in blocks of 900 kB, the last of which is lost
        if suffix != ".tar.bz2":
            assert rows[: len(before) + 1] == [(f"{path.name}{key}", content) for key, content in before] + [
                (f"{path.name}{lost}", "truncated")
            ]
            assert path.name in caplog.text
        assert rows[-3][0] == f"{whole.name}!/a.jpg"
    damaged = bytearray(packed)
    damaged[len(packed) // 2 : len(packed) // 2 + 100] = bytes(100)
    path = write(tmp_path / f"t{suffix}", bytes(damaged))
    rows = outcomes(opened(path, whole))
    assert rows[-3:] == [
        (f"{whole.name}!/{name}.jpg", content) for name, content in (("a", JPEG), ("b", noise), ("d", JPEG))
    ]
    for start in range(len(rows)):
        assert [shown(image)[1:3] for image in opened(path, whole).read(start)] == rows[start:]


def test_a_decompression_bomb_is_passed_over_in_small_pieces(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "t.tar.gz", "wb", compresslevel=1) as file:
        file.write(header(b"bomb.jpg", b"%o" % (40 * MEGABYTE)))
        for _ in range(40):
            file.write(bytes(MEGABYTE))
        file.write(pack(("a.jpg", JPEG)))
    assert outcomes(opened(tmp_path / "t.tar.gz")) == [("t.tar.gz!/bomb.jpg", "too_large"), ("t.tar.gz!/a.jpg", JPEG)]


# Damage


def test_a_tar_that_is_cut_keeps_its_good_members(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tar = pack(("a.jpg", PNG), ("b.txt", b"x" * 700), ("c.jpg", PNG))
    good = write(tmp_path / "z.tar", pack(("z.jpg", PNG)))
    first, last, lost = ("t.tar!/a.jpg", PNG), ("t.tar!/c.jpg", PNG), ("t.tar!", "truncated")
    ends: list[tuple[int, list[tuple[str, object]]]] = [  # what a cut before that byte leaves
        (1, [lost]),
        (512, [lost]),
        (512 + 69, [("t.tar!/a.jpg", "truncated")]),
        (1024 + 1, [first]),
        (1536 + 700, [first, lost]),
        (2560 + 1, [first]),
        (3072, [first, lost]),
        (3072 + 69, [first, ("t.tar!/c.jpg", "truncated")]),
        (5000, [first, last]),
    ]
    for cut in sorted({0, *range(0, 5000, 61), *(end - step for end, _ in ends for step in (0, 1))}):
        caplog.clear()
        *rows, other = outcomes(opened(write(tmp_path / "t.tar", tar[:cut]), good))
        assert other == ("z.tar!/z.jpg", PNG)
        assert rows == next(left for end, left in ends if cut < end or end == 5000)
        told = [name for name, content in rows if content == "truncated"]
        messages = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert [message.partition(":")[0] for message in messages] == [name.removesuffix("!") for name in told]


def test_the_message_says_what_is_there_and_how_much_was_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tar = pack(("a.jpg", JPEG), ("b.jpg", b"x" * 2000), ("c.txt", b"x" * 2000))
    cut = rows_of(opened(write(tmp_path / "t.tar", tar[: tar.index(b"b.jpg") + 1012])))[-1]
    assert str(cut.content) == "the archive ends within it: 500 of 2,000 bytes are there"
    assert caplog.messages == [f"{cut.key}: " + str(cut.content) + "; what follows it is lost"]
    caplog.clear()
    lost = rows_of(opened(write(tmp_path / "t.tar", tar[: tar.index(b"c.txt") + 1012])))[-1]
    assert str(lost.content) == "the file ends within a member (after 3 members; what follows is lost)"
    assert caplog.messages == ["t.tar: " + str(lost.content)]


def test_a_tar_without_end_marks_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tar = pack(("a.jpg", JPEG), ("b.jpg", b"x"))
    end = tar.index(b"b.jpg") + 512
    for cut in (end + 1, end + 100, end + 512, end + 600, end + 1024):
        source = opened(write(tmp_path / "t.tar", tar[:cut]))
        assert keys_of(source) == ["t.tar!/a.jpg", "t.tar!/b.jpg"]
        assert source.skipped == ({"tar without an end mark": 1} if cut <= end + 512 else {})
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert outcomes(opened(write(tmp_path / "t.tar", b""))) == [("t.tar!", "truncated")]


def test_tars_one_behind_the_other_are_read_as_one(tmp_path: Path) -> None:
    source = opened(write(tmp_path / "t.tar", pack(("a.jpg", JPEG)) + pack(("b.jpg", PNG), ("a.jpg", PNG))))
    assert outcomes(source) == [("t.tar!/a.jpg", JPEG), ("t.tar!/b.jpg", PNG), ("t.tar!/a.jpg#2", PNG)]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (b"1" * 512, "there is no header at byte 1,024 (bad checksum)"),
        (bytes(512) + b"1" * 512, "there is no header at byte 1,536 (bad checksum)"),
        (header(b"n.jpg", b"\xff" * 11 + b"\x00"), "the header at byte 1,024 tells a size of -256 bytes"),
        (header(b"n.jpg", b"-1"), "the header at byte 1,024 tells a size of -1 bytes"),
        (header(b"n.jpg", b"9z"), "there is no header at byte 1,024 (invalid header)"),
        (header(b"n", b"\x80" + b"\xff" * 11), "the file ends within a member"),
        (
            header(b"n", b"%o" % (MEGABYTE + 1), b"L"),
            "the extra header at byte 1,024 has 1,048,577 bytes, and may have 1,",
        ),
        (
            header(b"n", b"%o" % (MEGABYTE + 1), b"x"),
            "the extra header at byte 1,024 has 1,048,577 bytes, and may have 1,",
        ),
        (header(b"n", b"-1", b"g"), "the header at byte 1,024 tells a size of -1 bytes"),
        (header(b"n", b"4", b"x") + b"19 x".ljust(512, b"\0"), "the extra header at byte 1,024 is damaged"),
        (header(b"n", b"4", b"x") + b"0 x=".ljust(512, b"\0"), "the extra header at byte 1,024 is damaged"),
        (
            header(b"n", b"13", b"x") + b"11 size=-1\n".ljust(512, b"\0") + header(b"n", b"0"),
            "at byte 2,048 tells no size",
        ),
        (header(b"n", b"5", b"L") + b"hello".ljust(512, b"\0") + bytes(512), "ends behind the header of a long name"),
    ],
)
def test_a_bad_header_costs_what_is_behind_it_and_one_row_says_so(
    damage: bytes, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = pack(("a.jpg", PNG))[:1024]
    bad = write(tmp_path / "t.tar", first + damage + pack(("lost.jpg", JPEG)))
    good = write(tmp_path / "u.tar", pack(("a.jpg", JPEG)))
    rows = rows_of(opened(bad, good, keep=("json",)))
    assert [image.key for image in rows] == ["t.tar!/a.jpg", "t.tar!", "u.tar!/a.jpg"]
    content = rows[1].content
    assert isinstance(content, ImageError)
    assert content.code is (FailureCode.TRUNCATED if "ends" in message else FailureCode.UNREADABLE)
    assert message in str(content)
    assert "what follows is lost)" in str(content)
    assert caplog.messages[0] == f"t.tar: {content}"


def test_a_damaged_shard_has_no_columns_of_the_sample_before(tmp_path: Path) -> None:
    tar = pack(("1.jpg", JPEG), ("1.txt", b"one"))[: 512 + 7 * 0 + len(JPEG) // 512 * 512 + 512 + 1024]
    source = opened(write(tmp_path / "t.tar", tar + b"x" * 512), keep=("txt",))
    assert [shown(image)[1:] for image in rows_of(source)] == [
        ("t.tar!/1.jpg", JPEG, {"txt": "one"}),
        ("t.tar!", "unreadable", {"txt": None}),
    ]


def test_a_text_that_is_cut_leaves_its_picture(tmp_path: Path) -> None:
    tar = pack(("1.jpg", PNG), ("1.txt", b"one"))
    source = opened(write(tmp_path / "t.tar", tar[:1538]), keep=("txt",))
    assert [shown(image)[1:] for image in rows_of(source)] == [
        ("t.tar!/1.jpg", PNG, {"txt": None}),
        ("t.tar!", "truncated", {"txt": None}),
    ]


def test_shards_that_went_or_changed_after_they_were_listed_are_a_row_each(tmp_path: Path) -> None:
    shards = [write(tmp_path / f"{name}.tar", pack((f"{name}.jpg", JPEG))) for name in "abcde"]
    source = opened(*shards)
    shards[0].unlink()
    write(shards[1], pack(("other.jpg", JPEG * 9)))
    os.utime(shards[2], ns=(1, 1))
    shards[3].unlink()
    shards[3].mkdir()
    rows = rows_of(source)
    assert [shown(image)[1:3] for image in rows] == [
        ("a.tar!", "missing"),
        ("b.tar!", "unreadable"),
        ("c.tar!", "unreadable"),
        ("d.tar!", "unreadable"),
        ("e.tar!/e.jpg", JPEG),
    ]
    assert str(rows[1].content).startswith("it has changed since it was listed: its size is ")
    assert str(rows[2].content).startswith("it has changed since it was listed: its version is 1, and was ")


def test_a_shard_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'t.tar' cannot be read .*No such file.*: look after it, or leave it out"):
        opened(tmp_path / "t.tar")


def test_digests_tell_other_contents_and_other_names(tmp_path: Path) -> None:
    path = write(tmp_path / "t.tar", pack(("a.jpg", JPEG)))
    os.utime(path, ns=(1, 1))
    first = opened(path)
    assert (opened(path).digest, opened(path).keys_digest) == (first.digest, first.keys_digest)
    os.utime(path, ns=(1, 2))
    assert opened(path).digest != first.digest
    assert opened(path).keys_digest == first.keys_digest
    write(path, pack(("a.jpg", JPEG * 9)))
    assert opened(path).keys_digest != first.keys_digest


_MEMBERS = [(f"{number}{extension}", PNG * 5) for number in range(4) for extension in (".jpg", ".json")]
_BASES = [pack(*_MEMBERS, ("n" * 200 + ".jpg", PNG), kind=kind) for kind in FORMATS if kind != "ustar"]


@settings(max_examples=60, deadline=None)
@given(
    base=st.sampled_from(_BASES),
    flips=st.lists(st.tuples(st.integers(0, 12_000), st.binary(min_size=1, max_size=12)), min_size=1, max_size=4),
    cut=st.none() | st.integers(0, 12_000),
    form=st.tuples(st.sampled_from(["", ".gz", ".zst"]), st.booleans()),
)
def test_no_damage_is_more_than_failed_rows(
    base: bytes,
    flips: list[tuple[int, bytes]],
    cut: int | None,
    form: tuple[str, bool],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    suffix, is_hit_before_compression = form
    compress = COMPRESSORS[f".tar{suffix}"] if suffix else bytes
    content = bytearray(base if is_hit_before_compression else compress(base))
    for at, piece in flips:
        content[at % len(content) : at % len(content) + len(piece)] = piece
    path = tmp_path_factory.getbasetemp() / f"fuzz.tar{suffix}"
    data = compress(bytes(content)) if is_hit_before_compression else bytes(content)
    path.write_bytes(data[:cut])
    source = opened(path, keep=("json.a", "txt"))
    rows = [shown(image) for image in rows_of(source)]
    assert source.num_rows == len(rows)
    if rows:
        middle = len(rows) // 2
        assert [shown(image) for image in opened(path, keep=("json.a", "txt")).read(middle)] == rows[middle:]


def test_headers_with_right_checksums_and_any_content_are_harmless(tmp_path: Path) -> None:
    @settings(max_examples=60, deadline=None)
    @given(
        size=st.binary(min_size=12, max_size=12) | st.integers(0, 3000).map(lambda value: b"%o" % value),
        kind=st.binary(min_size=1, max_size=1) | st.sampled_from([b"L", b"K", b"x", b"g", b"S", b"X"]),
        content=st.binary(max_size=600) | st.just(b"12 size=99999999\n"),
    )
    def check(size: bytes, kind: bytes, content: bytes) -> None:
        block = header(b"n.jpg", size, kind)
        padding = bytes(-len(content) % 512)
        path = write(tmp_path / "t.tar", block + content + padding + pack(("a.jpg", JPEG)))
        rows_of(opened(path))

    check()


# Telling tars from other files


def test_tars_are_told_by_bytes_and_else_by_name() -> None:
    tar = pack(("a.jpg", JPEG))[:TAR_HEAD_BYTES]
    packed = gzip.compress(tar)
    assert is_tar("shard-000", tar)
    assert is_tar("shard.tar", tar[:100])
    assert is_tar("s3://bucket/SHARD.TAR", b"")
    assert is_tar("https://host/shard.tar?download=true#x", b"")
    assert is_tar("a.tar", packed)
    assert all(is_tar(f"a{suffix}", compress(tar)) for suffix, compress in COMPRESSORS.items())
    assert is_tar("a.tgz", b"")
    assert is_tar("a.tgz", tar)
    assert not is_tar("a.gz", packed)
    assert not is_tar("a.tgz", b"no gzip at all")
    assert not is_tar("a.jpg", JPEG[:TAR_HEAD_BYTES])
    assert not is_tar("a.tar", JPEG[:TAR_HEAD_BYTES])
    assert not is_tar("a.tar", b"PAR1")
    assert not is_tar("a.tar", b"PK\x03\x04")
    assert not is_tar("a.txt", b"")


# Servers


class FakeFile(io.RawIOBase):
    """A file on a server, which breaks off from the read of `breaks_at` on, or there alone."""

    def __init__(self, content: bytes, breaks: range = range(0)) -> None:
        self.content = content
        self.breaks = breaks
        self.num_bytes = len(content)
        self.version = "1"
        self.num_read = 0
        self._at = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go on elsewhere."""
        self._at = offset + (0, self._at, self.num_bytes)[whence]
        return self._at

    def tell(self) -> int:
        """Where reading goes on."""
        return self._at

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401  any buffer
        """Read, or break."""
        if self._at in self.breaks:
            msg = "https://host/t.tar: the connection broke 5 times"
            raise OSError(msg)
        end = min(self._at + len(buffer), self.breaks.start if self._at < self.breaks.start else self.num_bytes)
        piece = self.content[self._at : end]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        self.num_read += len(piece)
        return len(piece)


@dataclass
class FakeInfo:
    """What is known of a file."""

    num_bytes: int | None
    version: str


@dataclass
class FakeRemotes:
    """Files by URL."""

    files: dict[str, FakeFile] = field(default_factory=dict)

    def info(self, url: str) -> FakeInfo:
        """What is known of a file."""
        if url not in self.files:
            raise FileNotFoundError(url)
        return FakeInfo(num_bytes=self.files[url].num_bytes, version=self.files[url].version)

    def open(self, url: str) -> FakeFile:
        """The file, from its start."""
        if url not in self.files:
            raise FileNotFoundError(url)
        file = self.files[url]
        again = FakeFile(file.content, file.breaks)
        again.version = file.version
        self.files[url] = again
        return again


def remote(**files: FakeFile) -> tuple[TarSource, FakeRemotes]:
    remotes = FakeRemotes({f"https://host/{name}.tar": file for name, file in files.items()})
    named = [(url, url.rpartition("/")[2]) for url in remotes.files]
    source = TarSource(named, remotes=cast("Remotes", remotes), keep_columns=(), max_file_bytes=10 * MEGABYTE)
    return source, remotes


def test_tars_on_servers_are_read_once_and_checked_for_changes() -> None:
    tar = pack(("a.jpg", JPEG), ("b.jpg", os.urandom(MEGABYTE)), ("c.txt", b"x"))
    source, remotes = remote(one=FakeFile(tar), two=FakeFile(gzip.compress(tar)), gone=FakeFile(tar), new=FakeFile(tar))
    remotes.files["https://host/new.tar"].version = "2"
    del remotes.files["https://host/gone.tar"]
    rows = [shown(image)[1:3] for image in source.read(0)]
    assert [key for key, _ in rows[:4]] == [f"{name}.tar!/{key}.jpg" for name in ("one", "two") for key in "ab"]
    assert rows[4:] == [("gone.tar!", "missing"), ("new.tar!", "unreadable")]
    assert remotes.files["https://host/one.tar"].num_read == len(tar)
    assert source.skipped == {".txt": 2}


def test_a_connection_that_breaks_in_a_picture_costs_that_picture() -> None:
    noise = os.urandom(MEGABYTE)
    tar = pack(("a.jpg", JPEG), ("b.jpg", noise), ("c.jpg", PNG))
    at = tar.index(b"b.jpg") + 512
    source, _ = remote(t=FakeFile(tar, range(at + 200_000, at + 300_000)))
    rows = rows_of(source)
    assert [shown(image)[1:3] for image in rows] == [
        ("t.tar!/a.jpg", JPEG),
        ("t.tar!/b.jpg", "fetch_failed"),
        ("t.tar!/c.jpg", PNG),
    ]
    assert "https://host/t.tar: the connection broke 5 times" in str(rows[1].content)


def test_a_connection_that_is_gone_stops_the_run() -> None:
    tar = pack(("a.jpg", JPEG), ("b.jpg", os.urandom(MEGABYTE)), ("c.jpg", PNG))
    at = tar.index(b"b.jpg") + 512
    for content in (tar, gzip.compress(tar)):
        source, _ = remote(t=FakeFile(content, range(at + 200_000, 10**9)), u=FakeFile(tar))
        keys: list[object] = []
        with pytest.raises(StorageError, match="the same command goes on from there"):
            keys.extend(shown(image)[1:3] for image in source.read(0))
        assert keys[:1] == [("t.tar!/a.jpg", JPEG)]
        assert keys[1:] == ([("t.tar!/b.jpg", "fetch_failed")] if content is tar else [])


def test_a_server_that_does_not_tell_sizes_is_read_from_front_to_back() -> None:
    tar = pack(("a.jpg", JPEG), ("b.txt", b"x" * 100_000), ("c.jpg", PNG))
    file = FakeFile(tar)
    remotes = FakeRemotes({"https://host/t.tar": file})
    remotes.info = lambda url: FakeInfo(num_bytes=None, version="")  # type: ignore[method-assign]  # noqa: ARG005
    source = TarSource(
        [("https://host/t.tar", "t.tar")], remotes=cast("Remotes", remotes), keep_columns=(), max_file_bytes=10**6
    )
    assert outcomes(source) == [("t.tar!/a.jpg", JPEG), ("t.tar!/c.jpg", PNG)]
    assert source.files_bytes == [0]


@pytest.mark.parametrize("takes_ranges", [True, False])
def test_tars_come_over_http_also_where_a_connection_drops(*, takes_ranges: bool) -> None:
    tar = pack(("a.jpg", JPEG), ("a.txt", b"t"), ("b.jpg", os.urandom(MEGABYTE)), ("c.jpg", PNG))
    files = {"/t.tar": tar, "/u.tgz": gzip.compress(tar)}
    with http_server(files) as server, Remotes(timeout_seconds=20, allow_local=True) as remotes:
        server.takes_ranges = takes_ranges
        server.drop_after_bytes = 700_000
        named = [(f"{server.url}{path}", path[1:]) for path in files]
        source = TarSource(named, remotes=remotes, keep_columns=("txt",), max_file_bytes=10 * MEGABYTE)
        rows = [shown(image) for image in rows_of(source)]
        assert [key for _, key, _, _ in rows] == [f"{path[1:]}!/{name}.jpg" for path in files for name in "abc"]
        assert [content for _, _, content, _ in rows] == [JPEG, tar[tar.index(b"b.jpg") + 512 :][:MEGABYTE], PNG] * 2
        assert [columns["txt"] for *_, columns in rows] == ["t", None, None] * 2  # type: ignore[index]
        assert [shown(image) for image in source.read_rows([2, 5])] == [rows[2], rows[5]]
        del server.files["/t.tar"]
        server.files["/u.tgz"] += b"changed"
        assert [shown(image)[1:3] for image in source.read(0)] == [("t.tar!", "missing"), ("u.tgz!", "unreadable")]


def test_constants_are_what_the_documents_say() -> None:
    assert tarmembers.MAX_EXTRA_BYTES == MEGABYTE
    assert (samples.MAX_TEXT_BYTES, samples.MAX_SAMPLE_BYTES) == (16 * MEGABYTE, 256 * MEGABYTE)
    assert samples.MAX_SAMPLE_PICTURES == 1000
    assert json.dumps(samples.split_name("a.b/c.d.E")) == '["a.b/c", "d.e"]'


def claims_dictionary(packed: bytes, size: int) -> bytes:
    """A stream of xz whose block names a dictionary of this size, by the format's number, with the right checksum."""
    head = packed[12:16] + bytes([size]) + packed[17:20]
    return packed[:12] + head + zlib.crc32(head).to_bytes(4, "little") + packed[24:]


def test_an_xz_that_asks_for_a_huge_dictionary_is_a_damaged_shard(tmp_path: Path) -> None:
    packed = lzma.compress(pack(("a.jpg", JPEG)))
    assert claims_dictionary(packed, packed[16]) == packed
    for content, before in ((b"", 0), (lzma.compress(pack(("b.jpg", PNG))), 1)):  # in the first stream, in the second
        path = write(tmp_path / "t.tar.xz", content + claims_dictionary(packed, 40))
        rows = rows_of(opened(path, write(tmp_path / "u.tar", pack(("c.jpg", PNG)))))
        assert [image.key for image in rows] == [*["t.tar.xz!/b.jpg"] * before, "t.tar.xz!", "u.tar!/c.jpg"]
        lost = rows[before].content
        assert isinstance(lost, ImageError)
        assert lost.code == "unreadable"
        assert "asks for a decoder of more than 128 MiB: compress it again with xz -9" in str(lost)
    write(tmp_path / "t.tar.xz", claims_dictionary(packed, 28))  # 64 MiB, as of xz -9
    assert outcomes(opened(tmp_path / "t.tar.xz")) == [("t.tar.xz!/a.jpg", JPEG)]


@pytest.mark.parametrize(
    ("between", "behind", "is_whole"),
    [(b"", b"", True), (bytes(4), bytes(100_000), True), (bytes(70_000), b"no stream", True), (b"", b"\xfd7z", False)],
)
def test_streams_of_xz_are_read_one_behind_the_other(between: bytes, behind: bytes, *, is_whole: bool) -> None:
    content = os.urandom(MEGABYTE // 2) + bytes(5 * MEGABYTE)
    at = MEGABYTE // 4 + 7
    packed = between.join(lzma.compress(part, preset=0) for part in (content[:at], b"", content[at:])) + behind
    with ForwardFile(io.BufferedReader(cast("io.RawIOBase", io.BytesIO(packed))), len(packed)) as file:
        assert file.read(10) == content[:10]
        assert file.advance(1000)
        assert file.read(3 * MEGABYTE) == content[1000 : 1000 + 3 * MEGABYTE]
        assert file.read(len(content) - file.position) == content[1000 + 3 * MEGABYTE :]
        if is_whole:
            assert file.read(1) == b""
            assert not file.advance(len(content) + 1)
        else:
            with pytest.raises(EOFError):
                file.read(1)
