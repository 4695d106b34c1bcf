"""One of n pieces of a source. The pieces are contiguous, so that their outputs in order are the whole's."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from dataclasses import replace
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

from vlmembed.errors import InputError
from vlmembed.shards import parse_shard, shard_text
from vlmembed.sources.pieces import Countable, Divisible

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Self

    import pyarrow as pa

    from vlmembed.sources.base import Source
    from vlmembed.sources.pieces import Counted, CountPiece, Piece
    from vlmembed.types import EncodedImage


class ShardSource:
    """Rows [N * index // count, N * (index + 1) // count) of a source with N rows, numbered from 0.

    With a `limit` the source has that many rows at most, so that the shards of a limited run are the limited whole.

    Attributes:
        first_row: where they begin in the source; None where that is not known.
        shard: ``"index/count"``.
        whole_digest, whole_keys_digest, whole_num_rows: of the source that it is a piece of. The last one is None where
            rows are counted only by reading.

    Raises:
        InputError: there are fewer rows than shards.
    """

    def __init__(self, source: Source, index: int, count: int, *, limit: int | None = None) -> None:
        num_rows = source.num_rows
        assert num_rows is not None, "see `of_files`"
        assert 0 <= index < count
        num_rows = num_rows if limit is None else min(num_rows, limit)
        _check_count(num_rows, "rows", index, count)
        self._source = self._whole = source
        self.kept_schema: pa.Schema = source.kept_schema
        self.shard = shard_text(index, count)
        self.first_row: int | None = num_rows * index // count
        self._num_rows: int | None = num_rows * (index + 1) // count - self.first_row
        self.whole_num_rows: int | None = num_rows

    @classmethod
    def of_files(cls, piece: Source, whole: Source, index: int, count: int) -> Self:
        """A shard of a source whose rows are counted only by reading: `piece` has its files (see `split_files`),
        `whole` all files. Both are closed with it."""
        self = cls.__new__(cls)
        self._source, self._whole = piece, whole
        self.kept_schema = whole.kept_schema
        self.shard = shard_text(index, count)
        self.first_row = self._num_rows = self.whole_num_rows = None
        return self

    @property
    def num_rows(self) -> int | None:
        """Rows of the shard."""
        return self._num_rows if self.first_row is not None else self._source.num_rows

    @property
    def skipped(self) -> Counter[str]:
        """Files that are no rows: the whole's in every shard, as the whole is listed. Where rows are counted by
        reading, what the shard's own files hold, and in the first shard what lies beside all files."""
        is_all = self._source is self._whole or parse_shard(self.shard)[0]
        return self._source.skipped if is_all else self._source.skipped + self._whole.skipped

    @property
    def whole_digest(self) -> str:
        """The whole source's `digest`."""
        return self._whole.digest

    @property
    def whole_keys_digest(self) -> str:
        """The whole source's `keys_digest`."""
        return self._whole.keys_digest

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over the whole source and which piece of it this is."""
        return self._of_piece(self.whole_digest)

    @property
    def keys_digest(self) -> str:
        """The same over the ids alone."""
        return self._of_piece(self.whole_keys_digest)

    def _of_piece(self, digest: str) -> str:
        return hashlib.sha256(json.dumps([digest, self.shard]).encode()).hexdigest()

    def read(self, start: int) -> Iterator[EncodedImage]:
        """Yield the shard's rows from its row `start` on."""
        if self.first_row is None:
            return self._source.read(start)
        assert self._num_rows is not None
        images = self._source.read(self.first_row + start)
        return self._numbered(islice(images, max(0, self._num_rows - start)))

    def read_rows(self, rows: Sequence[int]) -> Iterator[EncodedImage]:
        """Yield these of them."""
        if self.first_row is None:
            return self._source.read_rows(rows)
        return self._numbered(self._source.read_rows([self.first_row + row for row in rows]))

    def pieces(self, rows: range, size: int, first_row: int = 0) -> Iterator[Piece]:
        """See `Divisible`."""
        assert isinstance(self._source, Divisible)
        return self._source.pieces(rows, size, first_row - (self.first_row or 0))

    def uncounted(self) -> list[CountPiece]:
        """See `Countable`: of the shard's own files."""
        return self._source.uncounted() if isinstance(self._source, Countable) else []

    def counted(self, counts: Sequence[Counted]) -> None:
        """See `Countable`."""
        if isinstance(self._source, Countable):
            self._source.counted(counts)

    def _numbered(self, images: Iterable[EncodedImage]) -> Iterator[EncodedImage]:
        for image in images:
            yield replace(image, row=image.row - (self.first_row or 0))

    def close(self) -> None:
        """Close the whole source."""
        self._source.close()
        if self._whole is not self._source:
            self._whole.close()


def shard_entries(source: Source) -> dict[str, Any]:
    """What the fingerprint of a run over `source` says of shards: ``shard`` and ``whole``, or nothing where it is none.

    ``whole`` has what the fingerprint of the run over the whole source has: digests and number of rows.
    """
    if not isinstance(source, ShardSource):
        return {}
    whole = {
        "source_sha256": source.whole_digest,
        "keys_sha256": source.whole_keys_digest,
        "num_rows": source.whole_num_rows,
    }
    return {"shard": source.shard, "whole": whole}


def split_files(sizes: Sequence[int], index: int, count: int) -> slice:
    """Which files are shard `index` of `count`: contiguous pieces of about equal bytes, each file in exactly one, and
    no piece without a file. `sizes` are all files' bytes, in order.

    Raises:
        InputError: there are fewer files than shards.
    """
    assert 0 <= index < count
    _check_count(len(sizes), "files, which are not cut", index, count)
    ends = list(accumulate(sizes, initial=0))  # ends[k]: bytes of the first k files
    bounds = [0]
    for number in range(1, count):
        wanted = ends[-1] * number  # times count, so that no fraction is rounded
        at = bisect_left(ends, wanted, key=lambda end: end * count)
        if at and wanted - ends[at - 1] * count <= ends[at] * count - wanted:
            at -= 1
        bounds.append(min(max(at, bounds[-1] + 1), len(sizes) - (count - number)))
    bounds.append(len(sizes))
    return slice(bounds[index], bounds[index + 1])


def _check_count(num_pieces: int, what: str, index: int, count: int) -> None:
    if num_pieces < count:
        msg = (
            f"shard {shard_text(index, count)}: the inputs are {num_pieces} {what}, and some of {count} shards would "
            f"be empty: cut them into {max(1, num_pieces)} or fewer"
        )
        raise InputError(msg)
