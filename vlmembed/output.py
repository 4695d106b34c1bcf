"""Where a run writes, who may write there, and how files appear whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from vlmembed.atomic import atomic, remove, sync_folder
from vlmembed.errors import MissingExtraError, OutputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Self

SUCCESS = "_SUCCESS"
PARTIAL = "_partial"
PARTIAL_SUFFIX = ".partial"
PUBLICATION = "publication.json"

LANCE = ".lance"
"""Names of Lance datasets, which are folders, end in it."""

GONE_PREFIX = "gone."
"""What a publication replaces, where it is a folder, waits under such a name in the partial folder to be removed."""

OWN_NAMES = re.compile(r"_SUCCESS|_errors\.parquet|_partial|part-\d{6,}\.parquet|\.\S+\.tmp")
"""What may lie in a folder output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputPaths:
    """Where a run writes: a file or a Lance dataset, the errors beside it, the parts until it is done; or a folder with
    all of them."""

    output: Path
    is_folder: bool = False

    @classmethod
    def of(cls, name: str | os.PathLike[str]) -> Self:
        """The paths for an output as the user names it; a link is followed, so that it stays one.

        Raises:
            OutputError: neither a .parquet file nor a .lance dataset nor a folder, or a folder that holds something
                else.
        """
        text, path = os.fspath(name), Path(name)
        try:
            path = Path(os.path.realpath(path)) if path.is_symlink() else path
            paths = cls(output=path, is_folder=is_folder_output(path, text))
            paths._check()
        except OSError as error:
            msg = f"cannot look at output {text!r} ({error}): make it accessible, or choose another"
            raise OutputError(msg) from error
        return paths

    def _check(self) -> None:
        shown = repr(str(self.output))
        try:
            str(self.output).encode()
        except UnicodeEncodeError:
            msg = f"output {shown} is not a name in Unicode, which Parquet writers need: choose another"
            raise OutputError(msg) from None
        if self.is_folder:
            self._check_folder()
            return
        if self.output.suffix not in (".parquet", LANCE):
            msg = (
                f"output {shown} does not end in .parquet: name a file like out.parquet, or a folder like out/, or a "
                "Lance dataset like out.lance"
            )
            raise OutputError(msg)
        if self.format == "lance" and self.output.exists() and not is_lance(self.output):
            msg = f"output {shown} exists and is no Lance dataset: choose another name"
            raise OutputError(msg)
        other = self.output.with_suffix(".parquet" if self.format == "lance" else LANCE)
        if other.exists():
            msg = (
                f"output {shown} would have its errors file, {self.errors}, in common with {other}: choose another name"
            )
            raise OutputError(msg)

    def _check_folder(self) -> None:
        if self.output.exists() and not self.output.is_dir():
            msg = f"output {str(self.output)!r} is a file: name it without the slash, or choose another"
            raise OutputError(msg)
        names = {path.name for path in self.output.iterdir()} if self.output.exists() else set()
        others = sorted(name for name in names if not OWN_NAMES.fullmatch(name))
        if names and not names & {SUCCESS, PARTIAL}:
            others = others or sorted(names)
        if others:
            msg = f"output folder {str(self.output)!r} holds {others[0]!r}, which is not a run's: choose another folder"
            raise OutputError(msg)

    @property
    def format(self) -> str:
        """What the rows are stored as: ``"parquet"`` or ``"lance"``."""
        return "lance" if not self.is_folder and self.output.suffix == LANCE else "parquet"

    @property
    def errors(self) -> Path:
        """The rows that failed."""
        return errors_beside(self.output, is_folder=self.is_folder)

    @property
    def partial(self) -> Path:
        """The folder of parts."""
        return partial_beside(self.output, is_folder=self.is_folder)

    @property
    def success(self) -> Path:
        """The file that says that a folder output is whole, and holds its provenance."""
        return self.output / SUCCESS

    def all(self) -> tuple[Path, Path, Path]:
        """Every path that the run may create."""
        return self.output, self.errors, self.partial

    def check_writable(self) -> None:
        """Tell before any work what `lock` would tell after it.

        Raises:
            OutputError: no folder can be made there. MissingExtraError: what writes the format is not installed.
        """
        if self.format == "lance":
            need_lance()
        parent = next(each for each in self.partial.absolute().parents if each.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
            msg = f"cannot write to {parent}: make it a folder that is writable, or choose another output"
            raise OutputError(msg)


def is_folder_output(path: Path, text: str = "") -> bool:
    """Whether an output, `text` as the user typed it, is a folder of parts; a Lance dataset is none."""
    return path.suffix != LANCE and (text.endswith("/") or path.is_dir())


def is_lance(path: Path) -> bool:
    """Whether this is a folder that Lance has written."""
    return path.suffix == LANCE and (path / "_versions").is_dir()


def need_lance() -> None:
    """Tell what must be installed before any work is done.

    Raises:
        MissingExtraError: Lance is not.
    """
    if find_spec("lance") is None:
        msg = "outputs that end in .lance need the package pylance: pip install 'vlmembed[lance]'"
        raise MissingExtraError(msg)


def partial_beside(output: Path, *, is_folder: bool) -> Path:
    """Where the parts of an output are until it is whole."""
    return output / PARTIAL if is_folder else output.with_name(output.name + PARTIAL_SUFFIX)


def errors_beside(output: Path, *, is_folder: bool) -> Path:
    """Where the rows that failed are, for an output."""
    return output / "_errors.parquet" if is_folder else output.with_suffix(".errors.parquet")


def errors_of(place: str, *, is_folder: bool) -> str:
    """The same of a Parquet output that is named by a URL, without what follows its path."""
    return f"{place}/_errors.parquet" if is_folder else f"{place.removesuffix('.parquet')}.errors.parquet"


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
        if set(os.listdir(folder)) <= {"lock", ".manifest.json.tmp", PUBLICATION}:  # noqa: PTH208  a set of names is what is wanted
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
        if path.name not in ("manifest.json", "lock", PUBLICATION):
            remove(path)


def drop(folder: Path) -> None:
    """Remove a partial folder, what says whose it was last."""
    drop_parts(folder)
    (folder / "manifest.json").unlink(missing_ok=True)
    (folder / PUBLICATION).unlink(missing_ok=True)
    shutil.rmtree(folder)


def publish(paths: OutputPaths, moves: Mapping[str, str], removes: Sequence[str]) -> None:
    """Put finished files in their places, all or, after a crash, all at the next start: see `finish_publication`.

    `moves` leads from names in the partial folder to names beside the output (in it, where it is a folder); `removes`
    are names there that go first. What is to be removed and has a successor of the same name is moved last.
    """
    with atomic(paths.partial / PUBLICATION) as path:
        path.write_text(json.dumps({"moves": dict(moves), "removes": list(removes)}), encoding="utf-8")
    finish_publication(paths)


def finish_publication(paths: OutputPaths) -> bool:
    """Do what is left of a publication that was begun, and drop the parts. Tells whether there was one.

    The caller holds the lock. Each step can be done again, so it does not matter where an earlier try ended.
    """
    try:
        steps = json.loads((paths.partial / PUBLICATION).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except ValueError as error:
        msg = f"{paths.partial / PUBLICATION} is damaged ({error}): delete it, and the same command goes on from there"
        raise OutputError(msg) from error
    there = paths.output if paths.is_folder else paths.output.parent
    left = {source: target for source, target in steps["moves"].items() if (paths.partial / source).exists()}
    for name in steps["removes"] if left else ():  # after the last move, what has such a name is new
        _take_away(there / name, paths.partial / f"{GONE_PREFIX}{name}")
    sync_folder(there)
    for source, target in left.items():
        (paths.partial / source).replace(there / target)
    sync_folder(there)
    drop(paths.partial)
    return True


def _take_away(path: Path, aside: Path) -> None:
    """A folder goes in one step, to `aside`: nobody shall find half of it, and nothing can be moved onto it."""
    if path.is_dir():
        remove(aside)
        path.replace(aside)
    else:
        path.unlink(missing_ok=True)


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
