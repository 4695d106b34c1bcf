"""What lies at a remote output: a finished one, the committed parts of an unfinished run, either or neither."""

from __future__ import annotations

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vlmembed.errors import InputError, OutputError
from vlmembed.output import OWN_NAMES, PARTIAL, SUCCESS
from vlmembed.partfiles import PartRecord
from vlmembed.schema import read_provenance

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vlmembed.mirror.objects import ObjectInfo, Objects

MANIFEST = "manifest.json"
OWNER = "owner.json"

NUM_TRANSFERS = 8
"""Objects on their way at a time, where there are many."""

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)

_PART_OBJECTS = re.compile(r"part-\d{6,}(\.errors)?\.(parquet|json)")


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteNames:
    """Names of a remote output's objects below the folder that it lies in; the same as locally.

    Attributes:
        output: the file or the folder. whole: the object that makes the output whole; the last one to be written.
        errors: the rows that failed. partial: the folder of parts.
    """

    output: str
    whole: str
    errors: str
    partial: str

    @property
    def is_folder(self) -> bool:
        """Whether the output is a folder of parts."""
        return self.whole != self.output

    @property
    def manifest(self) -> str:
        """Whose parts the partial folder holds."""
        return f"{self.partial}/{MANIFEST}"

    @property
    def owner(self) -> str:
        """Which process writes."""
        return f"{self.partial}/{OWNER}"

    def line(self, number: int) -> str:
        """The object that makes a part count."""
        return f"{self.partial}/{_line_name(number)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteRun:
    """What was found.

    Attributes:
        identity: of the object that makes the output whole; None where there is none.
        output: provenance of a finished output, by the rules of `find_earlier`.
        manifest: of an unfinished run, as it is stored. records: its committed parts.
        has_partial: something is in the partial folder.
    """

    identity: list[int] | None
    output: dict[str, Any] | None
    manifest: bytes | None
    records: tuple[PartRecord, ...]
    has_partial: bool

    @property
    def partial(self) -> dict[str, Any] | None:
        """Provenance of the committed parts; a run that committed nothing binds nobody."""
        return json.loads(self.manifest) if self.manifest is not None and self.records else None

    @classmethod
    def look(cls, objects: Objects, names: RemoteNames, *, overwrite: bool) -> RemoteRun:
        """Look at a remote output. Under `overwrite` a finished one does not matter, whoever wrote it.

        Raises:
            OutputError: something of another kind is in the way.
        """
        whole = objects.info(names.whole)
        output = None if overwrite else _finished(objects, names, is_whole=whole is not None)
        there = objects.list(names.partial)
        manifest = objects.read(names.manifest) if MANIFEST in there else None
        if MANIFEST not in there and not all(_PART_OBJECTS.fullmatch(name) for name in there.keys() - {OWNER}):
            url = objects.url(names.partial)
            msg = f"{url} exists and holds no {MANIFEST}, so it is not a run of vlmembed: move it away"
            raise OutputError(msg)
        if manifest is not None and not _is_manifest(manifest):
            manifest = None
        records = () if manifest is None else tuple(_records(objects, names, there, run_of(manifest)))
        identity = None if whole is None else whole.identity
        return cls(identity=identity, output=output, manifest=manifest, records=records, has_partial=bool(there))


def is_remote(name: str | os.PathLike[str]) -> bool:
    """Whether an output is named by a URL."""
    return URL.fullmatch(os.fspath(name)) is not None


def run_of(manifest: bytes) -> str:
    """What tells a run from any other with the same output."""
    return hashlib.sha256(manifest).hexdigest()


def line_of(record: PartRecord, run: str) -> bytes:
    """The content of the object that makes a part count in a run."""
    return json.dumps({"run": run, **asdict(record)}).encode()


def read_provenance_of(objects: Objects, name: str) -> dict[str, Any]:
    """How a finished output, or its errors file, was made; without its rows.

    Raises:
        OutputError: it was not written by vlmembed.
    """
    url = objects.url(name)
    try:
        if name.endswith(SUCCESS):
            content = json.loads(objects.read(name) or b"")
            content["fingerprint"]
            return dict(content)
        return read_provenance(objects.schema(name), url)
    except (ValueError, TypeError, KeyError, pa.ArrowException, InputError) as error:
        msg = f"{url} exists and is no output of vlmembed ({error}): choose another name, or --overwrite"
        raise OutputError(msg) from error


def _finished(objects: Objects, names: RemoteNames, *, is_whole: bool) -> dict[str, Any] | None:
    """Provenance of a finished output in which something is embedded."""
    if names.is_folder:
        _check_folder(objects, names)
    if objects.info(names.errors) is not None:
        read_provenance_of(objects, names.errors)
    if not is_whole:
        return None
    found = read_provenance_of(objects, names.whole)
    return found if found.get("counts", {}).get("embedded", 1) else None


def _check_folder(objects: Objects, names: RemoteNames) -> None:
    there = objects.list(names.output).keys()
    others = sorted(name for name in there if not OWN_NAMES.fullmatch(name))
    if there and not there & {SUCCESS, PARTIAL}:
        others = others or sorted(there)
    if others:
        url = objects.url(names.output)
        msg = f"output folder {url!r} holds {others[0]!r}, which is not a run's: choose another folder"
        raise OutputError(msg)


def _records(objects: Objects, names: RemoteNames, there: Mapping[str, ObjectInfo], run: str) -> Iterator[PartRecord]:
    """The parts that count: from the first one on, up to where one is missing or of another run."""
    lines: list[str] = []
    while _line_name(len(lines)) in there:
        lines.append(names.line(len(lines)))
    first_row = 0
    with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
        for content in pool.map(objects.read, lines):
            record = _record(content, run)
            if record is None or record.first_row != first_row:
                break
            if not {record.file_name, record.errors_name} <= there.keys():
                break
            first_row += record.num_rows
            yield record
        pool.shutdown(cancel_futures=True)


def _record(content: bytes | None, run: str) -> PartRecord | None:
    try:
        facts = json.loads(content or b"")
        return PartRecord(**facts) if facts.pop("run") == run else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _line_name(number: int) -> str:
    return f"part-{number:06d}.json"


def _is_manifest(content: bytes) -> bool:
    try:
        json.loads(content)["fingerprint"]
    except (ValueError, TypeError, KeyError):
        return False
    return True


@contextmanager
def looking(url: str) -> Iterator[None]:
    """Say as a person would that a store does not answer.

    Raises:
        OutputError: it does not, or not to these credentials.
    """
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        msg = (
            f"cannot look at output {url} ({error}): check the name, the network and your credentials, and "
            "AWS_ENDPOINT_URL where the store is not Amazon's"
        )
        raise OutputError(msg) from error
