"""Who decodes: here threads of this process; `vlmembed.decode_processes` are processes of their own, which may crash or
hang and are replaced. Both bound the time that one picture may take."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from vlmembed.parallel import DeadlinePool, ordered_map
from vlmembed.patcher import too_late
from vlmembed.types import EncodedImage, UniqueImage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future
    from typing import Self

    from vlmembed.patcher import Patch, Patched
    from vlmembed.suspects import SuspectRows

Image: TypeAlias = EncodedImage | UniqueImage
T = TypeVar("T", EncodedImage, UniqueImage)


class DecodePool(Protocol):
    """Decodes several pictures at a time.

    Attributes:
        num_replaced: threads that were left behind, or processes that crashed or were killed.
    """

    @property
    def num_replaced(self) -> int: ...  # noqa: D102  see above

    def submit(self, image: Image) -> Future[Patched]:
        """Put a picture in the queue. What waits there when the pool is closed is cancelled.

        Raises:
            StoppedError: the pool is closed.
        """

    def oldest(self) -> tuple[Image, float] | None:
        """The picture that has been under way for longest, and for how many seconds."""

    def close(self) -> None:
        """End the threads or processes, by force where they hear nothing else."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def decode_in_order(
    decoders: DecodePool, images: Iterable[T], *, max_items: int, max_bytes: int
) -> Iterator[tuple[T, Patched]]:
    """Each image with what the decoders make of it, in order; at most so many images and bytes are under way."""
    waiting: deque[T] = deque()

    def submit(image: T) -> Future[Patched]:
        waiting.append(image)
        return decoders.submit(image)

    for patched in ordered_map(submit, images, max_items=max_items, max_bytes=max_bytes, num_bytes=_num_bytes):
        yield waiting.popleft(), patched


def _num_bytes(image: Image) -> int:
    return len(image.content) if isinstance(image.content, bytes) else 0


class ThreadDecoders:
    """Threads. One that hangs is left behind; a decoder that crashes takes the run along, and `suspects` say which row
    it was at."""

    def __init__(
        self, patcher: Patch, *, num_threads: int, timeout_seconds: float, suspects: SuspectRows | None = None
    ) -> None:
        self._suspects = suspects
        self._pool: DeadlinePool[Image, Patched] = DeadlinePool(
            lambda image: patcher(image.row, image.content),
            num_threads=num_threads,
            seconds=timeout_seconds,
            late=lambda image: too_late(image.row, timeout_seconds),
            name="decode",
            around=self._mark,
        )

    @property
    def num_replaced(self) -> int:
        """Threads that were left behind."""
        return self._pool.num_given_up

    def submit(self, image: Image) -> Future[Patched]:
        """As in `DecodePool`."""
        return self._pool.submit(image)

    def oldest(self) -> tuple[Image, float] | None:
        """As in `DecodePool`."""
        return self._pool.oldest()

    def close(self) -> None:
        """As in `DecodePool`."""
        self._pool.close()

    def _mark(self, image: Image) -> AbstractContextManager[None]:
        return nullcontext() if self._suspects is None else self._suspects.mark(image.row, image.key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
