"""Where a run writes, who may write there, and how a file appears whole or not at all."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from vlmembed.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputPaths:
    """Where a run writes: the file, the errors beside it, and the parts until it is done."""

    output: Path

    @classmethod
    def of(cls, name: str | os.PathLike[str]) -> Self:
        """The paths for an output as the user names it; a link is followed, so that it stays one.

        Raises:
            OutputError: not a .parquet file, or a folder.
        """
        path = Path(name)
        return cls(output=Path(os.path.realpath(path)) if path.is_symlink() else path)

    def __post_init__(self) -> None:
        if self.output.suffix != ".parquet":
            msg = f"output {str(self.output)!r} does not end in .parquet: name a file like out.parquet"
            raise OutputError(msg)
        try:
            str(self.output).encode()
        except UnicodeEncodeError:
            msg = f"output {str(self.output)!r} is not a name in Unicode, which Parquet writers need: choose another"
            raise OutputError(msg) from None
        if self.output.is_dir():
            msg = f"output {str(self.output)!r} is a folder: name a file that does not exist"
            raise OutputError(msg)

    @property
    def errors(self) -> Path:
        """The rows that failed."""
        return errors_beside(self.output)

    @property
    def partial(self) -> Path:
        """The folder of parts."""
        return self.output.with_name(self.output.name + ".partial")

    def all(self) -> tuple[Path, Path, Path]:
        """Every path that the run may create."""
        return self.output, self.errors, self.partial


def errors_beside(output: Path) -> Path:
    """Where the rows that failed are, for an output file."""
    return output.with_suffix(".errors.parquet")


def read_manifest(folder: Path, *, ignore_damage: bool = False) -> dict[str, Any] | None:
    """Whose parts a partial folder holds, or None where it holds none (or, under `ignore_damage`, where it is damaged).

    Raises:
        OutputError: a folder of that name which no run of vlmembed made.
    """
    if not folder.exists():
        return None
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        if set(os.listdir(folder)) <= {"lock", ".manifest.json.tmp"}:  # noqa: PTH208  a set of names is what is wanted
            return None  # killed before the first line was written
        msg = f"{folder} exists and holds no manifest.json, so it is not a run of vlmembed: move it away"
        raise OutputError(msg) from None
    except ValueError as error:
        if ignore_damage:
            return None
        msg = f"{folder / 'manifest.json'} is damaged ({error}): start anew with --overwrite"
        raise OutputError(msg) from error
    assert isinstance(manifest, dict)
    return manifest


def drop_parts(folder: Path) -> None:
    """Remove every part; their list first, so that no part is ever listed that is not there."""
    (folder / "parts.jsonl").unlink(missing_ok=True)
    sync_folder(folder)
    for path in folder.iterdir():
        if path.name not in ("manifest.json", "lock"):
            path.unlink()


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Start the partial folder of a run; parts that it held before are gone."""
    drop_parts(folder)
    with atomic(folder / "manifest.json") as path:
        path.write_text(json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8")


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the partial folder for this process.

    Raises:
        OutputError: another process holds it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = FileLock(folder / "lock", timeout=0)
        held.acquire()
    except Timeout as error:
        msg = f"another process is writing to {folder}: wait for it, or choose another output"
        raise OutputError(msg) from error
    except OSError as error:
        msg = f"cannot write to {folder} ({error}): make the folder writable, or choose another output"
        raise OutputError(msg) from error
    try:
        yield
    finally:
        held.release()


@contextmanager
def atomic(target: Path) -> Iterator[Path]:
    """A temporary path beside `target` that becomes `target`, on disk, when the block ends well."""
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
