"""Where images come from: one module per kind of input, all behind `Source`."""

from __future__ import annotations

from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from vlmembed.errors import ConfigError, InputError
from vlmembed.remote.remotes import Remotes
from vlmembed.shards import parse_shard
from vlmembed.sources.arrow import HFDatasetSource
from vlmembed.sources.chained import ChainedSource
from vlmembed.sources.lance import LanceSource
from vlmembed.sources.listing import Listing
from vlmembed.sources.lists import ListSource
from vlmembed.sources.locations import public_url
from vlmembed.sources.parquet import ParquetSource
from vlmembed.sources.readahead import ReadAhead
from vlmembed.sources.shard import ShardSource, split_files
from vlmembed.sources.tar import TarSource
from vlmembed.sources.zip import ZipSource

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from vlmembed.config import EncodeConfig
    from vlmembed.sources.base import Source
    from vlmembed.sources.glance import Glance
    from vlmembed.sources.listing import Entry
    from vlmembed.sources.pieces import Counted, CountPiece, Piece
    from vlmembed.types import EncodedImage

__all__ = ["count_piece", "open_piece", "open_source"]

WITH_COLUMNS = ("parquet", "list", "huggingface", "lance")
SETTINGS = {"image_column": WITH_COLUMNS, "id_column": WITH_COLUMNS, "keep_columns": (*WITH_COLUMNS, "tar")}
"""The kinds of inputs that a setting is for."""


def open_source(
    config: EncodeConfig, own_output: Collection[Path] = (), *, glance: Glance | None = None
) -> ChainedSource | ShardSource:
    """List the inputs of a run. `own_output` are paths that are never input. While `glance` is on, files and URLs are
    read no further than it asks for.

    Raises:
        InputError: an input does not exist, two overlap, or there is nothing to read.
        ConfigError: column settings without inputs that have columns.
    """
    with ExitStack() as stack:
        reader, remotes = stack.enter_context(_reading(config, glance))
        listing = Listing(config, reader, remotes, own_output)
        stack.callback(listing.close)
        listing.fill()
        _check(config, listing)
        opener = _Opener(config, reader)
        sources = opener.open_all(listing.entries, stack)
        sources[0].skipped.update(listing.skipped)
        whole = ChainedSource(sources, stack.pop_all())
    if config.shard is None:
        return whole
    try:
        return opener.shard(whole, listing.entries)
    except BaseException:
        whole.close()
        raise


@contextmanager
def open_piece(config: EncodeConfig, piece: Piece) -> Iterator[Iterator[EncodedImage]]:
    """Read a piece of what `open_source` has listed, in any process: the rows, numbered as in the run."""
    with _reading(config) as (reader, _), closing(piece.open(reader)) as images:
        yield images


def count_piece(config: EncodeConfig, piece: CountPiece) -> Counted:
    """Count the rows of a file that `uncounted` of a source has named, in any process.

    Raises:
        StorageError: its server fails.
    """
    with _reading(config) as (reader, _):
        return piece.count(reader)


@contextmanager
def _reading(config: EncodeConfig, glance: Glance | None = None) -> Iterator[tuple[ReadAhead, Remotes]]:
    """What files and URLs are read with."""
    with Remotes(
        timeout_seconds=config.timeout, per_host=config.downloads_per_host, allow_local=config.allow_local_urls
    ) as remotes:
        reader = ReadAhead(
            timeout_seconds=config.timeout,
            max_source_pixels=config.max_source_pixels,
            remotes=remotes,
            downloads=config.downloads,
            glance=glance,
        )
        yield reader, remotes


def _check(config: EncodeConfig, listing: Listing) -> None:
    given = _given(config)
    if not listing.entries:
        found = ", ".join(f"{count} {kind}" for kind, count in listing.skipped.most_common()) or "nothing at all"
        msg = f"no pictures in {given} (found and skipped: {found}): name a folder that has some"
        raise InputError(msg)
    kinds = [entry.kind for entry in listing.entries]
    for setting, allowed in SETTINGS.items():
        if getattr(config, setting) and not all(kind in allowed for kind in kinds):
            remedy = "give the others in a run of their own" if len(set(kinds)) > 1 else "leave it out"
            msg = (
                f"--{setting.replace('_', '-')} is for inputs with columns only (Parquet, CSV, JSONL, Hugging Face and "
                f"Lance datasets{', tars' if 'tar' in allowed else ''}): {remedy}"
            )
            raise ConfigError(msg)
    if len(kinds) > 1 and (config.id_column or config.keep_columns):
        several = " and ".join(dict.fromkeys(kinds))
        msg = f"--id-column and --keep-columns are for inputs of one kind; these are {several}"
        raise ConfigError(msg)
    if len(kinds) > 1 and "list" in kinds:
        msg = "a list's ids are the paths in it, which other inputs may have too: give lists in a run of their own"
        raise InputError(msg)


class _Opener:
    """Makes sources of what was listed."""

    def __init__(self, config: EncodeConfig, reader: ReadAhead) -> None:
        self._config = config
        self._reader = reader

    def open_all(self, entries: Sequence[Entry], stack: ExitStack) -> list[Source]:
        """One source per entry; each is closed with `stack`."""
        sources = []
        for entry in entries:
            source = entry.pictures or self._open(entry.kind, entry.files)
            stack.callback(source.close)
            sources.append(source)
        if all(source.num_rows == 0 for source in sources):
            msg = f"{_given(self._config)}: there are no rows in it"
            raise InputError(msg)
        return sources

    def _open(self, kind: str, files: Sequence[tuple[str, str]]) -> Source:
        config, reader = self._config, self._reader
        remotes = reader.remotes
        assert remotes is not None
        if kind == "tar":
            return TarSource(
                files, remotes=remotes, keep_columns=config.keep_columns, max_file_bytes=reader.max_file_bytes
            )
        if kind == "zip":
            return ZipSource(files, remotes=remotes, max_file_bytes=reader.max_file_bytes)
        if kind == "list":
            return self._open_table(ListSource, files)
        if kind == "huggingface":
            return self._open_table(HFDatasetSource, files)
        return self._open_table(LanceSource if kind == "lance" else ParquetSource, files)

    def _open_table(self, source: Callable[..., Source], files: Sequence[tuple[str, str]]) -> Source:
        config = self._config
        return source(
            files,
            reader=self._reader,
            image_column=config.image_column,
            id_column=config.id_column,
            keep_columns=config.keep_columns,
        )

    def shard(self, whole: ChainedSource, entries: Sequence[Entry]) -> ShardSource:
        """The piece of the whole that the run is over; it closes the whole too.

        Raises:
            InputError: there are fewer rows, or files, than pieces.
            ConfigError: the pieces cannot be cut before the rows are counted.
        """
        assert self._config.shard is not None
        index, count = parse_shard(self._config.shard)
        if whole.num_rows is not None:
            return ShardSource(whole, index, count, limit=self._config.limit)
        if len(entries) > 1 or self._config.limit is not None:
            what = "without --limit" if self._config.limit is not None else "in a run of their own"
            msg = f"--shard of inputs whose rows are counted by reading (tars) is by whole files: give them {what}"
            raise ConfigError(msg)
        files, all_tars = entries[0].files, whole.sources[0]
        assert isinstance(all_tars, TarSource)
        piece = split_files(all_tars.files_bytes, index, count)
        return ShardSource.of_files(self._open("tar", files[piece]), whole, index, count)


def _given(config: EncodeConfig) -> str:
    return ", ".join(public_url(str(name)) for name in config.inputs)
