"""WebDataset samples: members of a tar with the same name up to the first dot belong together."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vlmembed.types import EncodedImage

MAX_TEXT_BYTES = 16 * 2**20
"""A larger member is not taken as a column."""

MAX_SAMPLE_BYTES = 256 * 2**20
MAX_SAMPLE_PICTURES = 1000
"""What is held back of a sample until its last member is known. The pictures beyond that get their own columns from
what the sample has shown so far."""

_JSON = "json"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def split_name(name: str) -> tuple[str, str]:
    """Sample and extension of a member: what is before and behind the first dot of its last part, lower case."""
    folder, slash, last = name.rpartition("/")
    stem, _, extension = last.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()


class KeptColumns:
    """Columns made of the members of a sample that are no pictures.

    A column is named by an extension (``txt``, ``seg.json``), or by a field of the sample's JSON object
    (``json.caption``, ``json.size.width``). All are strings, null where a sample has no such text: text as it is, other
    JSON values as JSON.

    Attributes:
        schema: of the columns.
        extensions: of the members that they are made of.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.schema = pa.schema([(name, pa.string()) for name in names])
        self._paths = {name: name.split(".")[1:] if name.startswith(f"{_JSON}.") else None for name in names}
        self.extensions = frozenset(_JSON if path else name.lower() for name, path in self._paths.items())
        self._missing = dict.fromkeys(names)

    @property
    def missing(self) -> list[str]:
        """Columns that were null in all of the rows so far."""
        return list(self._missing)

    def __bool__(self) -> bool:
        return bool(self._paths)

    def row(self, texts: Mapping[str, bytes]) -> pa.RecordBatch | None:
        """One row of a sample with these texts, by extension; None where no columns are kept."""
        if not self._paths:
            return None
        content = texts.get(_JSON)
        document = _parse(content) if content is not None and any(self._paths.values()) else None
        values = {
            name: _field(document, path) if path else _text(texts.get(name.lower()))
            for name, path in self._paths.items()
        }
        for name in [name for name in self._missing if values[name] is not None]:
            del self._missing[name]
        return pa.record_batch([pa.array([value], pa.string()) for value in values.values()], schema=self.schema)


def _text(content: bytes | None) -> str | None:
    return None if content is None else content.decode("utf-8", "backslashreplace")


def _parse(content: bytes) -> object:
    try:
        return json.loads(content.removeprefix(_BYTE_ORDER_MARK).decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        return None


def _field(document: object, path: Sequence[str]) -> str | None:
    for name in path:
        document = document.get(name) if isinstance(document, dict) else None
    if document is None:
        return None
    try:
        text = document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)
    except RecursionError:
        return None
    try:
        return _text(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:  # half of a pair, which JSON can hold
        return _text(text.encode("utf-8", "backslashreplace"))


class SampleBuffer:
    """Holds the pictures of a sample back until all of its texts are known.

    How far it holds them back goes by what all of them take, those that are not wanted too: so a row has the same
    columns wherever reading starts.
    """

    def __init__(self, columns: KeptColumns) -> None:
        self._columns = columns
        self._sample: str | None = None
        self._texts: dict[str, bytes] = {}
        self._images: list[EncodedImage] = []
        self._num_bytes = self._num_pictures = 0

    @property
    def is_empty(self) -> bool:
        """Whether no picture is held back."""
        return not self._images

    def begin(self, sample: str) -> Iterator[EncodedImage]:
        """A member of this sample comes next: yields what is held back of another one."""
        if sample != self._sample:
            yield from self.end()
            self._sample = sample

    def add_text(self, extension: str, content: bytes) -> None:
        """A text of the sample; the first of its kind counts."""
        self._texts.setdefault(extension, content)

    def add_picture(self, image: EncodedImage | None, num_bytes: int) -> Iterator[EncodedImage]:
        """A picture of the sample, None where it is not wanted. Yields what need not be held back."""
        self._num_bytes += num_bytes
        self._num_pictures += 1
        if image is not None:
            self._images.append(image)
        is_full = self._num_bytes > MAX_SAMPLE_BYTES or self._num_pictures >= MAX_SAMPLE_PICTURES
        if is_full or not self._columns:
            yield from self._flush()

    def end(self) -> Iterator[EncodedImage]:
        """The sample has no further members: yields what is held back of it."""
        yield from self._flush()
        self._sample = None
        self._texts = {}

    def _flush(self) -> Iterator[EncodedImage]:
        images, self._images = self._images, []
        self._num_bytes = self._num_pictures = 0
        if images:
            columns = self._columns.row(self._texts)
            for image in images:
                yield replace(image, columns=columns)
