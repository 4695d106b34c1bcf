"""From rows to packs: hashed, decoded and packed, but for duplicates and known embeddings. What becomes of a row on the
way is told at once."""

from __future__ import annotations

import logging
from itertools import chain
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from vlmembed.chunks import by_part, in_chunks
from vlmembed.decoders import decode_in_order
from vlmembed.dedup import dedup, ref_of
from vlmembed.packer import PackingStats, pack
from vlmembed.types import (
    Embedded,
    EmbeddingBatch,
    EncodedImage,
    EndOfInput,
    Failure,
    ImageRef,
    PackedBatch,
    PatchedImage,
    UniqueImage,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from vlmembed.config import EncodeConfig
    from vlmembed.decoders import DecodePool
    from vlmembed.dedup import Index
    from vlmembed.layout import TowerLayout
    from vlmembed.patcher import Patched
    from vlmembed.progress import StageClock

Image = TypeVar("Image", EncodedImage, UniqueImage)
Event: TypeAlias = ImageRef | Failure | Embedded | EmbeddingBatch | EndOfInput

logger = logging.getLogger(__name__)

MAX_DECODE_BYTES = 256 * 2**20
"""Encoded bytes that may wait for or be in decoding."""


class Finder(Protocol):
    """Knows embeddings that need not be computed: `vlmembed.known.Known`."""

    def find_all(self, images: Sequence[tuple[bytes, int]]) -> dict[int, Embedded]:
        """Of content hashes and their rows, the embeddings that are there, by row."""
        ...


class Feed:
    """The stages before the encoder, in the thread that takes the packs; only decoding has threads of its own.

    `tell` gets what the writer must know, in an order that it can use; `moved` is called whenever something is done.

    Attributes:
        packing: what the packer did.
        num_found: embeddings that were there already.
        num_malformed_exif: images whose EXIF block was ignored.
    """

    def __init__(
        self,
        config: EncodeConfig,
        *,
        index: Index | None,
        known: Finder,
        decoders: DecodePool,
        layout: TowerLayout,
        clock: StageClock,
        tell: Callable[[Sequence[Event]], None],
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        assert config.max_tokens_per_batch is not None
        assert config.rows_per_part is not None
        assert config.workers is not None
        self._config = config
        self._max_in_decoding = 4 * config.workers
        self._rows_per_part = config.rows_per_part
        self._index = index
        self._known = known
        self._decoders = decoders
        self._layout = layout
        self._clock = clock
        self._tell = tell
        self._moved = moved
        self.packing = PackingStats(config.max_tokens_per_batch)
        self.num_found = 0
        self.num_malformed_exif = 0

    def packs(self, rows: Iterator[EncodedImage]) -> Iterator[PackedBatch]:
        """The packs of these rows, which ascend without a gap."""
        chunks = self._clock.iterate("read", in_chunks(rows, self._rows_per_part))
        images = self._clock.iterate("wait", self._images(chunks))
        return self._clock.iterate("pack", pack(images, self._layout, self.packing, alone=self._config.deterministic))

    def _images(self, chunks: Iterator[list[EncodedImage]]) -> Iterator[PatchedImage | None]:
        """Unique images ready to be packed. None ends a part, and nothing is in flight across it: so rows wait in the
        writer for at most the part being decoded and those being encoded."""
        stage = self._dedup_decoded if self._config.dedup == "pixels" else self._dedup_encoded
        for chunks_of_part in by_part(chunks, self._rows_per_part):
            yield from stage(chunks_of_part)
            yield None

    def _dedup_encoded(self, chunks: Iterator[list[EncodedImage]]) -> Iterator[PatchedImage]:
        """Hash the bytes, decode what is new."""
        for _, patched in self._decoded(self._unique(chunks)):
            if isinstance(patched.result, Failure):
                self._tell([patched.result])
            else:
                yield patched.result

    def _unique(self, chunks: Iterator[list[EncodedImage]]) -> Iterator[UniqueImage]:
        """The images that must be decoded: neither duplicates nor found."""
        for chunk in chunks:
            with self._clock.measure("dedup"):
                pairs = list(dedup(chunk, self._index))
            self._tell([ref for ref, _ in pairs] + [work for _, work in pairs if isinstance(work, Failure)])
            unique = [work for _, work in pairs if isinstance(work, UniqueImage)]
            found = self._find([(image.content_hash, image.row) for image in unique])
            for image in unique:
                if image.row not in found:
                    yield image
            del chunk, pairs, unique  # their bytes, while the next chunk is waited for

    def _dedup_decoded(self, chunks: Iterator[list[EncodedImage]]) -> Iterator[PatchedImage]:
        """Decode everything, hash the pixels."""
        for image, patched in self._decoded(chain.from_iterable(chunks)):
            with self._clock.measure("dedup"):
                ref = ref_of(image, patched.pixel_hash, self._index)
            self._tell([ref])
            if ref.first_row != ref.row:
                continue
            if isinstance(patched.result, Failure):
                self._tell([patched.result])
            elif patched.pixel_hash is None or not self._find([(patched.pixel_hash, ref.row)]):
                yield patched.result

    def _find(self, images: Sequence[tuple[bytes, int]]) -> dict[int, Embedded]:
        """Those whose embeddings are there already; these are then on their way to the writer."""
        with self._clock.measure("find"):
            found = self._known.find_all(images)
        if found:
            self.num_found += len(found)
            self._tell(list(found.values()))
        return found

    def _decoded(self, images: Iterable[Image]) -> Iterator[tuple[Image, Patched]]:
        """Each image with what the decoders make of it, in order, within their bounds."""
        results = decode_in_order(self._decoders, images, max_items=self._max_in_decoding, max_bytes=MAX_DECODE_BYTES)
        for image, patched in results:
            self._moved()
            self._clock.add("decode", patched.seconds)
            if patched.exif_problem:
                self.num_malformed_exif += 1
                logger.warning("row %d (%s): malformed EXIF ignored (%s)", image.row, image.key, patched.exif_problem)
            yield image, patched
