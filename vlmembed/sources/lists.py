"""Pictures named by lists: text, CSV and JSON lines of paths or URLs, and standard input."""

from __future__ import annotations

import gzip
import io
import re
import sys
import zlib
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from vlmembed.errors import FailureCode, ImageError, InputError
from vlmembed.remote.urls import is_url
from vlmembed.sources.ids import IdIndex, UniqueNames, escape_name
from vlmembed.sources.list_formats import ListReader, is_list, list_format
from vlmembed.sources.list_lines import looks_like_json
from vlmembed.sources.locations import public_url, resolve, shown
from vlmembed.sources.pieces import SourcePiece
from vlmembed.sources.readahead import UnreadRow
from vlmembed.sources.scratch import ListedRows
from vlmembed.types import EncodedImage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vlmembed.sources.list_formats import Entry
    from vlmembed.sources.pieces import Piece
    from vlmembed.sources.readahead import ReadAhead, Row
    from vlmembed.sources.scratch import Numbered

__all__ = ["ListSource", "is_list"]

STDIN = "-"

_HEAD_BYTES = 64
_IDS_AT_ONCE = 4096
_DAMAGE = (OSError, EOFError, ValueError, zlib.error)


class ListRows:
    """Rows that lists have named."""

    def __init__(self, reader: ReadAhead, *, records: Numbered, kept_schema: pa.Schema) -> None:
        self._reader = reader
        self._records = records
        self._kept_schema = kept_schema

    def read_rows(self, rows: Sequence[int]) -> Iterator[EncodedImage]:
        """Read and fetch ahead, yield in order."""
        return self._reader.read(self._rows(rows))

    def _rows(self, rows: Sequence[int]) -> Iterator[Row]:
        for row, (key, kept, code, text) in self._records.read(rows):
            columns = None
            if kept:
                columns = pa.record_batch([pa.array([value], pa.string()) for value in kept], schema=self._kept_schema)
            if code is None:
                yield UnreadRow(row=row, key=key, path=text, columns=columns)
            else:
                yield EncodedImage(row=row, key=key, content=ImageError(FailureCode(code), text), columns=columns)


class ListSource(ListedRows):
    """What lists name, in their order. A list is read once, when the run is set up: what it says lies in a scratch file
    from then on, so memory does not grow with it, and standard input will do.

    A line that cannot be read is a row that fails, under the id ``LIST#lineN``. The pictures are not looked at before
    they are read, so a picture that has changed behind a list that has not is not noticed.
    """

    def __init__(
        self,
        files: Sequence[tuple[str, str]],
        *,
        reader: ReadAhead,
        image_column: str | None,
        id_column: str | None,
        keep_columns: tuple[str, ...],
    ) -> None:
        """`files` are lists: path, URL, or ``-`` for standard input, and what each is called.

        Raises:
            InputError: a list cannot be read, lacks a column, or an id is not unique.
            StorageError: the scratch files cannot be written.
        """
        super().__init__()
        self.skipped: Counter[str] = Counter()
        self.kept_schema = pa.schema([pa.field(name, pa.string()) for name in keep_columns])
        self._reader = reader
        self._id_column = id_column
        self._new_ids: list[str | int | None] = []
        formats = ListReader(
            image_column=image_column, id_column=id_column, keep_columns=keep_columns, skipped=self.skipped
        )
        try:
            with UniqueNames() as names, IdIndex(id_column or "", otherwise="paths and URLs") as ids:
                for name, key in files:
                    self._add_list(name, key, formats, names, ids)
            _check_found(formats, [key for _, key in files])
            self._records.seal()
        except BaseException:
            self.close()
            raise

    def _add_list(self, name: str, key: str, formats: ListReader, names: UniqueNames, ids: IdIndex) -> None:
        base = "" if name == STDIN else name
        try:
            with ExitStack() as stack:
                stream = _opened(name, self._reader, stack)
                kind = list_format(name) if name != STDIN else None
                if kind is None:
                    kind = "jsonl" if looks_like_json(stream.peek(_HEAD_BYTES)) else "text"
                for entry in formats.read(stream, key, kind):
                    self._add(entry, base, key, names)
                    if len(self._new_ids) == _IDS_AT_ONCE:
                        self._check_ids(ids, key)
        except _DAMAGE as error:
            msg = f"the list {shown(name)} cannot be read ({type(error).__name__}: {error})"
            raise InputError(msg) from error
        self._check_ids(ids, key)

    def _check_ids(self, ids: IdIndex, key: str) -> None:
        ids.add(self._new_ids, key)
        self._new_ids.clear()

    def _add(self, entry: Entry, base: str, key: str, names: UniqueNames) -> None:
        """Note a row."""
        line = f"{key}#line{entry.line}"
        location: str | ImageError
        if entry.problem is not None:
            location = ImageError(FailureCode.UNREADABLE, f"line {entry.line} of {key}: {entry.problem}")
        elif not (entry.written and entry.written.strip()):
            location = ImageError(FailureCode.NULL, f"line {entry.line} of {key} names no picture")
        else:
            written = entry.written.strip()
            written = written if is_url(written) else entry.written  # a path may begin or end with a blank
            location = resolve(base, written)
            line = escape_name(_public(written))
        if self._id_column:
            self._new_ids.append(line if entry.problem is not None else entry.id)
            row_key = line if entry.problem is not None else str(entry.id)
        else:
            row_key = names.key(line)
        record: list[object]
        if isinstance(location, ImageError):
            record, told = [row_key, entry.kept, location.code, str(location)], location.code.value
        else:
            record, told = [row_key, entry.kept, None, location], _public(location)
        self._list(record, key=row_key, noted=[row_key, entry.kept, told])

    def read(self, start: int) -> Iterator[EncodedImage]:
        """Yield the rows from `start` on."""
        return self.read_rows(range(start, self.num_rows))

    def read_rows(self, rows: Sequence[int]) -> Iterator[EncodedImage]:
        """Read only these."""
        return ListRows(self._reader, records=self._records, kept_schema=self.kept_schema).read_rows(rows)

    def pieces(self, rows: range, size: int, first_row: int = 0) -> Iterator[Piece]:
        """See `Divisible`."""
        for run, records in self._cut(rows, size, first_row):
            make = partial(ListRows, records=records, kept_schema=self.kept_schema)
            yield SourcePiece(run=run, first_row=first_row, make=make)


def _opened(name: str, reader: ReadAhead, stack: ExitStack) -> io.BufferedReader | gzip.GzipFile:
    """The bytes of a list, decompressed; closed with `stack`, unless it is standard input."""
    stream: io.BufferedReader
    if name == STDIN:
        if sys.stdin is None:
            msg = "there is no standard input to read a list from: name a file"
            raise InputError(msg)
        stream = io.BufferedReader(sys.stdin.buffer)  # type: ignore[arg-type]  # it has what is needed of a raw one
        stack.callback(stream.detach)
    elif is_url(name):
        if reader.remotes is None:
            msg = f"{shown(name)} is a URL: not read here"
            raise InputError(msg)
        stream = stack.enter_context(io.BufferedReader(reader.remotes.open(name)))
    else:
        stream = stack.enter_context(Path(name).open("rb"))  # noqa: SIM115  closed with `stack`
    if stream.peek(2)[:2] == b"\x1f\x8b":
        return stack.enter_context(gzip.GzipFile(fileobj=stream))
    return stream


def _public(location: str) -> str:
    """A path or URL without passwords; most have none, and there are many."""
    return public_url(location) if is_url(location) and re.search("[@?#]", location) else location


def _check_found(formats: ListReader, keys: Sequence[str]) -> None:
    """Raises:
    InputError: a column that was asked for is in no line of any list.
    """
    for column in filter(None, (formats.image_column, *formats.keep_columns)):
        if column not in formats.found:
            msg = f"no line of {', '.join(keys)} has {column!r}: is the name right?"
            raise InputError(msg)
