"""Tars, told from other files."""

from __future__ import annotations

from urllib.parse import urlsplit

from vlmembed.formats import sniff_format
from vlmembed.remote.urls import is_url
from vlmembed.sources.forward import compression_of

TAR_HEAD_BYTES = 512
"""How many leading bytes `is_tar` wants."""

_USTAR_OFFSET = 257
_COMPRESSED_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tbz", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")
_OTHER_MAGIC = (b"PAR1", b"PK\x03\x04", b"PK\x05\x06")


def is_tar(name: str, head: bytes) -> bool:
    """Whether the file at a path or URL, which begins with `head` (of `TAR_HEAD_BYTES`), is a tar.

    The bytes tell, where they can; what a compressed file holds is told by its name.
    """
    if sniff_format(head) is not None or head.startswith(_OTHER_MAGIC):
        return False
    if head.startswith(b"ustar", _USTAR_OFFSET):
        return True
    name = (urlsplit(name).path if is_url(name) else name).lower()
    return name.endswith(".tar") or (name.endswith(_COMPRESSED_SUFFIXES) and (not head or bool(compression_of(head))))
