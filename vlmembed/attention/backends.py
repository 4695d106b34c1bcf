"""What can compute varlen attention, where each backend may run, and on what it has been executed. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass

FLASH_MIN_CAPABILITY = 8
"""Ampere: the first generation that the flash kernels run on."""

HEAD_DIM_UNIT = 8
"""The flash kernels' heads are a multiple of that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """A way to compute varlen attention.

    Attributes:
        name: as ``--attention`` takes it.
        title: as people call it.
        function: module and function that it calls, or None for our own. package: the distribution that it is in.
        install: command that installs it where it is a package of its own.
        runs_on: for people.
        executed: on what this project has executed it.
        capabilities: first and last major compute capability of the GPUs it runs on; None for no GPU.
        max_head_dim: widest head that a flash backend takes on all of them.
    """

    name: str
    title: str
    function: tuple[str, str] | None = None
    package: str = ""
    install: str = ""
    runs_on: str
    executed: str
    capabilities: tuple[int, int] | None = None
    max_head_dim: int = 256

    @property
    def is_flash(self) -> bool:
        """It takes half precision only, and segments as `cu_seqlens` and `max_seqlen` alone: no lengths on the host,
        so a CUDA graph can hold it."""
        return self.function is not None


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(
            name="flash4",
            title="FlashAttention-4",
            function=("flash_attn.cute", "flash_attn_varlen_func"),
            package="flash-attn-4",
            max_head_dim=128,
            install="pip install --pre flash-attn-4",
            runs_on="Hopper, Blackwell; bf16, fp16",
            executed="never executed",
            capabilities=(9, 99),
        ),
        Backend(
            name="flash3",
            title="FlashAttention-3",
            function=("flash_attn_interface", "flash_attn_varlen_func"),
            package="flash-attn-3",
            install='pip install "git+https://github.com/Dao-AILab/flash-attention.git#subdirectory=hopper"',
            runs_on="Hopper; bf16, fp16",
            executed="never executed",
            capabilities=(9, 9),
        ),
        Backend(
            name="flash2",
            title="FlashAttention-2",
            function=("flash_attn.flash_attn_interface", "flash_attn_varlen_func"),
            package="flash-attn",
            install="pip install flash-attn --no-build-isolation",
            runs_on="Ampere and later; bf16, fp16",
            executed="never executed",
            capabilities=(FLASH_MIN_CAPABILITY, 99),
        ),
        Backend(
            name="torch",
            title="torch's varlen_attn",
            function=("torch.nn.attention.varlen", "varlen_attn"),
            runs_on="Ampere and later; bf16, fp16",
            executed="never executed",
            capabilities=(FLASH_MIN_CAPABILITY, 99),
        ),
        Backend(
            name="sdpa",
            title="torch's SDPA per run of equal segments",
            runs_on="any GPU, CPU; fp32 too",
            executed="CPU; never on a GPU",
            capabilities=(0, 99),
        ),
        Backend(
            name="cpu",
            title="bmm per run of equal segments",
            runs_on="CPU",
            executed="CPU",
        ),
    )
}
"""By name; `tests/flash_signatures.json` says against which versions the calls were checked."""


def preferred(capability: int | None, dtype: str) -> tuple[str, ...]:
    """What ``--attention auto`` tries, in that order, on a GPU of this major compute capability (None: on a CPU) for
    layers of `dtype`; the last one needs no package.

    On a CPU that is what was the faster one of two: `pipelines/benchmarks/LOG.md`."""
    if capability is None:
        return ("sdpa",) if dtype == "fp32" else ("cpu",)
    if dtype == "fp32" or capability < FLASH_MIN_CAPABILITY:
        return ("sdpa",)
    own = {9: ("flash3",)}.get(capability, ("flash4",) if capability > 9 else ())  # noqa: PLR2004  Hopper; Blackwell
    return (*own, "flash2", "torch")


def refusal(name: str, *, capability: int | None, dtype: str, head_dim: int) -> str | None:
    """Why backend `name` cannot run there, with what to do instead; None where it can."""
    problem = _problem(name, capability=capability, dtype=dtype, head_dim=head_dim)
    if problem is None:
        return None
    others = (*reversed(preferred(capability, dtype)), "sdpa")  # first the one that needs no package
    suited = [each for each in others if _problem(each, capability=capability, dtype=dtype, head_dim=head_dim) is None]
    return f"--attention {name} {problem}: use {suited[0]}"


def _problem(name: str, *, capability: int | None, dtype: str, head_dim: int) -> str | None:
    backend = BACKENDS[name]
    if capability is None:
        return "needs a GPU" if backend.is_flash else None
    if backend.capabilities is None:
        return "is for the CPU"
    first, last = backend.capabilities
    if not first <= capability <= last:
        return f"runs on {backend.runs_on}, and this GPU has compute capability {capability}"
    if backend.is_flash and dtype == "fp32":
        return "takes bf16 and fp16 (--dtype), and the layers have fp32"
    most = backend.max_head_dim
    if backend.is_flash and (head_dim % HEAD_DIM_UNIT or head_dim > most):
        return f"takes heads of up to {most} values in steps of {HEAD_DIM_UNIT}, and this tower's have {head_dim}"
    return None


def table() -> list[tuple[str, ...]]:
    """One row per backend, for docs/devices.md and ``vlmembed models``."""
    head = ("--attention", "What it is", "Runs on", "Install", "Executed on")
    rows = [
        (backend.name, backend.title, backend.runs_on, backend.install or "-", backend.executed)
        for backend in BACKENDS.values()
    ]
    return [head, *rows]
