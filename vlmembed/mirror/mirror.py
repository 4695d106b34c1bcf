"""An output on S3 or Google Cloud Storage: a run in a local working folder, and its mirror there, of whole objects.

The run knows nothing of the store. Behind every commit a thread uploads the part's two files to the partial folder
there, and then the object ``part-000123.json``: its line in ``parts.jsonl`` and the run that it is of, which makes the
part count. The run is told by the SHA-256 of ``manifest.json``, so that what other runs have left beside it counts for
nothing, and a new run starts with one object. At the end the finished files are uploaded, what makes the output whole
last. Another machine finds all that it needs to go on; the working folder may be lost at any time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlmembed.errors import InputError, NothingEmbeddedError, OutputError, StorageError, UsageError
from vlmembed.mirror.objects import Objects
from vlmembed.mirror.owner import Owner
from vlmembed.mirror.remoteparts import RemoteParts
from vlmembed.mirror.remoterun import RemoteNames, RemoteRun, looking, read_provenance_of, run_of
from vlmembed.mirror.uploader import Uploader
from vlmembed.mirror.workfolder import WorkFolder, default_folder
from vlmembed.output import LANCE, OutputPaths
from vlmembed.remote.remotes import Remotes
from vlmembed.remote.store_options import s3_endpoint
from vlmembed.remote.urls import is_url, parse_store_url, scheme_of, shown_url, without_options
from vlmembed.schema import read_provenance

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vlmembed.config import EncodeConfig
    from vlmembed.partfiles import PartRecord
from vlmembed.remote.urls import StoreUrl

logger = logging.getLogger(__name__)

SCHEMES = ("s3", "gs")
"""Stores that whole objects can be written to."""

CLOSE_SECONDS = 10.0
"""What is being uploaded when a run ends early may take so long to finish; else it ends with the process."""

_PART = re.compile(r"part-\d{6,}\.parquet")


class Mirror:
    """The remote side of one run, whose local side is `work`; use `open_mirror`.

    Attributes:
        paths: where the run writes, in the working folder.
    """

    def __init__(self, objects: Objects, work: WorkFolder, paths: OutputPaths) -> None:
        self.paths = paths
        self._objects = objects
        self._work = work
        self._names = RemoteNames(
            output=work.name_of(paths.output),
            whole=work.name_of(paths.success if paths.is_folder else paths.output),
            errors=work.name_of(paths.errors),
            partial=work.name_of(paths.partial),
        )
        self._url = objects.url(self._names.output)
        self._found = RemoteRun(identity=None, output=None, manifest=None, records=(), has_partial=False)
        self._owner = Owner(objects, self._names.owner, work.token)
        self._parts = RemoteParts(objects, self._names, paths.partial)
        self._uploader = Uploader()

    @property
    def names(self) -> dict[str, Any]:
        """What a report calls the two files."""
        return {"output": self._url, "errors": self._objects.url(self._names.errors)}

    def look(self, *, overwrite: bool) -> RemoteRun:
        """What lies there; see `RemoteRun.look`. Whatever is done next is for what was seen last.

        Raises:
            OutputError: something of another kind is in the way, another process is writing, or the store does not
                answer.
        """
        with looking(self._url):
            self._owner.check_free()
            self._found = RemoteRun.look(self._objects, self._names, overwrite=overwrite)
        return self._found

    def claim(self) -> None:
        """Become the one that writes there.

        Raises:
            OutputError: another process is writing. StorageError: nothing can be written there.
        """
        with self._storing():
            self._work.remember()  # the token, so that the next start of a killed run is not another process
            if not self._owner.claim():
                self._work.forget_uploads()

    def start(self, *, is_new: bool) -> None:
        """A run begins, whose manifest is in the working folder, or goes on: then have all its parts here, and soon
        there. What is damaged or missing there counts no more, nor what comes after it, unless it is here.

        Raises:
            StorageError: parts could not be downloaded, or uploaded.
        """
        found = self._found
        with self._storing():
            here = self._parts.start(found, is_new=is_new)
            self._work.remember(run=self._parts.run, base=found.identity)
        for record in here:
            self.add(record)

    def add(self, record: PartRecord) -> None:
        """A part was committed: it is uploaded when those before it are.

        Raises:
            StorageError: an earlier one could not be. OutputError: another process has taken over.
        """

        def upload() -> None:
            with self._storing():
                self._parts.upload(record, self._owner)

        self._uploader.submit(upload)

    def flush(self) -> None:
        """Wait until all parts are there.

        Raises:
            StorageError, OutputError: as `add`.
        """
        self._uploader.wait()

    def fetch_output(self) -> None:
        """Have the finished output here, to be read; what is here of it already is not fetched again.

        Raises:
            StorageError: it could not be downloaded.
        """
        found = self._found
        if found.output is None:
            return
        with self._storing():
            if self._work.base != found.identity:
                self._work.remove(self._finished())
            self._work.remember(base=found.identity, is_fetching=True)
            self._work.path(self._names.whole).parent.mkdir(exist_ok=True)
            for name in [
                *self._part_names(self._objects.list(self._names.output)),
                self._names.errors,
                self._names.whole,
            ]:
                if not self._work.is_fetched(name) and self._objects.info(name) is not None:
                    self._objects.download(name, self._work.path(name))
                    self._work.note(name, "fetched")
            self._work.remember(is_fetching=False)

    def _part_names(self, there: Mapping[str, object]) -> list[str]:
        names = sorted(there) if self._names.is_folder else []
        return [f"{self._names.output}/{name}" for name in names if _PART.fullmatch(name)]

    def _finished(self) -> list[str]:
        """The finished files in the working folder; what makes them whole is last."""
        parts = self._part_names({path.name: path for path in self.paths.output.glob("part-*.parquet")})
        return [name for name in [*parts, self._names.errors, self._names.whole] if self._work.path(name).exists()]

    def finish_earlier(self) -> None:
        """Upload what a run was killed at when all was done but that. Where the output was written anew by now, that
        stays, and the files here go.

        Raises:
            StorageError: it could not be uploaded. OutputError: another process is writing.
        """
        names = self._finished()
        if self._work.is_fetching:
            self._work.remove(names)
            return
        if all(self._work.is_fetched(name) for name in names):
            return
        self.look(overwrite=True)
        with looking(self._url):
            if self._is_superseded(self._found):
                logger.warning("%s was written anew since it was finished here: that stays", self._url)
                self._work.remove(names)
                return
        self.claim()
        self.publish()

    def _is_superseded(self, found: RemoteRun) -> bool:
        if found.manifest is not None and run_of(found.manifest) != self._work.run:
            return True
        if found.identity is None or found.identity == self._work.base:
            return False
        path = self._work.path(self._names.whole)
        if not path.exists() or found.identity[0] != path.stat().st_size:
            return True
        here = (
            json.loads(path.read_bytes()) if self._names.is_folder else read_provenance(pq.read_schema(path), self._url)
        )
        return bool(read_provenance_of(self._objects, self._names.whole) != here)

    def publish(self) -> None:
        """Upload the finished files, then tidy up there and here.

        Raises:
            StorageError, OutputError: as `add`; the same command goes on with it.
        """
        # in the uploader's thread, because Ctrl-C must not end an upload half-way; a job each, because it must end them
        names, whole = self._finished(), self._names.whole
        self._uploader.submit(lambda: self._make_room(names))
        for name in names:
            if name == whole or not self._work.is_there(name):
                self._uploader.submit(partial(self._upload_finished, name))
        self._uploader.submit(lambda: self._end(is_whole=whole in names))
        self._uploader.wait()

    def _make_room(self, names: Sequence[str]) -> None:
        """A folder is not whole while its files are replaced."""
        with self._storing():
            self._owner.check()
            if self._names.is_folder:
                self._objects.delete(self._names.whole)
                for name in set(self._part_names(self._objects.list(self._names.output))) - set(names):
                    self._objects.delete(name)

    def _upload_finished(self, name: str) -> None:
        with self._storing():
            if name == self._names.whole:
                self._owner.check()
            self._objects.upload(name, self._work.path(name))
            self._work.note(name, "uploaded")

    def _end(self, *, is_whole: bool) -> None:
        with self._storing():
            if not is_whole:  # nothing was embedded: what stood there is no result of this run
                self._objects.delete(self._names.whole)
            self._clean()

    def drop_leftovers(self) -> None:
        """Nothing is left to do for the finished output, but perhaps the parts of the run that made it.

        Raises:
            StorageError, OutputError: as `claim`.
        """
        found = self._found
        assert found.output is not None
        if found.manifest is not None and json.loads(found.manifest)["fingerprint"] != found.output["fingerprint"]:
            return
        with self._storing():
            if found.has_partial:
                self._owner.claim()
                self._clean()
            else:
                self._work.drop()

    def _clean(self) -> None:
        """Remove the parts, what says whose they were first, and the working folder."""
        self._objects.delete(self._names.manifest)
        self._owner.release()
        self._objects.delete_folder(self._names.partial)
        self._work.drop()

    def close(self) -> None:
        """End the uploads; let others write."""
        self._objects.stop()
        if not self._uploader.close(CLOSE_SECONDS):
            logger.warning("an upload to %s is still going on, and ends with this process", self._url)
            return
        try:
            self._owner.release()
        except OSError as error:
            logger.warning("%s could not be deleted: %s", self._objects.url(self._names.owner), error)

    @contextmanager
    def _storing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            msg = (
                f"cannot write {self._url} ({error}): what was committed is kept, also in {self.paths.output.parent}; "
                "check the network and your rights there, and the same command goes on from there"
            )
            raise StorageError(msg) from error


@contextmanager
def open_mirror(config: EncodeConfig) -> Iterator[Mirror]:
    """The mirror of a run whose output is a URL. Errors in the block name the output as the user does.

    Raises:
        OutputError: the output cannot be a URL of this kind, or another process of this machine writes to it.
    """
    url, is_folder = _parse(os.fspath(config.output))
    parent, _, name = url.path.rpartition("/")
    shown = shown_url(url.sibling(parent))
    root = Path(config.work_dir) if config.work_dir is not None else default_folder()
    folder = root.absolute() / _folder_name(url)
    try:
        with (
            Remotes(timeout_seconds=config.timeout) as remotes,
            closing(WorkFolder(folder, shown_url(url.sibling(url.path)))) as work,
        ):
            objects = Objects(remotes, url.sibling(parent))
            with closing(_mirror(objects, work, name, is_folder=is_folder)) as mirror:
                yield mirror
    except (UsageError, NothingEmbeddedError) as error:
        raise type(error)(str(error).replace(f"{folder}/", f"{shown}/")) from error


def _folder_name(url: StoreUrl) -> str:
    """The same for the same output."""
    server = s3_endpoint() if url.scheme == "s3" else None
    told = json.dumps([url.sibling(url.path), server or ""])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _mirror(objects: Objects, work: WorkFolder, name: str, *, is_folder: bool) -> Mirror:
    url = objects.url(name)
    with looking(url):
        found = objects.info(name)
        if found is None and not objects.bucket_exists():
            msg = f"there is no bucket for output {url}: make it, or name another"
            raise OutputError(msg)
    is_folder = is_folder or (found is not None and found.is_folder)
    path = work.path(name)
    return Mirror(objects, work, OutputPaths.of(f"{path}/" if is_folder else path))


def _parse(name: str) -> tuple[StoreUrl, bool]:
    """The URL of an output; whether it had a slash at its end.

    Raises:
        OutputError: nothing can be written there.
    """
    shown = shown_url(name)
    if not (is_url(name) and scheme_of(name) in SCHEMES):
        msg = f"output {shown} cannot be written to: name a local path, or a URL of s3:// or gs://"
        raise OutputError(msg)
    try:
        url = parse_store_url(name)
    except InputError as error:
        raise OutputError(str(error)) from error
    if url.path.endswith(LANCE):
        msg = f"output {shown}: Lance datasets are written to local disks only; name a .parquet file, or a folder"
        raise OutputError(msg)
    if "/" not in url.path:
        msg = f"output {shown} names no more than a bucket: name a file or a folder in it"
        raise OutputError(msg)
    return url, without_options(name).endswith("/")
