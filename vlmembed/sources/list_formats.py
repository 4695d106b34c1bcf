"""Lists of pictures as text, CSV and JSON lines: what a line names, and what is wrong with one that names nothing."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vlmembed.errors import InputError
from vlmembed.remote.urls import is_url
from vlmembed.sources.list_lines import MAX_LINE_BYTES, TOO_LONG, CsvLines, decoded, numbered_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from io import BufferedIOBase

    from vlmembed.sources.list_lines import Lines

_SUFFIXES = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_SUFFIXES |= dict.fromkeys((".txt", ".list", ".lst"), "text")
_URL_NAMES = ("url", "image_url", "img_url", "uri", "image_uri")
_PATH_NAMES = ("image", "image_path", "img_path", "path", "file_path", "filepath", "file_name", "filename", "file")


def list_format(name: str) -> str | None:
    """The format of a list by its name, a path or a URL, compressed by gzip or not; None where it tells none."""
    path = urlsplit(name).path if is_url(name) else name
    stem, extension = os.path.splitext(path.lower())  # noqa: PTH122  a URL's too
    if extension == ".gz":
        extension = os.path.splitext(stem)[1]  # noqa: PTH122
    return _SUFFIXES.get(extension)


def is_list(name: str) -> bool:
    """Whether an input is a list by its name: ``-`` is standard input, which always is one."""
    return name == "-" or list_format(name) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What a line of a list says.

    Attributes:
        line: its number, from 1; the first one's where there are several.
        written: the path or URL, None where the line has none. An undecodable byte is a surrogate, as in file names.
        id: what the id column holds.
        kept: what the kept columns hold.
        problem: why the line could not be read; all else is unknown then.
    """

    line: int
    written: str | None = None
    id: str | int | None = None
    kept: tuple[str | None, ...] = ()
    problem: str | None = None


@dataclass(kw_only=True, slots=True)
class ListReader:
    """Reads lists entry by entry.

    Attributes:
        image_column, id_column, keep_columns: names of columns; the first is found by the usual names if it is None.
        skipped: lines that are no entries, by kind.
        found: the columns above that any list had.
    """

    image_column: str | None
    id_column: str | None
    keep_columns: tuple[str, ...]
    skipped: Counter[str] = field(default_factory=Counter)
    found: set[str] = field(default_factory=set)

    def read(self, stream: BufferedIOBase, name: str, kind: str) -> Iterator[Entry]:
        """Yield the entries of a list called `name`. `kind` is one of `list_format`'s.

        Raises:
            InputError: it has not the columns that are asked for, or none that could hold paths or URLs.
            OSError: it cannot be read.
        """
        lines = numbered_lines(stream, name)
        if kind == "text":
            return self._text(lines, name)
        if kind == "jsonl":
            return self._json(lines, name)
        return self._csv(CsvLines(lines), name, "\t" if kind == "tsv" else ",")

    def _text(self, lines: Lines, name: str) -> Iterator[Entry]:
        asked = [*filter(None, (self.image_column, self.id_column)), *self.keep_columns]
        if asked:
            msg = f"{name} is a list of paths without columns, so it has no {asked[0]!r}: give a CSV or JSONL list"
            raise InputError(msg)
        for number, line in lines:
            if line is None:
                yield Entry(line=number, problem=TOO_LONG)
            elif not (text := line.strip()):
                self.skipped["blank line"] += 1
            elif text.startswith(b"#"):
                self.skipped["comment"] += 1
            elif b"\0" in text:
                yield Entry(line=number, problem="it holds a NUL byte (of find -print0? lines end in line breaks)")
            else:
                yield Entry(line=number, written=decoded(text))

    def _json(self, lines: Lines, name: str) -> Iterator[Entry]:
        image_column = self.image_column
        for number, line in lines:
            if line is None:
                yield Entry(line=number, problem=TOO_LONG)
                continue
            if not line.strip():
                self.skipped["blank line"] += 1
                continue
            try:
                value = json.loads(decoded(line))
            except (ValueError, RecursionError) as error:
                yield Entry(line=number, problem=f"it is no JSON: {error}"[:200])
                continue
            if not isinstance(value, dict):
                yield Entry(line=number, problem=f"it holds {_kind_of(value)}, not an object")
                continue
            if image_column is None:
                image_column = _image_column(list(value), name)
            yield self._of_object(value, number, image_column, name)

    def _of_object(self, value: dict[str, Any], number: int, image_column: str, name: str) -> Entry:
        columns = {name: _field(value, name) for name in (image_column, *self.keep_columns)}
        self.found.update(name for name, found in columns.items() if found is not None or name in value)
        written = columns[image_column]
        if not isinstance(written, str | None):
            return Entry(line=number, problem=f"{image_column!r} holds {_kind_of(written)}, not a path or URL")
        if written and (problem := _problem_of(written)):
            return Entry(line=number, problem=f"{image_column!r} {problem}")
        id_value = _field(value, self.id_column) if self.id_column else None
        if not isinstance(id_value, str | int | None) or isinstance(id_value, bool):
            msg = f"--id-column {self.id_column!r} holds {_kind_of(id_value)} in line {number} of {name}; ids are "
            raise InputError(msg + "text or whole numbers")
        kept = tuple(_as_text(columns[column]) for column in self.keep_columns)
        return Entry(
            line=number,
            written=written,
            id=(_valid(id_value) or None) if isinstance(id_value, str) else id_value,
            kept=kept,
        )

    def _csv(self, lines: CsvLines, name: str, delimiter: str) -> Iterator[Entry]:
        csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))  # the module's own, there is no other
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            header = next(rows, [])
        except csv.Error as error:
            msg = f"{name}: its first line, which names the columns, cannot be read ({error})"
            raise InputError(msg) from error
        columns = self._positions(header, name)
        while True:
            number = lines.begin()
            try:
                fields = next(rows, None)
                problem = fields and _csv_problem(fields, len(header))
            except csv.Error as error:
                problem = str(error)
            if problem:
                lines.give_back()
                yield Entry(line=number, problem=problem)
            elif fields is None:
                return
            elif not fields:
                self.skipped["blank line"] += 1
            else:
                yield Entry(
                    line=number,
                    written=fields[columns[0]],
                    id=_valid(fields[columns[1]]) or None if self.id_column else None,
                    kept=tuple(_valid(fields[column]) for column in columns[2:]),
                )

    def _positions(self, header: Sequence[str], name: str) -> list[int]:
        """Where in a row the image, the id (or again the image) and the kept columns stand."""
        image_column = self.image_column or _image_column(header, name)
        names = [image_column, self.id_column or image_column, *self.keep_columns]
        for column in names:
            if header.count(column) != 1:
                number = "more than one" if column in header else "no"
                msg = f"{name} has {number} column {column!r}; its first line names {_listed(header)}"
                raise InputError(msg)
        self.found.update(names)
        return [header.index(column) for column in names]


def _csv_problem(fields: Sequence[str], num_columns: int) -> str | None:
    """Why a row of a CSV list is none; None where it is."""
    if len(fields) != num_columns:
        return f"it has {len(fields)} fields, and the first line {num_columns}"
    return "it holds a NUL byte" if any("\0" in value for value in fields) else None


def _field(value: dict[str, Any], name: str) -> Any:  # noqa: ANN401  whatever JSON can hold
    """A field of an object, or, by dots, of an object in it; None where there is none."""
    if name in value:
        return value[name]
    first, dot, rest = name.partition(".")
    inner = value.get(first)
    return _field(inner, rest) if dot and isinstance(inner, dict) else None


def _image_column(columns: Sequence[str], name: str) -> str:
    """The column of paths or URLs: of URLs if there is one.

    Raises:
        InputError: none, or more than one that could be it.
    """
    for usual in (_URL_NAMES, _PATH_NAMES):
        candidates = [column for column in columns if column.strip().lower() in usual]
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            msg = f"{name} has {len(candidates)} columns that could name pictures ({_listed(candidates)}): name one "
            raise InputError(msg + "with --image-column")
    msg = f"{name} has no column of paths or URLs among {_listed(columns) or 'none at all'}: name one with "
    raise InputError(msg + "--image-column (the first line of a CSV list names the columns)")


def _listed(columns: Sequence[str]) -> str:
    text = _valid(", ".join(columns))
    return text if len(text) <= 200 else f"{text[:200]}..."  # noqa: PLR2004  a line of data can be a page long


def _valid(text: str) -> str:
    """Text as it is, or with backslashes where it is no valid Unicode."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _problem_of(written: str) -> str | None:
    """Why a path of a JSON text can be none; None where it can."""
    if "\0" in written:
        return "holds a NUL"
    try:
        os.fsencode(written)
    except UnicodeEncodeError:
        return "is not valid Unicode"
    return None


def _as_text(value: object) -> str | None:
    """A JSON value as a kept column holds it."""
    if value is None:
        return None
    return _valid(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _kind_of(value: object) -> str:
    kinds = {bool: "a truth value", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return kinds.get(type(value), "null")
