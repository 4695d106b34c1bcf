"""What is typed as an input: patterns become names, and no two names may cover one file."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from vlmembed.errors import InputError
from vlmembed.remote.urls import WEB_SCHEMES, is_url, scheme_of, without_options
from vlmembed.sources.locations import public_url, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MAX_BRACED = 1_000_000
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def expand_braces(name: str) -> Iterator[str]:
    """``{000..127}`` and ``{a,b}`` as a shell has them, leading zeros kept; other braces stay as they are.

    Raises:
        InputError: more names than a run could list.
    """
    for found in _BRACES.finditer(name):
        choices = _choices(found[1])
        if choices is not None:
            head, tail = name[: found.start()], name[found.end() :]
            for choice in choices:
                for rest in expand_braces(tail):
                    yield f"{head}{choice}{rest}"
            return
    yield name


def _choices(inner: str) -> Sequence[str] | None:
    if bounds := _RANGE.fullmatch(inner):
        first, last = int(bounds[1]), int(bounds[2])
        if abs(last - first) >= MAX_BRACED:
            msg = f"{{{inner}}} stands for {abs(last - first) + 1} names, and {MAX_BRACED} are the limit: use a list"
            raise InputError(msg)
        step = 1 if first <= last else -1
        width = len(bounds[1]) if bounds[1].startswith("0") else 0
        return [f"{number:0{width}}" for number in range(first, last + step, step)]
    return inner.split(",") if "," in inner else None


def url_pattern(pattern: str) -> re.Pattern[str]:
    """What URLs a pattern means: ``*`` stays within a folder's name, ``**/`` stands for any folders, ``[abc]`` and
    ``[!abc]`` for a character. A ``?`` begins a URL's options, so it is none."""
    pieces = re.split(r"(\*\*/|\*|\[!?[^\]]+\])", without_options(pattern))
    special = {"**/": "(?:.*/)?", "*": "[^/]*"}
    parts = []
    for number, piece in enumerate(pieces):
        if number % 2 == 0:
            parts.append(re.escape(piece))
        else:
            parts.append(special.get(piece) or f"[{'^' if piece[1] == '!' else ''}{piece[1:].lstrip('!')}")
    return re.compile("".join(parts), re.DOTALL)


def fixed_part(pattern: str) -> str:
    """The folder of a URL that holds all that a pattern can match."""
    head = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    return head[: head.rfind("/") + 1]


def has_pattern(url: str) -> bool:
    """Whether a URL is a pattern: of an object store, for a web server lists nothing. Behind a ``?`` come options, so
    that is none."""
    return scheme_of(url) not in WEB_SCHEMES and bool(re.search(r"[*\[]", without_options(url)))


def check_overlap(inputs: Sequence[str]) -> None:
    """No file may be read twice, and no id come twice, because two inputs cover it.

    Judged by where the inputs really lie, and by what they are called: a link inside one input may be another input.

    Raises:
        InputError: two do.
    """
    local = [name for name in inputs if not is_url(name) and name != "-"]
    _check(local, os.path.realpath)
    _check(local, os.path.abspath)
    _check([name for name in inputs if is_url(name) or name == "-"], lambda url: public_url(url).rstrip("/"))


def _check(inputs: Sequence[str], resolve: Callable[[str], str]) -> None:
    seen: dict[str, str] = {}
    for name in inputs:
        path = resolve(name)
        if path in seen:
            msg = f"inputs {shown(seen[path])} and {shown(name)} are the same: name it once"
            raise InputError(msg)
        seen[path] = name
    for path, name in seen.items():
        while "/" in path.rstrip("/"):
            path = path.rstrip("/").rpartition("/")[0] or "/"  # noqa: PLW2901  from folder to folder
            if path in seen:
                msg = f"input {shown(name)} lies inside input {shown(seen[path])}: name the outer one only"
                raise InputError(msg)
