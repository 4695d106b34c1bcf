"""What the pages of a Parquet row group hold, told from their headers before pyarrow reads them.

A Parquet file says in its footer how many rows there are and how large they are, and nothing holds it to that. pyarrow
goes by the headers of the pages: what they promise is what is taken into memory. So they are looked through first, one
read of a few bytes a page, and the size of a batch follows from them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmembed.sources.compact import I32, STRUCT, number, read_struct
from vlmembed.sources.dictionary import DictionaryPage

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from vlmembed.sources.compact import Fields
    from vlmembed.sources.footer import ChunkPlace

BATCH_BYTES = 16 * 2**20
"""Aim for a batch read from a row group; its rows follow from the mean row of the page with the largest ones."""

MAX_EXPANDED_BYTES = 32 * 2**20
"""Limit of a batch where each row might be the largest value of a dictionary."""

MAX_BATCH_ROWS = 1024

SMALL_DICTIONARY_BYTES = MAX_EXPANDED_BYTES // MAX_BATCH_ROWS
"""All of such a dictionary, in every row, makes no batch too large."""

MAX_SMALL_PAGE_BYTES = 128 * 2**20
MAX_EXPANSION = 20
"""A page larger than the first may not be so many times larger than what lies in the file: pictures are compressed
already, and a file of 100 kB could otherwise fill gigabytes."""

MAX_OVERHEAD_BYTES = 2**10
"""What a codec may add to a page, beside twice its size."""

_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3
_DELTA_BYTE_ARRAY = 7
"""Encoding in which a value may repeat the one before it at no cost, as with a dictionary."""

_WINDOWS_BYTES = (2**9, 2**14, 2**24)
"""A page's header is looked for in the first; statistics can make it longer, and pyarrow itself reads no more than the
last."""


def read_header(file: pa.NativeFile, position: int) -> tuple[Fields, int]:
    """A page's header, and where it ends.

    Raises:
        ValueError: there is none.
    """
    try:
        for num_bytes in _WINDOWS_BYTES:
            with suppress(IndexError):
                header, length = read_struct(file.read_at(num_bytes, position), 0)
                return header, position + length
        reason = "it has no end"
    except ValueError as error:
        reason = str(error)
    msg = f"no page header at byte {position}: {reason}"
    raise ValueError(msg)


def _check_sizes(num_bytes: int, packed_bytes: int, room_bytes: int) -> None:
    """Raises:
    ValueError: a page's sizes, unpacked and in the file, are not those of a page of pictures.
    """
    if packed_bytes > room_bytes:
        msg = f"the file ends inside a page of {packed_bytes} bytes"
        raise ValueError(msg)
    if packed_bytes > 2 * num_bytes + MAX_OVERHEAD_BYTES:
        msg = f"a page of {num_bytes} bytes takes {packed_bytes} in the file"
        raise ValueError(msg)
    if num_bytes > MAX_SMALL_PAGE_BYTES and num_bytes > MAX_EXPANSION * packed_bytes:
        msg = (
            f"a page of {packed_bytes} bytes expands to {num_bytes}; more than {MAX_EXPANSION}-fold is not read "
            f"above {MAX_SMALL_PAGE_BYTES} bytes: write the file with smaller pages, or without compression"
        )
        raise ValueError(msg)


@dataclass(slots=True, kw_only=True)
class ChunkPages:
    """What the page headers of a column chunk say.

    Attributes:
        num_values: of the data pages: rows, where the column is flat.
        mean_bytes: a value's mean size in the page where that is largest.
        delta_bytes: the largest page in which any number of values may each be as large as the whole.
        dictionary: that the pages draw on.
        damage: what is wrong with the page after those counted; None where nothing is.
    """

    num_values: int = 0
    mean_bytes: int = 0
    delta_bytes: int = 0
    dictionary: DictionaryPage | None = None
    damage: str | None = None

    @classmethod
    def of(cls, file: pa.NativeFile, place: ChunkPlace) -> ChunkPages:
        """Look through a chunk's headers."""
        pages = cls()
        position, end = place.start, place.start + place.num_bytes
        try:
            while position < end:
                header, begin = read_header(file, position)
                position = begin + pages._add(header, begin, file.size() - begin)
        except ValueError as error:
            if pages.num_values < place.num_values:  # else it is padding
                pages.damage = str(error)
        return pages

    def largest_bytes(self, file: pa.NativeFile, leaf: Leaf, place: ChunkPlace) -> int:
        """How large any number of values may each be, beyond what their pages hold."""
        if self.dictionary is None or leaf.keeps_dictionary:
            return self.delta_bytes
        if not leaf.is_variable:
            return max(self.delta_bytes, self.dictionary.mean_bytes())
        if self.dictionary.num_bytes <= SMALL_DICTIONARY_BYTES:
            return max(self.delta_bytes, self.dictionary.num_bytes)
        return max(self.delta_bytes, self.dictionary.largest_bytes(file, place.codec))

    def _add(self, header: Fields, begin: int, room_bytes: int) -> int:
        """Count a page, which begins behind its header and has so much room; returns its bytes in the file."""
        kind, num_bytes, packed_bytes = (number(header, field, I32) for field in (1, 2, 3))
        _check_sizes(num_bytes, packed_bytes, room_bytes)
        if kind == _DICTIONARY_PAGE:
            self._add_dictionary(header, begin)
        elif kind in (_DATA_PAGE, _DATA_PAGE_V2):
            details = header.get((5 if kind == _DATA_PAGE else 8, STRUCT))
            num_values = number(details, 1, I32)
            encoding = number(details, 2 if kind == _DATA_PAGE else 4, I32)
            self.num_values += num_values
            self.mean_bytes = max(self.mean_bytes, num_bytes // max(1, num_values))
            if encoding == _DELTA_BYTE_ARRAY:
                self.delta_bytes = max(self.delta_bytes, num_bytes)
        return packed_bytes

    def _add_dictionary(self, header: Fields, begin: int) -> None:
        if self.dictionary is not None:
            msg = "a second dictionary"
            raise ValueError(msg)
        self.dictionary = DictionaryPage(
            begin=begin,
            packed_bytes=number(header, 3, I32),
            num_bytes=number(header, 2, I32),
            num_values=number(header.get((7, STRUCT)), 1, I32),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """A column of values, many of which can make up one column of a table.

    Attributes:
        index: among all such columns of the file.
        is_flat: a row is one value.
        is_variable: values have lengths of their own.
        keeps_dictionary: pyarrow hands the dictionary and indices out, so that repeated values take no memory.
    """

    index: int
    is_flat: bool
    is_variable: bool
    keeps_dictionary: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPages:
    """How a row group is to be read.

    Attributes:
        batch_rows: that are taken at a time.
        num_rows: that all columns hold; None where no column is flat.
        damage: why there are no more rows than `num_rows`, where a page is damaged.
        keeps_dictionary: pyarrow hands dictionaries out.
    """

    batch_rows: int
    num_rows: int | None
    damage: str | None
    keeps_dictionary: bool

    def is_damaged_before(self, row: int) -> bool:
        """Whether the first so many rows are not all there."""
        return self.damage is not None and self.num_rows is not None and row > self.num_rows

    @classmethod
    def of(cls, file: pa.NativeFile, places: Sequence[ChunkPlace], leaves: Sequence[Leaf], num_rows: int) -> GroupPages:
        """Look through the pages of these columns of a row group, which should have so many rows."""
        mean_bytes = largest_bytes = 1
        num_held = damage = None
        chunks = sorted(
            zip(leaves, places, strict=True), key=lambda chunk: chunk[1].start
        )  # forwards costs a server less
        for leaf, place in sorted(chunks, key=lambda chunk: chunk[1].start):  # forwards: a server is asked less
            pages = ChunkPages.of(file, place)
            values_per_row = 1 if leaf.is_flat else -(-pages.num_values // max(1, num_rows))
            mean_bytes += values_per_row * pages.mean_bytes
            largest_bytes += values_per_row * pages.largest_bytes(file, leaf, place)
            if leaf.is_flat or pages.damage:
                held = pages.num_values if leaf.is_flat else 0
                if num_held is None or held < num_held or (held == num_held and pages.damage):
                    num_held, damage = held, pages.damage
        batch_rows = min(MAX_BATCH_ROWS, BATCH_BYTES // mean_bytes, MAX_EXPANDED_BYTES // largest_bytes)
        return cls(
            batch_rows=max(1, batch_rows),
            num_rows=num_held,
            damage=damage,
            keeps_dictionary=any(leaf.keeps_dictionary for leaf in leaves),
        )
