"""JPEG 2000 codestreams: what OpenJPEG would keep of their tiles and code-blocks.

Code-blocks can be 4x4 pixels and tiles 1x1, and OpenJPEG makes room for all before it decodes one: a file of 7 kB and a
picture well within the limit ask for gigabytes.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmembed.errors import FailureCode, ImageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_CODE_BLOCK_BYTES = 425
_TILE_BYTES = 8500
_TILE_COMPONENT_BYTES = 1000
"""What OpenJPEG 2.5.4 takes for each, measured with 7 million code-blocks and with 65,535 tiles."""

_ALLOWED_BYTES = 2**26
_ALLOWED_BYTES_PER_SAMPLE = 4
"""As much as OpenJPEG takes for the samples themselves, and 64 MiB."""

_START = re.compile(rb"(?:\A|jp2c|jp2c.{8}|ic...{4})(?=\xff\x4f\xff\x51)", re.DOTALL)
"""Of a bare codestream, of one in a JP2's box, and of one in an ICNS's."""

_MAX_STEPS = 2**20
"""Marker segments looked at in one file: a picture in 65,535 tiles has some 300,000."""

_SIZ, _COD, _COC, _SOT, _SOD, _EOC = 0xFF51, 0xFF52, 0xFF53, 0xFF90, 0xFF93, 0xFFD9
_OTHERS = frozenset(b"\x50\x55\x57\x58\x59\x5c\x5d\x5e\x5f\x60\x61\x63\x64\x74\x75\x77\x78")
_KNOWN = frozenset({_SIZ, _COD, _COC, _SOT, *(0xFF00 + low for low in _OTHERS)})


@dataclass(slots=True)
class _Demand:
    """What the marker segments seen so far ask OpenJPEG to make room for."""

    width: int = 0
    height: int = 0
    num_components: int = 0
    num_tiles: int = 0
    samples_per_tile: int = 0
    code_blocks_per_tile: int = 0

    def add(self, marker: int, segment: bytes) -> None:
        """Raises struct.error or IndexError for a segment that is too short."""
        if marker == _SIZ:
            right, bottom, left, top, tile_w, tile_h, tile_left, tile_top, num_components = struct.unpack_from(
                ">8IH", segment, 2
            )
            self.width, self.height, self.num_components = max(right - left, 0), max(bottom - top, 0), num_components
            self.num_tiles = -(-(right - tile_left) // max(tile_w, 1)) * -(-(bottom - tile_top) // max(tile_h, 1))
            self.samples_per_tile = min(tile_w, self.width) * min(tile_h, self.height) * num_components
        elif marker in (_COD, _COC):
            wide = self.num_components > 256  # noqa: PLR2004  by the standard, two bytes tell the component then
            style_at, parameters_at = (0, 5) if marker == _COD else (1 + wide, 2 + wide)
            num_code_blocks = _num_code_blocks(self.samples_per_tile, segment[style_at], segment[parameters_at:])
            self.code_blocks_per_tile = max(self.code_blocks_per_tile, num_code_blocks)

    def check(self, max_source_pixels: int) -> None:
        """Raise an ImageError where it is too much."""
        num_pixels = self.width * self.height
        if num_pixels > max_source_pixels:
            msg = (
                f"{self.width}x{self.height} = {num_pixels} pixels, over the limit of {max_source_pixels}: "
                "raise --max-source-pixels to accept it"
            )
            raise ImageError(FailureCode.TOO_LARGE, msg)
        kept_bytes = self.code_blocks_per_tile * _CODE_BLOCK_BYTES
        kept_bytes += self.num_tiles * (_TILE_BYTES + self.num_components * _TILE_COMPONENT_BYTES)
        if kept_bytes > _ALLOWED_BYTES + num_pixels * self.num_components * _ALLOWED_BYTES_PER_SAMPLE:
            msg = (
                f"{self.num_tiles} JPEG 2000 tiles of up to {self.code_blocks_per_tile} code-blocks would take "
                f"{kept_bytes >> 20} MiB beside the {self.width}x{self.height} pixels: save it with larger ones"
            )
            raise ImageError(FailureCode.TOO_LARGE, msg)


def check_codestreams(content: bytes, max_source_pixels: int) -> None:
    """Refuse a JP2, bare codestream or ICNS that asks for much more memory than its pixels, or has too many of them.

    Raises:
        ImageError: ``too_large``.
    """
    steps = iter(range(_MAX_STEPS))
    for match in _START.finditer(content):
        demand = _Demand()
        try:
            for marker, segment in _segments(content, match.end() + 2, steps):
                demand.add(marker, segment)
        except (struct.error, IndexError):
            pass  # the decoder will say that it is cut off; what came before counts
        demand.check(max_source_pixels)


def _segments(content: bytes, position: int, steps: Iterator[int]) -> Iterator[tuple[int, bytes]]:
    """The marker segments of the main header and of every tile-part's, found as OpenJPEG finds them."""
    tile_part_end = 0
    for _ in steps:
        if position + 4 > len(content):
            return
        marker, length = struct.unpack_from(">HH", content, position)
        if marker == _EOC or (marker == _SOD and tile_part_end <= position):
            return
        if marker == _SOD:
            position = tile_part_end
        elif marker not in _KNOWN:
            position += 2
        else:
            segment = content[position + 4 : position + 2 + length]
            if marker == _SOT:
                tile_part_end = position + struct.unpack_from(">I", segment, 2)[0]
            yield marker, segment
            position += 2 + length
    msg = f"its JPEG 2000 codestreams have more than {_MAX_STEPS} marker segments: save it as another format"
    raise ImageError(FailureCode.TOO_LARGE, msg)


def _num_code_blocks(num_samples: int, style: int, parameters: bytes) -> int:
    """Code-blocks of a tile by the parameters of a COD or COC segment: levels, block sides, two styles, precincts."""
    num_levels = min(parameters[0], 32)
    precincts = parameters[5 : 6 + num_levels] if style & 1 else bytes([0xFF]) * (num_levels + 1)
    total = 0
    for level, precinct in enumerate(precincts):
        half = int(level > 0)  # a precinct's side in a band: bands beyond the lowest have half the resolution
        width = min((parameters[1] & 15) + 2, (precinct & 15) - half)
        height = min((parameters[2] & 15) + 2, (precinct >> 4) - half)
        samples = num_samples >> 2 * (num_levels - level)
        total += (samples - (samples >> 2 if half else 0)) >> max(width + height, 0)
    return total
