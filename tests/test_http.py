"""Files over HTTP: tries, ranges, limits and redirects, against a server with bad manners; and refused hosts."""

from __future__ import annotations

import os
import re
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from servers import HttpServer, http_server

from vlmembed.errors import FailureCode, ImageError, InputError
from vlmembed.remote import guard, retries, slots
from vlmembed.remote.downloads import Oversized, read_whole
from vlmembed.remote.guard import local_kind
from vlmembed.remote.http import HttpClient
from vlmembed.remote.remotes import Remotes
from vlmembed.remote.transport import parse_web_url
from vlmembed.remote.urls import shown_url

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONTENT = bytes(range(256)) * 1200
PATH = "/a.bin"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 0.005)


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with http_server({PATH: CONTENT}) as running:
        yield running


@pytest.fixture
def remotes() -> Iterator[Remotes]:
    with Remotes(timeout_seconds=5, allow_local=True) as opened:
        yield opened


def failure(found: bytes | ImageError | int) -> tuple[FailureCode, str]:
    assert isinstance(found, ImageError)
    return found.code, str(found)


def ranges(server: HttpServer) -> list[str]:
    return [asked for method, _, asked, _ in server.requests if method == "GET"]


def test_a_file_is_read_whole_over_one_connection(server: HttpServer, remotes: Remotes) -> None:
    assert [remotes.read(server.url + PATH, 10**6) for _ in range(3)] == [CONTENT] * 3
    assert server.num_connections == 1
    headers = server.requests[0][3]
    assert headers["Accept-Encoding"] == "identity"
    assert headers["User-Agent"].startswith("vlmembed/")


def test_a_file_that_is_not_there_is_missing_at_once(server: HttpServer, remotes: Remotes) -> None:
    server.statuses["/gone"] = [(410, {})]
    for name in ("/none", "/gone"):
        code, message = failure(remotes.read(server.url + name, 10**6))
        assert code == FailureCode.MISSING
        assert name in message
    assert server.paths() == ["/none", "/gone"]


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again(server: HttpServer, remotes: Remotes, status: int) -> None:
    server.statuses[PATH] = [(status, {})] * 3
    assert remotes.read(server.url + PATH, 10**6) == CONTENT
    assert len(server.requests) == 4


def test_a_server_that_stays_busy_is_given_up_after_four_tries(server: HttpServer, remotes: Remotes) -> None:
    server.statuses[PATH] = [(503, {})] * 9
    code, message = failure(remotes.read(server.url + PATH, 10**6))
    assert code == FailureCode.FETCH_FAILED
    assert "status 503 (4 tries" in message
    assert len(server.requests) == 4


@pytest.mark.parametrize("status", [400, 401, 403, 405, 451])
def test_a_refusal_is_final(server: HttpServer, remotes: Remotes, status: int) -> None:
    server.statuses[PATH] = [(status, {})]
    code, message = failure(remotes.read(server.url + PATH, 10**6))
    assert code == FailureCode.FETCH_FAILED
    assert f"status {status}" in message
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("asked", "waited"),
    [
        ("7", 7.0),
        ("9999", 20.0),
        (None, 0.0),
        ("soon", 0.0),
        ("Mon, 01 Jan 2024 00:00:00 +9999999999999999999", 0.0),
        ("9" * 5000, 20.0),
    ],
)
def test_a_server_says_when_to_come_back(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, asked: str | None, waited: float
) -> None:
    pauses: list[float] = []
    server.statuses[PATH] = [(429, {"Retry-After": asked} if asked else {})]
    client = HttpClient(timeout_seconds=60, allow_local=True)
    monkeypatch.setattr(client.retries._closed, "wait", pauses.append)
    assert read_whole(client, server.url + PATH, 10**6) == CONTENT
    client.close()
    assert pauses == [pytest.approx(waited, abs=0.01)]


def test_a_server_may_say_it_by_a_date(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    server.statuses[PATH] = [(503, {"Retry-After": formatdate(time.time() + 12, usegmt=True)})]
    client = HttpClient(timeout_seconds=60, allow_local=True)
    monkeypatch.setattr(client.retries._closed, "wait", pauses.append)
    assert read_whole(client, server.url + PATH, 10**6) == CONTENT
    client.close()
    assert 5 < pauses[0] <= 12


def test_a_pause_beyond_the_timeout_is_not_made(server: HttpServer, remotes: Remotes) -> None:
    server.statuses[PATH] = [(429, {"Retry-After": "10"})]
    code, message = failure(remotes.read(server.url + PATH, 10**6))
    assert code == FailureCode.FETCH_FAILED
    assert "status 429 (1 try" in message


def test_a_body_that_breaks_off_is_continued(server: HttpServer, remotes: Remotes) -> None:
    server.drop_after_bytes, server.drops = 100_000, 3
    assert remotes.read(server.url + PATH, 10**6) == CONTENT
    assert ranges(server) == ["", "bytes=100000-", "bytes=200000-", "bytes=300000-"]


@pytest.mark.parametrize("manner", ["takes_ranges", "gives_etag"])
def test_a_body_that_breaks_off_is_read_again_where_it_cannot_be_continued(
    server: HttpServer, remotes: Remotes, manner: str
) -> None:
    setattr(server, manner, False)
    server.drop_after_bytes, server.drops = 100_000, 2
    assert remotes.read(server.url + PATH, 10**6) == CONTENT
    assert len(server.requests) == 3


def test_a_file_that_is_replaced_while_it_breaks_off_is_the_new_one(server: HttpServer, remotes: Remotes) -> None:
    server.drop_after_bytes = 100_000
    server.after_drop = lambda: server.files.update({PATH: CONTENT[::-1]})
    assert remotes.read(server.url + PATH, 10**6) == CONTENT[::-1]


def test_a_body_that_breaks_off_each_time_fails(server: HttpServer, remotes: Remotes) -> None:
    server.drop_after_bytes, server.drops = 10, 99
    code, message = failure(remotes.read(server.url + PATH, 10**6))
    assert code == FailureCode.FETCH_FAILED
    assert "the connection broke" in message
    assert len(server.requests) == 4


def test_a_body_in_chunks_is_read_and_noticed_when_it_breaks_off(server: HttpServer, remotes: Remotes) -> None:
    server.tells_length = False
    assert remotes.read(server.url + PATH, 10**6) == CONTENT
    server.drop_after_bytes = 100_000
    assert remotes.read(server.url + PATH, 10**6) == CONTENT
    assert ranges(server) == ["", "", "bytes=100000-"]


def test_a_file_that_is_too_large_is_not_read(server: HttpServer, remotes: Remotes) -> None:
    code, message = failure(remotes.read(server.url + PATH, 1000))
    assert code == FailureCode.TOO_LARGE
    assert "307200 bytes" in message
    server.tells_length = False
    code, message = failure(remotes.read(server.url + PATH, 1000))
    assert code == FailureCode.TOO_LARGE
    assert "more than 1000 bytes" in message


def test_a_larger_file_can_be_put_off(server: HttpServer, remotes: Remotes) -> None:
    assert remotes.read(server.url + PATH, 10**6, 1000) == len(CONTENT)
    assert remotes.read(server.url + PATH, 10**6, len(CONTENT)) == CONTENT
    assert failure(remotes.read(server.url + PATH, 10**5, 1000))[0] == FailureCode.TOO_LARGE
    server.tells_length = False
    assert remotes.read(server.url + PATH, 10**6, 1000) == 10**6


def test_a_silent_server_fails_in_time(server: HttpServer) -> None:
    server.delay_seconds = 1.0
    with Remotes(timeout_seconds=0.4, allow_local=True) as remotes:
        code, message = failure(remotes.read(server.url + PATH, 10**6))
    assert code == FailureCode.FETCH_FAILED
    assert "did not answer in time" in message


def test_a_server_that_drips_fails_in_time(server: HttpServer) -> None:
    server.drip_seconds = 0.05  # 15 seconds in all, and never silent
    with Remotes(timeout_seconds=0.4, allow_local=True) as remotes:
        code, message = failure(remotes.read(server.url + PATH, 10**6))
    assert code == FailureCode.FETCH_FAILED
    assert "in time" in message


def test_no_server_at_all_fails(remotes: Remotes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    code, message = failure(remotes.read(f"http://127.0.0.1:{port}/a", 10**6))
    assert code == FailureCode.FETCH_FAILED
    assert "(4 tries" in message


def test_a_host_is_asked_for_so_many_files_at_a_time(server: HttpServer) -> None:
    server.delay_seconds = 0.02
    with Remotes(timeout_seconds=5, per_host=3, allow_local=True) as remotes, ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda _: remotes.read(server.url + PATH, 10**6), range(24)))
    assert found == [CONTENT] * 24
    assert server.most_at_once == 3


def test_waiting_for_other_files_of_a_host_is_not_on_the_clock(server: HttpServer) -> None:
    server.delay_seconds = 0.05
    with Remotes(timeout_seconds=0.5, per_host=1, allow_local=True) as remotes, ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: remotes.read(server.url + PATH, 10**6), range(16)))
    assert found == [CONTENT] * 16
    assert server.most_at_once == 1


def test_a_host_whose_requests_all_hang_is_not_waited_for() -> None:
    places = slots.HostSlots(1, stuck_seconds=0.15)
    with places.taken("h:80", "http://h/1", nullcontext):
        with pytest.raises(OSError, match=r"http://h/2 is not read: none of 1 requests to h:80 has ended for 0.15 sec"):
            places.taken("h:80", "http://h/2", nullcontext).__enter__()
        with places.taken("other:80", "http://other/1", nullcontext):
            pass
    with places.taken("h:80", "http://h/3", nullcontext):
        pass
    assert places._hosts == {}


def test_those_that_wait_have_their_turns_in_order() -> None:
    places, order = slots.HostSlots(1, stuck_seconds=20), []
    threads = []

    def work(number: int) -> None:
        with places.taken("h", "", nullcontext):
            order.append(number)

    with places.taken("h", "", nullcontext):
        for number in range(5):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            while len(places._hosts["h"].waiting) <= number:
                time.sleep(0.001)
    for thread in threads:
        thread.join(20)
    assert order == [0, 1, 2, 3, 4]


def test_closing_ends_those_that_wait(server: HttpServer) -> None:
    client = HttpClient(timeout_seconds=600, per_host=1, allow_local=True)
    with client._slots.taken(f"127.0.0.1:{server.port}", "", nullcontext), ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(read_whole, client, server.url + PATH, 10**6) for _ in range(3)]
        while len(client._slots._hosts[f"127.0.0.1:{server.port}"].waiting) < 3:
            time.sleep(0.001)
        client.close()
        for future in waiting:
            with pytest.raises(OSError, match=f"{PATH} is not read: the reading of URLs was ended"):
                future.result(20)
    with pytest.raises(OSError, match="was ended"):
        read_whole(client, server.url + PATH, 10**6)
    assert server.requests == []


def test_hosts_that_are_done_are_forgotten(server: HttpServer) -> None:
    client = HttpClient(timeout_seconds=5, allow_local=True)
    read_whole(client, server.url + PATH, 10**6)
    assert client._slots._hosts == {}
    client.close()


def test_what_is_known_of_a_file(server: HttpServer, remotes: Remotes) -> None:
    by_head = remotes.info(server.url + PATH)
    assert (by_head.num_bytes, by_head.is_folder) == (len(CONTENT), False)
    assert by_head.version.startswith('"')
    assert server.paths("GET") == []
    server.answers_head = False
    assert remotes.info(server.url + PATH) == by_head
    server.takes_ranges = False
    assert remotes.info(server.url + PATH) == by_head
    with pytest.raises(FileNotFoundError, match="/none"):
        remotes.info(server.url + "/none")


def test_a_web_server_has_no_folders_and_takes_nothing(server: HttpServer, remotes: Remotes) -> None:
    with pytest.raises(InputError, match="lists no folders"):
        list(remotes.walk(server.url + "/"))
    with pytest.raises(InputError, match="written"):
        remotes.filesystem(server.url + "/")


def test_redirects_are_followed_and_end(server: HttpServer, remotes: Remotes) -> None:
    server.redirects = {"/1": "/2", "/2": f"{server.url}/3", "/3": "a.bin", "/loop": "/loop", "/ftp": "ftp://host/a"}
    assert remotes.read(server.url + "/1", 10**6) == CONTENT
    code, message = failure(remotes.read(server.url + "/loop", 10**6))
    assert code == FailureCode.FETCH_FAILED
    assert "more than 5 redirects" in message
    assert "ftp://" in failure(remotes.read(server.url + "/ftp", 10**6))[1]


def test_a_login_goes_to_its_own_host_only_and_into_no_message(remotes: Remotes) -> None:
    with http_server({PATH: CONTENT}) as other, http_server({PATH: CONTENT}) as server:
        server.redirects = {"/away": other.url + PATH, "/here": PATH}
        login = server.url.replace("://", "://me:pass%20word@")
        assert remotes.read(login + "/here", 10**6) == CONTENT
        assert remotes.read(login + "/away", 10**6) == CONTENT
        assert [sent[3].get("Authorization") for sent in server.requests] == ["Basic bWU6cGFzcyB3b3Jk"] * 3
        assert [sent[3].get("Authorization") for sent in other.requests] == [None]
        message = failure(remotes.read(login + "/none?token=secret", 10**6))[1]
    assert server.url + "/none" in message
    assert "pass" not in message
    assert "secret" not in message


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://h/a b/ä.jpg?x=1 2#part", "/a%20b/%C3%A4.jpg?x=1%202"),
        ("http://h/50%/%41%zz", "/50%25/%41%25zz"),
        ("http://h", "/"),
        ("http://h?a=/b?c", "/?a=/b?c"),
        ("http://h/a\r\nX: y", "/aX:%20y"),
    ],
)
def test_urls_are_encoded_for_the_request(url: str, target: str) -> None:
    assert parse_web_url(url).url.target.decode() == target


def test_a_host_in_any_script_is_encoded() -> None:
    parsed = parse_web_url("https://bücher.example:8443/a")
    assert parsed.url.host == b"xn--bcher-kva.example"
    assert parsed.headers == (("Host", "xn--bcher-kva.example:8443"),)
    assert parse_web_url("http://[::1]/").headers == (("Host", "[::1]"),)


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://a:b/",
        "http://[::1/",
        "http://a b/",
        "http:///x",
        "http://a:99999/",
        f"http://{'a' * 64}.example/",
        "http://a..example/",
    ],
)
def test_a_url_that_makes_no_sense_fails_alone(remotes: Remotes, url: str) -> None:
    assert failure(remotes.read(url, 10**6))[0] == FailureCode.FETCH_FAILED
    for method in (remotes.info, remotes.open):
        with pytest.raises(OSError, match=re.escape(url)):
            method(url)


@pytest.mark.parametrize("location", ["http://[", f"http://{'a' * 64}.example/", "//a:b/"])
def test_a_redirect_that_makes_no_sense_fails_alone(server: HttpServer, remotes: Remotes, location: str) -> None:
    server.redirects = {"/a": location}
    code, message = failure(remotes.read(f"{server.url}/a", 10**6))
    assert code == FailureCode.FETCH_FAILED
    assert location in message
    assert "leave it out" in message
    with pytest.raises(OSError, match="leave it out"):
        remotes.open(f"{server.url}/a")


@pytest.mark.parametrize("status", [206, 416])
def test_sizes_beyond_all_files_are_not_believed(server: HttpServer, remotes: Remotes, status: int) -> None:
    asked = f"bytes 0-0/{'9' * 5000}" if status == 206 else f"bytes */{'9' * 5000}"
    server.statuses[PATH] = [(status, {"Content-Range": asked})]
    if status == 206:
        with pytest.raises(OSError, match=f"{PATH}: the server sent a part.*'bytes 0-0/9{{50}}'.*download the file"):
            remotes.open(server.url + PATH)
    else:
        with remotes.open(server.url + PATH) as file:
            assert file.num_bytes == 0


def test_urls_are_shown_in_one_line_without_secrets() -> None:
    assert shown_url("https://me:pw@host/a.jpg?sig=x#y") == "https://host/a.jpg"
    assert shown_url("http://host/a\nb") == "http://host/a\\nb"
    assert shown_url("https://u:p/w@h/x") == "https://h/x"
    assert shown_url("https://u:p?w#v@w@h/x") == "https://h/x"
    assert shown_url("https://u@v:p/w@h/x") == "https://h/x"
    assert shown_url("http://h:80/a@2x.png") == "http://h:80/a@2x.png"
    assert shown_url("http://[::1]:80/a@2x.png") == "http://[::1]:80/a@2x.png"
    assert len(shown_url("http://host/" + "a" * 5000)) < 400


REFUSED = [
    "127.0.0.1",
    "127.1",
    "localhost",
    "[::1]",
    "0.0.0.0",  # noqa: S104  nothing is bound
    "0",
    "[::]",
    "169.254.169.254",
    "[fe80::1]",
    "2130706433",
    "0x7f000001",
    "0177.0.0.1",
    "017700000001",
    "[::ffff:127.0.0.1]",
    "[::ffff:a9fe:a9fe]",
    "[64:ff9b::7f00:1]",
    "[2002:7f00:1::]",
    "224.0.0.1",
    "255.255.255.255",
    "240.0.0.1",
    "100.100.100.200",
    "[fd00:ec2::254]",
    "[fd00:ec2::123]",
    "[fd00:ec2:1::1]",
    "127.0.0.1.",
]


@pytest.mark.parametrize("host", REFUSED)
def test_local_hosts_are_refused(server: HttpServer, host: str) -> None:
    with Remotes(timeout_seconds=2) as remotes:
        code, message = failure(remotes.read(f"http://{host}:{server.port}{PATH}", 10**6))
    assert code == FailureCode.FETCH_FAILED
    if host != "127.0.0.1.":  # some resolvers do not know it
        assert "--allow-local-urls" in message
        assert PATH in message
    assert server.requests == []


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("10.1.2.3", None),
        ("172.16.0.1", None),
        ("192.168.0.1", None),
        ("fc00::1", None),
        ("fd00:ec3::1", None),
        ("93.184.215.14", None),
        ("2606:4700::1111", None),
        ("64:ff9b::5db8:d70e", None),
        ("::ffff:10.0.0.1", None),
        ("127.255.0.1", "a loopback address"),
        ("2001:0:4136:e378:8000:63bf:80ff:fffe", "a loopback address"),
        ("fe80::1%2", "a link-local address, as clouds' metadata services have"),
        ("::127.0.0.1", "a reserved address"),
        ("0.1.2.3", "an unspecified address"),
        ("ff02::1", "a multicast address"),
        ("168.63.129.16", "a cloud's metadata service"),
    ],
)
def test_addresses_that_are_refused(address: str, kind: str | None) -> None:
    assert local_kind(ip_address(address)) == kind


def resolving(monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[list[str]]]) -> list[str]:
    """Names resolve to the next list of addresses; the log of look-ups."""
    real, asked = socket.getaddrinfo, []

    def look_up(host: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401  as socket's own
        if host not in answers:
            return real(host, *arguments, **named)
        asked.append(host)
        found = answers[host].pop(0) if len(answers[host]) > 1 else answers[host][0]
        return [entry for address in found for entry in real(address, *arguments, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return asked


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["93.184.215.14", "127.0.0.1"]])
def test_a_name_that_leads_to_this_machine_is_refused(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, addresses: list[str]
) -> None:
    resolving(monkeypatch, {"pictures.example": [addresses]})
    with Remotes(timeout_seconds=2) as remotes:
        code, message = failure(remotes.read(f"http://pictures.example:{server.port}{PATH}", 10**6))
    assert code == FailureCode.FETCH_FAILED
    assert "pictures.example is 127.0.0.1, a loopback address" in message
    assert server.requests == []


def test_the_address_that_was_checked_is_connected_to(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "local_kind", lambda address: "loopback" if str(address) == "127.0.0.1" else None)
    with http_server({PATH: b"good"}, host="127.0.0.2", port=server.port):
        asked = resolving(monkeypatch, {"pictures.example": [["127.0.0.2"], ["127.0.0.1"]]})
        with Remotes(timeout_seconds=2) as remotes:
            assert remotes.read(f"http://pictures.example:{server.port}{PATH}", 10**6) == b"good"
    assert asked == ["pictures.example"]
    assert server.requests == []


def test_this_machines_own_address_is_refused_where_no_range_tells(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "local_kind", lambda _: None)  # as of 10.0.0.5 on the machine that has it
    with Remotes(timeout_seconds=2) as remotes:
        code, message = failure(remotes.read(server.url + PATH, 10**6))
    assert code == FailureCode.FETCH_FAILED
    assert "127.0.0.1 is this machine" in message
    assert "--allow-local-urls" in message
    assert server.requests == []


def test_a_redirect_to_this_machine_is_refused(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "local_kind", lambda address: "loopback" if str(address) == "127.0.0.1" else None)
    with http_server({}, host="127.0.0.2") as allowed, Remotes(timeout_seconds=2) as remotes:
        allowed.redirects = {"/a": server.url + PATH}
        code, message = failure(remotes.read(allowed.url + "/a", 10**6))
    assert code == FailureCode.FETCH_FAILED
    assert server.url + PATH in message
    assert "--allow-local-urls" in message
    assert allowed.paths() == ["/a"]
    assert server.requests == []


def test_the_next_address_is_tried_where_one_does_not_answer(
    server: HttpServer, remotes: Remotes, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving(monkeypatch, {"pictures.example": [["127.0.0.3", "127.0.0.1"]]})  # nobody listens on the first
    assert remotes.read(f"http://pictures.example:{server.port}{PATH}", 10**6) == CONTENT


def certificate(folder: Path, host: str) -> tuple[Path, ssl.SSLContext]:
    """A certificate of a host, signed by nobody but itself: its file, and what a server takes."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file, both = folder / "certificate.pem", folder / "both.pem"
    file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    both.write_bytes(file.read_bytes() + key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)
    return file, context


def test_certificates_are_checked_against_the_name_in_the_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, context = certificate(tmp_path, "pictures.example")
    resolving(monkeypatch, {"pictures.example": [["127.0.0.1"]], "other.example": [["127.0.0.1"]]})
    with http_server({PATH: CONTENT}, tls=context) as server:
        url = f"https://pictures.example:{server.port}{PATH}"
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with Remotes(timeout_seconds=5, allow_local=True) as remotes:
            code, message = failure(remotes.read(url, 10**6))
        assert code == FailureCode.FETCH_FAILED
        assert "certificate is not trusted" in message
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        with Remotes(timeout_seconds=5, allow_local=True) as remotes:
            assert remotes.read(url, 10**6) == CONTENT
            message = failure(remotes.read(url.replace("pictures", "other"), 10**6))[1]
        assert "certificate is not trusted (Hostname mismatch" in message


def test_an_unknown_host_fails_at_once(remotes: Remotes, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    code, message = failure(remotes.read("http://none.example/a", 10**6))
    assert code == FailureCode.FETCH_FAILED
    assert message == "http://none.example/a: the host's name cannot be resolved (Name or service not known)"


def test_closing_ends_the_pauses(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 60.0)
    server.statuses[PATH] = [(503, {})] * 9
    remotes = Remotes(timeout_seconds=600, allow_local=True)
    found: list[bytes | ImageError | int] = []
    thread = threading.Thread(target=lambda: found.append(remotes.read(server.url + PATH, 10**6)))
    thread.start()
    while not server.requests:
        time.sleep(0.005)
    remotes.close()
    thread.join(20)
    assert failure(found[0])[0] == FailureCode.FETCH_FAILED


def test_random_content_is_read_by_many_threads(remotes: Remotes) -> None:
    files = {f"/{index}": os.urandom(index * 5_000) for index in range(20)}
    with http_server(files) as server, ThreadPoolExecutor(8) as pool:
        server.drop_after_bytes = 30_000
        found = pool.map(lambda name: remotes.read(server.url + name, 10**6), files)
        assert dict(zip(files, found, strict=True)) == files


def test_the_limit_names_what_came(server: HttpServer) -> None:
    client = HttpClient(timeout_seconds=5, allow_local=True)
    assert read_whole(client, server.url + PATH, 5) == Oversized(num_bytes=len(CONTENT))
    client.close()
