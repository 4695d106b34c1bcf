"""URLs as people write them: which are read, how they are joined, and how messages show them.

The key of an object in s3://, gs:// and hf:// is text as it stands: nothing in it is percent-encoded. Options may
follow behind the last ``?`` as ``name=value&...``; what looks otherwise belongs to the key. A key that ends in what
looks like options is written with a bare ``?`` behind it.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urljoin

from vlmembed.errors import InputError

STORE_SCHEMES = ("s3", "gs", "hf")
WEB_SCHEMES = ("http", "https")

_URL = re.compile(r"(s3|gs|hf|https?)://", re.IGNORECASE)
_ANY_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_OPTION = r"(?:(?:endpoint_override|scheme|region|anonymous)=[^&?]*|[a-z_]+=[^&?/]*)"
_OPTIONS = re.compile(rf"|{_OPTION}(?:&{_OPTION})*")
_ANY_OPTIONS = re.compile(r"\?[A-Za-z_][A-Za-z0-9_.-]*=")
"""Where what may be options begins in the URL of an object store, whether they are known or not."""

_AUTHORITY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)([^/?#]*)")
_PORTED = re.compile(r"(\[[^\]]*\]|[^:]*)(:\d*)?")
_SHOWN_CHARS = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreUrl:
    """A URL of an object store, taken apart.

    Attributes:
        scheme: s3, gs or hf.
        path: bucket/key, without a slash at either end.
        query: the options as written, "" where there are none.
    """

    scheme: str
    path: str
    query: str

    @property
    def options(self) -> dict[str, str]:
        """The options by name."""
        return dict(parse_qsl(self.query, keep_blank_values=True))

    def sibling(self, path: str) -> str:
        """The URL of another path in the same store."""
        needs_end = not self.query and _splits(path)
        return f"{self.scheme}://{path}{'?' if self.query or needs_end else ''}{self.query}"


def is_url(name: str) -> bool:
    """Whether a name is a URL with a scheme that is read: s3, gs, hf, http or https."""
    return _URL.match(name) is not None


def scheme_of(url: str) -> str:
    """The scheme of a URL that is read, in small letters.

    Raises:
        InputError: it is none.
    """
    if match := _URL.match(url):
        return match[1].lower()
    msg = f"{shown_url(url)} is no URL that can be read: s3://, gs://, hf://, http:// and https:// are"
    raise InputError(msg)


def parse_store_url(url: str) -> StoreUrl:
    """Take a URL of s3, gs or hf apart.

    Raises:
        InputError: no bucket, or credentials in it.
    """
    scheme = scheme_of(url)
    rest = url[len(scheme) + len("://") :]
    path, mark, query = rest.rpartition("?")
    if not mark or not _OPTIONS.fullmatch(query):
        path, query = rest, ""
    path = path.strip("/")
    bucket = path.partition("/")[0]
    if not bucket:
        msg = f"{shown_url(url)} names no bucket: write {scheme}://BUCKET/KEY"
        raise InputError(msg)
    if "@" in bucket and scheme != "hf":
        msg = f"{shown_url(url)} holds credentials: give them by the environment (as AWS_ACCESS_KEY_ID) or a profile"
        raise InputError(msg)
    return StoreUrl(scheme=scheme, path=path, query=query)


def join_url(base: str, relative: str) -> str:
    """What a file at the URL `base` means by a path or URL written in it, as a URL.

    An absolute URL stays. For object stores the options of `base` go with the path, and what looks like options in
    `relative` is part of its key, so that a file cannot choose another server by a path.
    """
    if _ANY_URL.match(relative):
        return relative
    if scheme_of(base) in WEB_SCHEMES:
        if ":" in relative.partition("/")[0]:
            relative = f"./{relative}"  # a colon in a name, not a scheme
        return urljoin(base, relative)
    parsed = parse_store_url(base)
    bucket, _, key = parsed.path.partition("/")
    joined = posixpath.normpath(posixpath.join("/", posixpath.dirname(key), relative)).lstrip("/")
    return parsed.sibling(f"{bucket}/{joined}")


def without_options(url: str) -> str:
    """A URL without credentials and without what follows its path: for ids."""
    if is_url(url) and scheme_of(url) in STORE_SCHEMES:
        path, mark, query = url.rpartition("?")
        url = path if mark and _OPTIONS.fullmatch(query) else url
    return _without_login(url)


def shown_url(url: str) -> str:
    """A URL as messages show it: without credentials, without its query, which may hold a token, and in one line."""
    text = _without_login(url)
    if is_url(text) and scheme_of(text) in STORE_SCHEMES:
        text = _ANY_OPTIONS.split(without_options(text), maxsplit=1)[0]
    else:
        text = text.partition("?")[0].partition("#")[0]
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _without_login(url: str) -> str:
    """A URL without its user's name and password, also where a slash in the password makes a host of its beginning."""
    match = _AUTHORITY.match(url)
    if match is None:
        return url
    host = match[2].rpartition("@")[2]
    rest = url[match.end() :]
    if "@" in rest and not _PORTED.fullmatch(host):
        return match[1] + rest.rpartition("@")[2]
    return match[1] + host + rest


def _splits(path: str) -> bool:
    """Whether the end of a path would be taken for options."""
    return "?" in path and _OPTIONS.fullmatch(path.rpartition("?")[2]) is not None
