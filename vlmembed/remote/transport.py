"""One request over http or https: the URL as it goes over the wire, and what can go wrong, told in one way."""

from __future__ import annotations

import base64
import re
import socket
import ssl
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, quote, unquote, urlsplit

import httpcore2

from vlmembed.remote.guard import LocalAddressError
from vlmembed.remote.retries import TransientError
from vlmembed.remote.urls import WEB_SCHEMES, shown_url

if TYPE_CHECKING:
    from collections.abc import Iterator

_SAFE = "/:@!$&'()*+,;=~-._"
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_HOST = re.compile(r"[A-Za-z0-9._:-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class WebUrl:
    """A URL taken apart for a request.

    Attributes:
        url: for `httpcore2`. host: its name, encoded, and its port, as one text that requests are counted by.
        headers: Host, and Authorization where the URL holds a user's name.
    """

    url: httpcore2.URL
    host: str
    headers: tuple[tuple[str, str], ...]


def parse_web_url(url: str) -> WebUrl:
    """Take a URL apart, and encode what may not stand in a request as it is.

    Raises:
        OSError: it is not one of http or https with a host.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        host = _encoded_host(parts.hostname or "")
    except ValueError as error:  # UnicodeError is one
        msg = f"{shown_url(url)} is no URL that can be read: {error}: correct it, or leave it out"
        raise OSError(msg) from error
    if parts.scheme.lower() not in WEB_SCHEMES:
        msg = f"{shown_url(url)} cannot be read: http:// and https:// can be followed, {parts.scheme}:// cannot"
        raise OSError(msg)
    if not _HOST.fullmatch(host):
        msg = f"{shown_url(url)} is no URL that can be read: its host is {host!r}: correct it, or leave it out"
        raise OSError(msg)
    target = _quoted(parts.path, "") or "/"
    if parts.query:
        target += f"?{_quoted(parts.query, '?')}"
    scheme = parts.scheme.lower()
    named = f"[{host}]" if ":" in host else host
    headers = [("Host", named if port is None else f"{named}:{port}")]
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers.append(("Authorization", f"Basic {base64.b64encode(login).decode()}"))
    return WebUrl(
        url=httpcore2.URL(scheme=scheme, host=host, port=port, target=target),
        host=f"{host}:{port or {'http': 80, 'https': 443}[scheme]}",
        headers=tuple(headers),
    )


def without_login(url: str) -> str:
    """A URL without its user's name and password."""
    parts = urlsplit(url)
    return SplitResult(parts.scheme, parts.netloc.rpartition("@")[2], *parts[2:]).geturl()


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Tell what goes wrong in a request to `url` as OSError.

    Raises:
        TransientError: it may pass.
        OSError: it will not.
    """
    shown = shown_url(url)
    try:
        yield
    except LocalAddressError as error:
        msg = (
            f"{shown} is not read: {error}, and a URL in data must not lead to what only this machine or its network "
            "can reach; where it is meant to, give --allow-local-urls"
        )
        raise OSError(msg) from error
    except socket.gaierror as error:
        msg = f"{shown}: the host's name cannot be resolved ({error.strerror})"
        raise (TransientError(msg) if error.errno == socket.EAI_AGAIN else OSError(msg)) from error
    except httpcore2.ConnectError as error:
        cause = error.args[0] if error.args else None
        if isinstance(cause, ssl.SSLCertVerificationError):
            msg = f"{shown}: the server's certificate is not trusted ({cause.verify_message})"
            raise OSError(msg) from error
        msg = f"{shown}: no connection ({error})"
        raise TransientError(msg) from error
    except httpcore2.TimeoutException as error:
        msg = f"{shown}: the server did not answer in time"
        raise TransientError(msg) from error
    except (httpcore2.NetworkError, httpcore2.RemoteProtocolError) as error:
        msg = f"{shown}: the connection broke ({error})"
        raise TransientError(msg) from error
    except (httpcore2.LocalProtocolError, httpcore2.UnsupportedProtocol, ValueError) as error:
        msg = f"{shown} cannot be asked for: {error}"
        raise OSError(msg) from error


def _encoded_host(host: str) -> str:
    return host.encode("idna").decode()  # an ASCII name stays, and is checked: looking it up would raise the same


def _quoted(text: str, safe: str) -> str:
    """Text with everything percent-encoded that is not allowed; what is encoded already stays."""
    return quote(_STRAY_PERCENT.sub("%25", text), safe=f"{_SAFE}%{safe}", errors="surrogateescape")
