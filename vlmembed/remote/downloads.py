"""Files from web servers, whole or in part: where a connection breaks, the next try goes on there."""

from __future__ import annotations

import io
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmembed.remote.retries import TransientError
from vlmembed.remote.urls import shown_url
from vlmembed.remote.web_answer import check_unchanged

if TYPE_CHECKING:
    from vlmembed.remote.http import HttpClient
    from vlmembed.remote.retries import Deadline
    from vlmembed.remote.slots import Pause
    from vlmembed.remote.web_answer import WebInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class Oversized:
    """What came in place of content that is larger than was allowed; `num_bytes` is its size, None if unknown."""

    num_bytes: int | None


def read_whole(client: HttpClient, url: str, max_bytes: int, pause: Pause = nullcontext) -> bytes | Oversized:
    """A whole file, unless it is larger than `max_bytes`. Where it waits for its host's other files, it does so in
    `pause`.

    Raises:
        FileNotFoundError: it is not there. OSError: it cannot be read.
    """
    download = _Download(client, url, max_bytes)
    return client.retries.run(download.advance, pause=pause)


def read_head(
    client: HttpClient, url: str, num_bytes: int, max_bytes: int, pause: Pause = nullcontext
) -> tuple[bytes, int] | Oversized:
    """The first `num_bytes` of a file, or all of a shorter one, and its size, by one request. A server that sends the
    whole file is not listened to for longer, unless it does not tell the size: then all is read, up to `max_bytes`. One
    that sends a part and does not say of how many bytes is asked for the whole.

    Raises:
        FileNotFoundError: it is not there. OSError: it cannot be read.
    """
    download = _Download(client, url, max_bytes)

    def whole(deadline: Deadline) -> tuple[bytes, int] | Oversized:
        content = download.advance(deadline)
        return content if isinstance(content, Oversized) else (content, len(content))

    def read(deadline: Deadline) -> tuple[bytes, int] | Oversized:
        content = io.BytesIO()
        with client.answer("GET", url, {"Range": f"bytes=0-{num_bytes - 1}"}, deadline) as answer:
            if answer.status == 416:  # noqa: PLR2004  Range Not Satisfiable: it is empty
                return b"", 0
            if answer.range is not None and answer.range[0]:
                msg = f"{shown_url(url)}: a part came that was not asked for, from byte {answer.range[0]} on"
                raise TransientError(msg)
            if answer.range is not None and answer.num_bytes is None:  # of how many bytes it is a part is not said
                return whole(deadline)
            is_known = answer.num_bytes is not None
            wanted = min(num_bytes, answer.num_bytes) if answer.num_bytes is not None else max_bytes + 1
            for chunk in answer.chunks:
                content.write(chunk)
                if content.tell() >= wanted:
                    break
            if content.tell() > max_bytes:
                return Oversized(num_bytes=answer.num_bytes)
            if is_known and content.tell() < wanted:
                msg = f"{shown_url(url)}: {content.tell()} bytes came of {wanted}"
                raise TransientError(msg)
            head = content.getvalue()
            return (head, len(head)) if answer.num_bytes is None else (head[:wanted], answer.num_bytes)

    return client.retries.run(read, pause=pause)


def read_range(client: HttpClient, url: str, start: int, stop: int, expected: WebInfo) -> bytes:
    """Bytes `start` to `stop` of a file that takes ranges.

    Raises:
        OSError: it cannot be read, or is not as `expected`.
    """
    part = _Part(client, url, start, stop, expected)
    return client.retries.run(part.advance)


class _Download:
    """A file on its way: a try goes on where the one before it broke off, if the server can say that it is the same."""

    def __init__(self, client: HttpClient, url: str, max_bytes: int) -> None:
        self._client = client
        self._url = url
        self._max_bytes = max_bytes
        self._content = io.BytesIO()
        self._validator = ""

    def advance(self, deadline: Deadline) -> bytes | Oversized:
        """Try to read what is missing."""
        num_bytes = self._content.tell()
        headers = {}
        if num_bytes and self._validator:
            headers = {"Range": f"bytes={num_bytes}-", "If-Range": self._validator}
        with self._client.answer("GET", self._url, headers, deadline) as answer:
            goes_on = bool(headers) and answer.range is not None and answer.range[0] == num_bytes
            if not goes_on:
                self._content = io.BytesIO()
                self._validator = answer.validator
                if answer.status != 200:  # noqa: PLR2004  OK
                    self._validator = ""
                    msg = f"{shown_url(self._url)}: a part came that was not asked for (status {answer.status})"
                    raise TransientError(msg)
            if answer.num_bytes is not None and answer.num_bytes > self._max_bytes:
                return Oversized(num_bytes=answer.num_bytes)
            for chunk in answer.chunks:
                self._content.write(chunk)
                if self._content.tell() > self._max_bytes:
                    return Oversized(num_bytes=None)
            if answer.num_bytes is not None and self._content.tell() != answer.num_bytes:
                msg = f"{shown_url(self._url)}: {self._content.tell()} bytes came of {answer.num_bytes}"
                raise TransientError(msg)
        return self._content.getvalue()


class _Part:
    """A range of a file on its way."""

    def __init__(self, client: HttpClient, url: str, start: int, stop: int, expected: WebInfo) -> None:
        self._client = client
        self._url = url
        self._start = start
        self._stop = stop
        self._expected = expected
        self._content = io.BytesIO()

    def advance(self, deadline: Deadline) -> bytes:
        """Try to read what is missing."""
        start = self._start + self._content.tell()
        headers = {"Range": f"bytes={start}-{self._stop - 1}"}
        with self._client.answer("GET", self._url, headers, deadline) as answer:
            check_unchanged(self._url, self._expected, answer)
            if answer.range is None or answer.range[0] != start:
                msg = f"{shown_url(self._url)}: the server took ranges when it was opened, and takes none now"
                raise OSError(msg)
            for chunk in answer.chunks:
                self._content.write(chunk[: self._stop - self._start - self._content.tell()])
        if self._content.tell() < self._stop - self._start:
            msg = f"{shown_url(self._url)}: {self._content.tell()} bytes came of {self._stop - self._start}"
            raise TransientError(msg)
        return self._content.getvalue()
