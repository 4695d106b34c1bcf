"""Every attention backend that can run on this GPU gives what SDPA gives in float32. Skipped where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's own name for it
from on_gpu import GPU, MARKS

from vlmembed.attention.backends import BACKENDS, refusal
from vlmembed.attention.metadata import DeviceSegments
from vlmembed.attention.varlen import load_kernel, varlen_attention
from vlmembed.errors import MissingExtraError
from vlmembed.layout import make_segments

pytestmark = MARKS

LENGTHS = (1, 5, 64, 64, 257, 1000)
BY_LENGTHS = [name for name, backend in BACKENDS.items() if backend.is_flash]


def device_segments(lengths: tuple[int, ...]) -> DeviceSegments:
    host = make_segments(lengths)
    return DeviceSegments(
        cu_seqlens=torch.from_numpy(host.cu_seqlens).to(GPU), max_seqlen=host.max_seqlen, runs=host.runs
    )


def qkv_of(num_tokens: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """(T, 3, H, d), as a tower's layer makes them: queries, keys and values are strided views."""
    generator = torch.Generator().manual_seed(head_dim)
    return torch.randn(num_tokens, 3, 4, head_dim, generator=generator).to(device=GPU, dtype=dtype)


def attend(qkv: torch.Tensor, segments: DeviceSegments, backend: str) -> torch.Tensor:
    q, k, v = qkv.unbind(1)
    return varlen_attention(q, k, v, segments, scale=q.shape[-1] ** -0.5, backend=backend)


def skip_unless_usable(backend: str, dtype: str, head_dim: int) -> None:
    capability = torch.cuda.get_device_capability(GPU)[0]
    if problem := refusal(backend, capability=capability, dtype=dtype, head_dim=head_dim):
        pytest.skip(problem)
    if BACKENDS[backend].is_flash:
        try:
            load_kernel(backend)
        except MissingExtraError as error:
            pytest.skip(str(error))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [16, 64, 72, 80])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_gives_what_sdpa_gives_in_float32(backend: str, head_dim: int, dtype: str) -> None:
    skip_unless_usable(backend, dtype, head_dim)
    qkv = qkv_of(sum(LENGTHS), head_dim, {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    segments = device_segments(LENGTHS)
    found, expected = attend(qkv, segments, backend), attend(qkv.float(), segments, "sdpa")
    assert found.shape == expected.shape
    assert F.cosine_similarity(found.float(), expected, dim=-1).min() >= 0.999
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("backend", BY_LENGTHS)
def test_segments_without_tokens_and_a_max_seqlen_that_is_too_long_change_nothing(backend: str) -> None:
    """So is a pack filled up that goes through a graph."""
    skip_unless_usable(backend, "bf16", 72)
    qkv, segments = qkv_of(sum(LENGTHS), 72, torch.bfloat16), device_segments(LENGTHS)
    end = segments.cu_seqlens[-1:]
    filled = replace(segments, cu_seqlens=torch.cat([segments.cu_seqlens, end, end]), max_seqlen=1024, runs=())
    found, expected = attend(qkv, filled, backend), attend(qkv, segments, backend)
    assert torch.isfinite(found).all()
    assert F.cosine_similarity(found.float(), expected.float(), dim=-1).min() >= 0.9999


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "cpu"])
def test_what_a_neighbour_holds_changes_nothing(backend: str) -> None:
    skip_unless_usable(backend, "bf16", 64)
    qkv, segments = qkv_of(sum(LENGTHS), 64, torch.bfloat16), device_segments(LENGTHS)
    other = qkv.clone()
    other[: sum(LENGTHS[:-1])] = 7.0
    found, expected = attend(other, segments, backend), attend(qkv, segments, backend)
    assert torch.equal(found[-LENGTHS[-1] :], expected[-LENGTHS[-1] :])
