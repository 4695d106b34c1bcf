"""One machine: the stages on three threads and a decoding pool, joined by bounded channels.

    reader thread: source -> dedup -> (pool: decode, preprocess) -> pack      main thread: encode     writer thread

No channel is waited for without a look at the stop event, so an error or Ctrl-C anywhere ends the run; a decode that is
under way is waited for, for a minute at most.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby, islice
from typing import TYPE_CHECKING, TypeVar

from vlmembed.decode import decode
from vlmembed.dedup import dedup, ref_of
from vlmembed.errors import FailureCode, ImageError, StoppedError
from vlmembed.packer import PackingStats, pack
from vlmembed.parallel import Channel, ordered_map
from vlmembed.preprocess import preprocess
from vlmembed.types import EmbeddingBatch, EncodedImage, Failure, ImageRef, PackedBatch, PatchedImage, UniqueImage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vlmembed.config import EncodeConfig
    from vlmembed.dedup import HashIndex
    from vlmembed.encoder import Encoder
    from vlmembed.layout import ResizeRule
    from vlmembed.progress import ProgressBar, StageClock
    from vlmembed.sources.base import Source
    from vlmembed.workers import WorkerPool
    from vlmembed.writer import Writer

Image = TypeVar("Image", EncodedImage, UniqueImage)

logger = logging.getLogger(__name__)

MAX_PACKS_WAITING = 4
MAX_EVENTS_WAITING = 4096
MAX_DECODE_BYTES = 256 * 2**20
"""Encoded bytes that may wait for or be in decoding."""

JOIN_SECONDS = 60.0
"""How long the end of a stopped run waits for a thread: the longest single decode, generously."""


class Pipeline:
    """The stages of one run, wired together.

    Attributes:
        packing: what the packer did.
        num_encoded, num_tokens: images and tokens encoded by this process.
        num_rows_read: rows read, those of an earlier start included.
        num_malformed_exif: images whose EXIF block was ignored.
        clock: where the time went.
    """

    def __init__(
        self,
        config: EncodeConfig,
        *,
        source: Source,
        index: HashIndex | None,
        rule: ResizeRule,
        encoder: Encoder | WorkerPool,
        writer: Writer,
        clock: StageClock,
    ) -> None:
        assert config.max_tokens_per_batch is not None
        assert config.rows_per_part is not None
        assert config.workers is not None
        self._config = config
        self._num_workers = config.workers
        self._rows_per_part = config.rows_per_part
        self._source = source
        self._index = index
        self._rule = rule
        self._encoder = encoder
        self._writer = writer
        self.clock = clock
        self._stop = threading.Event()
        self._packs: Channel[PackedBatch] = Channel(MAX_PACKS_WAITING, self._stop)
        self._events: Channel[ImageRef | Failure | EmbeddingBatch] = Channel(MAX_EVENTS_WAITING, self._stop)
        self._errors: list[BaseException] = []
        self.packing = PackingStats(config.max_tokens_per_batch)
        self.num_encoded = 0
        self.num_tokens = 0
        self.num_rows_read = 0
        self.num_malformed_exif = 0
        self._exif_lock = threading.Lock()

    @property
    def stage_threads(self) -> dict[str, int]:
        """How many threads work in each stage."""
        return {"read": 1, "dedup": 1, "decode": self._num_workers, "pack": 1, "encode": 1, "write": 1}

    def run(self, start: int, num_rows: int, bar: ProgressBar) -> None:
        """Take rows `start` to `num_rows` through all stages; returns when the last one is committed.

        Raises:
            VlmembedError: whatever ended the run. KeyboardInterrupt passes through, after the threads have ended.
        """
        self.num_rows_read = start
        threads = [
            threading.Thread(target=self._guard, args=(self._read, start, num_rows), name="reader", daemon=True),
            threading.Thread(target=self._guard, args=(self._write,), name="writer", daemon=True),
        ]
        with self._joined(threads):
            self._encode(bar)
            self._events.close()

    @contextmanager
    def _joined(self, threads: list[threading.Thread]) -> Iterator[None]:
        """Start the threads; end them with the block, at once if it fails; then raise what went wrong first."""
        try:
            for thread in threads:
                thread.start()
            yield
            for thread in threads:
                while thread.is_alive():  # a bounded wait each, so that Ctrl-C gets through
                    thread.join(1.0)
        except StoppedError:
            pass  # another thread failed and is in `_errors`
        finally:
            self._stop.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join(JOIN_SECONDS)
        if self._errors:
            raise self._errors[0]

    def _guard(self, stage: Callable[..., None], *arguments: int) -> None:
        try:
            stage(*arguments)
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001  handed to the main thread, which raises it
            self._errors.append(error)
            self._stop.set()

    def _read(self, start: int, num_rows: int) -> None:
        rows = self.clock.iterate("read", islice(self._source.read(start), num_rows - start))
        with ThreadPoolExecutor(self._num_workers, thread_name_prefix="decode") as pool:
            images = self.clock.iterate("wait", self._images(self._counted(rows), pool))
            for batch in self.clock.iterate("pack", pack(images, self._rule.layout, self.packing)):
                self._packs.put(batch)
        self._packs.close()

    def _counted(self, rows: Iterator[EncodedImage]) -> Iterator[EncodedImage]:
        for image in rows:
            self.num_rows_read += 1
            yield image

    def _images(self, rows: Iterator[EncodedImage], pool: ThreadPoolExecutor) -> Iterator[PatchedImage | None]:
        """Unique images ready to be packed. None ends a part, and nothing is in flight across it: so rows wait in the
        writer for at most the part being decoded and those being encoded."""
        stage = self._dedup_decoded if self._config.dedup == "pixels" else self._dedup_encoded
        for _, rows_of_part in groupby(rows, key=lambda image: image.row // self._rows_per_part):
            yield from stage(rows_of_part, pool)
            yield None

    def _dedup_encoded(self, rows: Iterator[EncodedImage], pool: ThreadPoolExecutor) -> Iterator[PatchedImage]:
        """Hash the bytes, decode what is new."""

        def unique() -> Iterator[UniqueImage]:
            for ref, work in self.clock.iterate("dedup", dedup(rows, self._index)):
                self._events.put(ref)
                if isinstance(work, Failure):
                    self._events.put(work)
                elif work is not None:
                    yield work

        for _, _, result in self._in_pool(unique(), pool):
            if isinstance(result, Failure):
                self._events.put(result)
            else:
                yield result

    def _dedup_decoded(self, rows: Iterator[EncodedImage], pool: ThreadPoolExecutor) -> Iterator[PatchedImage]:
        """Decode everything, hash the pixels."""
        for image, pixel_hash, result in self._in_pool(rows, pool):
            with self.clock.measure("dedup"):
                ref = ref_of(image, pixel_hash, self._index)
            self._events.put(ref)
            if ref.first_row != ref.row:
                continue
            if isinstance(result, Failure):
                self._events.put(result)
            else:
                yield result

    def _in_pool(
        self, images: Iterable[Image], pool: ThreadPoolExecutor
    ) -> Iterator[tuple[Image, bytes | None, PatchedImage | Failure]]:
        """Each image with what `_patch` makes of it, in order, within the bounds of `pool`."""
        return ordered_map(
            lambda image: pool.submit(lambda: (image, *self._patch(image.row, image.content))),
            images,
            max_items=4 * self._num_workers,
            max_bytes=MAX_DECODE_BYTES,
            num_bytes=lambda image: len(image.content) if isinstance(image.content, bytes) else 0,
        )

    def _patch(self, row: int, content: bytes | ImageError) -> tuple[bytes | None, PatchedImage | Failure]:
        """Decode and preprocess one image; its pixel hash too where the dedup wants one."""
        if isinstance(content, ImageError):
            return None, Failure.from_error(row, "read", content)
        stage, pixel_hash = "decode", None
        with self.clock.measure("decode"):
            try:
                decoded = decode(content, max_source_pixels=self._config.max_source_pixels)
                if decoded.exif_problem:
                    with self._exif_lock:
                        self.num_malformed_exif += 1
                    logger.warning("row %d: malformed EXIF ignored (%s)", row, decoded.exif_problem)
                if self._config.dedup == "pixels":
                    pixel_hash = decoded.pixel_hash()
                stage = "preprocess"
                return pixel_hash, preprocess(decoded.rgb, row, self._rule)
            except ImageError as error:
                return pixel_hash, Failure.from_error(row, stage, error)
            except MemoryError:
                code = FailureCode.OUT_OF_MEMORY
                return pixel_hash, Failure(row=row, stage=stage, code=code, message="no memory for the image's pixels")

    def _encode(self, bar: ProgressBar) -> None:
        began = time.perf_counter()
        results = self._encoder.stream(self.clock.iterate("idle", self._packs.polled()))
        for result in self.clock.iterate("encode", results):
            if result is None:  # nothing came for a while
                self._packs.check()
                continue
            self._events.put(result)
            if isinstance(result, Failure):
                continue
            self.num_encoded += len(result.rows)
            self.num_tokens += sum(self._rule.layout.num_tokens((h, w)) for h, w in result.grid_hw.tolist())
            seconds = time.perf_counter() - began
            bar.note(
                num_encoded=self.num_encoded,
                num_tokens=self.num_tokens,
                seconds=seconds,
                slowest=self.clock.busiest(self.stage_threads, seconds)[0],
            )

    def _write(self) -> None:
        for item in self._events:
            with self.clock.measure("write"):
                self._writer.add(item)
