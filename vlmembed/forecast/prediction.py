"""What is foreseen of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vlmembed.forecast.histogram import Bin, Summary

NOT_FORESEEN = (
    "damage behind a picture's header",
    "what a cache, --reuse or an earlier start of the run has done already",
    "another load of the machine, the disk or the network than during the calibration",
)
"""Whatever the settings are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedFailure:
    """Rows that will fail with one code; `examples` are the ids and reasons of a few."""

    code: str
    num_rows: int
    examples: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What the estimate of the time was told from.

    Attributes:
        num_images: encoded in `seconds`.
        stage_seconds: what each stage would take for the whole run, if it never waited for another one.
    """

    num_images: int
    seconds: float
    stage_seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What a run would do. With a sample (`num_looked_at` < `num_rows`) all numbers of rows, bytes, tokens and packs
    are estimates, scaled up from it.

    Attributes:
        num_rows: input rows = `num_embedded` + `num_duplicates` + `num_failed`.
        num_duplicates: rows whose bytes an earlier row has; None where nothing was hashed, and then all are in
            `num_embedded`.
        num_bytes: of the rows' files, in all. formats: rows by Pillow's name of their format.
        skipped: files that are no rows, by kind. failures: by code, most frequent first.
        widths, heights: in pixels, after EXIF orientation. pixels: width x height of each picture.
        tokens: that attention sees, of each picture that is encoded. token_bins: their histogram.
        num_stored_tokens: with ``--emit tokens``, what the output holds; None otherwise.
        num_packs, max_tokens_per_batch, packing_efficiency: as in the run's report, 0 to 1.
        output_bytes: of the output without its errors file.
        setup_seconds: listing and loading, as it was just now.
        seconds: all that comes after, None without a calibration; `slowest_stage` is what most of it will go to.
        not_foreseen: what the numbers leave out.
    """

    model: str
    device: str
    dtype: str
    num_rows: int
    num_looked_at: int
    num_embedded: int
    num_duplicates: int | None
    num_failed: int
    num_bytes: int
    formats: Mapping[str, int]
    skipped: Mapping[str, int]
    failures: tuple[ExpectedFailure, ...]
    widths: Summary
    heights: Summary
    pixels: Summary
    tokens: Summary
    token_bins: tuple[Bin, ...]
    num_stored_tokens: int | None
    num_packs: int
    max_tokens_per_batch: int
    packing_efficiency: float
    output_bytes: int
    setup_seconds: float
    seconds: float | None = None
    slowest_stage: str = ""
    calibration: Calibration | None = None
    not_foreseen: tuple[str, ...] = field(default=NOT_FORESEEN)

    @property
    def is_sampled(self) -> bool:
        """Not all rows were looked at."""
        return self.num_looked_at < self.num_rows

    @property
    def images_per_second(self) -> float | None:
        """Images to be encoded over `seconds`."""
        return self.num_embedded / self.seconds if self.seconds else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"images_per_second": self.images_per_second}
