"""How often a tower has begun with the same packs: packs that take their tower along must not do so for ever.

Ray starts a tower again, and gives it the same packs, as often as it dies. So each attempt leaves an empty file, which
goes when it has succeeded.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from vlmembed.atomic import remove
from vlmembed.errors import WorkerError
from vlmembed.partfiles import storing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ATTEMPTS = "attempts"
"""Folder in the partial folder."""

MAX_ATTEMPTS = 5
"""Machines that are taken away in the middle count too."""


def clear_attempts(folder: Path) -> None:
    """A start of the run begins to count anew."""
    remove(folder / ATTEMPTS)
    with storing(folder / ATTEMPTS):
        (folder / ATTEMPTS).mkdir()


@contextmanager
def attempt(folder: Path, part: int, place: int) -> Iterator[None]:
    """Note that a tower begins with the packs from a place of a part on, and that it has come through with the block.

    Raises:
        WorkerError: so many towers have died of them. StorageError: the folder cannot be written.
    """
    paths = [folder / ATTEMPTS / f"{part:06d}-{place:06d}.{number}" for number in range(MAX_ATTEMPTS)]
    mine = next((number for number, path in enumerate(paths) if not path.exists()), None)
    if mine is None:
        msg = (
            f"packs of part {part} were in hand when {MAX_ATTEMPTS} towers died, and are given to no other: see why in "
            "Ray's logs (often memory: lower --max-tokens-per-batch). What was committed is kept"
        )
        raise WorkerError(msg)
    with storing(paths[mine]):
        paths[mine].touch()
    yield
    for path in paths[: mine + 1]:
        path.unlink(missing_ok=True)
