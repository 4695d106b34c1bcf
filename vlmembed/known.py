"""Embeddings that a run need not compute: from the cache, and from earlier outputs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from vlmembed.cache import EmbeddingCache
from vlmembed.errors import ConfigError
from vlmembed.finished import FinishedOutput
from vlmembed.provenance import encoder_fingerprint
from vlmembed.remote.urls import is_url, shown_url
from vlmembed.reuse import EarlierOutputs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Self

    from vlmembed.config import EncodeConfig
    from vlmembed.schema import VectorColumn
    from vlmembed.types import Embedded

INDEX = "reuse.sqlite"
"""Scratch file in the partial folder: where in the earlier outputs a content hash is."""


class Known:
    """The cache and the earlier outputs of one run, as its config names them; scratch files go into `folder`."""

    def __init__(
        self,
        config: EncodeConfig,
        fingerprint: Mapping[str, Any],
        vectors: tuple[VectorColumn, ...],
        folder: Path,
        *,
        more: Sequence[EarlierOutputs] = (),
    ) -> None:
        """Open what there is, behind `more`.

        Raises:
            InputError: an earlier output cannot be read, or was made by another encoder.
            OutputError: the cache's folder cannot be written.
        """
        self._stack = ExitStack()
        self._cache: EmbeddingCache | None = None
        self._earlier = list(more)
        encoder = encoder_fingerprint(fingerprint)
        with ExitStack() as opened:
            if config.reuse:
                paths = [Path(name) for name in config.reuse]
                earlier = EarlierOutputs(paths, fingerprint=encoder, vectors=vectors, index=folder / INDEX)
                self._earlier.append(opened.enter_context(earlier))
            if config.cache is not None:
                cache = EmbeddingCache(
                    Path(config.cache), fingerprint=encoder, vectors=vectors, max_bytes=config.cache_max_bytes
                )
                self._cache = opened.enter_context(cache)
            self._stack = opened.pop_all()

    def find(self, content_hash: bytes, row: int) -> Embedded | None:
        """The embedding of a content, for a row."""
        for earlier in self._earlier:
            if (found := earlier.find(content_hash, row)) is not None:
                return found
        return self._cache.find(content_hash, row) if self._cache is not None else None

    def find_all(self, images: Sequence[tuple[bytes, int]]) -> dict[int, Embedded]:
        """Of content hashes and their rows, the embeddings that are there, by row."""
        found = ((row, self.find(content_hash, row)) for content_hash, row in images)
        return {row: image for row, image in found if image is not None}

    def keep(self, images: Sequence[tuple[bytes, Embedded]]) -> None:
        """Give what was computed, by content hash, to the cache."""
        if self._cache is not None and images:
            self._cache.put(images)

    def close(self) -> None:
        """Close the cache and the earlier outputs that were opened here."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_reuse(config: EncodeConfig) -> None:
    """What can be said of the earlier outputs before a model is loaded. Outputs of a run with ``--dedup pixels`` hold
    hashes of pixels, others of files.

    Raises:
        InputError: one cannot be read. ConfigError: nothing would ever be found in it.
    """
    dedup = config.dedup
    for name in config.reuse:
        if is_url(str(name)):
            msg = f"--reuse {shown_url(str(name))} is a URL; look-ups need a disk: download it, and name the copy"
            raise ConfigError(msg)
        path = Path(name)
        theirs = FinishedOutput.open(path).provenance.get("fingerprint", {}).get("dedup")
        if (theirs == "pixels") != (dedup == "pixels"):
            msg = f"--reuse {path} was made with --dedup {theirs}, whose hashes are others than --dedup {dedup}'s"
            raise ConfigError(msg)
