"""What the headers of a run's rows tell: formats, sizes, tokens, duplicates, failures, and the packs to be made."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from vlmembed.decode import Header, read_header, read_header_of_head
from vlmembed.errors import ImageError
from vlmembed.forecast.histogram import Spread
from vlmembed.packer import PackingStats, choose
from vlmembed.schema import HASH_BYTES
from vlmembed.sources.glance import GlancedImage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa

    from vlmembed.batch import PackCost
    from vlmembed.dedup import HashIndex
    from vlmembed.layout import ResizeRule
    from vlmembed.planning import Plan
    from vlmembed.schema import VectorColumn
    from vlmembed.types import EncodedImage

NUM_EXAMPLES = 3
"""Failed rows that are named, of each code."""

SAMPLE_PACKS = 64
"""Packs that a sample is made to fill, so that the last one, which is not full, does not count for much."""

CACHED_SIZES = 4096

SIZE_COLUMNS_BYTES = 16
"""Width, height and grid: four int32 a row."""


class Sized(NamedTuple):
    """All that the packer must know of an image."""

    row: int
    grid_hw: tuple[int, int]


@dataclass(slots=True)
class Trouble:
    """Rows that fail with one code: how many, and the ids and messages of the first."""

    num_rows: int = 0
    examples: list[tuple[str, str]] = field(default_factory=list)


@dataclass(slots=True)
class OutputVolume:
    """What rows with vectors hold, before any compression: `num_merged` tokens that are stored, where they are."""

    num_rows: int = 0
    num_merged: int = 0
    id_bytes: int = 0
    kept_bytes: int = 0

    def add(self, key: str, columns: pa.RecordBatch | None, num_merged: int) -> None:
        """Take in one row."""
        self.num_rows += 1
        self.num_merged += num_merged
        self.id_bytes += len(key.encode())
        self.kept_bytes += 0 if columns is None else columns.nbytes

    def num_bytes(self, vectors: Sequence[VectorColumn]) -> int:
        """Of the output with these columns of vectors."""
        num_vectors = self.num_merged if vectors[0].per_token else self.num_rows
        own = HASH_BYTES + SIZE_COLUMNS_BYTES
        per_vector = sum(column.bytes_per_vector for column in vectors)
        return num_vectors * per_vector + self.num_rows * own + self.id_bytes + self.kept_bytes


def look(content: bytes, num_bytes: int, *, max_source_pixels: int) -> Header | ImageError | None:
    """What a file of `num_bytes` is by its first bytes: its header, or why it will fail; None where they do not suffice
    to tell."""
    try:
        if len(content) < num_bytes:
            return read_header_of_head(content, max_source_pixels=max_source_pixels)
        return read_header(content, max_source_pixels=max_source_pixels)
    except ImageError as error:
        return error


class Survey:
    """Counts, sizes and packs of the rows that were looked at; what it holds does not grow with their number.

    With an `index`, contents are hashed, and whole files are needed. Without, every row counts as distinct.

    Attributes:
        num_rows: looked at. num_bytes: of their files.
        formats: rows by Pillow's name of their format, where it could be told.
        troubles: rows that fail, by code.
        num_duplicates: rows with vectors whose bytes an earlier row has.
        widths, heights, pixels: of the pictures, upright. tokens: that attention sees of those that are encoded; prefix
            tokens included.
        packing: the packs that a run would make. num_encoded: of the rows looked at, what they hold.
        work: operations of the tower over all images. decode_pixels: of what will be decoded, by format.
        volume: what the output will hold.
        file_bytes: part of `num_bytes` that lies in files and URLs of its own.
    """

    def __init__(self, plan: Plan, cost: PackCost, index: HashIndex | None) -> None:
        config = plan.config
        assert config.max_tokens_per_batch is not None
        assert config.rows_per_part is not None
        self._rule: ResizeRule = plan.rule
        self._max_source_pixels = config.max_source_pixels
        self._rows_per_part = config.rows_per_part
        self._alone = config.deterministic
        self._dedup = config.dedup
        self._cost = cost
        self._index = index
        self._grid = lru_cache(maxsize=CACHED_SIZES)(self._grid_of)
        self.num_rows = self.num_bytes = self.file_bytes = self.num_duplicates = self.num_encoded = 0
        self.formats: Counter[str] = Counter()
        self.troubles: dict[str, Trouble] = {}
        self.widths, self.heights, self.pixels, self.tokens = Spread(), Spread(), Spread(), Spread()
        self.packing = PackingStats(config.max_tokens_per_batch)
        self.work = 0.0
        self.decode_pixels: Counter[str] = Counter()
        self.volume = OutputVolume()

    def take(self, images: Iterable[EncodedImage]) -> None:
        """Look at rows in their order, and pack them as a run would, part by part."""
        for _ in choose(self._sized(images), self._rule.layout, self.packing, alone=self._alone):
            pass

    def take_sample(self, images: Iterable[EncodedImage], num_rows: int) -> None:
        """Look at rows that stand for `num_rows`. They are packed as if they came again and again: a few alone would
        fill no pack."""
        sized = [each for each in self._sized(images) if each is not None]
        if not sized:
            return
        total = round(len(sized) * num_rows / self.num_rows)
        some = math.ceil(SAMPLE_PACKS * self.packing.max_tokens_per_batch / self.tokens.summary(1.0).mean)
        part = max(1, round(self._rows_per_part * len(sized) / self.num_rows))

        def repeated() -> Iterator[Sized | None]:
            for number in range(min(total, max(len(sized), some))):
                if number and number % part == 0:
                    yield None
                yield sized[number % len(sized)]

        for _ in choose(repeated(), self._rule.layout, self.packing, alone=self._alone):
            pass

    @property
    def num_packs(self) -> float:
        """Packs for the rows that were looked at; no whole number where they stand for others."""
        return self.packing.num_packs * self.num_encoded / self.packing.num_images if self.num_encoded else 0.0

    def _sized(self, images: Iterable[EncodedImage]) -> Iterator[Sized | None]:
        for image in images:
            if self.num_rows and self.num_rows % self._rows_per_part == 0:
                yield None
            self.num_rows += 1
            if (sized := self._take(image)) is not None:
                yield sized

    def _take(self, image: EncodedImage) -> Sized | None:
        """Count a row; what is left of it for the packer, if it will be encoded."""
        content = image.content
        if isinstance(content, ImageError):
            self._fail(image.key, content)
            return None
        if isinstance(image, GlancedImage):
            num_bytes, seen = image.num_bytes, image.seen
            self.file_bytes += num_bytes
        else:
            num_bytes = len(content)
            seen = look(content, num_bytes, max_source_pixels=self._max_source_pixels)
        self.num_bytes += num_bytes
        is_first = self._is_first(image.row, content)
        if isinstance(seen, ImageError):
            self._fail(image.key, seen)
            return None
        assert isinstance(seen, Header)
        self.formats[seen.format] += 1
        try:
            grid_hw = self._grid(seen.size_hw)
        except ImageError as error:
            self._fail(image.key, error)
            return None
        return self._pass(image, seen, grid_hw, is_first=is_first)

    def _is_first(self, row: int, content: bytes) -> bool:
        return self._index is None or self._index.first_row(hashlib.sha256(content).digest(), row) == row

    def _pass(self, image: EncodedImage, header: Header, grid_hw: tuple[int, int], *, is_first: bool) -> Sized | None:
        """Count a row that will have vectors."""
        height, width = header.size_hw
        layout = self._rule.layout
        num_tokens = layout.num_tokens(grid_hw)
        for spread, number in (
            (self.widths, width),
            (self.heights, height),
            (self.pixels, width * height),
        ):
            spread.add(number)
        self.volume.add(image.key, image.columns, layout.num_merged(grid_hw))
        self.num_duplicates += not is_first
        if is_first or self._dedup != "bytes":
            self.decode_pixels[header.format] += width * height
        if not is_first and self._dedup != "none":
            return None
        self.num_encoded += 1
        self.tokens.add(num_tokens)
        self.work += self._cost.per_token * num_tokens + self._cost.per_pair * num_tokens**2
        return Sized(image.row, grid_hw)

    def _grid_of(self, size_hw: tuple[int, int]) -> tuple[int, int]:
        height, width = self._rule.fit(size_hw).canvas_hw
        patch = self._rule.layout.patch_size
        return height // patch, width // patch

    def _fail(self, key: str, error: ImageError) -> None:
        trouble = self.troubles.setdefault(error.code.value, Trouble())
        trouble.num_rows += 1
        if len(trouble.examples) < NUM_EXAMPLES:
            trouble.examples.append((key, str(error)))
