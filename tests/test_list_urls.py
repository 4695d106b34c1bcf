"""Lists that name URLs, and lists that lie on a server."""

from __future__ import annotations

import gzip
import socket
from typing import TYPE_CHECKING

import pytest
from conftest import SAMPLES
from servers import http_server

from vlmembed.errors import ImageError, InputError
from vlmembed.remote.remotes import Remotes
from vlmembed.sources.lists import ListSource
from vlmembed.sources.readahead import ReadAhead, UnreadRow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from servers import HttpServer

    from vlmembed.types import EncodedImage

PNG = (SAMPLES / "drawings/one-pixel.png").read_bytes()
LARGE = PNG + bytes(3 * 2**20)


@pytest.fixture
def server() -> Iterator[HttpServer]:
    files = {f"/p/{number}.png": PNG + str(number).encode() for number in range(60)}
    with http_server({**files, "/flaky": PNG, "/large": LARGE, "/giant": LARGE + bytes(2 * 2**20)}) as server:
        yield server


def read(path: Path | str, *, timeout_seconds: float = 20, per_host: int = 16) -> list[EncodedImage]:
    """All rows of a list."""
    with Remotes(timeout_seconds=20, per_host=per_host, allow_local=True) as remotes:
        reader = ReadAhead(timeout_seconds=timeout_seconds, max_source_pixels=10**6, remotes=remotes, downloads=8)
        reader.max_file_bytes = 4 * 2**20
        lists = [(str(path), "list")]
        source = ListSource(lists, reader=reader, image_column=None, id_column=None, keep_columns=())
        try:
            rows = list(source.read(0))
        finally:
            source.close()
    assert [image.row for image in rows] == list(range(source.num_rows))
    return rows


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines))
    return path


def told(image: EncodedImage) -> str:
    """What a row holds, in words."""
    if isinstance(image.content, ImageError):
        return f"{image.content.code}: {image.content}"
    return image.content.removeprefix(PNG).decode()


def test_urls_and_files_come_in_the_order_of_the_list(server: HttpServer, tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number}.png").write_bytes(PNG + str(number).encode())
    names = [f"{number}.png" if number % 3 == 1 else f"{server.url}/p/{number}.png" for number in range(60)]
    rows = read(write(tmp_path / "list.txt", [*names, *names[:4]]))
    assert [image.key for image in rows] == [*names, *(f"{name}#2" for name in names[:4])]
    assert [told(image) for image in rows] == list(map(str, [*range(60), 0, 1, 2, 3]))


def test_what_servers_do_to_a_row(server: HttpServer, tmp_path: Path) -> None:
    server.statuses["/flaky"] = [(503, {})]
    server.redirects["/redirect"] = "/p/5.png"
    names = ["flaky", "gone", "redirect", "large", "giant", "p/1.png?token=1"]
    rows = read(write(tmp_path / "list.txt", [f"{server.url}/{name}" for name in names]))
    assert rows[0].content == PNG
    assert told(rows[1]).startswith(f"missing: {server.url}/gone: the server has no such file (status 404)")
    assert told(rows[2]) == "5"
    assert rows[3].content == LARGE
    assert told(rows[4]).startswith(f"too_large: {server.url}/giant has {len(LARGE) + 2 * 2**20} bytes, and a picture")
    assert told(rows[5]) == "1"
    assert rows[5].key == f"{server.url}/p/1.png"  # what gives access stays out of ids
    asked = server.paths()
    assert (asked.count("/flaky"), asked.count("/gone"), asked.count("/large")) == (2, 1, 2)


def test_a_server_that_hangs_costs_its_own_rows(server: HttpServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hung = f"http://127.0.0.1:{silent.getsockname()[1]}/x.png"
        names = [hung if number in {2, 9} else f"{server.url}/p/{number}.png" for number in range(30)]
        rows = read(write(tmp_path / "list.txt", names), timeout_seconds=0.3)
    late = {image.row: told(image) for image in rows if isinstance(image.content, ImageError)}
    assert list(late) == [2, 9]
    assert all(text.startswith("timeout: reading took longer than 0.3 seconds") for text in late.values())
    others = [number for number in range(30) if number not in late]
    assert [told(rows[number]) for number in others] == list(map(str, others))


def test_a_host_is_asked_for_a_few_pictures_at_a_time(server: HttpServer, tmp_path: Path) -> None:
    server.delay_seconds = 0.01
    names = [f"{server.url}/p/{number}.png" for number in range(30)]
    rows = read(write(tmp_path / "list.txt", names), per_host=3)
    assert [told(image) for image in rows] == list(map(str, range(30)))
    assert 2 <= server.most_at_once <= 3


def test_rows_that_wait_for_others_of_their_host_are_not_late(server: HttpServer) -> None:
    server.delay_seconds = 0.1
    with Remotes(timeout_seconds=0.5, per_host=1, allow_local=True) as remotes:
        reader = ReadAhead(timeout_seconds=0.5, max_source_pixels=10**6, remotes=remotes, downloads=16)
        urls = [f"{server.url}/p/{number}.png" for number in range(16)]
        rows = list(reader.read([UnreadRow(row=row, key=url, path=url) for row, url in enumerate(urls)]))
    assert [told(image) for image in rows] == list(map(str, range(16)))
    assert server.most_at_once == 1


def test_redirects_to_one_host_wait_for_each_other_in_time(server: HttpServer) -> None:
    with http_server() as front:
        server.delay_seconds = 0.05
        front.redirects = {f"/{number}": f"{server.url}/p/{number}.png" for number in range(16)}
        urls = [f"http://{host}:{front.port}/{number}" for number, host in enumerate(["127.0.0.1", "localhost"] * 8)]
        with Remotes(timeout_seconds=0.5, per_host=1, allow_local=True) as remotes:
            reader = ReadAhead(timeout_seconds=0.5, max_source_pixels=10**6, remotes=remotes, downloads=16)
            rows = list(reader.read([UnreadRow(row=row, key=url, path=url) for row, url in enumerate(urls)]))
    assert [told(image) for image in rows] == list(map(str, range(16)))


@pytest.mark.parametrize("name", ["list.csv", "list.csv.gz", "list.csv?token=x"])
def test_a_list_on_a_server_names_what_lies_beside_it(name: str, server: HttpServer) -> None:
    lines = ["path", "../p/3.png", f"{server.url}/p/4.png", "/etc/passwd", "file:///etc/passwd", "ftp://host/a.png"]
    text = "\n".join([*lines, "gone.png"]).encode()
    server.files |= {"/lists/list.csv": text, "/lists/list.csv.gz": gzip.compress(text)}
    rows = read(f"{server.url}/lists/{name}")
    texts = [told(image) for image in rows]
    assert texts[:2] == ["3", "4"]
    assert all(text.startswith("unreadable: ") and "is a path on this machine" in text for text in texts[2:4])
    assert texts[4].startswith("unreadable: ftp://host/a.png: ftp:// is not read")
    assert texts[5].startswith(f"missing: {server.url}/lists/gone.png")
    assert [image.key for image in rows][2:] == ["/etc/passwd", "file:///etc/passwd", "ftp://host/a.png", "gone.png"]


def test_a_list_that_no_server_has(server: HttpServer) -> None:
    with pytest.raises(InputError, match=r"the list http://127.*/gone.txt cannot be read \(FileNotFoundError: "):
        read(f"{server.url}/gone.txt?secret=1")
