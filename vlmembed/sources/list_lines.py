"""The lines of a list: bounded, numbered, and, of a CSV list, to be had once more."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, TypeAlias

from vlmembed.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BufferedIOBase

MAX_LINE_BYTES = 4 * 2**20
"""What a line of a list may have, and a row of a CSV list with line ends in it: memory stays flat whatever is given."""

TOO_LONG = f"it has more than {MAX_LINE_BYTES} bytes: is this a list?"

_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
Lines: TypeAlias = "Iterator[tuple[int, bytes | None]]"


def numbered_lines(stream: BufferedIOBase, name: str) -> Lines:
    """The lines of a list with their numbers; None for one that is too long."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number == 1:
            if line.startswith(_UTF16):
                msg = f"{name} is UTF-16: write it as UTF-8"
                raise InputError(msg)
            line = line.removeprefix(_BOM)
        if len(line) <= MAX_LINE_BYTES:
            yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE_BYTES)
        yield number, None


class CsvLines:
    """Lines for a `csv.reader`, of which those of a bad row can be given back: a quote that is never closed must not
    swallow the rows behind it."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._given_back: list[tuple[int, bytes | None]] = []  # the next one last
        self._row: list[tuple[int, bytes | None]] = []
        self._num_bytes = 0
        self._last = 0

    def begin(self) -> int:
        """A row begins: the number of its first line."""
        self._row.clear()
        self._num_bytes = 0
        return self._given_back[-1][0] if self._given_back else self._last + 1

    def give_back(self) -> None:
        """The row was none: its first line is spent, the others come again."""
        self._given_back.extend(reversed(self._row[1:]))

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        number, line = self._given_back.pop() if self._given_back else next(self._lines)
        self._last = max(self._last, number)
        self._row.append((number, line))
        self._num_bytes += MAX_LINE_BYTES + 1 if line is None else len(line)
        if self._num_bytes > MAX_LINE_BYTES:
            raise csv.Error(TOO_LONG if len(self._row) == 1 else "a quote is not closed")
        assert line is not None
        return decoded(line)


def looks_like_json(head: bytes) -> bool:
    """Whether a list of no known name is one of JSON lines, by its first bytes."""
    return head.removeprefix(_BOM).lstrip().startswith(b"{")


def decoded(line: bytes) -> str:
    """A line as text; an undecodable byte is a surrogate, as in file names."""
    return line.decode(errors="surrogateescape")
