"""``i/n``: which of n equal pieces of the inputs a run is over."""

from __future__ import annotations

import re

from vlmembed.errors import ConfigError

_SHARD = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")


def parse_shard(text: str) -> tuple[int, int]:
    """Index (from 0) and count of ``"i/n"``.

    Raises:
        ConfigError: it is not written like that, or i is not below n.
    """
    found = _SHARD.fullmatch(text) if isinstance(text, str) else None
    index, count = (int(number) for number in found.groups()) if found else (0, 0)
    if index >= count:
        limit = f"; i can be 0 to {count - 1}" if count else ""
        msg = f"shard is {text!r}{limit}; it is i/n with i from 0 to n-1: 0/4, 1/4, 2/4 and 3/4 are the whole"
        raise ConfigError(msg)
    return index, count


def shard_text(index: int, count: int) -> str:
    """What `parse_shard` reads."""
    return f"{index}/{count}"
