"""An unfinished run whose output is remote, as local files to be looked at: all but the vectors."""

from __future__ import annotations

import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from vlmembed.errors import InputError, OutputError
from vlmembed.mirror.objects import Objects
from vlmembed.mirror.owner import STALE_SECONDS
from vlmembed.mirror.remoterun import MANIFEST, NUM_TRANSFERS, RemoteNames, RemoteRun
from vlmembed.output import PARTIAL, PARTIAL_SUFFIX, OutputPaths
from vlmembed.parts import LINES
from vlmembed.remote.remotes import Remotes
from vlmembed.remote.urls import WEB_SCHEMES, parse_store_url, scheme_of, shown_url

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialCopy:
    """What was found.

    Attributes:
        path: of the copy of the partial folder. partial, output: URLs of the two.
        sizes: bytes of the objects in the partial folder, by name.
        is_held: a process has written there in the last minutes, and has not let go.
    """

    path: Path
    partial: str
    output: str
    sizes: dict[str, int]
    is_held: bool


@contextmanager
def partial_copy(url: str, *, timeout_seconds: float = 120.0) -> Iterator[PartialCopy | None]:
    """The parts of an unfinished run, by the URL of its output or of its partial folder, in a temporary folder that is
    gone behind the block; None where there are none.

    Raises:
        InputError: the store does not answer.
    """
    if scheme_of(url) in WEB_SCHEMES:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="vlmembed-") as folder:
        with Remotes(timeout_seconds=timeout_seconds) as remotes:
            try:
                copy = _copy(remotes, url, Path(folder))
            except (OSError, ValueError, OutputError, pa.ArrowException) as error:
                msg = f"{shown_url(url)} cannot be read ({error}): name the output of an earlier run"
                raise InputError(msg) from error
        yield copy


def _copy(remotes: Remotes, url: str, folder: Path) -> PartialCopy | None:
    parsed = parse_store_url(url)
    parent, _, name = parsed.path.rstrip("/").rpartition("/")
    if name == PARTIAL:
        parent, _, name = parent.rpartition("/")
    name = name.removesuffix(PARTIAL_SUFFIX)
    objects = Objects(remotes, parsed.sibling(parent))
    for is_folder in (False, True):
        paths = OutputPaths(output=folder / name, is_folder=is_folder)
        output, errors, partial = (path.relative_to(folder).as_posix() for path in paths.all())
        whole = paths.success.relative_to(folder).as_posix() if is_folder else output
        names = RemoteNames(output=output, whole=whole, errors=errors, partial=partial)
        found = RemoteRun.look(objects, names, overwrite=True)
        if found.manifest is not None:
            return _fetch(objects, names, found, paths.partial)
    return None


def _fetch(objects: Objects, names: RemoteNames, found: RemoteRun, target: Path) -> PartialCopy:
    assert found.manifest is not None
    target.mkdir(parents=True)
    (target / MANIFEST).write_bytes(found.manifest)
    lines = target / LINES
    lines.write_text("".join(json.dumps(asdict(record)) + "\n" for record in found.records), encoding="utf-8")
    there = objects.list(names.partial)
    if found.records:
        when = there[found.records[-1].file_name].mtime_seconds
        os.utime(lines, (when, when))
    failed = [record.errors_name for record in found.records if record.num_failed]
    with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
        list(pool.map(lambda name: objects.download(f"{names.partial}/{name}", target / name), failed))
    owner = objects.info(names.owner)
    return PartialCopy(
        path=target,
        partial=objects.url(names.partial),
        output=objects.url(names.output),
        sizes={name: info.num_bytes for name, info in sorted(there.items()) if not info.is_folder},
        is_held=owner is not None and time.time() - owner.mtime_seconds < STALE_SECONDS,
    )
