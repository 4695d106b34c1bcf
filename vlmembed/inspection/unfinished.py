"""A run that is not finished, as it is seen from outside: what it has committed, and whether a process is at it."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from vlmembed.errors import InputError, OutputError
from vlmembed.events import as_text
from vlmembed.output import PARTIAL, PARTIAL_SUFFIX, PUBLICATION, is_folder_output, partial_beside, read_manifest
from vlmembed.parts import LINES, read_records

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from vlmembed.partfiles import PartRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfinishedRun:
    """What lies in a partial folder. Nothing there is changed by looking.

    Attributes:
        partial: the folder. output: where the run will put its rows. URLs where they are remote.
        provenance: as it will be recorded, without counts.
        num_rows_total: of the run; None where only reading the inputs tells.
        records: its committed parts.
        last_commit: when the last part was; UTC, ISO 8601; None where there is none.
        is_held: whether a process is at it now; None where that cannot be told.
        is_retry: the rows are those that failed in the finished output, numbered from 0.
        is_assembled: all rows are done, and the files were being moved into their places.
    """

    partial: Path | str
    output: Path | str
    provenance: dict[str, Any]
    num_rows_total: int | None
    records: tuple[PartRecord, ...]
    last_commit: str | None
    is_held: bool | None
    is_retry: bool
    is_assembled: bool

    @classmethod
    def open(cls, partial: Path) -> Self:
        """Look into a partial folder.

        Raises:
            InputError: no run of vlmembed has made it, or one that committed nothing and left no word.
        """
        try:
            manifest = read_manifest(partial)
            records = read_records(partial) if manifest is not None else []
            last_commit = _changed(partial / LINES) if records else None
        except (OSError, OutputError) as error:
            msg = f"{partial} cannot be read as the parts of a run: {error}"
            raise InputError(msg) from error
        if manifest is None or "fingerprint" not in manifest:
            msg = f"{partial} holds no parts: a run began there and ended before it had any; give its command again"
            raise InputError(msg)
        fingerprint = manifest["fingerprint"]
        return cls(
            partial=partial,
            output=partial.parent
            if partial.name == PARTIAL
            else partial.with_name(partial.name.removesuffix(PARTIAL_SUFFIX)),
            provenance=manifest,
            num_rows_total=fingerprint.get("num_rows"),
            records=tuple(records),
            last_commit=last_commit,
            is_held=is_held(partial / "lock"),
            is_retry=bool(fingerprint.get("retry_failed")),
            is_assembled=(partial / PUBLICATION).exists(),
        )

    @property
    def num_rows_done(self) -> int:
        """Committed = `num_embedded` + `num_duplicates` + `num_failed`."""
        return sum(record.num_rows for record in self.records)

    @property
    def num_embedded(self) -> int:
        """Of them those with an embedding of their own."""
        return sum(record.num_embedded for record in self.records)

    @property
    def num_duplicates(self) -> int:
        """Those that have another row's."""
        return sum(record.num_duplicates for record in self.records)

    @property
    def num_failed(self) -> int:
        """Those that have none."""
        return sum(record.num_failed for record in self.records)


def partial_of(path: Path) -> Path | None:
    """The partial folder that belongs to what a user has named, or is it, if there is one."""
    is_itself = path.is_dir() and (path.name == PARTIAL or path.name.endswith(PARTIAL_SUFFIX))
    partial = path if is_itself else partial_beside(path, is_folder=is_folder_output(path))
    return partial if partial.is_dir() else None


def is_held(lock: Path) -> bool | None:
    """Whether a process holds a lock file, or None where the file system does not tell.

    It is tried with a shared lock that is given back at once. Who holds it notices nothing; a process that wants it in
    these microseconds is refused.
    """
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def _changed(path: Path) -> str:
    seconds = path.stat().st_mtime
    return as_text(datetime.fromtimestamp(seconds, UTC))
