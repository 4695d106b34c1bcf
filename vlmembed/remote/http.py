"""A client for http:// and https://: whole files and ranges of them, with several tries, a few at a time from a host.

Redirects are followed here, at most `MAX_REDIRECTS`, so that each host on the way is checked by `guard`; from https to
http as well, as curl does when it is told to follow, since the open web's lists lead there often. A URL's
``user:password@`` is sent to its own host only. There are no proxies: a connection through one would leave the check of
addresses to it.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING
from urllib.parse import urljoin

import httpcore2

from vlmembed.remote.guard import GuardedBackend
from vlmembed.remote.retries import Deadline, Retries
from vlmembed.remote.slots import HostSlots
from vlmembed.remote.transport import parse_web_url, translated, without_login
from vlmembed.remote.urls import shown_url
from vlmembed.remote.web_answer import Answer, WebInfo, check_part, size_of, status_error

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator, Mapping

MAX_REDIRECTS = 5
MAX_CONNECT_SECONDS = 10.0
MAX_SILENCE_SECONDS = 30.0
"""Limits of the time until a connection stands, and of the time in which a server sends nothing; less with a short
timeout, so that several tries fit into it."""

MIN_STUCK_SECONDS = 10.0
"""A request has ended by twice its timeout, unless its thread hangs; never less than this."""

KEEP_SECONDS = 15.0
MAX_KEPT_CONNECTIONS = 64

_REDIRECTS = (301, 302, 303, 307, 308)


class HttpClient:
    """Reads files over http and https; thread-safe.

    Methods raise FileNotFoundError where the server says that there is no such file, and another OSError where it
    refuses or the last try has failed; the message names the URL without its login and query.
    """

    def __init__(self, *, timeout_seconds: float, per_host: int = 16, allow_local: bool = False) -> None:
        self._retries = Retries(timeout_seconds)
        self._connect_seconds = min(MAX_CONNECT_SECONDS, timeout_seconds / 4)
        self._silence_seconds = min(MAX_SILENCE_SECONDS, timeout_seconds / 2)
        self._slots = HostSlots(per_host, stuck_seconds=max(MIN_STUCK_SECONDS, 2 * timeout_seconds))
        self._backend = GuardedBackend(allow_local=allow_local)
        self._pool = self._new_pool(None)
        self._tls_pool: httpcore2.ConnectionPool | None = None
        self._lock = threading.Lock()
        self._user_agent = f"vlmembed/{version('vlmembed')}"

    @property
    def retries(self) -> Retries:
        """For what is read with `answer`."""
        return self._retries

    def close(self) -> None:
        """End the connections; what is under way fails."""
        self._retries.close()
        self._slots.close()
        self._pool.close()
        if self._tls_pool is not None:
            self._tls_pool.close()

    def info(self, url: str) -> WebInfo:
        """What a server says of a file when asked for its headers, or, where it does not answer that, for one byte."""
        try:
            found = self._asked("HEAD", url, Deadline(self._silence_seconds))
        except FileNotFoundError:
            raise
        except OSError:  # some refuse HEAD, and with any status; `probe` has the further tries
            return self.probe(url)
        return found if found.num_bytes is not None else self.probe(url)

    def probe(self, url: str) -> WebInfo:
        """What a server says of a file when asked for one byte of it."""
        return self._retries.run(lambda deadline: self._asked("GET", url, deadline))

    def _asked(self, method: str, url: str, deadline: Deadline) -> WebInfo:
        headers = {"Range": "bytes=0-0"} if method == "GET" else {}
        with self.answer(method, url, headers, deadline) as answer:
            if answer.status == 416:  # noqa: PLR2004  Range Not Satisfiable: it is empty
                total = answer.headers.get("content-range", "").rpartition("/")[2]
                return WebInfo(num_bytes=size_of(total) or 0, version="", takes_ranges=False)
            takes_ranges = answer.range is not None and answer.num_bytes is not None
            return WebInfo(num_bytes=answer.num_bytes, version=answer.version, takes_ranges=takes_ranges)

    @contextmanager
    def answer(
        self, method: str, url: str, headers: Mapping[str, str], deadline: Deadline, *, in_slot: bool = True
    ) -> Iterator[Answer]:
        """The answer to one try: 200, 206 or 416, after redirects. `in_slot`: it counts as one of its host's, and waits
        for its turn, in which time the deadline is put off.

        Raises:
            TransientError: another try is worth it. FileNotFoundError, OSError: it is not.
        """
        shown = shown_url(url)
        for _ in range(MAX_REDIRECTS + 1):
            target = parse_web_url(url)
            with (
                self._slots.taken(target.host, shown, deadline.paused) if in_slot else nullcontext(),
                translated(url),
                self._request(method, target.url, (*target.headers, *headers.items()), deadline) as (
                    status,
                    answered,
                    chunks,
                ),
            ):
                if status in _REDIRECTS and "location" in answered:
                    url = _redirected(url, answered["location"])
                    continue
                if status not in (200, 206, 416):
                    raise status_error(shown, status, answered)
                check_part(shown, status, answered)
                yield Answer(url=url, status=status, headers=answered, chunks=chunks)
                return
        msg = f"{shown} leads to more than {MAX_REDIRECTS} redirects, the last to {shown_url(url)}"
        raise OSError(msg)

    @contextmanager
    def _request(
        self, method: str, url: httpcore2.URL, headers: tuple[tuple[str, str], ...], deadline: Deadline
    ) -> Iterator[tuple[int, dict[str, str], Iterator[bytes]]]:
        left = max(0.1, deadline.left_seconds)
        timeout = {
            "connect": min(self._connect_seconds, left),
            "read": min(self._silence_seconds, left),
            "write": min(self._silence_seconds, left),
        }
        own = [("User-Agent", self._user_agent), ("Accept", "*/*"), ("Accept-Encoding", "identity")]
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in [*headers, *own]]
        with self._pool_for(url).stream(method, url, headers=encoded, extensions={"timeout": timeout}) as response:
            answered = {name.decode().lower(): value.decode("latin-1") for name, value in response.headers}
            yield response.status, answered, _until(deadline, response.iter_stream())

    def _pool_for(self, url: httpcore2.URL) -> httpcore2.ConnectionPool:
        if url.scheme != b"https":
            return self._pool
        with self._lock:
            if self._tls_pool is None:  # reading the certificates takes a tenth of a second
                self._tls_pool = self._new_pool(httpcore2.default_ssl_context())
            return self._tls_pool

    def _new_pool(self, ssl_context: ssl.SSLContext | None) -> httpcore2.ConnectionPool:
        return httpcore2.ConnectionPool(
            ssl_context=ssl_context,
            max_connections=None,  # `per_host` is the limit
            max_keepalive_connections=MAX_KEPT_CONNECTIONS,
            keepalive_expiry=KEEP_SECONDS,
            network_backend=self._backend,
        )


def _until(deadline: Deadline, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The chunks, as long as there is time: a server that sends a little now and then never times out."""
    for chunk in chunks:
        yield chunk
        if deadline.left_seconds < 0:
            raise httpcore2.ReadTimeout


def _redirected(url: str, location: str) -> str:
    """Where a redirect leads; another host is not given the login.

    Raises:
        OSError: nowhere.
    """
    try:
        to = urljoin(without_login(url), location)
    except ValueError as error:
        msg = f"{shown_url(url)} leads to {shown_url(location)}, which is no URL ({error}): leave it out"
        raise OSError(msg) from error
    login = url.partition("://")[2].partition("/")[0].rpartition("@")[0]
    if login and parse_web_url(to).host == parse_web_url(url).host:
        scheme, _, rest = without_login(to).partition("://")
        to = f"{scheme}://{login}@{rest}"
    return to
