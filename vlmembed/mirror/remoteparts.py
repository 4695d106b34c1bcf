"""The committed parts of a run on both sides: those that one side lacks come from the other."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING

from vlmembed.atomic import atomic
from vlmembed.mirror.remoterun import MANIFEST, NUM_TRANSFERS, RemoteNames, RemoteRun, line_of, run_of
from vlmembed.output import drop_parts
from vlmembed.parts import LINES, read_records

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vlmembed.mirror.objects import Objects
    from vlmembed.mirror.owner import Owner
    from vlmembed.partfiles import PartRecord

logger = logging.getLogger(__name__)


class RemoteParts:
    """The partial folder there and the one here, `folder`.

    Attributes:
        run: which run's parts they are; see `run_of`.
    """

    def __init__(self, objects: Objects, names: RemoteNames, folder: Path) -> None:
        self._objects = objects
        self._names = names
        self._folder = folder
        self.run = ""

    def start(self, found: RemoteRun, *, is_new: bool) -> list[PartRecord]:
        """A run begins, whose manifest is here, or goes on with the parts that were `found` there and those that are
        here; then all are here. Returns those that are still to be uploaded.

        What is damaged or missing there counts no more, nor what comes after it, unless it is here.
        """
        there = () if is_new else found.records
        if not there:
            self._objects.put(self._names.manifest, self._manifest())
        elif self._manifest() != found.manifest:
            self._take_manifest(found)
        self.run = run_of(self._manifest())
        if is_new:
            return []
        here = [each for each in read_records(self._folder) if self._has_files(each)]
        num_same = _num_same(here, there)
        if num_same < len(there):
            here = here[:num_same]  # what others can see counts
        self._fetch(here, there[len(here) :])
        return here[num_same:]

    def upload(self, record: PartRecord, owner: Owner) -> None:
        """Upload a part, which counts from then on, if this process is still the `owner`."""
        for name in (record.file_name, record.errors_name):
            self._objects.upload(self._name(name), self._folder / name)
        owner.check()
        self._objects.put(self._names.line(record.number), line_of(record, self.run))

    def _name(self, file_name: str) -> str:
        return f"{self._names.partial}/{file_name}"

    def _has_files(self, record: PartRecord) -> bool:
        return all((self._folder / name).exists() for name in (record.file_name, record.errors_name))

    def _manifest(self) -> bytes:
        path = self._folder / MANIFEST
        return path.read_bytes() if path.exists() else b""

    def _take_manifest(self, found: RemoteRun) -> None:
        assert found.manifest is not None
        drop_parts(self._folder)
        with atomic(self._folder / MANIFEST) as path:
            path.write_bytes(found.manifest)

    def _fetch(self, here: Sequence[PartRecord], missing: Sequence[PartRecord]) -> None:
        """Download parts behind those that are here."""
        with atomic(self._folder / LINES) as path:
            path.write_text("".join(json.dumps(asdict(record)) + "\n" for record in here), encoding="utf-8")
        if missing:
            logger.info("downloading %d parts from %s", len(missing), self._objects.url(self._names.partial))
        with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
            for record, is_sound in zip(missing, pool.map(self._fetch_part, missing), strict=True):
                if not is_sound:
                    url, row = self._objects.url(self._name(record.file_name)), record.first_row
                    logger.error("%s is not what was written there: rows from %d on are done again", url, row)
                    pool.shutdown(cancel_futures=True)
                    return
                with (self._folder / LINES).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(record)) + "\n")

    def _fetch_part(self, record: PartRecord) -> bool:
        """Download the two files of a part; tells whether they are what was written."""
        files = {record.file_name: record.sha256, record.errors_name: record.errors_sha256}
        try:
            return all(
                self._objects.download(self._name(name), self._folder / name) == sha256
                for name, sha256 in files.items()
            )
        except FileNotFoundError:
            return False


def _num_same(here: Sequence[PartRecord], there: Sequence[PartRecord]) -> int:
    """How many parts from the first one on are the same."""
    differ = [number for number, (ours, theirs) in enumerate(zip(here, there, strict=False)) if ours != theirs]
    return differ[0] if differ else min(len(here), len(there))
