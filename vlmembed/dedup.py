"""Finds, for every row, the first row with the same content.

The hash is SHA-256, whole: 256 bits, never cut. The index lives on disk, so memory does not grow with the rows.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Protocol

from vlmembed.database import open_scratch
from vlmembed.errors import ImageError
from vlmembed.parts import storing
from vlmembed.types import Failure, ImageRef, UniqueImage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import Self

    from vlmembed.types import EncodedImage


class Index(Protocol):
    """Remembers which row showed a content first."""

    def first_row(self, content_hash: bytes, row: int) -> int:
        """The first row with this hash; `row` itself, which is then remembered, where there was none."""
        ...


class HashIndex:
    """On-disk map from a content hash to the first row that showed it.

    It is a scratch file: a resumed run builds it again from the committed parts.
    Used by one thread at a time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with storing(path):
            self._database = open_scratch(
                path, "CREATE TABLE seen (hash BLOB PRIMARY KEY, first_row INTEGER) WITHOUT ROWID"
            )

    def first_row(self, content_hash: bytes, row: int) -> int:
        """The first row with this hash; `row` itself, which is then remembered, where there was none.

        Raises:
            StorageError: the disk is full, say.
        """
        with storing(self._path):
            cursor = self._database.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (content_hash, row))
        if cursor.rowcount:
            return row
        found = self._database.execute("SELECT first_row FROM seen WHERE hash = ?", (content_hash,)).fetchone()
        return int(found[0])

    def close(self) -> None:
        """Drop the scratch file."""
        self._database.close()
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ref_of(image: EncodedImage, content_hash: bytes | None, index: Index | None) -> ImageRef:
    """The writer's view of a row. Without a hash or an index the row stands for itself."""
    first_row = image.row
    if content_hash is not None and index is not None:
        first_row = index.first_row(content_hash, image.row)
    return ImageRef(
        row=image.row,
        key=image.key,
        content_hash=content_hash,
        first_row=first_row,
        columns=image.columns,
    )


def dedup(
    images: Iterable[EncodedImage], index: Index | None
) -> Iterator[tuple[ImageRef, UniqueImage | Failure | None]]:
    """Pair every row's `ImageRef` with what is left to do for it.

    That is a `UniqueImage` to decode, a `Failure` where its bytes could not be read, or None for a duplicate. Without
    an index every readable row is unique; its hash is taken all the same.
    """
    for image in images:
        if isinstance(image.content, ImageError):
            yield ref_of(image, None, None), Failure.from_error(image.row, "read", image.content)
            continue
        content_hash = hashlib.sha256(image.content).digest()
        ref = ref_of(image, content_hash, index)
        if ref.first_row != ref.row:
            yield ref, None
            continue
        yield ref, UniqueImage(row=image.row, key=image.key, content_hash=content_hash, content=image.content)
