"""Takes packs to a device and results back, beside the computation: three lanes, and buffers for two packs.

    in       pinned block ──▶ device block          one pack ahead
    compute                   forward
    out                                ──▶ pinned   read by the host one pack later

The host waits for nothing but the end of the pack before the one that it has just handed over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vlmembed.types import PackedBatch

    Forward = Callable[[torch.Tensor], list[torch.Tensor]]
    """From a pack's block on the device to what is to be copied back."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A pack that was handed over.

    Attributes:
        batch: the images in it.
        outputs: on the device. results: on the host, once `done` has come.
    """

    batch: PackedBatch
    outputs: list[torch.Tensor] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)
    done: Any = None


class Link(Protocol):
    """The way to a device and back. At most `lag` tickets may be open when the next pack is handed over."""

    lag: int

    def submit(self, batch: PackedBatch, block: torch.Tensor, forward: Forward) -> Ticket:
        """Hand over a pack whose bytes are `block`."""

    def collect(self, ticket: Ticket) -> list[torch.Tensor]:
        """The results on the host, in memory of their own; waits for them."""

    def make_room(self) -> None:
        """Let what is under way end and give cached memory back, as after a pack that did not fit. No ticket is open
        that will be collected."""


class HostLink:
    """A CPU: nothing is copied, and a pack is done when `submit` returns."""

    lag = 0

    def submit(self, batch: PackedBatch, block: torch.Tensor, forward: Forward) -> Ticket:
        """Run the forward."""
        return Ticket(batch=batch, results=forward(block))

    def collect(self, ticket: Ticket) -> list[torch.Tensor]:
        """The results of the forward."""
        return ticket.results

    def make_room(self) -> None:
        """A CPU's allocator keeps nothing back."""


class Lanes(Protocol):
    """Queues of work that run beside each other; what stands in one runs in order."""

    def run(self, lane: str, work: Callable[[], None], after: Sequence[Any] = ()) -> Any:  # noqa: ANN401  an event
        """Queue `work` in a lane, to start after these events; returns the event of its end."""

    def wait(self, event: Any) -> None:  # noqa: ANN401  what `run` returned
        """Let the host wait for an event."""

    def pinned(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that a lane can copy to and from."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether this is such memory."""

    def on_device(self, num_bytes: int) -> torch.Tensor:
        """A block on the device."""

    def make_room(self) -> None:
        """Give cached memory back."""


class CudaLanes:
    """A CUDA stream per lane."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # the weights were copied on another stream
        self._device = device
        self._streams: dict[str, Any] = {
            lane: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for lane in ("in", "compute", "out")
        }

    def run(self, lane: str, work: Callable[[], None], after: Sequence[Any] = ()) -> Any:  # noqa: ANN401  an event
        """Launch `work` on the lane's stream."""
        stream = self._streams[lane]
        for each in after:
            stream.wait_event(each)
        with torch.cuda.stream(stream):
            work()
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a host that waits sleeps
        event.record(stream)
        return event

    def wait(self, event: Any) -> None:  # noqa: ANN401  what `run` returned
        """Sleep until the event has come."""
        event.synchronize()

    def pinned(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """From torch's cache of pinned memory."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Pinned by torch, or registered with CUDA."""
        return tensor.is_pinned()

    def on_device(self, num_bytes: int) -> torch.Tensor:
        """From torch's caching allocator."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def make_room(self) -> None:
        """Let all that is under way end, since it reads buffers that are to be filled anew; then return the allocator's
        free blocks to the driver, so that larger ones can be made of them."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


@dataclass(slots=True, eq=False)
class _Buffers:
    """Room for one pack on its way in."""

    host: torch.Tensor | None = None
    device: torch.Tensor | None = None


class DeviceLink:
    """A device beside the host: copies in, computation and copies out overlap."""

    lag = 1

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._buffers = (_Buffers(), _Buffers())
        self._num_submitted = 0

    def submit(self, batch: PackedBatch, block: torch.Tensor, forward: Forward) -> Ticket:
        """Queue the three steps of a pack and return at once.

        Its buffers are those of the pack before the last, which has been collected: so no step needs to wait for them.
        """
        lanes, buffers = self._lanes, self._buffers[self._num_submitted % len(self._buffers)]
        num_bytes = len(block)
        if lanes.is_pinned(block):
            source = block
        else:
            if buffers.host is None or len(buffers.host) < num_bytes:
                buffers.host = lanes.pinned((num_bytes,), torch.uint8)
            source = buffers.host[:num_bytes].copy_(block)
        if buffers.device is None or len(buffers.device) < num_bytes:
            buffers.device = lanes.on_device(num_bytes)
        target, ticket = buffers.device[:num_bytes], Ticket(batch=batch)

        def copy_in() -> None:
            target.copy_(source, non_blocking=True)

        def compute() -> None:
            ticket.outputs = forward(target)

        def copy_out() -> None:
            for output in ticket.outputs:
                ticket.results.append(lanes.pinned(output.shape, output.dtype))
                ticket.results[-1].copy_(output, non_blocking=True)

        arrived = lanes.run("in", copy_in)
        computed = lanes.run("compute", compute, after=(arrived,))
        ticket.done = lanes.run("out", copy_out, after=(computed,))
        self._num_submitted += 1
        return ticket

    def collect(self, ticket: Ticket) -> list[torch.Tensor]:
        """Wait for the pack and take its results out of pinned memory, which the next packs need."""
        self._lanes.wait(ticket.done)
        ticket.outputs.clear()
        return [result.clone() for result in ticket.results]

    def make_room(self) -> None:
        """Give cached memory back."""
        self._lanes.make_room()
