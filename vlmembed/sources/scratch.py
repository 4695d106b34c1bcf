"""What is known of the rows of a run, in a scratch file: memory does not grow with their number."""

from __future__ import annotations

import json
import tempfile
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from vlmembed.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Records:
    """JSON values by their number, from 0: written once, then read in order as often as one likes.

    Attributes:
        num_rows: how many there are.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._file: IO[str] = tempfile.TemporaryFile("w+", encoding="ascii")  # noqa: SIM115  closed in `close`

    def add(self, value: object) -> None:
        """Append a value.

        Raises:
            StorageError: the disk is full.
        """
        with _writing():
            self._file.write(json.dumps(value) + "\n")
        self.num_rows += 1

    def seal(self) -> None:
        """All are there: bring them to disk before the run goes by them. Raises as `add`."""
        with _writing():
            self._file.flush()

    def read(self, rows: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Yield the numbers, which ascend, with their values."""
        wanted = iter(rows)
        next_row = next(wanted, None)
        self._file.seek(0)
        for row, line in enumerate(self._file):
            if row == next_row:
                yield row, json.loads(line)
                if (next_row := next(wanted, None)) is None:
                    return

    def close(self) -> None:
        """Drop the file."""
        with suppress(OSError):  # what could not be written, where the disk is full
            self._file.close()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        msg = f"cannot write the list of rows into {tempfile.gettempdir()} ({error}): make room, or set TMPDIR"
        raise StorageError(msg) from error
