"""What the inputs of a run hold: pictures, and files that hold many, in the order in which they are named."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from vlmembed.errors import InputError
from vlmembed.formats import picture_extensions
from vlmembed.output import errors_of
from vlmembed.remote.urls import is_url, shown_url, without_options
from vlmembed.sources.folder import FolderSource, Walk, identity_of, key_of
from vlmembed.sources.hfstate import inside, is_hf_dataset
from vlmembed.sources.ids import escape_name
from vlmembed.sources.kinds import HEAD_BYTES, is_lance_dataset, kind_of_file, kind_of_name
from vlmembed.sources.lists import is_list
from vlmembed.sources.locations import place_of, public_url, shown
from vlmembed.sources.names import check_overlap, expand_braces, fixed_part, has_pattern, url_pattern

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Collection, Iterator, Sequence

    from vlmembed.config import EncodeConfig
    from vlmembed.remote.remotes import RemoteInfo, Remotes
    from vlmembed.sources.readahead import ReadAhead

Kind: TypeAlias = Literal["pictures", "parquet", "tar", "zip", "list", "huggingface", "lance"]


@dataclass(slots=True)
class Entry:
    """Neighbouring inputs of one kind: (path or URL, id) of each; `pictures` are listed in a source at once."""

    kind: Kind
    files: list[tuple[str, str]] = field(default_factory=list)
    pictures: FolderSource | None = None


class Listing:
    """Lists the inputs of a run. `own_output` are paths that are never input.

    Attributes:
        entries: what is to be read. skipped: files that are no rows, by kind.
    """

    def __init__(self, config: EncodeConfig, reader: ReadAhead, remotes: Remotes, own_output: Collection[Path]) -> None:
        self._reader = reader
        self._remotes = remotes
        self._output = os.fspath(config.output)
        self._excluded = {identity for path in own_output if (identity := identity_of(path))}
        self._walk = Walk(recursive=config.recursive, excluded=self._excluded)
        self.entries: list[Entry] = []
        self._typed = [os.fspath(name) for name in config.inputs]

    @property
    def skipped(self) -> Counter[str]:
        """Files that are no rows, by kind."""
        return +self._walk.skipped

    def fill(self) -> None:
        """List everything.

        Raises:
            InputError: an input does not exist, or two overlap.
        """
        inputs = [name for given in self._typed for name in self._expand(given)]
        check_overlap(inputs)
        for name in inputs:
            prefix = "" if inputs == self._typed and len(inputs) == 1 else public_url(name).rstrip("/")
            if is_url(name):
                self._add_url(name, prefix)
            elif name == "-":
                self._add("list", name, "-")
            else:
                self._add_local(name, prefix if is_list(name) or not prefix else name.rstrip("/"))
        for entry in self.entries:
            if entry.pictures is not None:
                entry.pictures.seal()

    def close(self) -> None:
        """Drop what was listed."""
        for entry in self.entries:
            if entry.pictures is not None:
                entry.pictures.close()

    def _add(self, kind: Kind, path: str, key: str) -> None:
        self._entry(kind).files.append((path, key))

    def _entry(self, kind: Kind) -> Entry:
        if not (self.entries and self.entries[-1].kind == kind):
            pictures = FolderSource(self._reader) if kind == "pictures" else None
            self.entries.append(Entry(kind=kind, pictures=pictures))
        return self.entries[-1]

    def _add_picture(self, path: str, key: str, info: RemoteInfo | None = None) -> None:
        pictures = self._entry("pictures").pictures
        assert pictures is not None
        pictures.add(path, key, info)

    def _add_local(self, name: str, prefix: str) -> None:
        if identity_of(name) in self._excluded:
            msg = f"{name!r} is input and output of the same run: choose another output"
            raise InputError(msg)
        key = escape_name(prefix or os.path.basename(name.rstrip("/")))  # noqa: PTH119  as typed, undecodable or not
        if Path(name).is_dir():
            if is_lance_dataset(name):
                self._add("lance", name, key)
            elif (splits := is_hf_dataset(name)) is not None:
                self._add_splits(name, key, splits)
            else:
                self._add_folder(name, prefix)
        elif is_list(name):
            self._add("list", name, key)
        elif kind := kind_of_file(name):
            self._add(kind, name, key)
        else:
            self._add_picture(name, key)

    def _add_folder(self, folder: str, prefix: str) -> None:
        """A folder's pictures or, where it has none, its files that hold many."""
        self._walk.containers.clear()
        has_pictures = False
        for path in self._walk.pictures(folder):
            self._add_picture(path, key_of(path, folder, prefix) + ("/" if path.endswith("/") else ""))
            has_pictures = True
        found = sorted(self._walk.containers)
        if has_pictures:
            self._walk.skipped.update(os.path.splitext(path)[1].lower() for path in found)  # noqa: PTH122  see `Walk`
            return
        for path in found:
            if kind := kind_of_name(path):
                self._add(kind, path, key_of(path, folder, prefix))

    def _add_splits(self, folder: str, key: str, splits: Sequence[str] | None) -> None:
        """A Hugging Face dataset; one without splits has one called ""."""
        for split in splits or ():
            self._add("huggingface", inside(folder, split) if split else folder, f"{key}/{split}".rstrip("/"))

    def _add_url(self, url: str, prefix: str) -> None:
        place = place_of(url)
        key = escape_name(prefix or place.rstrip("/").rpartition("/")[2])
        if self._is_own(place.rstrip("/")):
            msg = f"{shown_url(url)} is input and output of the same run: choose another output"
            raise InputError(msg)
        if is_lance_dataset(place):
            self._add("lance", url, key)
            return
        if is_list(place):
            self._add("list", url, key)
            return
        try:
            info = self._remotes.info(url)
        except FileNotFoundError as error:
            msg = f"{shown_url(url)} does not exist"
            raise InputError(msg) from error
        except OSError as error:
            msg = f"{shown_url(url)} cannot be looked at ({error}): check the address and your access to it"
            raise InputError(msg) from error
        if info.is_folder:
            self._add_remote_folder(url, prefix)
        elif kind := kind_of_name(place) or self._kind_of_head(url):
            self._add(kind, url, key)
        else:
            self._add_picture(url, key, info)

    def _kind_of_head(self, url: str) -> Kind | None:
        """By the first bytes, where the name says nothing."""
        if os.path.splitext(place_of(url))[1].lower() in picture_extensions():  # noqa: PTH122  a URL
            return None
        try:
            with self._remotes.open(url) as file:
                return kind_of_file(url, file.read(HEAD_BYTES))
        except OSError as error:
            msg = f"{shown_url(url)} cannot be read ({error}): check the address and your access to it"
            raise InputError(msg) from error

    def _add_remote_folder(self, url: str, prefix: str) -> None:
        """As a folder on disk; what a file is goes by its name, since each look into one is a request."""
        place = without_options(url).rstrip("/") + "/"
        found = [info for info in self._walked(url) if not self._is_own(place_of(info.url))]
        names = {place_of(info.url).removeprefix(place) for info in found}
        if names & {"state.json", "dataset_dict.json"}:
            key = escape_name(prefix or place.rstrip("/").rpartition("/")[2])
            self._add_splits(url, key, is_hf_dataset(url, self._remotes))
            return
        containers, has_pictures = [], False
        for info in found:
            relative = place_of(info.url).removeprefix(place)
            key = escape_name(f"{prefix}/{relative}" if prefix else relative)
            extension = os.path.splitext(relative)[1].lower()  # noqa: PTH122  a URL
            if any(part.startswith(".") for part in relative.split("/")):
                self._walk.skipped["hidden"] += 1
            elif extension in picture_extensions():
                self._add_picture(info.url, key, info)
                has_pictures = True
            elif (kind := kind_of_name(relative)) and not relative.rpartition("/")[2].startswith("_"):
                containers.append((kind, info.url, key))
            else:
                self._walk.skipped[extension or "no extension"] += 1
        for kind, file, key in containers:
            if has_pictures:
                self._walk.skipped[os.path.splitext(key)[1].lower()] += 1  # noqa: PTH122  as above
            else:
                self._add(kind, file, key)

    def _walked(self, url: str) -> Iterator[RemoteInfo]:
        try:
            yield from self._remotes.walk(url, recursive=self._walk.recursive)
        except OSError as error:
            msg = f"{shown_url(url)} cannot be listed ({error}): check the address and your access to it"
            raise InputError(msg) from error

    def _is_own(self, place: str) -> bool:
        """Whether something remote is this run's output."""
        if not is_url(self._output):
            return False
        own = without_options(self._output).rstrip("/")
        beside = (own, f"{own}.partial", errors_of(own, is_folder=False))
        return any(place == name or place.startswith(f"{name}/") for name in beside)

    def _expand(self, given: str) -> list[str]:
        """An input as typed; a pattern becomes its matches."""
        if given == "-" or os.path.lexists(given):
            return [given]
        return [name for braced in expand_braces(given) for name in self._matches(braced)]

    def _matches(self, name: str) -> list[str]:
        """A glob's matches, by name, told and counted as in a folder.

        A match inside a folder that matches too is left to that folder; of several ways to one file, one is taken.
        """
        if is_url(name):
            return self._matching_urls(name) if has_pattern(name) else [name]
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
        self._walk.containers.clear()
        found: dict[str, str] = {}  # by where it really lies: a link to another match is that match
        for match in matches:
            real = os.path.realpath(match)
            if real in found:
                self._walk.skipped["matched twice"] += 1
            elif folders & set(map(str, Path(real).parents)):
                continue
            elif Path(match).is_dir() or (is_list(name) and is_list(match)) or self._walk.is_picture(match):
                found[real] = match
        return sorted([*found.values(), *self._walk.containers])

    def _matching_urls(self, pattern: str) -> list[str]:
        options = pattern.removeprefix(without_options(pattern))
        expression = url_pattern(pattern)
        found = [
            info.url
            for info in self._walked(fixed_part(without_options(pattern)) + options)
            if expression.fullmatch(place_of(info.url))
        ]
        if not found:
            msg = f"no file matches {shown(pattern)}"
            raise InputError(msg)
        return found
