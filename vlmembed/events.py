"""What a run tells while it goes on: plain values for job schedulers and dashboards, one event per committed part.

start    the model is loaded, the work begins         (once, where there is work)
part     a part is committed
end      the output is whole, or was so already
error    the command ended another way                (written by the command line; the library raises)
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vlmembed.config import EncodeConfig
    from vlmembed.engines.base import Work
    from vlmembed.partfiles import PartRecord
    from vlmembed.report import RunReport


class Start(TypedDict):
    """A run begins, or goes on.

    Attributes:
        time: of every event; UTC, ISO 8601, to the millisecond.
        output: a path, or a URL. device, dtype, max_tokens_per_batch, rows_per_part: as decided.
        num_rows: of the inputs; None where only reading them tells. With `retry_failed` the failed rows alone, which
            are numbered from 0.
        num_resumed: rows that an earlier start committed.
        version: of vlmembed. weights_sha256: of the model's tensors.
    """

    event: Literal["start"]
    time: str
    output: str
    model: str
    weights_sha256: str
    device: str
    dtype: str
    max_tokens_per_batch: int
    rows_per_part: int
    num_rows: int | None
    num_resumed: int
    retry_failed: bool
    version: str


class Part(TypedDict):
    """A part is committed: on the local disk; of a remote output its upload follows.

    Attributes:
        number, first_row: from 0. num_rows: = `num_embedded` + `num_duplicates` + `num_failed`, of this part.
        num_rows_done: all that are committed, by earlier starts too. num_rows_total: None where it is not known.
        seconds: since the process began the run, its set-up included.
        images_per_second, tokens_per_second: encoded by this process, since its set-up.
        slowest_stage, slowest_share: the busiest stage, and its share of the time since the set-up, 0 to 1.
        eta_seconds: until all rows are committed, at the speed of this process; None where the total is not known.
    """

    event: Literal["part"]
    time: str
    number: int
    first_row: int
    num_rows: int
    num_embedded: int
    num_duplicates: int
    num_failed: int
    num_rows_done: int
    num_rows_total: int | None
    seconds: float
    images_per_second: float
    tokens_per_second: float
    slowest_stage: str
    slowest_share: float
    eta_seconds: float | None


class _End(TypedDict):
    event: Literal["end"]
    time: str
    status: Literal["done", "already_complete"]
    too_many_failed: bool
    report: dict[str, Any]


class End(_End, total=False):
    """The output is whole.

    Attributes:
        status: ``"already_complete"`` where the output of this very run was there.
        too_many_failed: a larger share of rows than `EncodeConfig.max_error_rate`.
        report: the `RunReport`.
        exit_code: 0, or 3 with `too_many_failed`; from the command line only.
    """

    exit_code: int


class Error(TypedDict):
    """The command ended without a whole output.

    Attributes:
        kind: name of the exception. message: what the command said on stderr.
        num_rows_done: rows that are committed; None where that is not known.
    """

    event: Literal["error"]
    time: str
    status: Literal["failed", "usage", "interrupted", "terminated"]
    kind: str
    message: str
    exit_code: int
    num_rows_done: int | None


Event: TypeAlias = Start | Part | End | Error


def now() -> str:
    """The time, as events have it."""
    return as_text(datetime.now(UTC))


def as_text(moment: datetime) -> str:
    """A time in UTC as ISO 8601, to the millisecond."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class RunEvents:
    """Makes the events of one run for `on_event`, which may be None. What that raises ends the run; what was committed
    is kept."""

    def __init__(self, on_event: Callable[[Event], None] | None) -> None:
        self._on_event = on_event
        self._began = self._ready = time.perf_counter()
        self._num_rows: int | None = None
        self._num_resumed = 0

    def started(
        self, config: EncodeConfig, facts: Mapping[str, Any], *, output: str, num_rows: int | None, num_resumed: int
    ) -> None:
        """The set-up is done; `config` and the provenance `facts` are the run's, as decided."""
        self._ready, self._num_rows, self._num_resumed = time.perf_counter(), num_rows, num_resumed
        assert config.max_tokens_per_batch is not None
        assert config.rows_per_part is not None
        self._tell(
            {
                "event": "start",
                "time": now(),
                "output": output,
                "model": facts["model"]["name"],
                "weights_sha256": facts["model"]["weights_sha256"],
                "device": config.device,
                "dtype": config.dtype,
                "max_tokens_per_batch": config.max_tokens_per_batch,
                "rows_per_part": config.rows_per_part,
                "num_rows": num_rows,
                "num_resumed": num_resumed,
                "retry_failed": config.retry_failed,
                "version": facts["versions"]["vlmembed"],
            }
        )

    def committed(self, record: PartRecord, work: Work) -> None:
        """A part is on the disk; `work` knows how fast it goes."""
        at = time.perf_counter()
        seconds = max(at - self._ready, 1e-9)
        num_done = record.first_row + record.num_rows
        rate = (num_done - self._num_resumed) / seconds
        stage, share = work.clock.busiest(work.stage_threads, seconds)
        self._tell(
            {
                "event": "part",
                "time": now(),
                "number": record.number,
                "first_row": record.first_row,
                "num_rows": record.num_rows,
                "num_embedded": record.num_embedded,
                "num_duplicates": record.num_duplicates,
                "num_failed": record.num_failed,
                "num_rows_done": num_done,
                "num_rows_total": self._num_rows,
                "seconds": round(at - self._began, 3),
                "images_per_second": round(work.num_encoded / seconds, 3),
                "tokens_per_second": round(work.num_tokens / seconds, 1),
                "slowest_stage": stage,
                "slowest_share": round(share, 4),
                "eta_seconds": None if self._num_rows is None else round((self._num_rows - num_done) / rate, 1),
            }
        )

    def ended(self, report: RunReport, *, max_error_rate: float) -> None:
        """The output is whole."""
        self._tell(
            {
                "event": "end",
                "time": now(),
                "status": "already_complete" if report.already_complete else "done",
                "too_many_failed": report.exceeds(max_error_rate),
                "report": report.to_dict(),
            }
        )

    def _tell(self, event: Event) -> None:
        if self._on_event is not None:
            self._on_event(event)
