"""What stands for the encoder of a plan whose towers are on other machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vlmembed.types import EmbeddingBatch, Failure, PackedBatch


class Elsewhere:
    """Encoders that are neither in this process nor in its children: whoever has them gives them packs."""

    def stream(self, batches: Iterable[PackedBatch | None]) -> Iterator[EmbeddingBatch | Failure | None]:
        """Not from here."""
        del batches
        msg = "the towers are elsewhere"
        raise AssertionError(msg)

    def close(self) -> None:
        """Whoever has them closes them."""
