"""The sides of ``peers.py``, and the ways in which each may run: the best of a contest is what is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PHOTOS, FEW, STAMPS = "photos", "few photos", "stamps"
"""Which pictures a way runs over."""

OURS, RUN, FORWARDS, GEMMS = "vlmembed", "run", "forwards", "gemms"


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way of a side: its label and what the side is told."""

    label: str
    order: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """Ways of one side that do the same job; the fastest in the trials stands for it.

    Attributes:
        title: as the results name it. script: of the side. pictures: what it runs over.
        runtime: of vlmembed's own sides.
        num_trials: of each way, where there are several; the first warms up.
        is_foreign: it runs in the environment of ``peers.txt``.
    """

    title: str
    script: str
    pictures: str
    ways: tuple[Way, ...]
    runtime: str = ""
    num_trials: int = 2
    is_foreign: bool = False

    @property
    def side(self) -> str:
        """The process that it runs in."""
        return f"{self.script} {self.runtime}".strip()


def plain(dtype: str, batches: tuple[int, ...], pictures: str) -> Contest:
    """The transformers script."""
    ways = [Way(label=f"batch {batch}", order={"dtype": dtype, "batch": batch}) for batch in batches]
    return Contest(title=f"plain script, {dtype}", script="peer_plain.py", pictures=pictures, ways=tuple(ways))


def openvino(threads: int) -> tuple[Contest, Contest]:
    """The model alone: at 224x224, and with dynamic shapes."""
    hints = {"LATENCY": "one request at a time", "THROUGHPUT": f"{threads} streams"}
    fixed = [
        Way(label=f"batch {batch}, {title}", order={"batch": batch, "hint": hint})
        for batch in (1, 8, 16)
        for hint, title in hints.items()
    ]
    dynamic = [Way(label=title, order={"native": True, "hint": hint}) for hint, title in hints.items()]
    return (
        Contest(title="OpenVINO alone", script="peer_openvino.py", pictures=PHOTOS, ways=tuple(fixed)),
        Contest(title="OpenVINO alone, dynamic", script="peer_openvino.py", pictures=STAMPS, ways=tuple(dynamic)),
    )


def ours(runtime: str) -> list[Contest]:
    """Whole runs, and of those over photos the forwards and the bare products alone."""
    jobs = [(PHOTOS, "official", RUN), (PHOTOS, "official", FORWARDS), (STAMPS, "native", RUN)]
    if runtime == "torch":  # the products are torch's
        jobs.insert(2, (PHOTOS, "official", GEMMS))
    return [
        Contest(
            title=our_title(runtime, pictures, do),
            script="peer_vlmembed.py",
            runtime=runtime,
            pictures=pictures,
            ways=(Way(label=resize, order={"do": do, "resize": resize}),),
        )
        for pictures, resize, do in jobs
    ]


def our_title(runtime: str, pictures: str, do: str) -> str:
    """As the results name one of our own contests."""
    return f"{OURS}, {runtime}, {pictures}, {do}"


def contests(dtype: str, runtimes: tuple[str, ...], threads: int, *, is_bf16_emulated: bool) -> list[Contest]:
    """All, in the order of a round. Where bf16 is emulated, its script gets a few pictures in small batches."""
    daft = [Way(label=f"batch {batch}", order={"batch": batch}) for batch in (8, 32)]
    ray = [
        *(Way(label=f"batch {batch}", order={"batch": batch}) for batch in (8, 32)),
        Way(label="batch 8, apart", order={"batch": 8, "apart": True}),
    ]
    bf16 = plain("bf16", (1, 4), FEW) if is_bf16_emulated else plain("bf16", (1, 8, 32), PHOTOS)
    loop = Way(label="one by one", order={"dtype": dtype, "native": True})
    at_224, dynamic = openvino(threads)
    return [
        *(contest for runtime in runtimes for contest in ours(runtime)),
        at_224,
        plain("fp32", (1, 8, 32), PHOTOS),
        bf16,
        Contest(title="Daft", script="peer_daft.py", pictures=PHOTOS, ways=tuple(daft), is_foreign=True),
        Contest(
            title="Ray Data", script="peer_ray.py", pictures=PHOTOS, ways=tuple(ray), is_foreign=True, num_trials=1
        ),
        dynamic,
        Contest(title="transformers loop", script="peer_plain.py", pictures=STAMPS, ways=(loop,)),
    ]
