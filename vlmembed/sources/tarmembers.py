"""The members of a tar, header by header.

`tarfile` parses the headers. Its own iteration is not used: it takes a bad header in the middle for the end, and keeps
what it knows of every member.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmembed.errors import FailureCode, ImageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlmembed.sources.forward import ForwardFile

BLOCK_BYTES = tarfile.BLOCKSIZE

MAX_EXTRA_BYTES = 2**20
"""Of a header that holds a long name or other attributes."""

NO_END = "tar without an end mark"

_PAX_TYPES = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_LONG_TYPES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_FILE_TYPES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_KINDS = {
    tarfile.DIRTYPE: "folder",
    tarfile.LNKTYPE: "link",
    tarfile.SYMTYPE: "link",
}
_TYPES_WITHOUT_CONTENT = (*_KINDS, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A member of a tar.

    Attributes:
        name: bytes that are no UTF-8 as lone surrogates.
        kind: ``"file"``, or as what it is counted: ``"folder"``, ``"link"``, ``"special member"``, `NO_END`.
        begin, end: where its content lies in the tar, in bytes.
    """

    name: str
    kind: str
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Of its content."""
        return self.end - self.begin


def read_members(file: ForwardFile) -> Iterator[Member]:
    """Yield the members of a tar. The one who iterates may read a member's content before going on.

    A tar that ends with a member, without the blocks of zeros that mark an end, may be whole or not: a member of kind
    `NO_END` says so at last. Tars that were put one behind the other are read as one.

    Raises:
        ImageError: the tar is cut or damaged, and what follows cannot be found.
        READ_ERRORS: of `ForwardFile`.
    """
    headers = _Headers(file)
    while (member := headers.next()) is not None:
        yield member
        if not file.advance(member.end):
            raise ImageError(FailureCode.TRUNCATED, "the file ends within a member")
        file.advance(_padded(member.end))  # the last one may have no padding
    if not headers.has_ended:
        if not file.position:
            raise ImageError(FailureCode.TRUNCATED, "the file is empty")
        yield Member(name="", kind=NO_END, begin=file.position, end=file.position)


class _Headers:
    """Reads headers, which may take several blocks each."""

    def __init__(self, file: ForwardFile) -> None:
        self._file = file
        self.has_ended = False
        """Whether the last that came was a mark of an end."""

    def next(self) -> Member | None:
        """The member whose header comes next; None at the end."""
        long_name: bytes | None = None
        pax: dict[bytes, bytes] = {}
        while True:
            at = self._file.position
            block = self._file.read(BLOCK_BYTES)
            is_whole = not pax and long_name is None
            if len(block) < BLOCK_BYTES and (is_whole or block):
                if not any(block) and is_whole:
                    self.has_ended |= bool(block)
                    return None
                raise ImageError(FailureCode.TRUNCATED, "the file ends within a header")
            if not any(block):
                if not is_whole:
                    raise ImageError(FailureCode.TRUNCATED, "the file ends behind the header of a long name")
                self.has_ended = True
                continue
            self.has_ended = False
            header = _parse(block, at)
            if header.type in _LONG_TYPES:
                content = self._extra(header, at)
                if header.type == tarfile.GNUTYPE_LONGNAME:
                    long_name = content.partition(b"\0")[0]
            elif header.type in _PAX_TYPES:
                pax.update(_parse_pax(self._extra(header, at), at))
            elif header.type == tarfile.XGLTYPE:
                self._extra(header, at)
            else:
                return self._member(header, block, long_name, pax, at)

    def _extra(self, header: tarfile.TarInfo, at: int) -> bytes:
        """The content of a header that only says more about the next one."""
        if header.size > MAX_EXTRA_BYTES:
            msg = f"the extra header at byte {at:,} has {header.size:,} bytes, and may have {MAX_EXTRA_BYTES:,}"
            raise ImageError(FailureCode.UNREADABLE, msg)
        content = self._file.read(header.size)
        if len(content) < header.size:
            raise ImageError(FailureCode.TRUNCATED, "the file ends within a header")
        self._file.advance(_padded(self._file.position))
        return content

    def _member(
        self, header: tarfile.TarInfo, block: bytes, long_name: bytes | None, pax: dict[bytes, bytes], at: int
    ) -> Member:
        name, kind, num_bytes = header.name, _KINDS.get(header.type, "special member"), header.size
        if header.type in _FILE_TYPES:
            kind = "file"
        if long_name is not None:
            name = _decode(long_name)
        if b"path" in pax:
            name = _decode(pax[b"path"])
        if b"size" in pax:
            num_bytes = _pax_size(pax[b"size"], at)
        if any(key.startswith(b"GNU.sparse.") for key in pax):
            kind = "special member"
        if header.type == tarfile.GNUTYPE_SPARSE:
            self._pass_sparse_map(block)
        if header.type in _TYPES_WITHOUT_CONTENT:
            num_bytes = 0
        begin = self._file.position
        return Member(name=name, kind=kind, begin=begin, end=begin + num_bytes)

    def _pass_sparse_map(self, block: bytes) -> None:
        """Pass over the blocks that go on with the map of a sparse member; each says whether one more follows."""
        is_continued = block[482]
        while is_continued:
            block = self._file.read(BLOCK_BYTES)
            if len(block) < BLOCK_BYTES:
                raise ImageError(FailureCode.TRUNCATED, "the file ends within a header")
            is_continued = block[504]


def _padded(position: int) -> int:
    return -(-position // BLOCK_BYTES) * BLOCK_BYTES


def _decode(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _parse(block: bytes, at: int) -> tarfile.TarInfo:
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.TarError, ValueError) as error:
        raise ImageError(FailureCode.UNREADABLE, f"there is no header at byte {at:,} ({error})") from error
    if header.size < 0:
        raise ImageError(FailureCode.UNREADABLE, f"the header at byte {at:,} tells a size of {header.size} bytes")
    return header


def _parse_pax(content: bytes, at: int) -> dict[bytes, bytes]:
    """Records of a pax header: ``LENGTH KEY=VALUE`` and a newline each, LENGTH that of the whole record."""
    records: dict[bytes, bytes] = {}
    begin = 0
    while begin < len(content) and content[begin]:
        digits, space, _ = content[begin : begin + 21].partition(b" ")
        end = begin + int(digits) if space and digits.isdigit() else 0
        key, equals, value = content[begin + len(digits) + 1 : end].partition(b"=")
        if not begin < end <= len(content) or not equals or not value.endswith(b"\n"):
            msg = f"the extra header at byte {at:,} is damaged"
            raise ImageError(FailureCode.UNREADABLE, msg)
        if key in {b"path", b"size"} or key.startswith(b"GNU.sparse."):
            records[key] = value[:-1]
        begin = end
    return records


def _pax_size(value: bytes, at: int) -> int:
    if not value.isdigit() or len(value) > 20:  # noqa: PLR2004  2**64 has 20 digits
        raise ImageError(FailureCode.UNREADABLE, f"the header at byte {at:,} tells no size")
    return int(value)
