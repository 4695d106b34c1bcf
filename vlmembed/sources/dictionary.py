"""The dictionary of a Parquet column chunk: how large its largest value is.

Any number of rows can be that value, whatever the file's size, so the rows of a batch follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

MAX_UNPACKED_BYTES = 32 * 2**20
"""A larger page is not unpacked just to look at it."""

_CODECS = {0: None, 1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
_PREFIX_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class DictionaryPage:
    """A page of values, each behind its length or all of one length.

    Attributes:
        begin: where it begins in the file, behind its header.
        packed_bytes, num_bytes: its size there, and unpacked.
        num_values: in it.
    """

    begin: int
    packed_bytes: int
    num_bytes: int
    num_values: int

    def mean_bytes(self) -> int:
        """The size of its values where they are of one length."""
        return self.num_bytes // max(1, self.num_values)

    def largest_bytes(self, file: pa.NativeFile, codec: int) -> int:
        """The size of its largest value, or of the page, if that is not easily said."""
        if max(self.num_bytes, self.packed_bytes) > MAX_UNPACKED_BYTES or codec not in _CODECS:
            return self.num_bytes
        try:
            page = file.read_at(self.packed_bytes, self.begin)
            if (name := _CODECS[codec]) is not None:
                page = pa.Codec(name).decompress(page, self.num_bytes, asbytes=True)
        except (OSError, pa.ArrowException):  # it is damaged, or the codec is not there: reading it will say so
            return self.num_bytes
        offset = largest = 0
        while offset < len(page):
            length = int.from_bytes(page[offset : offset + _PREFIX_BYTES], "little")
            largest = max(largest, length)
            offset += _PREFIX_BYTES + length
        return largest
