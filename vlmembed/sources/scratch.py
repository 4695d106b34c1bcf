"""What is known of the rows of a run, in a scratch file: memory does not grow with their number."""

from __future__ import annotations

import hashlib
import json
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol

from vlmembed.errors import StorageError
from vlmembed.sources.pieces import cut

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Numbered(Protocol):
    """Values by their number."""

    def read(self, rows: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Yield the numbers, which ascend, with their values."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FewRecords:
    """Some of the values of `Records`, in memory, from number `first_row` on."""

    first_row: int
    values: list[Any]

    def read(self, rows: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Yield the numbers with their values."""
        for row in rows:
            yield row, self.values[row - self.first_row]


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

    def cut(self, runs: Iterable[range]) -> Iterator[FewRecords]:
        """Yield the values of each run of numbers, in one pass. The runs ascend."""
        next_row = position = 0
        for run in runs:
            self._file.seek(position)  # it may have been read from since
            values = []
            for row in range(next_row, run.stop):
                line = self._file.readline()
                position += len(line)  # it is ASCII
                if row >= run.start:
                    values.append(json.loads(line))
            next_row = run.stop
            yield FewRecords(first_row=run.start, values=values)

    def close(self) -> None:
        """Drop the file."""
        with suppress(OSError):  # what could not be written, where the disk is full
            self._file.close()


class ListedRows:
    """What sources whose rows are listed once, when the run is set up, have in common: the list, and its digests."""

    def __init__(self) -> None:
        self._records = Records()
        self._hash = hashlib.sha256()
        self._keys_hash = hashlib.sha256()

    @property
    def num_rows(self) -> int:
        """Rows in the list."""
        return self._records.num_rows

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over all that was noted."""
        return self._hash.hexdigest()

    @property
    def keys_digest(self) -> str:
        """SHA-256 (hex) over the ids."""
        return self._keys_hash.hexdigest()

    def _note(self, value: object) -> None:
        """Let the digest depend on a value."""
        self._hash.update(json.dumps(value).encode() + b"\n")

    def _list(self, record: object, *, key: str, noted: object) -> None:
        """Append a row: what is to be read of it, its id, and what the digest goes by."""
        self._note(noted)
        self._keys_hash.update(json.dumps(key).encode() + b"\n")
        self._records.add(record)

    def _cut(self, rows: range, size: int, first_row: int) -> Iterator[tuple[range, FewRecords]]:
        """The rows of each piece (see `Divisible`), and what is listed of them."""
        records = self._records.cut(cut(rows, size, first_row))
        return zip(cut(rows, size, first_row), records, strict=True)

    def close(self) -> None:
        """Drop the list."""
        self._records.close()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        msg = f"cannot write the list of rows into {tempfile.gettempdir()} ({error}): make room, or set TMPDIR"
        raise StorageError(msg) from error
