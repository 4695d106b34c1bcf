"""A finished output, named by a path or a URL, as local files."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa

from vlmembed.errors import InputError
from vlmembed.mirror.objects import BLOCK_BYTES, Objects
from vlmembed.mirror.remoterun import NUM_TRANSFERS, is_remote
from vlmembed.output import SUCCESS, errors_beside
from vlmembed.remote.remotes import Remotes
from vlmembed.remote.urls import WEB_SCHEMES, join_url, parse_store_url, scheme_of, shown_url

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator


@contextmanager
def local_copy(name: str | os.PathLike[str], *, timeout_seconds: float = 120.0) -> Iterator[Path]:
    """The path of an output; of one that is named by a URL a copy in a temporary folder, with the errors beside it,
    which is gone behind the block.

    Raises:
        InputError: there is no such output, or it could not be downloaded.
    """
    if not is_remote(name):
        yield Path(name)
        return
    url = str(name)
    with tempfile.TemporaryDirectory(prefix="vlmembed-") as folder:
        with Remotes(timeout_seconds=timeout_seconds) as remotes:
            try:
                copy = (_copy_web if scheme_of(url) in WEB_SCHEMES else _copy)(remotes, url, Path(folder))
            except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: a name that no file can have
                msg = f"{shown_url(url)} cannot be read ({error}): name the output of an earlier run"
                raise InputError(msg) from error
        yield copy


def _copy_web(remotes: Remotes, url: str, folder: Path) -> Path:
    """A file from a web server, and the errors if they are beside it."""
    name = PurePosixPath(unquote(urlsplit(url).path)).name
    with remotes.open(url) as source, (folder / name).open("wb") as target:
        shutil.copyfileobj(source, target, BLOCK_BYTES)
    errors = errors_beside(folder / name, is_folder=False)
    try:
        with remotes.open(join_url(url, quote(errors.name))) as source, errors.open("wb") as target:
            shutil.copyfileobj(source, target, BLOCK_BYTES)
    except FileNotFoundError:
        errors.unlink(missing_ok=True)
    return folder / name


def _copy(remotes: Remotes, url: str, folder: Path) -> Path:
    """A file and the errors beside it, or a folder, from an object store."""
    parsed = parse_store_url(url)
    parent, _, output = parsed.path.rpartition("/")
    if not parent:
        msg = f"{shown_url(url)} names no more than a bucket: name a file or a folder in it"
        raise InputError(msg)
    objects = Objects(remotes, parsed.sibling(parent))
    found = objects.info(output)
    if found is None:
        msg = f"{shown_url(url)} does not exist: name the output of an earlier run"
        raise InputError(msg)
    names = _folder_names(objects, output) if found.is_folder else _file_names(objects, output)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
    with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
        list(pool.map(lambda name: objects.download(name, folder / name), names))
    return folder / output


def _file_names(objects: Objects, output: str) -> list[str]:
    errors = errors_beside(Path(output), is_folder=False).name
    return [output, *([errors] if objects.info(errors) is not None else [])]


def _folder_names(objects: Objects, output: str) -> list[str]:
    there = objects.list(output)
    if SUCCESS not in there:
        msg = f"{objects.url(output)} is a folder without {SUCCESS}: not finished, or no output of vlmembed"
        raise InputError(msg)
    return [f"{output}/{name}" for name, info in there.items() if not info.is_folder]
