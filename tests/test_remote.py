"""Objects in stores and files on web servers, whole and in parts, over connections that break."""

from __future__ import annotations

import functools
import io
import json
import os
import random
import re
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfFileSystem
from servers import breaking_proxy, http_server, put_s3, s3_environment, s3_filesystem, s3_server, times, use_s3

from vlmembed.errors import FailureCode, ImageError, InputError
from vlmembed.remote import remote_file, retries, store_options
from vlmembed.remote import remotes as remotes_module
from vlmembed.remote.remote_file import RangedBlocks, RemoteFile
from vlmembed.remote.remotes import Remotes
from vlmembed.remote.urls import is_url, join_url, parse_store_url, shown_url, without_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BIG = random.Random(1).randbytes(3_000_000)  # noqa: S311  no secret
OBJECTS = {
    "photos/a.jpg": b"first",
    "photos/deep/b c%20d.jpg": b"second",
    "photos/deep/what?.jpg": b"third",
    "photos/deep/w?x=1": b"fourth",
    "photos/empty.jpg": b"",
    "other/big.bin": BIG,
}


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as endpoint:
        put_s3(endpoint, {f"bucket/{key}": content for key, content in OBJECTS.items()})
        yield endpoint


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 0.005)
    monkeypatch.setattr(store_options, "SDK_TRIES", 1)  # its pauses are half a second and more


@pytest.fixture
def remotes(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remotes]:
    use_s3(s3, monkeypatch)
    with Remotes(timeout_seconds=20, allow_local=True) as opened:
        yield opened


def failure(found: bytes | ImageError | int) -> tuple[FailureCode, str]:
    assert isinstance(found, ImageError)
    return found.code, str(found)


def test_which_names_are_urls() -> None:
    assert all(map(is_url, ("s3://b/k", "gs://b/k", "hf://datasets/a/b", "http://h/x", "https://h/x", "S3://b/k")))
    assert not any(map(is_url, ("ftp://h/x", "file:///x", "s3:/b/k", "/s3://b", "photos/s3", "", "C:\\x", "azs3://b")))


@pytest.mark.parametrize(
    ("base", "relative", "joined"),
    [
        ("s3://b/lists/l.csv", "img/a.jpg", "s3://b/lists/img/a.jpg"),
        ("s3://b/lists/l.csv", "../a.jpg", "s3://b/a.jpg"),
        ("s3://b/l.csv", "../../../a.jpg", "s3://b/a.jpg"),
        ("s3://b/l.csv", "s3://c/a.jpg", "s3://c/a.jpg"),
        ("s3://b/l.csv", "http://h/a.jpg", "http://h/a.jpg"),
        ("s3://b/l.csv", "a%20 b?.jpg", "s3://b/a%20 b?.jpg"),
        ("s3://b/x/l.csv?region=eu", "a.jpg", "s3://b/x/a.jpg?region=eu"),
        ("s3://b/l.csv", "a?endpoint_override=evil", "s3://b/a?endpoint_override=evil?"),
        ("s3://b/l.csv?region=eu", "a?endpoint_override=evil", "s3://b/a?endpoint_override=evil?region=eu"),
        ("hf://datasets/u/r/l.csv", "img/a.jpg", "hf://datasets/u/r/img/a.jpg"),
        ("http://h/lists/l.csv?token=1", "img/a.jpg", "http://h/lists/img/a.jpg"),
        ("https://h/lists/l.csv", "/a.jpg", "https://h/a.jpg"),
        ("https://h/lists/l.csv", "12:30.jpg", "https://h/lists/12:30.jpg"),
    ],
)
def test_paths_are_joined_to_the_file_that_names_them(base: str, relative: str, joined: str) -> None:
    assert join_url(base, relative) == joined


def test_what_looks_like_options_in_a_path_is_no_option() -> None:
    parsed = parse_store_url(join_url("s3://b/l.csv", "a?endpoint_override=evil"))
    assert (parsed.path, parsed.options) == ("b/a?endpoint_override=evil", {})
    parsed = parse_store_url("s3://b/a b?c/d?endpoint_override=http://h:1&scheme=http&region=eu&anonymous=true")
    assert parsed.path == "b/a b?c/d"
    assert parsed.options == {"endpoint_override": "http://h:1", "scheme": "http", "region": "eu", "anonymous": "true"}
    assert without_options("s3://b/k.jpg?region=eu") == "s3://b/k.jpg"
    assert shown_url("s3://b/k?.jpg") == "s3://b/k?.jpg"
    assert shown_url("s3://b/x?secret_key=a/b") == "s3://b/x"
    assert shown_url("gs://b/x?Secret-Key=a?b&c=d") == "gs://b/x"
    assert shown_url("s3://key:se/cr@et@bucket/x") == "s3://bucket/x"


def test_objects_are_listed_in_order_and_read_by_what_they_are_listed_as(remotes: Remotes) -> None:
    found = list(remotes.walk("s3://bucket/photos"))
    assert [info.url for info in found] == sorted(
        [
            "s3://bucket/photos/a.jpg",
            "s3://bucket/photos/deep/b c%20d.jpg",
            "s3://bucket/photos/deep/w?x=1?",
            "s3://bucket/photos/deep/what?.jpg",
            "s3://bucket/photos/empty.jpg",
        ]
    )
    for info in found:
        content = OBJECTS[parse_store_url(info.url).path.removeprefix("bucket/")]
        assert remotes.read(info.url, 10**6) == content
        assert info.num_bytes == len(content)
        assert remotes.info(info.url) == info
        with remotes.open(info.url) as file:
            assert (file.num_bytes, file.version, file.read()) == (info.num_bytes, info.version, content)
    assert [info.url for info in remotes.walk("s3://bucket/photos/", recursive=False)] == [
        "s3://bucket/photos/a.jpg",
        "s3://bucket/photos/empty.jpg",
    ]


def test_folders_and_what_is_not_there(remotes: Remotes) -> None:
    assert remotes.info("s3://bucket/photos").is_folder
    assert remotes.info("s3://bucket").is_folder
    for method in (remotes.info, remotes.open):
        with pytest.raises(FileNotFoundError, match="s3://bucket/none is not there"):
            method("s3://bucket/none")
        with pytest.raises(FileNotFoundError, match="there is no such bucket"):
            method("s3://no-bucket/none")
    for url in ("s3://bucket/none", "s3://no-bucket/none"):
        with pytest.raises(FileNotFoundError, match=url):
            list(remotes.walk(url))
        assert failure(remotes.read(url, 100))[0] == FailureCode.MISSING


def test_an_object_that_is_too_large_is_not_read(remotes: Remotes) -> None:
    url = "s3://bucket/other/big.bin"
    code, message = failure(remotes.read(url, 1000))
    assert code == FailureCode.TOO_LARGE
    assert "3000000 bytes" in message
    assert remotes.read(url, 10**7, 1000) == 3_000_000
    assert remotes.read(url, 10**7, 3_000_000) == BIG


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://", "names no bucket"),
        ("s3://key:secret@bucket/a.jpg", "holds credentials"),
        ("s3://bucket/a.jpg?no_option=secret", "^s3://bucket/a.jpg: 'no_option' is no option"),
        ("file:///etc/passwd", "is no URL that can be read"),
        ("a.jpg", "is no URL that can be read"),
    ],
)
def test_a_url_that_makes_no_sense_is_a_failure_in_data_and_an_error_as_an_input(
    remotes: Remotes, url: str, said: str
) -> None:
    code, message = failure(remotes.read(url, 100))
    assert code == FailureCode.FETCH_FAILED
    assert re.search(said, message)
    assert "secret" not in message
    with pytest.raises(InputError, match=said):
        remotes.open(url)


def test_a_url_in_data_does_not_choose_the_server(remotes: Remotes, s3: str) -> None:
    url = f"s3://bucket/photos/a.jpg?endpoint_override={s3}"
    code, message = failure(remotes.read(url, 100, trusted=False))
    assert code == FailureCode.FETCH_FAILED
    assert "options" in message
    for method in (remotes.info, remotes.open):
        with pytest.raises(OSError, match="options"):
            method(url, trusted=False)
    assert remotes.read("s3://bucket/photos/a.jpg", 100, trusted=False) == b"first"


def test_a_url_in_data_goes_where_the_list_that_names_it_lies(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_environment("http://127.0.0.1:1").items():
        monkeypatch.setenv(name, value)
    base = f"s3://bucket/photos/list.csv?endpoint_override={s3.partition('://')[2]}&scheme=http"
    with Remotes(timeout_seconds=20) as remotes:
        assert remotes.read(base.replace("list.csv", "a.jpg"), 100) == b"first"
        assert remotes.read(join_url(base, "deep/what?.jpg"), 100, trusted=False) == b"third"


def test_a_file_system_is_handed_out_for_writing(remotes: Remotes, s3: str) -> None:
    filesystem, path = remotes.filesystem("s3://bucket/made/x.bin?region=us-east-1")
    assert path == "bucket/made/x.bin"
    with filesystem.open_output_stream(path) as stream:
        stream.write(b"written")
    with s3_filesystem(s3).open_input_file("bucket/made/x.bin") as file:
        assert file.read() == b"written"


def test_a_part_of_an_object_is_read_after_a_seek(remotes: Remotes) -> None:
    generator = random.Random(2)  # noqa: S311  no secret
    with remotes.open("s3://bucket/other/big.bin") as file:
        for _ in range(20):
            start, size = generator.randrange(len(BIG)), generator.randrange(1, 100_000)
            file.seek(start)
            assert file.read(size) == BIG[start : start + size]
            assert file.tell() == min(start + size, len(BIG))
        assert file.seek(-5, io.SEEK_END) == len(BIG) - 5
        assert file.read() == BIG[-5:]
        assert file.read(1) == b""
        assert file.seek(len(BIG) + 5) == len(BIG) + 5
        assert file.read(1) == b""
        with pytest.raises(ValueError, match="before the beginning"):
            file.seek(-1)
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


def test_parquet_is_read_from_a_store(remotes: Remotes, s3: str) -> None:
    table = pa.table({f"column {index}": pa.array(range(index, 60_000 + index)) for index in range(4)})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, row_group_size=20_000, compression="none", use_dictionary=False)
    put_s3(s3, {"bucket/tables/t.parquet": buffer.getvalue()})
    for pre_buffer in (True, False):
        with remotes.open("s3://bucket/tables/t.parquet") as raw, pa.PythonFile(raw, mode="r") as file:
            assert pq.read_table(file, pre_buffer=pre_buffer).equals(table)


def test_a_connection_that_breaks_once_does_no_harm(remotes: Remotes, s3: str) -> None:
    with breaking_proxy(s3, times(3)) as proxy:
        url = f"s3://bucket/other/big.bin?endpoint_override={proxy.url}"
        assert remotes.read(url, 10**7) == BIG
        assert proxy.num_broken == 3
        proxy.breaks = times(3)
        with remotes.open(url) as file:
            assert file.readall() == BIG
        assert proxy.num_broken == 6


def test_a_connection_that_breaks_each_time_fails_and_names_the_object(remotes: Remotes, s3: str) -> None:
    with breaking_proxy(s3, lambda line: line.startswith("GET /bucket/other")) as proxy:
        url = f"s3://bucket/other/big.bin?endpoint_override={proxy.url}"
        code, message = failure(remotes.read(url, 10**7))
        assert code == FailureCode.FETCH_FAILED
        assert "s3://bucket/other/big.bin" in message
        assert "(4 tries" in message
        with remotes.open(url) as file, pytest.raises(OSError, match=r"s3://bucket/other/big.bin.*\(4 tries"):
            file.read(10)


def test_a_server_that_is_not_there_fails_in_time(remotes: Remotes) -> None:
    code, message = failure(remotes.read("s3://bucket/a.jpg?endpoint_override=http://127.0.0.1:1", 100))
    assert code == FailureCode.FETCH_FAILED
    assert "connect" in message.lower()


@pytest.mark.parametrize(
    ("status", "said", "num_requests"),
    [(403, "access is denied", 1), (301, "another region", 1), (400, "HTTP status 400", 1), (503, "4 tries", 4)],
)
def test_refusals_of_a_store_are_told_apart(remotes: Remotes, status: int, said: str, num_requests: int) -> None:
    with http_server({"/bucket/a.jpg": b"a"}) as server:
        server.statuses[""] = [(status, {})] * 50
        code, message = failure(remotes.read(f"s3://bucket/a.jpg?endpoint_override={server.url}", 100))
    assert code == FailureCode.FETCH_FAILED
    assert said in message
    assert len(server.requests) == num_requests


def test_a_small_object_takes_two_requests(remotes: Remotes, s3: str) -> None:
    with breaking_proxy(s3, times(0)) as proxy:
        assert remotes.read(f"s3://bucket/photos/a.jpg?endpoint_override={proxy.url}", 100) == b"first"
    assert [line.split()[0] for line in proxy.lines] == ["HEAD", "GET"]


def test_an_object_that_changes_while_it_is_read_is_no_mixture(
    remotes: Remotes, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_file, "FIRST_BYTES", 1000)
    put_s3(s3, {"bucket/changing": b"1" * 5000})
    with remotes.open("s3://bucket/changing") as file:
        assert file.read(10) == b"1" * 10
        put_s3(s3, {"bucket/changing": b"2" * 5000})
        file.seek(3000)
        with pytest.raises(OSError, match="s3://bucket/changing has changed while it was read"):
            file.read(10)


def test_a_file_on_a_web_server_is_read_in_parts(remotes: Remotes) -> None:
    with http_server({"/big.bin": BIG, "/empty": b""}) as server:
        with remotes.open(server.url + "/big.bin") as file:
            assert file.num_bytes == len(BIG)
            assert file.version == remotes.info(server.url + "/big.bin").version
            file.seek(2_000_000)
            assert file.read(1000) == BIG[2_000_000:2_001_000]
            file.seek(0)
            server.drop_after_bytes, server.drops = 200_000, 3
            assert file.readall() == BIG
        with remotes.open(server.url + "/empty") as file:
            assert (file.num_bytes, file.read()) == (0, b"")
        with pytest.raises(FileNotFoundError, match="/none"):
            remotes.open(server.url + "/none")


def test_a_file_on_a_web_server_that_changes_is_no_mixture(remotes: Remotes) -> None:
    with http_server({"/a": BIG}) as server, remotes.open(server.url + "/a") as file:
        assert file.read(10) == BIG[:10]
        server.files["/a"] = BIG[::-1]
        file.seek(1_000_000)
        with pytest.raises(OSError, match="has changed while it was read: its version"):
            file.read(10)


def test_a_server_without_ranges_is_read_forwards(remotes: Remotes) -> None:
    with http_server({"/big.bin": BIG}) as server:
        server.takes_ranges = False
        with remotes.open(server.url + "/big.bin") as file:
            assert file.read(10) == BIG[:10]
            file.seek(1_000_000)
            assert file.read(10) == BIG[1_000_000:1_000_010]
            file.seek(0)
            with pytest.raises(OSError, match="takes no ranges"):
                file.read(10)
        server.drop_after_bytes, server.drops = 1_000_000, 2
        with remotes.open(server.url + "/big.bin") as file:
            assert file.readall() == BIG
        server.files["/big.bin"] = BIG[:2_000_000]
        server._dropped.clear()
        server.after_drop = lambda: server.files.update({"/big.bin": BIG})
        with remotes.open(server.url + "/big.bin") as file, pytest.raises(OSError, match="has changed"):
            file.readall()


def test_a_file_without_a_length_is_read_forwards(remotes: Remotes) -> None:
    with http_server({"/list.csv": BIG}) as server:
        server.takes_ranges = server.tells_length = False
        with remotes.open(server.url + "/list.csv") as file:
            assert file.num_bytes == -1
            with pytest.raises(OSError, match="size"):
                file.seek(0, io.SEEK_END)
            assert file.readall() == BIG


def test_a_stream_and_the_files_of_its_host_do_not_wait_for_each_other() -> None:
    with (
        http_server({"/list.csv": BIG, "/a": b"a"}) as server,
        Remotes(timeout_seconds=5, per_host=1, allow_local=True) as remotes,
    ):
        server.takes_ranges = False
        with remotes.open(server.url + "/list.csv") as file:
            file.read(10)
            assert remotes.read(server.url + "/a", 10) == b"a"


def test_files_on_the_hub_are_listed_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"a.jpg": b"first", "deep/b.jpg": b"second", "deep/big.bin": BIG}
    api, resolve = "/api/datasets/me/photos", "/datasets/me/photos/resolve/main"
    entries = [
        {"type": "file", "path": name, "oid": f"oid of {name}", "size": len(content)} for name, content in names.items()
    ]
    folder = {"type": "directory", "path": "deep", "oid": "1"}
    answers = {
        api: {"id": "me/photos", "sha": "1", "siblings": []},
        f"{api}/tree/main": [entries[0], folder, *entries[1:]],
        f"{api}/tree/main/deep": entries[1:],
    }
    files = {path: json.dumps(answer).encode() for path, answer in answers.items()}
    with http_server({**files, **{f"{resolve}/{name}": content for name, content in names.items()}}) as server:
        hub = functools.partial(HfFileSystem, endpoint=server.url, token=False, skip_instance_cache=True)
        monkeypatch.setattr(huggingface_hub, "HfFileSystem", hub)
        with Remotes(timeout_seconds=20) as remotes:
            found = list(remotes.walk("hf://datasets/me/photos"))
            assert [info.url for info in found] == [f"hf://datasets/me/photos/{name}" for name in sorted(names)]
            assert [(info.num_bytes, info.version) for info in found] == [
                (len(content), f"oid of {name}") for name, content in sorted(names.items())
            ]
            assert remotes.info(found[0].url) == found[0]
            assert remotes.info("hf://datasets/me/photos/deep").is_folder
            assert [remotes.read(info.url, 10**7, trusted=False) for info in found] == [b"first", b"second", BIG]
            with remotes.open(found[2].url) as file:
                file.seek(1_000_000)
                assert file.read(1000) == BIG[1_000_000:1_001_000]
                assert file.version == found[2].version
            assert failure(remotes.read("hf://datasets/me/photos/none.jpg", 100))[0] == FailureCode.MISSING
            server.statuses["/api/datasets/me/none"] = [(404, {"X-Error-Code": "RepoNotFound"})] * 9
            assert failure(remotes.read("hf://datasets/me/none/a.jpg", 100))[0] == FailureCode.MISSING
            assert failure(remotes.read("hf://datasets", 100))[0] == FailureCode.FETCH_FAILED
        with Remotes(timeout_seconds=20) as remotes:
            server.statuses[""] = [(403, {})] * 99
            code, message = failure(remotes.read("hf://datasets/me/photos/a.jpg", 100))
            assert code == FailureCode.FETCH_FAILED
            assert "403" in message


class AtOnce(Executor):
    """Does what is submitted before it goes on, so that the order is known."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:  # noqa: ANN401
        """As `Executor` says."""
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments, **named))
        except OSError as error:
            future.set_exception(error)
        return future


def recorded(content: bytes) -> tuple[list[tuple[int, int]], RangedBlocks, RemoteFile]:
    """A file, its blocks, and the ranges that are asked for."""
    ranges: list[tuple[int, int]] = []

    def read_range(start: int, stop: int) -> bytes:
        ranges.append((start, stop))
        return content[start:stop]

    blocks = RangedBlocks(len(content), read_range, AtOnce())
    return ranges, blocks, RemoteFile("s3://b/k", num_bytes=len(content), version="", blocks=blocks)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_file, "FIRST_BYTES", 100)
    monkeypatch.setattr(remote_file, "BLOCK_BYTES", 1000)


@pytest.mark.usefixtures("small_blocks")
def test_reading_in_sequence_reads_ahead_and_holds_few_blocks() -> None:
    content = os.urandom(20_500)
    ranges, blocks, file = recorded(content)
    with file:
        assert file.read(50) == content[:50]
        assert ranges == [(0, 100)]
        assert file.read(100) == content[50:150]
        assert ranges == [(0, 100), (100, 1100), (1100, 2100), (2100, 3100), (3100, 4100)]
        seen = b""
        while piece := file.read(333):
            seen += piece
            assert len(blocks._blocks) <= 5
        assert seen == content[150:]
    assert ranges == [(0, 100), *((at, min(at + 1000, 20_500)) for at in range(100, 20_500, 1000))]


@pytest.mark.usefixtures("small_blocks")
def test_a_short_way_forward_costs_nothing_and_a_jump_reads_what_is_asked_for() -> None:
    content = os.urandom(20_500)
    ranges, _, file = recorded(content)
    with file:
        assert file.read(50) + file.read(100) == content[:150]
        assert ranges[-1] == (3100, 4100)
        file.seek(2500)
        assert file.read(10) == content[2500:2510]
        assert ranges[5:] == [(4100, 5100), (5100, 6100)]
        file.seek(15_000)
        assert file.read(300) == content[15_000:15_300]
        assert ranges[7:] == [(15_000, 15_300)]


@pytest.mark.usefixtures("small_blocks")
def test_a_block_that_failed_is_tried_again_by_the_next_read() -> None:
    content = os.urandom(5000)
    failing = {1100}

    def read_range(start: int, stop: int) -> bytes:
        if start in failing:
            raise OSError(str(start))
        return content[start:stop]

    blocks = RangedBlocks(5000, read_range, AtOnce())
    with RemoteFile("s3://b/k", num_bytes=5000, version="", blocks=blocks) as file:
        file.read(50)
        file.read(100)
        file.seek(1100)
        with pytest.raises(OSError, match="1100"):
            file.read(10)
        failing.clear()
        assert file.read(10) == content[1100:1110]


@pytest.mark.usefixtures("small_blocks")
def test_an_open_file_fails_when_all_is_closed() -> None:
    with http_server({"/a": BIG}) as server:
        remotes = Remotes(timeout_seconds=5, allow_local=True)
        with remotes.open(server.url + "/a") as file:
            file.read(50)
            remotes.close()
            with pytest.raises(OSError, match="closed"):
                file.read(100)


@pytest.mark.parametrize("endpoint", ["http://[", "ftp://me:secret@host"])
def test_an_endpoint_that_makes_no_sense_is_an_error_of_the_input(
    s3: str, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    use_s3(s3, monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with Remotes(timeout_seconds=5) as remotes:
        with pytest.raises(
            InputError, match=r"s3://bucket/x cannot be reached with the endpoint .*AWS_ENDPOINT_URL"
        ) as told:
            remotes.filesystem("s3://bucket/x")
        assert failure(remotes.read("s3://bucket/x", 100))[0] == FailureCode.FETCH_FAILED
    assert "secret" not in str(told.value)


def test_so_many_buckets_are_kept_and_open_objects_stay_readable(
    remotes: Remotes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remotes_module, "MAX_STORES", 3)
    kept = remotes.filesystem("s3://bucket/x")[0]
    with remotes.open("s3://bucket/other/big.bin") as file:
        for number in range(6):
            remotes.filesystem(f"s3://bucket-{number % 3}/x")
            if number == 1:
                assert remotes.filesystem("s3://bucket/x")[0] is kept
        assert [bucket for _, _, bucket in remotes._stores] == ["bucket-0", "bucket-1", "bucket-2"]
        assert file.read() == BIG
    assert remotes.filesystem("s3://bucket/x")[0] is not kept


def test_nothing_is_asked_of_amazon_where_an_endpoint_is_given(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(_: str) -> str:
        raise AssertionError

    monkeypatch.setattr("pyarrow.fs.resolve_s3_region", resolve)
    use_s3(s3, monkeypatch)
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with Remotes(timeout_seconds=20) as remotes:
        assert remotes.filesystem("s3://bucket/x")[0].region == "us-east-1"
        monkeypatch.setenv("AWS_REGION", "eu-west-1")
        assert remotes.filesystem("s3://bucket-2/x")[0].region == "eu-west-1"
        assert remotes.filesystem("s3://bucket/x?region=eu-north-1")[0].region == "eu-north-1"
