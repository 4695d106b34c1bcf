"""How often the cluster has begun with the same work: what takes its process along must not do so for ever.

Ray starts a task or a tower again, and gives it the same work, as often as it dies. So each attempt leaves an empty
file, which goes when it has succeeded.
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
    """A start of the run begins to count anew. Raises `StorageError`."""
    with storing(folder / ATTEMPTS):
        remove(folder / ATTEMPTS)
        (folder / ATTEMPTS).mkdir()


@contextmanager
def attempt(folder: Path, work: str, why: str) -> Iterator[None]:
    """Note that a process begins with this work, and that it has come through. `why` says what else may happen.

    Raises:
        WorkerError: so many have died of it. StorageError: the folder cannot be written.
    """
    paths = [folder / ATTEMPTS / f"{work}.{number}" for number in range(MAX_ATTEMPTS)]
    mine = next((number for number, path in enumerate(paths) if not path.exists()), None)
    if mine is None:
        msg = (
            f"{work} was begun {MAX_ATTEMPTS} times, and is not begun again; {why}. Ray's logs say more. What was "
            "committed is kept"
        )
        raise WorkerError(msg)
    with storing(paths[mine]):
        paths[mine].touch()
    yield
    for path in paths[: mine + 1]:
        path.unlink(missing_ok=True)
