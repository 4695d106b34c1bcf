"""A short run over some of the rows: what reading, decoding and encoding cost on this machine.

They work at the same time, as in a run, since on a CPU they share the cores. What is measured is taken per unit of work
(operations of the tower, pixels decoded, bytes read), so that rows of other sizes can be told from it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vlmembed.calibration import MAX_PACK_TOKENS, calibration_batch
from vlmembed.decode import read_header
from vlmembed.decoders import decode_in_order
from vlmembed.errors import StoppedError
from vlmembed.feed import MAX_DECODE_BYTES
from vlmembed.packer import PackingStats, pack
from vlmembed.parallel import Channel
from vlmembed.pipeline import JOIN_SECONDS
from vlmembed.stages import decoders_of
from vlmembed.types import EmbeddingBatch, Failure, ImageRef

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vlmembed.batch import PackCost
    from vlmembed.decoders import DecodePool
    from vlmembed.planning import Plan
    from vlmembed.types import Embedded, EncodedImage, PackedBatch, PatchedImage

MIN_PACKS = 2
"""Packs that are timed, however long they take."""

SHARE_TOGETHER = 0.8
"""Of the time, in which rows are read. Then what is decoded is encoded alone, until the time is over, or for a pack."""

MAX_STRETCH = 6
"""No row is read later than so many times the seconds that were given, though `MIN_PACKS` be not full."""

MAX_WAITING_PACKS = 1
LOOKAHEAD_PACKS = 1
"""Less than a run has, so that decoding and encoding keep step from the first pack on."""

MAX_KEPT_ROWS = 2048
MAX_KEPT_BYTES = 32 * 2**20
"""Results that are kept, to see what they take in a file."""


@dataclass(slots=True)
class Timings:
    """What was measured.

    Attributes:
        num_images: encoded. seconds: from the first row to the last result; warming up is left out.
        encode_seconds: in which the encoder was at work, while others decoded. work: operations of the tower in them.
        alone_encode_seconds, alone_work: the same of the last packs, when all was decoded.
        decode_seconds: of all decoding threads together, by format. decode_pixels: what they decoded in it.
        alone_decode_seconds, alone_decode_pixels: of them, those before the first pack was there to be encoded.
        num_read, read_bytes: rows and bytes that came. read_seconds: waiting for them.
        reader_seconds: processor time of the thread that hashes and packs.
    """

    num_images: int = 0
    seconds: float = 0.0
    encode_seconds: float = 0.0
    work: float = 0.0
    alone_encode_seconds: float = 0.0
    alone_work: float = 0.0
    alone_decode_seconds: float = 0.0
    alone_decode_pixels: int = 0
    decode_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    decode_pixels: Counter[str] = field(default_factory=Counter)
    num_read: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    reader_seconds: float = 0.0


class Trial:
    """Runs rows through the stages for some seconds, or to their end.

    Attributes:
        timings: what was measured.
        kept: some of the rows that were encoded, with their results.
    """

    def __init__(self, plan: Plan, cost: PackCost, seconds: float) -> None:
        config = plan.config
        assert config.max_tokens_per_batch is not None
        assert config.workers is not None
        self._plan = plan
        self._cost = cost
        self._seconds = seconds
        self._budget = config.max_tokens_per_batch
        self._num_workers = config.workers
        self._stop = threading.Event()
        self._packs: Channel[PackedBatch] = Channel(MAX_WAITING_PACKS, self._stop)
        self._refs: dict[int, ImageRef] = {}  # of rows that wait for their result
        self._errors: list[BaseException] = []
        self._is_decoded = threading.Event()
        self._num_packs_taken = self._num_tokens_ready = self._kept_bytes = 0
        self._idle_seconds = self._began_at = 0.0
        self.timings = Timings()
        self.kept: list[tuple[ImageRef, Embedded]] = []

    def run(self, rows: Iterable[EncodedImage]) -> None:
        """Take rows, in any order, until the time is used up; whatever goes wrong in a stage is raised."""
        warming = calibration_batch(self._plan.rule, min(self._budget, MAX_PACK_TOKENS))
        for _ in self._plan.encoder.stream([warming]):
            pass
        with decoders_of(self._plan.config, self._plan.rule) as decoders:
            reader = threading.Thread(target=self._read_and_pack, args=(rows, decoders), name="trial", daemon=True)
            self._began_at = time.perf_counter()
            reader.start()
            try:
                with suppress(StoppedError):
                    self._encode()
            finally:
                self._stop.set()
                decoders.close()  # nobody waits for what is under way
                reader.join(JOIN_SECONDS)
        if self._errors:
            raise self._errors[0]

    def _encode(self) -> None:
        num_packs = num_alone = 0
        busy_before, is_alone = 0.0, False
        for result in self._plan.encoder.stream(self._waited_for()):
            if result is None:  # nothing came for a while
                self._packs.check()
                continue
            num_packs, num_alone = num_packs + 1, num_alone + is_alone
            self.timings.seconds = time.perf_counter() - self._began_at
            busy = self.timings.seconds - self._idle_seconds
            if isinstance(result, EmbeddingBatch):
                self._take(result, busy - busy_before, is_alone=is_alone)
            busy_before, is_alone = busy, self._is_decoded.is_set()
            if num_packs >= MIN_PACKS and num_alone and self.timings.seconds >= self._seconds:
                return

    def _waited_for(self) -> Iterator[PackedBatch | None]:
        packs = self._packs.polled()
        while True:
            began = time.perf_counter()
            try:
                batch = next(packs)
            except StopIteration:
                return
            finally:
                self._idle_seconds += time.perf_counter() - began
            self._num_packs_taken += batch is not None
            yield batch

    def _take(self, batch: EmbeddingBatch, seconds: float, *, is_alone: bool) -> None:
        """Note a result, and how long the encoder was at it."""
        layout = self._plan.rule.layout
        work = self._cost.of(np.array([layout.num_tokens((h, w)) for h, w in batch.grid_hw.tolist()], dtype=np.int64))
        self.timings.num_images += len(batch.rows)
        if is_alone:
            self.timings.alone_encode_seconds += seconds
            self.timings.alone_work += work
        else:
            self.timings.encode_seconds += seconds
            self.timings.work += work
        for index, row in enumerate(batch.rows.tolist()):
            ref = self._refs.pop(row)
            if len(self.kept) < MAX_KEPT_ROWS and self._kept_bytes < MAX_KEPT_BYTES:
                embedded = batch.of_image(index)
                self.kept.append((ref, embedded))
                self._kept_bytes += sum(values.nbytes for values in embedded.vectors.values())

    def _read_and_pack(self, rows: Iterable[EncodedImage], decoders: DecodePool) -> None:
        try:
            images = self._patched(self._read(rows), decoders)
            alone, layout = self._plan.config.deterministic, self._plan.rule.layout
            stats = PackingStats(self._budget)
            for batch in pack(images, layout, stats, alone=alone, lookahead_packs=LOOKAHEAD_PACKS):
                self._packs.put(batch)
            self._packs.close()
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001  handed to the main thread, which raises it
            self._errors.append(error)
            self._stop.set()
        finally:
            self.timings.reader_seconds = time.thread_time()

    def _read(self, rows: Iterable[EncodedImage]) -> Iterator[EncodedImage]:
        iterator = iter(rows)
        while not self._has_enough():
            began = time.perf_counter()
            image = next(iterator, None)
            self.timings.read_seconds += time.perf_counter() - began
            if image is None:
                return
            self.timings.num_read += 1
            if isinstance(image.content, bytes):
                self.timings.read_bytes += len(image.content)
                yield image

    def _has_enough(self) -> bool:
        seconds = time.perf_counter() - self._began_at
        is_full = self._num_tokens_ready >= MIN_PACKS * self._budget
        return seconds >= self._seconds * (SHARE_TOGETHER if is_full else MAX_STRETCH)

    def _patched(self, images: Iterator[EncodedImage], decoders: DecodePool) -> Iterator[PatchedImage]:
        """Images ready to be packed."""
        results = decode_in_order(decoders, images, max_items=4 * self._num_workers, max_bytes=MAX_DECODE_BYTES)
        for image, patched in results:
            result = patched.result
            if isinstance(result, Failure):
                continue
            assert isinstance(image.content, bytes)
            header = read_header(image.content, max_source_pixels=self._plan.config.max_source_pixels)
            num_pixels = result.size_hw[0] * result.size_hw[1]
            self.timings.decode_seconds[header.format] += patched.seconds
            self.timings.decode_pixels[header.format] += num_pixels
            if not self._num_packs_taken:
                self.timings.alone_decode_seconds += patched.seconds
                self.timings.alone_decode_pixels += num_pixels
            content_hash = hashlib.sha256(image.content).digest()
            self._refs[image.row] = ImageRef(
                row=image.row, key=image.key, content_hash=content_hash, first_row=image.row, columns=image.columns
            )
            self._num_tokens_ready += self._plan.rule.layout.num_tokens(result.grid_hw)
            yield result
        self._is_decoded.set()
