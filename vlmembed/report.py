"""What a run did, for the caller of `vlmembed.encode` and the command line's summary."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from vlmembed.errors import NothingEmbeddedError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Self

    from vlmembed.output import OutputPaths


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """What a run did.

    Attributes:
        output, errors: the two files; URLs where the output is remote; empty for a stream.
        num_rows: input rows = `num_embedded` + `num_duplicates` + `num_failed`.
        codes: failed rows by code. skipped: files that were no rows, by kind.
        already_complete: nothing was done, the output of this very run was there.
        num_resumed: rows that an earlier start had committed.
        num_found: embeddings that the cache or an earlier output had.
        num_retried, num_recovered: failed rows that were tried again, and those that have an embedding now.
        num_encoded, num_tokens: images and tokens that this process encoded.
        packing_efficiency: tokens over packs x budget, 0 to 1.
        num_malformed_exif: images that were embedded as they are because their EXIF block could not be read.
        num_splits: packs that did not fit into memory and were split.
        num_replaced_decoders: decoding threads or processes that hung or crashed.
        num_lost_workers: processes that died; their packs went to the others.
        setup_seconds: listing and loading. seconds: all that came after.
        slowest_stage, slowest_share: the busiest stage and its share of the time, 0 to 1.
    """

    output: Path | str
    errors: Path | str
    num_rows: int
    num_embedded: int
    num_duplicates: int
    num_failed: int
    codes: Mapping[str, int]
    width: int
    skipped: Mapping[str, int] = field(default_factory=dict)
    already_complete: bool = False
    num_resumed: int = 0
    num_found: int = 0
    num_retried: int = 0
    num_recovered: int = 0
    num_encoded: int = 0
    num_tokens: int = 0
    num_packs: int = 0
    packing_efficiency: float = 0.0
    num_malformed_exif: int = 0
    num_splits: int = 0
    num_replaced_decoders: int = 0
    num_lost_workers: int = 0
    setup_seconds: float = 0.0
    seconds: float = 0.0
    slowest_stage: str = ""
    slowest_share: float = 0.0

    @property
    def failed_share(self) -> float:
        """Failed rows over all rows, 0 to 1."""
        return self.num_failed / self.num_rows if self.num_rows else 0.0

    def exceeds(self, max_error_rate: float) -> bool:
        """Whether this process has embedded, and more than this share of the rows has failed."""
        return not self.already_complete and self.failed_share > max_error_rate

    def check_embedded(self) -> None:
        """Whoever asked for embeddings must notice that there is not one.

        Raises:
            NothingEmbeddedError: there is none.
        """
        if not self.num_rows:
            skipped = ", ".join(f"{count} {kind}" for kind, count in self.skipped.items()) or "nothing at all"
            msg = f"the inputs hold no pictures (found and skipped: {skipped}): name others"
            raise NothingEmbeddedError(msg)
        if not self.num_embedded:
            shown = ", ".join(f"{count} {code}" for code, count in self.codes.items())
            where = self.errors or "the stream's errors"
            msg = f"not one of {self.num_rows} rows has an embedding ({shown}); the reasons are in {where}"
            raise NothingEmbeddedError(msg)

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        texts = {name: os.fspath(values[name]) for name in ("output", "errors")}
        counted = {name: dict(values[name]) for name in ("codes", "skipped")}
        return {**values, **texts, **counted}

    @classmethod
    def from_provenance(cls, paths: OutputPaths, facts: Mapping[str, Any]) -> Self:
        """What an output's own provenance `facts` tell of the run that made it; nothing of this process."""
        counts = facts["counts"]
        return cls(
            output=paths.output,
            errors=paths.errors,
            num_rows=counts["rows"],
            num_embedded=counts["embedded"],
            num_duplicates=counts["duplicates"],
            num_failed=counts["failed"],
            codes=counts["codes"],
            skipped=counts["skipped"],
            width=facts["model"]["width"],
            already_complete=True,
        )
