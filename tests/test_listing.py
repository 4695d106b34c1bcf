"""What is typed as an input: patterns, braces, folders of shards; and runs whose rows are counted by reading them."""

from __future__ import annotations

import io
import tarfile
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from conftest import noise
from servers import http_server

import vlmembed
from vlmembed.checking.verification import verify
from vlmembed.errors import ConfigError, FailureCode, ImageError, InputError, NothingEmbeddedError
from vlmembed.sources import open_source
from vlmembed.sources.names import expand_braces, url_pattern

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def picture(seed: int) -> bytes:
    buffer = io.BytesIO()
    noise(30, 40, seed).save(buffer, "PNG")
    return buffer.getvalue()


def shard(path: Path, names: Sequence[str], first_seed: int = 0) -> Path:
    """A tar of pictures, and one member that is none."""
    with tarfile.open(path, "w") as tar:
        for seed, name in enumerate(names, first_seed):
            content = b"no picture" if "bad" in name else picture(seed)
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def keys(*inputs: str | Path, start: int = 0, **settings: Any) -> list[str]:  # noqa: ANN401
    """The ids of a run's rows from `start` on; their numbers must be right."""
    config = vlmembed.EncodeConfig(inputs=tuple(map(str, inputs)), output="out.parquet", **settings)
    with closing(open_source(config)) as source:
        rows = list(source.read(start))
        assert [image.row for image in rows] == list(range(start, start + len(rows)))
        again = [image.key for image in source.read_rows([image.row for image in rows][::2])]
        assert again == [image.key for image in rows][::2]
    return [image.key for image in rows]


def encode(tmp_path: Path, model: Path, *inputs: Path | str, **settings: Any) -> vlmembed.RunReport:  # noqa: ANN401
    """A run into ``out.parquet``."""
    named: dict[str, Any] = {"output": tmp_path / "out.parquet", "model": model, "rows_per_part": 4} | settings
    return vlmembed.encode(vlmembed.EncodeConfig(inputs=tuple(map(str, inputs)), **named))


def test_braces_are_those_of_a_shell() -> None:
    assert list(expand_braces("s-{008..011}.tar")) == ["s-008.tar", "s-009.tar", "s-010.tar", "s-011.tar"]
    assert list(expand_braces("{2..0}{a,b}")) == ["2a", "2b", "1a", "1b", "0a", "0b"]
    assert list(expand_braces("{8..10}")) == ["8", "9", "10"]
    assert list(expand_braces("a{x}b{}{1..}")) == ["a{x}b{}{1..}"]
    with pytest.raises(InputError, match="stands for 9999999 names, and 1000000 are the limit"):
        list(expand_braces("{1..9999999}"))


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        ("s3://b/x/*.tar", ["s3://b/x/1.tar", "s3://b/x/.tar"], ["s3://b/x/y/1.tar", "s3://b/x/1xtar"]),
        ("s3://b/**/*.jpg", ["s3://b/1.jpg", "s3://b/x/y/1.jpg"], ["s3://c/1.jpg"]),
        ("s3://b/[0-3]?.jpg", ["s3://b/2?.jpg"], ["s3://b/24.jpg", "s3://b/4?.jpg"]),
        ("gs://b/[!a]*", ["gs://b/b1"], ["gs://b/a1", "gs://b/b/1"]),
    ],
)
def test_patterns_of_urls(pattern: str, matches: list[str], others: list[str]) -> None:
    expression = url_pattern(pattern)
    assert [url for url in matches + others if expression.fullmatch(url)] == matches


def test_a_folder_without_pictures_is_its_shards(tmp_path: Path) -> None:
    shard(tmp_path / "b.tar", ["1.png"])
    shard(tmp_path / "a.tar", ["1.png", "2.png"])
    (tmp_path / "notes.txt").write_text("a.jpg\n")
    assert keys(tmp_path) == ["a.tar!/1.png", "a.tar!/2.png", "b.tar!/1.png"]
    (tmp_path / "p.png").write_bytes(picture(7))
    assert keys(tmp_path) == ["p.png"]
    assert keys(tmp_path / "*.tar") == [f"{tmp_path}/{key}" for key in ("a.tar!/1.png", "a.tar!/2.png", "b.tar!/1.png")]


def test_tars_among_other_inputs(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in ("x.png", "y.png"):
        (folder / name).write_bytes(picture(ord(name[0])))
    first, last = shard(tmp_path / "1.tar", ["a.png", "b.png", "c.png"]), shard(tmp_path / "2.tar", ["d.png"])
    expected = [f"{first}!/{name}.png" for name in "abc"] + [f"{folder}/{name}.png" for name in "xy"]
    expected += [f"{last}!/d.png"]
    for start in range(len(expected) + 1):
        assert keys(first, folder, last, start=start) == expected[start:]


def test_lists_stand_alone_and_column_settings_need_columns(tmp_path: Path) -> None:
    tar = shard(tmp_path / "a.tar", ["1.png"])
    (tmp_path / "l.txt").write_text("1.png\n")
    with pytest.raises(InputError, match="give lists in a run of their own"):
        keys(tar, tmp_path / "l.txt")
    with pytest.raises(ConfigError, match=r"--id-column is for inputs with columns only \(Parquet, CSV"):
        keys(tar, id_column="id")
    with pytest.raises(ConfigError, match="is by whole files: give them without --limit"):
        keys(tar, shard="0/1", limit=1)
    with pytest.raises(InputError, match="some of 2 shards would be empty"):
        keys(tar, shard="0/2")
    with pytest.raises(ConfigError, match=r"shard is '2/2'; i can be 0 to 1"):
        keys(tar, shard="2/2")


@pytest.mark.parametrize("num_rows", [0, 3, 4, 5, 8])
def test_rows_that_are_counted_by_reading_are_all_there(num_rows: int, tiny_model: Path, tmp_path: Path) -> None:
    tar = shard(tmp_path / "a.tar", [f"{number}.png" for number in range(num_rows)])
    if not num_rows:
        with pytest.raises(NothingEmbeddedError, match="the inputs hold no pictures"):
            encode(tmp_path, tiny_model, tar)
        return
    report = encode(tmp_path, tiny_model, tar)
    assert (report.num_rows, report.num_embedded) == (num_rows, num_rows)
    assert pq.read_table(tmp_path / "out.parquet")["id"].to_pylist() == [f"a.tar!/{n}.png" for n in range(num_rows)]
    assert encode(tmp_path, tiny_model, tar).already_complete


def test_a_run_over_tars_stops_goes_on_retries_and_is_verified(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["0.png", "1.png", "bad.png", *(f"{number}.png" for number in range(3, 11))]
    tar = shard(tmp_path / "a.tar", names)
    undisturbed = tmp_path / "undisturbed.parquet"
    encode(tmp_path, tiny_model, tar, output=undisturbed, max_error_rate=1.0)

    from vlmembed.sources.tar import TarSource  # noqa: PLC0415  patched below

    read = TarSource.read

    def breaks(self: TarSource, start: int) -> Any:  # noqa: ANN401
        for image in read(self, start):
            if image.row == 9:
                while not (tmp_path / "out.parquet.partial" / "parts.jsonl").exists():
                    time.sleep(0.01)
                msg = "the power is out"
                raise RuntimeError(msg)
            yield image

    with monkeypatch.context() as patch:
        patch.setattr(TarSource, "read", breaks)
        with pytest.raises(RuntimeError):
            encode(tmp_path, tiny_model, tar)
    report = encode(tmp_path, tiny_model, tar)
    assert report.num_resumed in (4, 8)
    assert report.num_rows == 11
    assert pq.read_table(tmp_path / "out.parquet").equals(pq.read_table(undisturbed))
    found = verify(tmp_path / "out.parquet", num_rows=None)
    assert found.is_good
    assert found.num_checked == 10
    report = encode(tmp_path, tiny_model, tar, retry_failed=True)
    assert (report.num_retried, report.num_recovered, report.num_failed) == (1, 0, 1)


def test_shards_of_a_run_over_tars_are_the_whole(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tars"
    folder.mkdir()
    for number, names in enumerate((["0.png", "bad.png"], ["1.png", "2.png", "again.png"], ["3.png"], ["4.png"])):
        shard(folder / f"{number}.tar", names, first_seed=10 * number)
    (folder / "3.tar").write_bytes((folder / "1.tar").read_bytes())  # the same pictures again, in another shard
    whole = tmp_path / "whole.parquet"
    encode(tmp_path, tiny_model, folder, output=whole, max_error_rate=1.0)
    outputs = [tmp_path / f"{index}.parquet" for index in range(3)]
    for index, output in enumerate(outputs):
        encode(tmp_path, tiny_model, folder, output=output, shard=f"{index}/3", max_error_rate=1.0)
    merged = tmp_path / "merged.parquet"
    report = vlmembed.merge(list(map(str, outputs)), str(merged))
    assert (report.num_rows, report.num_embedded, report.num_duplicates, report.num_failed) == (9, 5, 3, 1)
    for name in ("id", "duplicate_of", "content_hash"):
        assert pq.read_table(merged)[name].equals(pq.read_table(whole)[name])
    assert pq.read_table(tmp_path / "merged.errors.parquet")["row"].to_pylist() == [1]
    assert encode(tmp_path, tiny_model, folder, output=merged).already_complete


def test_the_limit_of_a_run_over_tars(tiny_model: Path, tmp_path: Path) -> None:
    tar = shard(tmp_path / "a.tar", [f"{number}.png" for number in range(9)])
    report = encode(tmp_path, tiny_model, tar, limit=6)
    assert (report.num_rows, report.num_embedded) == (6, 6)
    with pytest.raises(vlmembed.VlmembedError, match="limit: 6 there, 7 now"):
        encode(tmp_path, tiny_model, tar, limit=7)


def test_retries_after_a_limit_over_tars(tiny_model: Path, tmp_path: Path) -> None:
    tar = shard(tmp_path / "a.tar", ["0.png", "bad.png", "1.png", "2.png"])
    encode(tmp_path, tiny_model, tar, limit=3, max_error_rate=1.0)
    report = encode(tmp_path, tiny_model, tar, limit=3, retry_failed=True)
    assert (report.num_rows, report.num_retried, report.num_failed) == (3, 1, 1)


def test_a_tar_that_is_gone_is_no_good_verification(tiny_model: Path, tmp_path: Path) -> None:
    tar = shard(tmp_path / "a.tar", ["0.png", "1.png", "2.png"])
    encode(tmp_path, tiny_model, tar)
    tar.write_bytes(bytes(tar.stat().st_size))
    found = verify(tmp_path / "out.parquet", num_rows=None)
    assert not found.is_good
    assert found.failed == dict.fromkeys(
        [f"a.tar!/{number}.png" for number in range(3)], "the inputs do not have it any more"
    )
    shard(tar, ["0.png", "2.png", "1.png"])
    found = verify(tmp_path / "out.parquet", num_rows=None)
    assert found.failed == {
        "a.tar!/1.png": "in its place is 'a.tar!/2.png'",
        "a.tar!/2.png": "in its place is 'a.tar!/1.png'",
    }


def test_a_run_over_tars_that_give_other_rows_now_is_not_gone_on_with(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = (shard(tmp_path / f"{n}.tar", [f"{n}{m}.png" for m in range(6)], 10 * n) for n in range(2))

    from vlmembed.sources import tarpass  # noqa: PLC0415  patched below
    from vlmembed.sources.archive import open_archive  # noqa: PLC0415  the same

    def unreadable(archive: Any, remotes: Any, *, stops: bool) -> Any:  # noqa: ANN401
        if archive.path == str(first):
            raise ImageError(FailureCode.UNREADABLE, "Permission denied")
        return open_archive(archive, remotes, stops=stops)

    read = tarpass.TarPass.read

    def stops(self: tarpass.TarPass, remotes: Any) -> Any:  # noqa: ANN401
        for image in read(self, remotes):
            if image.row == 6:
                while not (tmp_path / "out.parquet.partial" / "parts.jsonl").exists():
                    time.sleep(0.01)
                raise KeyboardInterrupt
            yield image

    with monkeypatch.context() as patch:
        patch.setattr(tarpass, "open_archive", unreadable)
        patch.setattr(tarpass.TarPass, "read", stops)
        with pytest.raises(KeyboardInterrupt):
            encode(tmp_path, tiny_model, first, last, max_error_rate=1.0)
    with pytest.raises(
        InputError, match=r"row 3 was '.*/1\.tar!/12\.png' when it was committed, and is '.*/0\.tar!/03"
    ):
        encode(tmp_path, tiny_model, first, last)


def test_logins_and_signatures_of_urls_are_written_nowhere(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = picture(1)
    with http_server({"/a.png": content}) as server:
        address = server.url.partition("://")[2]
        urls = [f"http://user:SECRET@{address}/a.png?n={number}&X-Amz-Signature=SECRET#part" for number in range(2)]
        report = encode(tmp_path, tiny_model, *urls, allow_local_urls=True)
        assert (report.num_rows, report.num_embedded, report.num_duplicates) == (2, 1, 1)
        expected = [f"{server.url}/a.png?n={number}" for number in range(2)]
        assert pq.read_table(tmp_path / "out.parquet")["id"].to_pylist() == expected
        (tmp_path / "l.txt").write_text("\n".join(urls))
        encode(tmp_path, tiny_model, tmp_path / "l.txt", allow_local_urls=True, output=tmp_path / "listed.parquet")
        assert pq.read_table(tmp_path / "listed.parquet")["id"].to_pylist() == expected
        with pytest.raises(InputError, match="are the same: name it once") as caught:
            keys(urls[0], urls[0].replace("SECRET", "OTHER"), allow_local_urls=True)
    assert "SECRET" not in str(caught.value) + caplog.text
    for path in tmp_path.glob("*.parquet"):
        assert b"SECRET" not in path.read_bytes() + str(pq.read_schema(path).metadata).encode()
