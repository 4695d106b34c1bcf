"""Files and folders that appear whole or not at all, and last through a power cut."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def atomic(target: Path, *, writer: str = "") -> Iterator[Path]:
    """A temporary path beside `target` that becomes `target`, on disk, when the block ends well. `writer` tells apart
    those that may write it at a time."""
    temporary = target.with_name(f".{target.name}{writer}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(target.parent)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A name beside `target`, at which the block makes a folder that then becomes `target`, on disk with all its
    files."""
    temporary = target.with_name(f".{target.name}.tmp")
    remove(temporary)
    try:
        yield temporary
        for folder, _, names in os.walk(temporary):
            for name in names:
                with Path(folder, name).open("rb") as file:
                    os.fsync(file.fileno())
            sync_folder(Path(folder))
        remove(target)
        temporary.replace(target)
    finally:
        remove(temporary)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
