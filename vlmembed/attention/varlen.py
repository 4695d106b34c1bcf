"""Varlen attention over the segments of a pack, by whichever backend was chosen.

Shape legend: T tokens of a pack, L tokens per segment, N segments, H heads, d head width.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it

from vlmembed.attention.backends import BACKENDS, HEAD_DIM_UNIT, preferred, refusal
from vlmembed.attention.metadata import DeviceSegments
from vlmembed.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Callable

    class Kernel(Protocol):
        """A flash backend: (T, H, d) to the shape of q."""

        def __call__(
            self,
            q_THd: torch.Tensor,
            k_THd: torch.Tensor,
            v_THd: torch.Tensor,
            segments: DeviceSegments,
            *,
            queries: DeviceSegments,
            scale: float,
        ) -> torch.Tensor:
            """Attention as `varlen_attention` defines it."""


logger = logging.getLogger(__name__)

FLASH_KEYWORDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale")

MAX_SCORES = 2**26
"""Attention scores held at a time: 256 MiB in float32, beside a softmax of the same size."""


def varlen_attention(
    q_THd: torch.Tensor,
    k_THd: torch.Tensor,
    v_THd: torch.Tensor,
    segments: DeviceSegments,
    *,
    scale: float,
    queries: DeviceSegments | None = None,
    backend: str = "cpu",
) -> torch.Tensor:
    """Softmax attention inside each segment of a pack, (T, H, d) to (T, H, d).

    Formula: softmax(scale * q k^T) v per segment and head. `queries` are the segments of q where these are others than
    those of k and v, number by number. Lengths come from the host, or stay on the device: nothing is computed of them
    here, and nothing waits for the device.
    """
    queries = queries or segments
    if backend == "cpu":
        return _by_runs(_bmm_attention, q_THd, k_THd, v_THd, runs=segments.runs, query_runs=queries.runs, scale=scale)
    if backend == "sdpa":
        return _by_runs(_sdpa, q_THd, k_THd, v_THd, runs=segments.runs, query_runs=queries.runs, scale=scale)
    return load_kernel(backend)(q_THd, k_THd, v_THd, segments, queries=queries, scale=scale)


def pick_attention(name: str, *, device: torch.device, dtype: str, head_dim: int, try_out: bool = False) -> str:
    """The backend that ``--attention`` means for layers of `dtype` with heads of `head_dim` values.

    With `try_out` a flash backend is called once: a package can be there without the kernels for this GPU.

    Raises:
        ConfigError: the one that is asked for cannot run there.
        MissingExtraError: it is not installed, or not for this GPU.
    """
    capability = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None
    if name != "auto":
        if problem := refusal(name, capability=capability, dtype=dtype, head_dim=head_dim):
            raise ConfigError(problem)
        _check_kernel(name, device=device, dtype=dtype, head_dim=head_dim, try_out=try_out)
        return name
    for candidate in preferred(capability, dtype):
        if problem := refusal(candidate, capability=capability, dtype=dtype, head_dim=head_dim):
            logger.info("%s", problem)
            continue
        try:
            _check_kernel(candidate, device=device, dtype=dtype, head_dim=head_dim, try_out=try_out)
        except MissingExtraError as error:
            logger.info("%s", error)
            continue
        return candidate
    return "sdpa"


def _check_kernel(name: str, *, device: torch.device, dtype: str, head_dim: int, try_out: bool) -> None:
    """Load a flash backend, and with `try_out` call it; ours are always there.

    Raises:
        MissingExtraError: one of them failed.
    """
    if not BACKENDS[name].is_flash:
        return
    kernel = load_kernel(name)
    if not try_out:
        return
    half = torch.float16 if dtype == "fp16" else torch.bfloat16
    try:
        q_THd = torch.zeros(HEAD_DIM_UNIT, 1, head_dim, dtype=half, device=device)
        cu_seqlens = torch.tensor([0, len(q_THd)], dtype=torch.int32, device=device)
        segments = DeviceSegments(cu_seqlens=cu_seqlens, max_seqlen=len(q_THd), runs=())
        kernel(q_THd, q_THd, q_THd, segments, queries=segments, scale=head_dim**-0.5).sum().item()
    except Exception as error:
        msg = f"--attention {name} does not run on {device} ({error}): install it for this GPU and torch, or use torch"
        raise MissingExtraError(msg) from error


@cache
def load_kernel(name: str) -> Kernel:
    """The flash backend `name` as a function of q, k, v, segments and scale.

    Raises:
        MissingExtraError: its package is not installed, or cannot be loaded beside this torch.
    """
    backend = BACKENDS[name]
    assert backend.function is not None
    try:
        function = _imported(*backend.function, needed=() if name == "torch" else FLASH_KEYWORDS)
    except Exception as error:  # whatever a binary for another torch or GPU raises
        remedy = f"install it with: {backend.install}" if backend.install else "it comes with torch 2.10 and later"
        msg = f"--attention {name} needs {backend.title}, which cannot be loaded ({error}); {remedy}"
        raise MissingExtraError(msg) from error
    return _torch_kernel(function) if name == "torch" else _flash_kernel(function)


def _imported(module: str, name: str, *, needed: tuple[str, ...]) -> Callable[..., Any]:
    """A function of a package.

    Raises:
        ImportError: it is not there, or is of a version without one of the `needed` keywords: flash-attn 2.8.3 brings
            an early FlashAttention-4 along. And whatever importing the package raises.
    """
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    if unknown := [keyword for keyword in needed if keyword not in inspect.signature(function).parameters]:
        msg = f"{module}.{name} is of a version that takes no {', '.join(unknown)}"
        raise ImportError(msg)
    return function


def _flash_kernel(function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]) -> Kernel:
    """FlashAttention 2, 3 and 4 share these keywords; some versions return the log-sum-exp beside the output."""

    def attend(
        q_THd: torch.Tensor,
        k_THd: torch.Tensor,
        v_THd: torch.Tensor,
        segments: DeviceSegments,
        *,
        queries: DeviceSegments,
        scale: float,
    ) -> torch.Tensor:
        result = function(
            q_THd,
            k_THd,
            v_THd,
            cu_seqlens_q=queries.cu_seqlens,
            cu_seqlens_k=segments.cu_seqlens,
            max_seqlen_q=queries.max_seqlen,
            max_seqlen_k=segments.max_seqlen,
            softmax_scale=scale,
        )
        return result[0] if isinstance(result, tuple) else result

    return attend


def _torch_kernel(function: Callable[..., torch.Tensor]) -> Kernel:
    """Torch 2.10 knows no `scale` and uses 1 / sqrt(d), which is every tower's."""
    takes_scale = "scale" in inspect.signature(function).parameters

    def attend(
        q_THd: torch.Tensor,
        k_THd: torch.Tensor,
        v_THd: torch.Tensor,
        segments: DeviceSegments,
        *,
        queries: DeviceSegments,
        scale: float,
    ) -> torch.Tensor:
        assert takes_scale or scale == q_THd.shape[-1] ** -0.5
        return function(
            q_THd,
            k_THd,
            v_THd,
            queries.cu_seqlens,
            segments.cu_seqlens,
            queries.max_seqlen,
            segments.max_seqlen,
            **({"scale": scale} if takes_scale else {}),
        )

    return attend


def _by_runs(
    attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor],
    q_THd: torch.Tensor,
    k_THd: torch.Tensor,
    v_THd: torch.Tensor,
    *,
    runs: tuple[tuple[int, int], ...],
    query_runs: tuple[tuple[int, int], ...],
    scale: float,
) -> torch.Tensor:
    """`attention`, over (N, H, L, d), for each run: the segments of a run have one length and are one batched call."""
    outputs, q_start, start = [], 0, 0
    for (q_length, count), (length, _) in zip(query_runs, runs, strict=True):
        q_stop, stop = q_start + q_length * count, start + length * count
        q_NHLd = _by_head(q_THd[q_start:q_stop], count)
        out_NHLd = attention(q_NHLd, _by_head(k_THd[start:stop], count), _by_head(v_THd[start:stop], count), scale)
        outputs.append(out_NHLd.transpose(1, 2).reshape(q_stop - q_start, -1))
        q_start, start = q_stop, stop
    assert (q_start, start) == (len(q_THd), len(k_THd)), "a backend that goes by runs was given segments without them"
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).view(q_THd.shape)


def _by_head(x_THd: torch.Tensor, count: int) -> torch.Tensor:
    """`count` segments of one length as (N, H, L, d)."""
    return x_THd.view(count, -1, *x_THd.shape[1:]).transpose(1, 2)


def _sdpa(q_NHLd: torch.Tensor, k_NHLd: torch.Tensor, v_NHLd: torch.Tensor, scale: float) -> torch.Tensor:
    return F.scaled_dot_product_attention(q_NHLd, k_NHLd, v_NHLd, scale=scale)


def _bmm_attention(q_NHLd: torch.Tensor, k_NHLd: torch.Tensor, v_NHLd: torch.Tensor, scale: float) -> torch.Tensor:
    """``bmm -> softmax -> bmm``; the queries are taken in slices that keep the scores within `MAX_SCORES`."""
    shape = q_NHLd.shape
    q, k, v = (x.flatten(0, 1) for x in (q_NHLd, k_NHLd, v_NHLd))
    length = k.shape[1]
    parts = [
        torch.bmm(torch.softmax(_scores(part, k, scale), dim=-1), v)
        for part in torch.split(q, max(1, MAX_SCORES // (len(q) * length)), dim=1)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).view(shape)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Scale * q k^T; scaled inside the product, so that half precision does not overflow before it."""
    unused = q.new_empty(q.shape[0], q.shape[1], k.shape[1])
    return torch.baddbmm(unused, q, k.transpose(1, 2), beta=0, alpha=scale)


def varlen_pooling(
    q_Hd: torch.Tensor, k_THd: torch.Tensor, v_THd: torch.Tensor, segments: DeviceSegments, *, scale: float
) -> torch.Tensor:
    """One query that attends to each segment in turn: (N, H, d)."""
    num_heads, head_dim = q_Hd.shape
    pooled, start = [], 0
    for length, count in segments.runs:
        stop = start + length * count
        k_NLHd = k_THd[start:stop].view(count, length, num_heads, head_dim)
        v_NLHd = v_THd[start:stop].view(count, length, num_heads, head_dim)
        weights_NLH = torch.softmax((k_NLHd * q_Hd).sum(-1, dtype=torch.float32) * scale, dim=1).to(v_THd.dtype)
        pooled.append((weights_NLH[..., None] * v_NLHd).sum(1))
        start = stop
    return torch.cat(pooled)
