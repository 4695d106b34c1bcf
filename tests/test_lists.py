"""Lists of paths and URLs: what they name, what it is called, and what becomes of lines that name nothing."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tracemalloc
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from conftest import SAMPLES

from vlmembed.config import EncodeConfig
from vlmembed.errors import FailureCode, ImageError, InputError
from vlmembed.sources import open_source
from vlmembed.sources.ids import UniqueNames
from vlmembed.sources.list_lines import MAX_LINE_BYTES
from vlmembed.sources.lists import ListSource, is_list
from vlmembed.sources.locations import resolve
from vlmembed.sources.readahead import ReadAhead

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from vlmembed.types import EncodedImage

PNG = (SAMPLES / "drawings/one-pixel.png").read_bytes()

_open_sources: list[ListSource] = []


@pytest.fixture(autouse=True)
def _close_sources() -> Iterator[None]:
    yield
    while _open_sources:
        _open_sources.pop().close()


def listed(*lists: Path | str, **settings: Any) -> ListSource:  # noqa: ANN401
    source = ListSource(
        [(str(path), str(path).rpartition("/")[2]) for path in lists],
        reader=settings.pop("reader", None) or ReadAhead(timeout_seconds=10, max_source_pixels=10**6),
        **{"image_column": None, "id_column": None, "keep_columns": (), **settings},
    )
    _open_sources.append(source)
    return source


def rows_of(source: ListSource) -> list[EncodedImage]:
    rows = list(source.read(0))
    assert [image.row for image in rows] == list(range(source.num_rows))
    assert len({image.key for image in rows}) == len(rows)
    return rows


def told(image: EncodedImage) -> str:
    """What a row holds, in words."""
    if isinstance(image.content, ImageError):
        return f"{image.content.code}: {image.content}"
    return image.content.removeprefix(PNG).decode()


def keys_of(source: ListSource) -> list[str]:
    return [image.key for image in rows_of(source)]


def kept_of(source: ListSource) -> list[dict[str, str | None] | None]:
    return [image.columns.to_pylist()[0] if image.columns else None for image in rows_of(source)]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def pictures(folder: Path, *names: str) -> None:
    """Files that hold a picture and, behind it, their own name."""
    for name in names:
        write(folder / name, PNG + name.encode())


def test_lists_are_told_by_their_names() -> None:
    names = ["-", "a.txt", "a.LST", "x/a.list", "a.csv", "a.tsv.gz", "a.jsonl", "https://host/a.ndjson?token=x.png"]
    assert all(map(is_list, names))
    assert not any(map(is_list, ["a", "a.json", "a.parquet", "a.gz", "a.png", "txt", "https://host/a?list=a.csv"]))


def test_a_text_list_names_pictures_beside_it(tmp_path: Path) -> None:
    pictures(tmp_path, "sub/a.png", "sub/with blank.png", "sub/~.png", "b.png", "ü.png", "#c.png")
    lines = ["\ufeff# a comment", "a.png", "", "  with blank.png \t", "../b.png", f"{tmp_path}/ü.png", "../#c.png"]
    lines += ["a.png", "~.png", "gone.png", (tmp_path / "b.png").as_uri(), " # another", "a.png#2"]
    source = listed(write(tmp_path / "sub/list.txt", "\r\n".join(lines)))
    assert source.num_rows == 10
    assert source.skipped == {"comment": 2, "blank line": 1}
    rows = rows_of(source)
    keys = ["a.png", "with blank.png", "../b.png", f"{tmp_path}/ü.png", "../#c.png", "a.png#2", "~.png", "gone.png"]
    assert [image.key for image in rows] == [*keys, (tmp_path / "b.png").as_uri(), "a.png#2#2"]
    names = ["sub/a.png", "sub/with blank.png", "b.png", "ü.png", "#c.png", "sub/a.png", "sub/~.png"]
    assert [told(image) for image in rows[:7]] == names
    assert told(rows[7]) == "missing: the file does not exist"
    assert told(rows[8]) == "b.png"
    assert told(rows[9]).startswith("missing")


def test_undecodable_names_survive(tmp_path: Path) -> None:
    name = b"\xff\\.png"
    (tmp_path / name.decode(errors="surrogateescape")).write_bytes(PNG)
    source = listed(write(tmp_path / "list.txt", name), write(tmp_path / "list.csv", b"path,cap\n" + name + b",\xe9\n"))
    assert [(image.key, image.content) for image in rows_of(source)] == [(r"\xff\\.png", PNG), (r"\xff\\.png#2", PNG)]
    assert kept_of(listed(tmp_path / "list.csv", keep_columns=("cap",))) == [{"cap": r"\udce9"}]


def test_a_name_that_repeats_never_meets_another() -> None:
    names = ["a", "a#2", "a", "a", "a#2", "a#3", "b#2", "b", "b", "a"]
    with UniqueNames() as unique:
        keys = [unique.key(name) for name in names]
    assert keys == ["a", "a#2", "a#3", "a#4", "a#2#2", "a#3#2", "b#2", "b", "b#3", "a#5"]


def test_a_csv_list_as_spreadsheets_write_them(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", 'b,"c".png', "d.png")
    text = '\ufefffile_name,caption\r\na.png,"two\r\nlines, and ""quotes"""\r\n"b,""c"".png",\r\n\r\nd.png, x \r\n'
    source = listed(write(tmp_path / "list.csv", text), keep_columns=("caption", "file_name"))
    assert [told(image) for image in rows_of(source)] == ["a.png", 'b,"c".png', "d.png"]
    captions = ['two\r\nlines, and "quotes"', "", " x "]
    assert [kept and kept["caption"] for kept in kept_of(source)] == captions
    assert source.kept_schema.names == ["caption", "file_name"]
    assert source.skipped == {"blank line": 1}
    write(tmp_path / "list.tsv", "id\tpath\n1\td.png\n")
    assert [told(image) for image in rows_of(listed(tmp_path / "list.tsv"))] == ["d.png"]


def test_blanks_around_a_url_go_and_those_of_a_path_stay(tmp_path: Path) -> None:
    pictures(tmp_path, " a.png ")
    source = listed(write(tmp_path / "list.csv", "x, url\n1, https://host/b.png \n2, a.png \n"))
    rows = rows_of(source)
    assert [image.key for image in rows] == ["https://host/b.png", " a.png "]
    assert told(rows[1]) == " a.png "


def test_bad_rows_of_a_csv_list_are_rows(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", "b.png", "c.png", "d.png", "e.png")
    lines = ["path,x", "a.png,1", "few", "one,too,many", 'b.png,"open', "c.png,2", 'd.png,"odd"quote', "nul\0.png,"]
    lines += [",3", "  ,4", "x" * (MAX_LINE_BYTES + 1), 'e.png,"5"', '"never', "closed"]
    rows = rows_of(listed(write(tmp_path / "list.csv", "\n".join(lines)), keep_columns=("x",)))
    assert [image.key for image in rows] == [
        "a.png", *(f"list.csv#line{number}" for number in (3, 4, 5)), "c.png",
        *(f"list.csv#line{number}" for number in (7, 8, 9, 10, 11)), "e.png", "list.csv#line13", "list.csv#line14",
    ]  # fmt: skip
    assert [told(image) for image in rows] == [
        "a.png",
        "unreadable: line 3 of list.csv: it has 1 fields, and the first line 2",
        "unreadable: line 4 of list.csv: it has 3 fields, and the first line 2",
        """unreadable: line 5 of list.csv: ',' expected after '"'""",
        "c.png",
        """unreadable: line 7 of list.csv: ',' expected after '"'""",
        "unreadable: line 8 of list.csv: it holds a NUL byte",
        "null: line 9 of list.csv names no picture",
        "null: line 10 of list.csv names no picture",
        "unreadable: line 11 of list.csv: it has more than 4194304 bytes: is this a list?",
        "e.png",
        "unreadable: line 13 of list.csv: unexpected end of data",
        "unreadable: line 14 of list.csv: it has 1 fields, and the first line 2",
    ]
    assert [image.columns and image.columns.to_pylist() for image in rows[-5:]] == [
        [{"x": "4"}], None, [{"x": "5"}], None, None,
    ]  # fmt: skip


def test_a_quote_that_is_never_closed_costs_one_row_of_a_long_list(tmp_path: Path) -> None:
    lines = [f"{number:06}.png,{'x' * 2000}" for number in range(3000)]
    lines[5] = '5.png,"open'
    keys = [record[1][0] for record in _records(listed(write(tmp_path / "l.csv", "\n".join(["path,x", *lines]))))]
    assert keys == [f"{number:06}.png" if number != 5 else "l.csv#line7" for number in range(3000)]


def _records(source: ListSource) -> list[tuple[int, Any]]:
    return list(source._records.read(range(source.num_rows)))


def test_json_lines_and_what_they_may_hold(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", "b.png")
    lines: list[str] = [
        '{"id": 7, "image": "a.png", "tags": ["x", "ü"], "n": 1.50, "ok": true, "none": null}',
        '{"image": "b.png"',
        "",
        '["b.png"]',
        '{"image": 5, "id": 6}',
        '{"image": null}',
        '{"tags": {}}',
        '{"image": "b.png", "tags": "t\\u0000\\ud800"}',
        '{"image": "\\ud800.png"}',
        '{"image": "a\\u0000.png"}',
        "[" * 100_000,
        "7" * 5000,
    ]
    path = write(tmp_path / "list.jsonl", "\n".join(lines))
    source = listed(path, keep_columns=("tags", "n", "ok", "none"))
    rows = rows_of(source)
    assert [image.key for image in rows] == [
        "a.png", *(f"list.jsonl#line{number}" for number in (2, 4, 5, 6, 7)), "b.png",
        *(f"list.jsonl#line{number}" for number in (9, 10, 11, 12)),
    ]  # fmt: skip
    texts = [told(image) for image in rows]
    assert (texts[0], texts[6]) == ("a.png", "b.png")
    assert texts[1].startswith("unreadable: line 2 of list.jsonl: it is no JSON: Expecting ',' delimiter")
    assert texts[2] == "unreadable: line 4 of list.jsonl: it holds a list, not an object"
    assert texts[3] == "unreadable: line 5 of list.jsonl: 'image' holds a number, not a path or URL"
    assert texts[4:6] == [f"null: line {number} of list.jsonl names no picture" for number in (6, 7)]
    assert texts[7] == "unreadable: line 9 of list.jsonl: 'image' is not valid Unicode"
    assert texts[8] == "unreadable: line 10 of list.jsonl: 'image' holds a NUL"
    assert all(text.startswith("unreadable: line 1") and "it is no JSON" in text for text in texts[9:])
    kept = kept_of(source)
    assert kept[0] == {"tags": '["x", "ü"]', "n": "1.5", "ok": "true", "none": None}
    assert kept[6] == {"tags": "t\0\\ud800", "n": None, "ok": None, "none": None}
    assert kept[5] == {"tags": "{}", "n": None, "ok": None, "none": None}
    assert kept[1] is None


@pytest.mark.parametrize(
    ("columns", "chosen"),
    [
        (["caption", "URL", "path"], "URL"),
        (["file_name", "text"], "file_name"),
        (["Image", "width"], "Image"),
        (["image_url", "id"], "image_url"),
    ],
)
def test_the_column_is_found_by_its_usual_names(columns: list[str], chosen: str, tmp_path: Path) -> None:
    values = dict.fromkeys(columns, "other") | {chosen: "this"}
    write(tmp_path / "a.csv", f"{','.join(columns)}\n{','.join(values.values())}\n")
    write(tmp_path / "a.jsonl", json.dumps(values))
    assert keys_of(listed(tmp_path / "a.csv")) == ["this"]
    assert keys_of(listed(tmp_path / "a.jsonl")) == ["this"]
    assert keys_of(listed(tmp_path / "a.jsonl", image_column=columns[0])) == [values[columns[0]]]


@pytest.mark.parametrize(
    ("name", "text", "settings", "message"),
    [
        ("a.csv", "x,y\n1,2\n", {}, r"a.csv has no column of paths or URLs among x, y: name one with --image-column"),
        ("a.csv", "", {}, r"among none at all"),
        ("a.csv", '"x,\n1', {}, r"its first line, which names the columns, cannot be read"),
        ("a.csv", "path,image\n", {}, r"2 columns that could name pictures \(path, image\): name one with --image-col"),
        ("a.csv", "path,path\n", {"image_column": "path"}, r"a.csv has more than one column 'path'"),
        ("a.csv", "path,x\n", {"keep_columns": ("y",)}, r"a.csv has no column 'y'; its first line names path, x"),
        ("a.csv", "path,x\n", {"id_column": "y"}, r"a.csv has no column 'y'"),
        ("a.jsonl", '{"x": "a.png"}', {}, r"a.jsonl has no column of paths or URLs among x"),
        ("a.jsonl", '{"x": "a.png"}', {"image_column": "y"}, r"no line of a.jsonl has 'y': is the name right\?"),
        ("a.jsonl", '{"path": "a.png"}', {"keep_columns": ("y",)}, r"no line of a.jsonl has 'y'"),
        ("a.jsonl", '{"path": "a", "y": 1.5}', {"id_column": "y"}, r"'y' holds a number in line 1 of a.jsonl; ids are"),
        ("a.jsonl", '{"path": "a", "y": true}', {"id_column": "y"}, r"'y' holds a truth value in line 1"),
        ("a.jsonl", '{"path": "a"}', {"id_column": "y"}, r"--id-column 'y' of a.jsonl holds nulls"),
        ("a.jsonl", '{"path": "a", "y": ""}', {"id_column": "y"}, r"--id-column 'y' of a.jsonl holds nulls"),
        ("a.csv", "path,y\na,\n", {"id_column": "y"}, r"--id-column 'y' of a.csv holds nulls"),
        ("a.csv", "path,y\na,1\nb,1\n", {"id_column": "y"}, r"'y' repeats an id, in a.csv; the first is '1'"),
        ("a.txt", "a.png", {"keep_columns": ("y",)}, r"a.txt is a list of paths without columns, so it has no 'y'"),
        ("a.txt", b"\xff\xfea\0", {}, r"a.txt is UTF-16: write it as UTF-8"),
        ("a.csv.gz", gzip.compress(b"path\na", mtime=0)[:-9], {}, r"the list '.*a.csv.gz' cannot be read \(EOFError"),
    ],
)
def test_what_is_wrong_with_a_list_is_told_before_the_run(
    name: str, text: str | bytes, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        listed(write(tmp_path / name, text), **settings)


def test_a_list_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the list '.*gone.txt' cannot be read \(FileNotFoundError"):
        listed(tmp_path / "gone.txt")
    with pytest.raises(InputError, match=r"^https://host/a.txt is a URL: not read here"):
        listed("https://user:secret@host/a.txt")
    with pytest.raises(InputError, match=r"the list 'a\\x00.txt' cannot be read \(ValueError: embedded null byte"):
        listed("a\0.txt")


def test_ids_of_a_column(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png")
    csv_list = write(tmp_path / "a.csv", "path,uid\na.png,x\na.png,y\nbad\n")
    json_list = write(tmp_path / "b.jsonl", '{"path": "a.png", "uid": 3}\n{"path": null, "uid": "z"}\n{"p\n')
    source = listed(csv_list, json_list, id_column="uid")
    assert keys_of(source) == ["x", "y", "a.csv#line4", "3", "z", "b.jsonl#line3"]
    write(tmp_path / "b.jsonl", '{"path": "a.png", "uid": "y"}\n')
    with pytest.raises(InputError, match=r"'uid' repeats an id, in b.jsonl; the first is 'y'"):
        listed(csv_list, json_list, id_column="uid")


def test_lists_of_several_kinds_are_one_source(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", "b.png", "c.png")
    write(tmp_path / "1.txt", "a.png\nb.png\n")
    write(tmp_path / "2.csv.gz", gzip.compress(b"path\nb.png\nc.png\n"))
    write(tmp_path / "3.jsonl", '{"path": "a.png"}\n')
    source = listed(*(tmp_path / name for name in ("1.txt", "2.csv.gz", "3.jsonl")))
    every = rows_of(source)
    assert [image.key for image in every] == ["a.png", "b.png", "b.png#2", "c.png", "a.png#2"]
    assert [told(image) for image in every] == ["a.png", "b.png", "b.png", "c.png", "a.png"]
    for wanted in ([], [0], [4], [1, 3], range(2, 5)):
        chosen = [(image.row, image.key, image.content) for image in source.read_rows(wanted)]
        assert chosen == [(row, every[row].key, every[row].content) for row in wanted]
    assert [image.row for image in source.read(3)] == [3, 4]


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        (b"a.png\nb.png\n", ["a.png", "b.png"]),
        (b'\xef\xbb\xbf{"path": "b.png"}\n', ["b.png"]),
        (gzip.compress(b"b.png", mtime=0), ["b.png"]),
        (b"", []),
    ],
)
def test_standard_input_is_a_list_like_others(
    given: bytes, keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures(tmp_path, "a.png", "b.png")
    monkeypatch.chdir(tmp_path)
    digests = set()
    for _ in range(2):  # a run that goes on is given the same list again
        stdin = io.TextIOWrapper(io.BytesIO(given))
        monkeypatch.setattr(sys, "stdin", stdin)
        source = listed("-")
        assert [(image.key, told(image)) for image in rows_of(source)] == [(key, key) for key in keys]
        assert not stdin.buffer.closed
        digests.add((source.digest, source.keys_digest))
    assert len(digests) == 1


def test_the_digest_is_of_what_the_list_says(tmp_path: Path) -> None:
    def digests(text: str, name: str = "a.csv", **settings: Any) -> tuple[str, str]:  # noqa: ANN401
        source = listed(write(tmp_path / name, text), **settings)
        return source.digest, source.keys_digest

    plain = digests("path,x\na.png,1\nb.png,2\n")
    assert digests("x,path\n9,a.png\n9,b.png\n") == plain
    pictures(tmp_path, "a.png")
    assert digests("path,x\na.png,1\nb.png,2\n") == plain
    assert digests("path,x\nb.png,1\na.png,2\n")[1] != plain[1]
    kept = digests("path,x\na.png,1\nb.png,2\n", keep_columns=("x",))
    assert kept[0] != plain[0]
    assert kept[1] == plain[1]
    elsewhere = digests("path,x\na.png,1\nb.png,2\n", name="sub/a.csv")
    assert elsewhere[0] != plain[0]
    assert elsewhere[1] == plain[1]


def test_a_long_list_is_not_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    with path.open("w") as file:
        file.write("url,caption\n")
        file.writelines(f"https://host/{number}.jpg,{'x' * 8000}\n" for number in range(3000))
    tracemalloc.start()
    source = listed(path, keep_columns=("caption",))
    records = source._records.read(range(2999, 3000))
    assert [(row, record[0]) for row, record in records] == [(2999, "https://host/2999.jpg")]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert source.num_rows == 3000
    assert peak < 4 * 2**20


@pytest.mark.parametrize(
    ("base", "written", "location"),
    [
        ("/data/list.txt", "a.png", "/data/a.png"),
        ("/data/list.txt", "../a.png", "/data/../a.png"),
        ("/data/list.txt", "/a.png", "/a.png"),
        ("/data/list.txt", "~/a.png", "/data/~/a.png"),
        ("/data/list.txt", "file:///x/a%20b.png", "/x/a b.png"),
        ("/data/list.txt", "FILE://localhost/a.png", "/a.png"),
        ("/data/list.txt", "https://host/a.png?x=1", "https://host/a.png?x=1"),
        ("https://host/x/list.txt", "a.png", "https://host/x/a.png"),
        ("https://host/x/list.txt", "s3://bucket/a.png", "s3://bucket/a.png"),
    ],
)
def test_where_a_name_leads(base: str, written: str, location: str) -> None:
    assert resolve(base, written) == location


@pytest.mark.parametrize(
    ("base", "written", "message"),
    [
        ("/data/list.txt", "", "the path is empty"),
        ("/data/list.txt", "ftp://host/a.png", "ftp://host/a.png: ftp:// is not read; s3, gs, http, https, hf and"),
        ("/data/list.txt", "file://host/a.png", "file://host/a.png lies on another machine: file:///PATH is read"),
        ("https://host/list.txt", "/etc/passwd", "'/etc/passwd' is a path on this machine, and the file that names it"),
        ("https://host/list.txt", "file:///etc/passwd", "file:///etc/passwd is a path on this machine"),
        ("s3://bucket/list.txt", "ftp://u:p@host/a.png", "ftp://host/a.png: ftp:// is not read"),
    ],
)
def test_names_that_lead_nowhere(base: str, written: str, message: str) -> None:
    result = resolve(base, written)
    assert isinstance(result, ImageError)
    assert result.code is FailureCode.UNREADABLE
    assert str(result).startswith(message)


def test_no_password_shows(tmp_path: Path) -> None:
    text = "https://user:p@ss@host/a@b.png?c=@\nhttps://host/a@b.png?c=@\nuser:p@host\n"
    source = listed(write(tmp_path / "l.txt", text))
    assert keys_of(source) == ["https://host/a@b.png?c=@", "https://host/a@b.png?c=@#2", "user:p@host"]
    assert not any("p@ss" in told(image) for image in rows_of(source))


def test_dots_lead_into_the_objects_of_json_lines(tmp_path: Path) -> None:
    lines = [{"m": {"url": "a.jpg", "c": {"d": 1}}}, {"m": {"url": "b.jpg"}, "m.c": "own"}, {"m": 3}]
    (tmp_path / "l.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = EncodeConfig(
        inputs=(str(tmp_path / "l.jsonl"),), output="o.parquet", image_column="m.url", keep_columns=("m.c", "m.c.d")
    )
    with closing(open_source(config)) as source:
        rows = list(source.read(0))
    assert [row.key for row in rows[:2]] == ["a.jpg", "b.jpg"]
    assert isinstance(rows[2].content, ImageError)
    assert rows[2].content.code == "null"
    kept = [row.columns.to_pylist()[0] for row in rows if row.columns is not None]
    assert kept == [
        {"m.c": '{"d": 1}', "m.c.d": "1"},
        {"m.c": "own", "m.c.d": None},
        {"m.c": None, "m.c.d": None},
    ]
