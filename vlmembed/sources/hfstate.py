"""What a folder that `Dataset.save_to_disk` has written says of itself: its splits, and the files of each."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from vlmembed.errors import FailureCode, ImageError, InputError
from vlmembed.remote.urls import is_url, without_options
from vlmembed.sources.locations import shown
from vlmembed.sources.readahead import read_content

if TYPE_CHECKING:
    from vlmembed.remote.remotes import Remotes

STATE, SPLITS = "state.json", "dataset_dict.json"
MAX_STATE_BYTES = 16 * 2**20


def is_hf_dataset(folder: str, remotes: Remotes | None = None) -> list[str] | None:
    """The splits of a folder that `save_to_disk` has written, by name; of a dataset without splits, one that is "".

    None: the folder, which may be a URL, is none of these.

    Raises:
        InputError: it is one, and cannot be read.
    """
    found = _read_json(inside(folder, SPLITS), remotes)
    if found is not None and isinstance(names := found.get("splits"), list):
        names = [str(name) for name in names]
        if not _are_names(names):
            msg = (
                f"{shown(folder)} names splits that are no folders in it, or one of them twice: save the dataset again"
            )
            raise InputError(msg)
        return names
    found = _read_json(inside(folder, STATE), remotes)
    return [""] if found is not None and "_data_files" in found else None


def inside(folder: str, name: str) -> str:
    """A path or URL below a folder's."""
    if not is_url(folder):
        return os.path.join(folder, name)  # noqa: PTH118  may not be text
    place = without_options(folder)
    return f"{place.rstrip('/')}/{name}{folder.removeprefix(place)}"


def _read_json(path: str, remotes: Remotes | None) -> dict[str, Any] | None:
    """What a file holds; None where there is none, or no JSON in it.

    Raises:
        InputError: it is there, and cannot be read.
    """
    if is_url(path):
        content = remotes.read(path, MAX_STATE_BYTES) if remotes else ImageError(FailureCode.MISSING, "")
    else:
        content = read_content(path, MAX_STATE_BYTES)
    if isinstance(content, ImageError) and content.code is not FailureCode.MISSING:
        msg = f"{shown(path)} cannot be read: {content}"
        raise InputError(msg)
    try:
        found = json.loads(content) if isinstance(content, bytes) else None
    except (ValueError, RecursionError):  # too deep for the parser
        return None
    return found if isinstance(found, dict) else None


def data_files(folder: str, remotes: Remotes | None) -> list[str]:
    """The names of the files that hold a split's rows, in order.

    Raises:
        InputError: the folder does not say so, or has rows that indices choose from.
    """
    path = inside(folder, STATE)
    state = _read_json(path, remotes)
    try:
        names = [str(file["filename"]) for file in (state or {})["_data_files"]]
    except (KeyError, TypeError):
        state, names = None, []
    if state is None or not _are_names(names):
        msg = f"{shown(path)} does not say which files beside it hold the rows: save the dataset again"
        raise InputError(msg)
    if state.get("_indices_data_files"):
        msg = f"{shown(folder)} holds a selection of its rows by indices: call flatten_indices() and save it again"
        raise InputError(msg)
    return names


def _are_names(names: list[str]) -> bool:
    """Whether these are names of different entries of a folder."""
    return len(set(names)) == len(names) and all(map(_is_name, names))


def _is_name(name: str) -> bool:
    is_entry = name == os.path.basename(name)  # noqa: PTH119  a path's last part may be ".."
    return is_entry and name not in ("", ".", "..") and "\0" not in name
