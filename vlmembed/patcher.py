"""An encoded picture to patches: what a decoding thread or process does with each row."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vlmembed.decode import decode
from vlmembed.errors import FailureCode, ImageError
from vlmembed.preprocess import preprocess
from vlmembed.types import Failure

if TYPE_CHECKING:
    from vlmembed.layout import ResizeRule
    from vlmembed.types import PatchedImage

PROTOCOL = 5
"""Of pickles of what is here: it does not copy arrays once more."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Patched:
    """What became of one picture.

    Attributes:
        result: its patches, or why there are none.
        pixel_hash: 32 bytes, where the run wants it and the picture could be decoded.
        exif_problem: why its EXIF block was ignored, if it was.
        seconds: the time that it took, waiting left out.
    """

    result: PatchedImage | Failure
    pixel_hash: bytes | None = None
    exif_problem: str = ""
    seconds: float = 0.0


class Patch(Protocol):
    """Makes patches of encoded pictures. Can be pickled."""

    @property
    def max_source_pixels(self) -> int:
        """The largest picture that is decoded, in pixels."""

    def __call__(self, row: int, content: bytes | ImageError) -> Patched:
        """What becomes of a row's picture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patcher:
    """Decodes and preprocesses by `rule`; hashes the decoded pixels where `hash_pixels` says so. With `fast_decode`,
    which does not go with that, JPEGs are decoded at a reduced scale where they are much larger than `rule` wants."""

    rule: ResizeRule
    max_source_pixels: int
    hash_pixels: bool
    fast_decode: bool = False

    def __call__(self, row: int, content: bytes | ImageError) -> Patched:
        """A picture that cannot be decoded is a result too; what is raised is a bug."""
        if isinstance(content, ImageError):
            return Patched(result=Failure.from_error(row, "read", content))
        began = time.perf_counter()
        stage, pixel_hash, exif_problem = "decode", None, ""
        result: PatchedImage | Failure
        try:
            fit = self.rule.fit if self.fast_decode else None
            decoded = decode(content, max_source_pixels=self.max_source_pixels, fit=fit)
            exif_problem = decoded.exif_problem
            if self.hash_pixels:
                pixel_hash = decoded.pixel_hash()
            stage = "preprocess"
            result = preprocess(decoded.rgb, row, self.rule, decoded.draft)
        except ImageError as error:
            result = Failure.from_error(row, stage, error)
        except MemoryError:
            result = out_of_memory(row, stage)
        seconds = time.perf_counter() - began
        return Patched(result=result, pixel_hash=pixel_hash, exif_problem=exif_problem, seconds=seconds)


def out_of_memory(row: int, stage: str) -> Failure:
    """The failure of a row whose pixels found no room."""
    code = FailureCode.OUT_OF_MEMORY
    return Failure(row=row, stage=stage, code=code, message="no memory for the image's pixels")


def too_late(row: int, seconds: float) -> Patched:
    """What becomes of a row whose picture was given up after so many seconds."""
    message = f"decoding did not end within {seconds:g} s: --timeout can give it longer"
    failure = Failure(row=row, stage="decode", code=FailureCode.TIMEOUT, message=message)
    return Patched(result=failure, seconds=seconds)
