"""Where the pictures lie that a file names: the paths and URLs written in a list or in a Parquet column."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from vlmembed.errors import FailureCode, ImageError
from vlmembed.remote.urls import WEB_SCHEMES, is_url, join_url, scheme_of, shown_url, without_options

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SHOWN_CHARS = 200

_SIGNATURE = re.compile(
    r"(?:x-(?:amz|goog|ms)-.*|signature|sig|se|sp|sv|sr|st|token|access_token|expires|key-pair-id|policy|awsaccesskeyid"
    r"|googleaccessid)",
    re.IGNORECASE,
)
"""Names of the parameters by which object stores and content networks sign a URL."""


def resolve(base: str, written: str) -> str | ImageError:  # noqa: PLR0911  each is a kind of its own
    """What a file at `base` means by the path or URL `written` in it: an absolute path or URL.

    `base` is a path or a URL; "" stands for the current folder. A relative path is relative to the folder of `base`.
    A file on a server says nothing about this machine: it may name URLs and relative paths only. ``~`` and variables
    are characters like any other. Nothing is looked up, so this costs nothing and the result may not exist.

    Returns:
        An ``unreadable`` ImageError where `written` is none of these.
    """
    if not written:
        return ImageError(FailureCode.UNREADABLE, "the path is empty")
    if is_url(written):
        return written
    scheme = _SCHEME.match(written)
    if scheme and scheme[1].lower() != "file":
        msg = f"{shown(written)}: {scheme[1]}:// is not read; s3, gs, http, https, hf and file are"
        return ImageError(FailureCode.UNREADABLE, msg)
    if is_url(base):
        if not scheme and not written.startswith("/"):
            return join_url(base, written)
        msg = f"{shown(written)} is a path on this machine, and the file that names it lies on a server: not read"
        return ImageError(FailureCode.UNREADABLE, msg)
    if not scheme:
        return os.path.join(os.path.abspath(os.path.dirname(base)), written)  # noqa: PTH100, PTH118, PTH120  may not be text
    host, slash, path = written[scheme.end() :].partition("/")
    if host in {"", "localhost"} and slash:
        return "/" + unquote(path, errors="surrogateescape")
    return ImageError(FailureCode.UNREADABLE, f"{shown(written)} lies on another machine: file:///PATH is read")


def public_url(url: str) -> str:
    """A URL as it may be written into files: without its login, its fragment, and what signs it for a while (such as
    ``X-Amz-Signature``). Other names are as they are."""
    if not is_url(url):
        return url
    url = without_options(url)
    if scheme_of(url) not in WEB_SCHEMES:
        return url
    place, mark, query = url.partition("#")[0].partition("?")
    kept = [entry for entry in query.split("&") if not _SIGNATURE.fullmatch(entry.partition("=")[0])]
    return f"{place}{mark}{'&'.join(kept)}" if any(kept) else place


def place_of(url: str) -> str:
    """A name, or a URL without what follows its path."""
    place = public_url(url)
    return place.partition("?")[0] if is_url(url) and scheme_of(url) in WEB_SCHEMES else place


def shown(location: str) -> str:
    """A path or URL as messages show it; no password of a URL is in it."""
    if "://" in location:
        return shown_url(location)
    return repr(location if len(location) <= _SHOWN_CHARS else f"{location[:_SHOWN_CHARS]}...")
