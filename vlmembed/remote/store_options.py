"""The file system that a URL of an object store asks for: S3 and what speaks its protocol, Google's store, and the
Hugging Face hub.

It is built from the URL's options and the environment, and not by `FileSystem.from_uri`, which asks Amazon for the
bucket's region whatever the endpoint is.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pyarrow import fs

from vlmembed.errors import InputError
from vlmembed.remote.urls import shown_url

if TYPE_CHECKING:
    from vlmembed.remote.urls import StoreUrl

OPTIONS = {
    "s3": ("endpoint_override", "scheme", "region", "anonymous"),
    "gs": ("endpoint_override", "scheme", "anonymous"),
    "hf": (),
}

SDK_TRIES = 2
"""Tries of the store's own client for one of ours: it sees at once that a kept connection is dead."""

MAX_CONNECT_SECONDS = 10.0


def build_filesystem(url: StoreUrl, timeout_seconds: float) -> fs.FileSystem:
    """The file system that a URL's scheme and options ask for.

    Raises:
        InputError: an option that is not known, or an endpoint or another setting that makes no sense.
    """
    options = url.options
    for name in options:
        if name not in OPTIONS[url.scheme]:
            known = ", ".join(OPTIONS[url.scheme]) or "none are"
            msg = (
                f"{shown_url(url.sibling(url.path))}: {name!r} is no option of {url.scheme}://, of which these are "
                f"known: {known}"
            )
            raise InputError(msg)
    try:
        if url.scheme == "s3":
            return _s3(options, url.path.partition("/")[0], timeout_seconds)
        if url.scheme == "gs":
            return _gs(options, timeout_seconds)
    except ValueError as error:
        endpoint = options.get("endpoint_override") or (s3_endpoint() if url.scheme == "s3" else None)
        named = f" with the endpoint {shown_url(endpoint)!r}" if endpoint else ""
        msg = (
            f"{shown_url(url.sibling(url.path))} cannot be reached{named} ({type(error).__name__}): see to the options "
            "behind the URL, and to AWS_ENDPOINT_URL and the like in the environment, as http://HOST:PORT"
        )
        raise InputError(msg) from error
    from huggingface_hub import HfFileSystem  # noqa: PLC0415  takes a second to load

    return fs.PyFileSystem(fs.FSSpecHandler(HfFileSystem()))


def _s3(options: dict[str, str], bucket: str, timeout_seconds: float) -> fs.FileSystem:
    endpoint = options.get("endpoint_override") or s3_endpoint()
    region = options.get("region") or _environment("AWS_REGION", "AWS_DEFAULT_REGION")
    chosen: dict[str, Any] = {"anonymous": _is_true(options.get("anonymous", ""))}
    if endpoint:
        parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
        chosen["endpoint_override"] = parts.netloc + parts.path.rstrip("/")
        chosen["scheme"] = options.get("scheme") or parts.scheme or "https"
        chosen["region"] = region or "us-east-1"
    else:
        chosen["region"] = region or _region_of(bucket)
    return fs.S3FileSystem(
        **chosen,
        connect_timeout=min(MAX_CONNECT_SECONDS, timeout_seconds / 4),
        request_timeout=min(MAX_CONNECT_SECONDS, timeout_seconds / 2),
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=SDK_TRIES),
        tls_ca_file_path=_environment("AWS_CA_BUNDLE"),
    )


def s3_endpoint() -> str | None:
    """The server that the environment names for s3://; None is Amazon's."""
    return _environment("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def _region_of(bucket: str) -> str | None:
    """Amazon's region of a bucket; None leaves it to the profile, where it cannot be found out."""
    try:
        return str(fs.resolve_s3_region(bucket))
    except OSError:
        return None


def _gs(options: dict[str, str], timeout_seconds: float) -> fs.FileSystem:
    return fs.GcsFileSystem(
        anonymous=_is_true(options.get("anonymous", "")),
        scheme=options.get("scheme"),
        endpoint_override=options.get("endpoint_override"),
        retry_time_limit=timedelta(seconds=max(1.0, timeout_seconds / 4)),
    )


def _environment(*names: str) -> str | None:
    return next((value for name in names if (value := os.environ.get(name))), None)


def _is_true(text: str) -> bool:
    return text.lower() in {"1", "true", "yes"}
