"""What web servers answer: the file's size and version, where a part begins, and what their refusals mean."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from vlmembed.remote.retries import TransientError
from vlmembed.remote.urls import shown_url

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_GONE = (404, 410)
_MAY_PASS = (408, 425, 429)
_SIZE = r"\d{1,18}"
_CONTENT_RANGE = re.compile(rf"bytes ({_SIZE})-({_SIZE})/({_SIZE}|\*)", re.ASCII)
_PARTIAL_CONTENT = 206
_SHOWN_CHARS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class WebInfo:
    """What a server says of a file.

    Attributes:
        num_bytes: its size, None if unknown.
        version: ETag or time of change; "" if unknown.
        takes_ranges: whether parts of it can be asked for.
    """

    num_bytes: int | None
    version: str
    takes_ranges: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answer:
    """The server's answer: header names are in small letters; `chunks` can be read while the answer is open."""

    url: str
    status: int
    headers: Mapping[str, str]
    chunks: Iterator[bytes]

    @property
    def version(self) -> str:
        """ETag or time of change; "" if there is none."""
        return self.headers.get("etag", "").removeprefix("W/") or self.headers.get("last-modified", "")

    @property
    def validator(self) -> str:
        """What the rest of a broken body can be asked for by, on the condition that nothing has changed."""
        etag = self.headers.get("etag", "")
        return etag if etag and not etag.startswith("W/") else self.headers.get("last-modified", "")

    @property
    def range(self) -> tuple[int, int | None] | None:
        """Of a part: where it begins, and the size of the whole, None if unknown; None where it is no part."""
        match = _CONTENT_RANGE.fullmatch(self.headers.get("content-range", ""))
        if self.status != _PARTIAL_CONTENT or not match:
            return None
        return int(match[1]), None if match[3] == "*" else int(match[3])

    @property
    def num_bytes(self) -> int | None:
        """The size of the whole file, None if unknown."""
        if part := self.range:
            return part[1]
        return None if "transfer-encoding" in self.headers else size_of(self.headers.get("content-length", ""))


def size_of(text: str) -> int | None:
    """A number of bytes in a header; None where it is none, or larger than any file."""
    return int(text) if re.fullmatch(_SIZE, text, re.ASCII) else None


def check_part(shown: str, status: int, headers: Mapping[str, str]) -> None:
    """Raises:
    OSError: the answer is a part, and does not say of what; `shown` is the URL for the message.
    """
    text = headers.get("content-range", "")
    if status == _PARTIAL_CONTENT and not _CONTENT_RANGE.fullmatch(text):
        msg = (
            f"{shown}: the server sent a part, and says of what in no way that can be read (Content-Range "
            f"{text[:_SHOWN_CHARS]!r}): download the file, or put it on another server"
        )
        raise OSError(msg)


def check_unchanged(url: str, expected: WebInfo, answer: Answer) -> None:
    """Raises:
    OSError: the file is not as it was.
    """
    for name, then, now in (
        ("size", expected.num_bytes, answer.num_bytes),
        ("version", expected.version, answer.version),
    ):
        if then != now:
            msg = f"{shown_url(url)} has changed while it was read: its {name} was {then}, and is {now}"
            raise OSError(msg)


def status_error(shown: str, status: int, headers: Mapping[str, str]) -> OSError:
    """What a status that brings no file means; `shown` is the URL for messages."""
    if status in _GONE:
        return FileNotFoundError(f"{shown}: the server has no such file (status {status})")
    if status in _MAY_PASS or status >= 500:  # noqa: PLR2004  server errors
        pause = _retry_after_seconds(headers.get("retry-after", ""))
        return TransientError(f"{shown}: the server answered with status {status}", pause)
    if status in (401, 403):
        return PermissionError(f"{shown}: the server refuses access (status {status})")
    return OSError(f"{shown}: the server answered with status {status}")


def _retry_after_seconds(text: str) -> float | None:
    """What Retry-After asks for, a number of seconds or a date."""
    if text.strip().isdecimal():
        return float(text)
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
