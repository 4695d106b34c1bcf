"""Question: how near does a tower come to the bare chain of its own matrix products? Floor (iii).

Qwen3-VL-2B's vision tower at its published widths (``tests/vision_configs.json``, random weights) over a mixed pack of
8 images and 3,184 patches, and the built-in model over 8 pictures at 224x224; the same weights on all sides, in one
process, interleaved. Rates are operations per second: of the towers by `Tower.cost` (every weight once per token, and
attention), of the chain by its own products. ``--layers`` of Qwen's 24 are taken (all are alike, so that rates hardly
change), without deepstack, which transformers' class would compute and ours need not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from floors import floor, quotients, spread
from gemm import GemmChain
from record import write_result
from tower_cases import CPU, built_in, qwen

from vlmembed.attention.backends import preferred
from vlmembed.attention.metadata import DevicePack
from vlmembed.devices import pick_dtype
from vlmembed.encoder import DTYPES
from vlmembed.errors import ConfigError, MissingExtraError
from vlmembed.towers.openvino_layers import OpenVinoLayers, check_openvino

if TYPE_CHECKING:
    from collections.abc import Callable

    from tower_cases import Case

    from vlmembed.towers.base import Tower

CHAIN, THEIRS = "bare GEMM chain", "transformers"
PLAIN, COMPILED, OPENVINO = "plain", "compiled", "openvino"
"""Ways to compute our own layers."""

LEAST_COSINE = 0.999


@torch.inference_mode()
def timed(forward: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Seconds of one call, and its tokens."""
    began = time.perf_counter()
    tokens = forward()
    return time.perf_counter() - began, tokens


def title_of(way: str) -> str:
    """As the results name one of our own sides."""
    return f"vlmembed, {way}"


def openvino_layers(tower: Tower, dtype: str) -> OpenVinoLayers | None:
    """The tower's layers by OpenVINO, where it is there and takes them."""
    try:
        check_openvino(dtype, CPU)
    except (ConfigError, MissingExtraError) as error:
        print(f"without OpenVINO: {error}")
        return None
    return OpenVinoLayers(tower, dtype)


class Sides:
    """What is measured of a case, by title: each a function that returns its seconds.

    Attributes:
        attention: the one that ``--attention auto`` takes. ours: titles of our own sides.
        first_seconds: of the first forward of those that compile or convert first.
    """

    def __init__(self, case: Case, dtype: str, *, compiled: bool) -> None:
        self.case, tower = case, case.tower
        self._pack, self._way = DevicePack.of(case.batch, CPU), PLAIN
        self.attention = preferred(None, dtype)[0]
        tower.use_attention(self.attention)
        self._stack = openvino_layers(tower, dtype)
        _, self._reference = timed(case.theirs)  # in float32
        case.model.to(tower.dtype)
        self.lowest_cosines: dict[str, float] = {}
        self.first_seconds: dict[str, float] = {}
        chain = GemmChain(tower, case.batch.num_tokens)
        self.flops = {CHAIN: chain.flops}
        self.seconds: dict[str, Callable[[], float]] = {CHAIN: chain.seconds, THEIRS: lambda: timed(case.theirs)[0]}
        is_there = {PLAIN: True, COMPILED: compiled, OPENVINO: self._stack is not None}
        self.ours = [self._enter(way) for way in is_there if is_there[way]]

    def _enter(self, way: str) -> str:
        """Try a way out: how long its first forward takes, and how near its tokens are to transformers' own."""
        self.first_seconds[title_of(way)] = round(self._forward(way), 2)
        tokens = self._tokens().float()
        reference = self._reference.reshape(tokens.shape).float()
        cosines = torch.nn.functional.cosine_similarity(tokens, reference, dim=-1)
        self.lowest_cosines[title_of(way)] = round(float(cosines.min()), 7)
        self.seconds[title_of(way)] = partial(self._forward, way)
        return title_of(way)

    def _tokens(self) -> torch.Tensor:
        with torch.inference_mode():
            return self.case.tower.tokens(self._pack.patches, self._pack.metadata)[0]

    def _forward(self, way: str) -> float:
        if way != self._way:
            self.case.tower.use_compiled(way == COMPILED)
            self.case.tower.use_stack(self._stack if way == OPENVINO else None)
            self._way = way
        return timed(self._tokens)[0]

    def measure(self, repeats: int) -> dict[str, list[float]]:
        """Operations per second by title, interleaved, there and back, after one round that warms up."""
        flops = self.case.tower.cost.of(self.case.batch.lengths)
        rates: dict[str, list[float]] = {title: [] for title in self.seconds}
        for number in range(repeats + 1):
            for title in sorted(rates, key=list(rates).index, reverse=number % 2 == 1):
                rate = self.flops.get(title, flops) / self.seconds[title]()
                if number:
                    rates[title].append(rate)
        return rates


def describe(sides: Sides, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Figures of one case."""
    batch = sides.case.batch
    return {
        "images": len(batch.rows),
        "patches": len(batch.patches),
        "attention": sides.attention,
        "GFLOP/s, median (min to max)": {title: spread([rate / 1e9 for rate in each]) for title, each in rates.items()},
        "share of the chain, median (min to max)": {
            title: spread(quotients(each, rates[CHAIN])) for title, each in rates.items() if title != CHAIN
        },
        "first forward, compiling and converting included, s": sides.first_seconds,
        "lowest cosine to float32 transformers": sides.lowest_cosines,
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="the compiled layers, too: a minute or more to compile")
    arguments = parser.parse_args()
    dtype = pick_dtype(arguments.dtype, CPU)
    title = f"Qwen3-VL-2B, {arguments.layers} of 24 layers"
    cases = (
        (title, "iii", lambda: qwen(arguments.layers, DTYPES[dtype]), (0.8, 0.9)),
        ("dinov2-small (built in)", "i", lambda: built_in(DTYPES[dtype]), (0.9,)),
    )
    floors, figures = [], {}
    for name, number, make, limits in cases:
        sides = Sides(make(), dtype, compiled=arguments.compile)
        rates = sides.measure(arguments.repeats)
        best = max(sides.ours, key=lambda each: statistics.median(rates[each]))
        figures[name] = describe(sides, rates)
        print(name, json.dumps(figures[name], indent=1), flush=True)
        shares = quotients(rates[best], rates[CHAIN])
        for limit in limits:
            what = f"operations/s, {best}, {dtype}, tower alone ({name}) / bare GEMM chain"
            floors.append(floor(number, what, shares, at_least=limit, stretch=limit >= 0.9))  # noqa: PLR2004  the goal
        what = f"lowest cosine to float32 transformers, {best}, tower alone ({name})"
        floors.append(floor(number, what, [sides.lowest_cosines[best]], at_least=LEAST_COSINE, digits=7))
        del sides
    claim = "a tower's forward over a pack is little slower than the bare chain of its matrix products: floor (iii)"
    print(write_result("tower_limit", claim, arguments.repeats, {"dtype": dtype, "floors": floors, "towers": figures}))


if __name__ == "__main__":
    main()
