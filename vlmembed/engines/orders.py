"""What a task of a cluster must know of its run, wherever it is started."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from vlmembed.errors import ClusterError
from vlmembed.partfiles import PartFiles
from vlmembed.remote.urls import is_url

if TYPE_CHECKING:
    import pyarrow as pa

    from vlmembed.config import EncodeConfig
    from vlmembed.engines.firsts import FirstsIndex
    from vlmembed.layout import ResizeRule
    from vlmembed.schema import VectorColumn


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunOrder:
    """A planned run, as its tasks see it. Can be pickled.

    Attributes:
        config: with everything decided.
        schema, kept: of the parts, and of the source's columns among theirs. max_row_bytes: see `PartFiles`.
        num_rows: of the input.
        working_folder: where relative paths begin.
        run_id: see `PartFiles.run_id`.
        firsts: where the first rows are; None before they have been looked for, or where nothing is deduplicated.
    """

    config: EncodeConfig
    rule: ResizeRule
    vectors: tuple[VectorColumn, ...]
    schema: pa.Schema
    kept: pa.Schema
    folder: Path
    working_folder: str
    run_id: str
    max_row_bytes: int
    num_rows: int
    firsts: FirstsIndex | None = None

    @property
    def rows_per_part(self) -> int:
        """Rows of all parts but the last one."""
        assert self.config.rows_per_part is not None
        return self.config.rows_per_part

    def rows_of(self, part: int) -> range:
        """The rows of a part."""
        first_row = part * self.rows_per_part
        return range(first_row, min(first_row + self.rows_per_part, self.num_rows))

    def take_place(self) -> None:
        """What a task does first, on whichever machine.

        Raises:
            ClusterError: the machine does not see the inputs, which would fail row by row.
        """
        go_to(self.working_folder)
        check_inputs(tuple(self.config.inputs))

    def files(self) -> PartFiles:
        """The parts' files.

        Raises:
            ClusterError: this machine does not see the folder that they are in, or another run has it now.
        """
        check_folder(self.folder)
        files = PartFiles(
            self.folder,
            self.schema,
            vectors=self.vectors,
            rows_per_part=self.rows_per_part,
            max_row_bytes=self.max_row_bytes,
            writer=f".{platform.node()}-{os.getpid()}",
        )
        if files.run_id() != self.run_id:
            msg = f"{self.folder} is another run's by now: this one was ended, or replaced with --overwrite"
            raise ClusterError(msg)
        return files


def go_to(working_folder: str) -> None:
    """Let relative paths begin there, if this machine has such a folder."""
    with suppress(OSError):
        os.chdir(working_folder)


@cache
def check_inputs(inputs: tuple[str | os.PathLike[str], ...]) -> None:
    """Look once in each process.

    Raises:
        ClusterError: this machine does not see an input that the run has listed.
    """
    for name in (os.fspath(each) for each in inputs):
        if is_url(name) or name == "-" or set(name) & set("*?[{"):
            continue
        if not Path(name).exists():
            msg = (
                f"machine {platform.node()} does not see the input {name}: put it on storage that all nodes have under "
                "the same path, or on an object store"
            )
            raise ClusterError(msg)


def check_folder(folder: Path) -> None:
    """Raises:
    ClusterError: this machine does not see the folder of the run's parts.
    """
    if not (folder / "manifest.json").exists():
        msg = (
            f"machine {platform.node()} does not see {folder}, where the parts are written: put the output (or of a "
            "remote output --work-dir) on storage that all nodes have under the same path"
        )
        raise ClusterError(msg)
