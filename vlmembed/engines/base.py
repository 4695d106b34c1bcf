"""What an engine is: who takes the rows of a planned run through the stages, and on which machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from vlmembed.partfiles import PartRecord
    from vlmembed.parts import PartStore
    from vlmembed.planning import Plan
    from vlmembed.progress import ProgressBar, StageClock
    from vlmembed.reuse import EarlierOutputs
    from vlmembed.site import Site


class Work(Protocol):
    """What can be told of a run while it goes on."""

    clock: StageClock
    num_encoded: int
    num_tokens: int

    @property
    def stage_threads(self) -> dict[str, int]:
        """How many threads, or tasks, work in each stage."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of the rows.

    Attributes:
        num_rows: read, those of earlier starts included. counts: of these by ``embedded``, ``duplicates``, ``failed``.
        figures: what a `RunReport` tells of this process, without the time that was taken.
    """

    num_rows: int
    counts: Counter[str]
    figures: Callable[[float], dict[str, Any]]


class Engine(Protocol):
    """Takes the rows of a run that are not committed yet through the stages.

    Attributes:
        site: who has the devices, for the plan.
    """

    @property
    def site(self) -> Site:
        """See above."""
        ...

    def embed(
        self,
        plan: Plan,
        store: PartStore,
        *,
        more: tuple[EarlierOutputs, ...],
        bar: ProgressBar,
        on_commit: Callable[[PartRecord, Work], None],
        hung: Callable[[], None],
    ) -> Outcome:
        """Commit the rows that are left to `store`. `more` are outputs whose embeddings are known too.

        Raises:
            VlmembedError: whatever ended the run.
        """
        ...
