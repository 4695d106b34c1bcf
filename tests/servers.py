"""Servers on loopback for tests: S3 in a process of its own, HTTP with bad manners, and a proxy that breaks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator

    import pytest
    from pyarrow import fs

_S3_PROCESS = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def s3_server() -> Iterator[str]:
    """A server that speaks S3, empty, in a process of its own; its URL. It starts in about two seconds."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _S3_PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # a line for every request
        env={**os.environ, "AWS_EC2_METADATA_DISABLED": "true"},
    )
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def s3_environment(endpoint: str) -> dict[str, str]:
    """What leads S3 clients to a server; nothing is set here."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def use_s3(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lead S3 clients that are made from now on, in this process and its children, to a server."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_environment(endpoint).items():
        monkeypatch.setenv(name, value)


def s3_filesystem(endpoint: str) -> fs.S3FileSystem:
    """A client of a server, which may make buckets."""
    from pyarrow import fs  # noqa: PLC0415  starting S3 takes a moment, which other tests need not wait

    return fs.S3FileSystem(
        endpoint_override=endpoint.partition("://")[2],
        scheme="http",
        region="us-east-1",
        access_key="test",
        secret_key="test",  # noqa: S106  no secret
        allow_bucket_creation=True,
        allow_bucket_deletion=True,
    )


def put_s3(endpoint: str, objects: dict[str, bytes]) -> None:
    """Put objects into a server by ``bucket/key``; buckets are made."""
    filesystem = s3_filesystem(endpoint)
    for path, content in objects.items():
        filesystem.create_dir(path.partition("/")[0])
        with filesystem.open_output_stream(path, compression=None) as stream:
            stream.write(content)


@dataclass(kw_only=True, eq=False)
class HttpServer:
    """An HTTP server and its manners, which can be changed while it runs.

    Attributes:
        files: content by path, as ``/a.jpg`` (decoded, without the query).
        takes_ranges, tells_length, answers_head, gives_etag: what it can do; without `tells_length` it sends chunks.
        tells_total: a part says of how many bytes it is one.
        redirects: where a path leads.
        statuses: (status, headers) with which it answers requests of a path first, in place of the file; "" stands for
            every path.
        drop_after_bytes: the connection ends after so many bytes of a body; `drops` says how often that happens
            (per path), then no more.
        delay_seconds: time before an answer. drip_seconds: time between pieces of 1,000 bytes.
        requests: (method, path, Range or "", headers) of all that came.
        most_at_once: most requests that were under way at the same time. num_connections: all that were made.
        after_drop: called before a connection is dropped.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    takes_ranges: bool = True
    tells_length: bool = True
    tells_total: bool = True
    answers_head: bool = True
    gives_etag: bool = True
    redirects: dict[str, str] = field(default_factory=dict)
    statuses: dict[str, list[tuple[int, dict[str, str]]]] = field(default_factory=dict)
    drop_after_bytes: int | None = None
    drops: int = 1
    delay_seconds: float = 0.0
    drip_seconds: float = 0.0
    host: str = "127.0.0.1"
    port: int = 0
    requests: list[tuple[str, str, str, dict[str, str]]] = field(default_factory=list)
    most_at_once: int = 0
    num_connections: int = 0
    after_drop: Callable[[], None] | None = None
    _dropped: Counter[str] = field(default_factory=Counter)
    _at_once: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        """Without a slash at its end."""
        return f"http://{self.host}:{self.port}"

    def paths(self, method: str = "GET") -> list[str]:
        """Paths of the requests with a method, in order."""
        return [path for name, path, _, _ in self.requests if name == method]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A request is under way."""
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            yield
        finally:
            with self._lock:
                self._at_once -= 1

    def next_status(self, path: str) -> tuple[int, dict[str, str]] | None:
        """The status to answer with in place of the file, if there is one left."""
        with self._lock:
            for key in (path, ""):
                if self.statuses.get(key):
                    return self.statuses[key].pop(0)
        return None

    def drops_now(self, path: str) -> bool:
        """Whether the connection is to end in the middle of this body."""
        with self._lock:
            if self.drop_after_bytes is None or self._dropped[path] >= self.drops:
                return False
            self._dropped[path] += 1
            return True


class _HttpHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    manners: HttpServer

    def setup(self) -> None:
        super().setup()
        self.manners.num_connections += 1

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.manners.counting():
            self.manners.requests.append((self.command, path, self.headers.get("Range", ""), dict(self.headers)))
            time.sleep(self.manners.delay_seconds)
            with suppress(ConnectionError):
                self._answer(path)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, path: str) -> None:
        manners = self.manners
        if status := manners.next_status(path):
            self._send(status[0], status[1], b"")
        elif path in manners.redirects:
            self._send(302, {"Location": manners.redirects[path]}, b"moved")
        elif path not in manners.files:
            self._send(404, {}, b"no such file")
        elif self.command == "HEAD" and not manners.answers_head:
            self._send(405, {}, b"")
        else:
            self._send_file(path, manners.files[path])

    def _send_file(self, path: str, content: bytes) -> None:
        headers = {"ETag": f'"{hash(content):x}"'} if self.manners.gives_etag else {}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        condition = self.headers.get("If-Range")
        if not (asked and self.manners.takes_ranges) or condition not in (None, headers.get("ETag")):
            self._send(200, headers, content, path)
            return
        start, stop = int(asked[1]), int(asked[2] or len(content)) + 1
        if start >= len(content):
            self._send(416, {"Content-Range": f"bytes */{len(content)}"}, b"")
            return
        part = content[start:stop]
        total = len(content) if self.manners.tells_total else "*"
        headers["Content-Range"] = f"bytes {start}-{start + len(part) - 1}/{total}"
        self._send(206, headers, part, path)

    def _send(self, status: int, headers: dict[str, str], body: bytes, path: str | None = None) -> None:
        chunked = path is not None and not self.manners.tells_length
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header(*(("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(len(body)))))
        self.end_headers()
        if self.command == "HEAD":
            return
        drops = path is not None and self.manners.drops_now(path)
        if drops:
            body = body[: self.manners.drop_after_bytes]
        piece_bytes = 1000 if self.manners.drip_seconds else max(1, len(body))
        for start in range(0, len(body), piece_bytes):
            piece = body[start : start + piece_bytes]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
            time.sleep(self.manners.drip_seconds)
        if drops:
            if self.manners.after_drop:
                self.manners.after_drop()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif chunked:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


class _ThreadingServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        """A client that goes is no error."""


@contextmanager
def http_server(
    files: Path | dict[str, bytes] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
) -> Iterator[HttpServer]:
    """A server of a folder's files (read now), or of content by path, each with a slash before it; with `tls` for
    https."""
    if isinstance(files, Path):
        files = {f"/{file.relative_to(files)}": file.read_bytes() for file in files.rglob("*") if file.is_file()}
    manners = HttpServer(files=files or {}, host=host)
    handler = type("Handler", (_HttpHandler,), {"manners": manners})
    with _ThreadingServer((host, port), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        manners.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield manners
        finally:
            server.shutdown()
            thread.join()


@dataclass(kw_only=True, eq=False)
class BreakingProxy:
    """A proxy for TCP that ends connections in the middle of an answer.

    Attributes:
        url: of the proxy, which answers as its upstream does.
        breaks: whether the answer to a request is broken, by its first line (``GET /bucket/key HTTP/1.1``); can be
            changed while it runs.
        after_bytes: of the answer (its head included), let through before that.
        num_broken: connections that were.
        lines: first lines of the requests that were seen.
    """

    breaks: Callable[[str], bool]
    after_bytes: int
    url: str = ""
    num_broken: int = 0
    lines: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def is_to_break(self, line: str) -> bool:
        """Look at a request."""
        with self.lock:
            self.lines.append(line)
            broken = self.breaks(line)
            self.num_broken += broken
            return broken


def times(count: int, word: str = "GET ") -> Callable[[str], bool]:
    """A rule for `BreakingProxy`: break the first `count` requests with a word in their first line."""
    left = [count]

    def breaks(line: str) -> bool:
        if word in line and left[0]:
            left[0] -= 1
            return True
        return False

    return breaks


@contextmanager
def breaking_proxy(
    upstream: str, breaks: Callable[[str], bool], *, after_bytes: int = 10_000
) -> Iterator[BreakingProxy]:
    """A proxy before a server (its URL). Each connection carries one request, so it costs clients a connection each."""
    proxy = BreakingProxy(breaks=breaks, after_bytes=after_bytes)
    parts = urlsplit(upstream)
    assert parts.hostname is not None
    assert parts.port is not None
    address = (parts.hostname, parts.port)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        listener.settimeout(0.05)
        proxy.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def accept() -> None:
            while not over.is_set():
                with suppress(TimeoutError):
                    client, _ = listener.accept()
                    threading.Thread(target=_carry, args=(client, address, proxy), daemon=True).start()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield proxy
        finally:
            over.set()
            thread.join()


def _carry(client: socket.socket, address: tuple[str, int], proxy: BreakingProxy) -> None:
    """One request, and its answer."""
    with client, suppress(OSError), socket.create_connection(address) as server:
        client.settimeout(60)
        server.settimeout(60)
        head = b""
        while b"\r\n\r\n" not in head:
            received = client.recv(65_536)
            if not received:
                return
            head += received
        first, _, rest = head.partition(b"\r\n")
        left = proxy.after_bytes if proxy.is_to_break(first.decode("latin-1")) else None
        server.sendall(first + b"\r\nConnection: close\r\n" + re.sub(rb"(?im)^connection:.*\r\n", b"", rest))
        threading.Thread(target=_pump, args=(client, server), daemon=True).start()  # the request's body
        while received := server.recv(65_536):
            client.sendall(received if left is None else received[:left])
            if left is not None and (left := left - len(received)) <= 0:
                break
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while received := source.recv(65_536):
            sink.sendall(received)
