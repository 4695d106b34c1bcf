"""Where images come from: one module per kind of input, all behind `Source`."""

from __future__ import annotations

import glob
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from vlmembed.errors import ConfigError, InputError
from vlmembed.shards import parse_shard
from vlmembed.sources.chained import ChainedSource
from vlmembed.sources.folder import FolderSource, Walk, escape_name, identity_of, is_parquet, key_of
from vlmembed.sources.parquet import ParquetSource
from vlmembed.sources.readahead import ReadAhead
from vlmembed.sources.shard import ShardSource

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from vlmembed.config import EncodeConfig
    from vlmembed.sources.base import Source
    from vlmembed.types import EncodedImage

__all__ = ["open_source"]


class Listing:
    """What is read, in the order of the inputs; neighbouring inputs of one kind share an entry."""

    def __init__(self, reader: ReadAhead) -> None:
        self.reader = reader
        self.entries: list[FolderSource | list[tuple[Path, str]]] = []

    def add_picture(self, path: str, key: str) -> None:
        """Append a picture file."""
        if not (self.entries and isinstance(self.entries[-1], FolderSource)):
            self.entries.append(FolderSource(self.reader))
        last = self.entries[-1]
        assert isinstance(last, FolderSource)
        last.add(path, key)

    def add_parquet(self, path: str, key: str) -> None:
        """Append a Parquet file."""
        if not (self.entries and isinstance(self.entries[-1], list)):
            self.entries.append([])
        last = self.entries[-1]
        assert isinstance(last, list)
        last.append((Path(path), key))

    def close(self) -> None:
        """Drop what was listed."""
        for entry in self.entries:
            if isinstance(entry, FolderSource):
                entry.close()


def open_source(config: EncodeConfig, own_output: Collection[Path] = ()) -> Source:
    """List the inputs of a run. `own_output` are paths that are never input.

    Raises:
        InputError: an input does not exist, two overlap, or there is nothing to read.
        ConfigError: column settings without a Parquet input.
    """
    reader = ReadAhead(timeout_seconds=config.timeout, max_source_pixels=config.max_source_pixels)
    listing = Listing(reader)
    try:
        return _assemble(config, listing, _list_inputs(config, own_output, listing))
    except BaseException:
        listing.close()
        raise


def _list_inputs(config: EncodeConfig, own_output: Collection[Path], listing: Listing) -> Counter[str]:
    """Fill `listing`; returns what was skipped, by kind."""
    excluded = {identity for path in own_output if (identity := identity_of(path))}
    walk = Walk(recursive=config.recursive, excluded=excluded)
    typed = [os.fspath(name) for name in config.inputs]
    inputs = [name for given in typed for name in _expand(given, walk)]
    _check_overlap(inputs)
    for name in inputs:
        if identity_of(name) in excluded:
            msg = f"{name!r} is input and output of the same run: choose another output"
            raise InputError(msg)
        prefix = "" if inputs == typed and len(inputs) == 1 else name.rstrip("/")
        if Path(name).is_dir():
            _list_folder(listing, walk, name, prefix)
            continue
        key = escape_name(prefix or os.path.basename(name))  # noqa: PTH119  as typed, undecodable or not
        if is_parquet(Path(name)):
            listing.add_parquet(name, key)
        else:
            listing.add_picture(name, key)
    return +walk.skipped


def _list_folder(listing: Listing, walk: Walk, folder: str, prefix: str) -> None:
    """Add a folder's pictures to `listing`, or, where it has none, its Parquet files."""
    walk.parquet_files.clear()
    has_pictures = False
    for path in walk.pictures(folder):
        listing.add_picture(path, key_of(path, folder, prefix) + ("/" if path.endswith("/") else ""))
        has_pictures = True
    if has_pictures:
        walk.skipped[".parquet"] += len(walk.parquet_files)
    else:
        for path in sorted(walk.parquet_files):
            listing.add_parquet(path, key_of(path, folder, prefix))


def _assemble(config: EncodeConfig, listing: Listing, skipped: Counter[str]) -> Source:
    if not listing.entries:
        found = ", ".join(f"{count} {kind}" for kind, count in skipped.most_common()) or "nothing at all"
        given = ", ".join(map(str, config.inputs))
        msg = f"no pictures in {given} (found and skipped: {found}): name a folder that has some"
        raise InputError(msg)
    for entry in listing.entries:
        if isinstance(entry, FolderSource):
            entry.seal()
    for setting in ("image_column", "id_column", "keep_columns"):
        if getattr(config, setting) and not all(isinstance(entry, list) for entry in listing.entries):
            msg = f"--{setting.replace('_', '-')} is for Parquet inputs only; give pictures in a run of their own"
            raise ConfigError(msg)
    sources: list[Source] = [
        ParquetSource(
            entry,
            reader=listing.reader,
            image_column=config.image_column,
            id_column=config.id_column,
            keep_columns=config.keep_columns,
        )
        if isinstance(entry, list)
        else entry
        for entry in listing.entries
    ]
    source = sources[0] if len(sources) == 1 else ChainedSource(sources)
    if config.shard is not None:
        source = ShardSource(source, *parse_shard(config.shard), limit=config.limit)
    if source.num_rows == 0:
        msg = f"{', '.join(map(str, config.inputs))}: the Parquet files have no rows"
        raise InputError(msg)
    sources[0].skipped.update(skipped)
    return source


def _expand(name: str, walk: Walk) -> list[str]:
    """An input as typed; a glob becomes its matches, by name, told and counted as in a folder.

    A match inside a folder that matches too is left to that folder; of several ways to one file, one is taken.
    """
    if os.path.lexists(name):
        return [name]
    if not glob.has_magic(name):
        msg = f"{name!r} does not exist"
        raise InputError(msg)
    # The shortest way to a file comes first: links can make many.
    matches = sorted(glob.glob(name, recursive=True), key=lambda match: (match.count("/"), match))  # noqa: PTH207
    if not matches:
        msg = f"no file matches {name!r}"
        raise InputError(msg)
    folders = {os.path.realpath(match) for match in matches if Path(match).is_dir()}
    walk.parquet_files.clear()
    found: dict[str, str] = {}  # by where it really lies: a link to another match is that match
    for match in matches:
        real = os.path.realpath(match)
        if real in found:
            walk.skipped["matched twice"] += 1
        elif folders & set(map(str, Path(real).parents)):
            continue
        elif Path(match).is_dir() or walk.is_picture(match):
            found[real] = match
    return sorted([*found.values(), *walk.parquet_files])


def _check_overlap(inputs: Sequence[str]) -> None:
    """No file may be read twice, and no id come twice, because two inputs cover it.

    Judged by where the inputs really lie, and by what they are called: a link inside one input may be another input.
    """
    for resolve in (os.path.realpath, os.path.abspath):
        seen: dict[str, str] = {}
        for name in inputs:
            path = resolve(name)
            if path in seen:
                msg = f"inputs {seen[path]!r} and {name!r} are the same: name it once"
                raise InputError(msg)
            seen[path] = name
        for path, name in seen.items():
            for parent in Path(path).parents:
                if str(parent) in seen:
                    msg = f"input {name!r} lies inside input {seen[str(parent)]!r}: name the outer one only"
                    raise InputError(msg)
