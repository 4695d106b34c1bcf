"""How often a tower has begun with the same packs: packs that take their tower along must not do so for ever.

Ray starts a tower again, and gives it the same packs, as often as it dies. So each attempt leaves an empty file in the
partial folder, which goes when it has succeeded.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from vlmembed.errors import WorkerError
from vlmembed.partfiles import storing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_ATTEMPTS = 5
"""Machines that are taken away in the middle count too."""


def clear_attempts(folder: Path) -> None:
    """A start of the run begins to count anew."""
    for path in folder.glob("attempt-*"):
        path.unlink(missing_ok=True)


@contextmanager
def attempt(folder: Path, part: int, place: int) -> Iterator[None]:
    """Note that a tower begins with the packs from a place of a part on, and that it has come through with the block.

    Raises:
        WorkerError: so many towers have died of them. StorageError: the folder cannot be written.
    """
    name = f"attempt-{part:06d}-{place:06d}"
    earlier = list(folder.glob(f"{name}.*"))
    if len(earlier) >= MAX_ATTEMPTS:
        msg = (
            f"packs of part {part} were in hand when {len(earlier)} towers died, and are given to no other: see why in "
            "Ray's logs (often memory: lower --max-tokens-per-batch). What was committed is kept"
        )
        raise WorkerError(msg)
    mine = folder / f"{name}.{len(earlier)}"
    with storing(mine):
        mine.touch()
    yield
    for path in (*earlier, mine):
        path.unlink(missing_ok=True)
