"""Backends by name, and why one is or is not there. Imports no torch until a backend is opened.

Invariant: `backend_status` says for every backend whether it can run here and the reason; nothing
falls back without that reason being shown.
"""

from __future__ import annotations

import importlib.util

from edge_runtime.errors import BackendUnavailable, UsageError, cut
from edge_runtime.kernels.layout import KV_BLOCK, MAX_GAMMA
from edge_runtime.kernels.ops import Backend, Geometry, ModelWeights

BACKENDS = ("reference", "cpu", "cuda")
RUNTIME_BYTES = 500 << 20  # interpreter, torch, tokenizer, scratch, what the allocator keeps
CPU_RUNTIME_BYTES = 66 << 20  # interpreter, libraries, tokenizer
INSTALL_TORCH = "pip install torch==2.13.0"
TORCH_HINT = f"install it with: {INSTALL_TORCH} (on a Jetson use NVIDIA's build for your JetPack)"


def backend_status() -> list[tuple[str, bool, str]]:
    """Return (name, available, reason) for every backend."""
    has_torch = importlib.util.find_spec("torch") is not None
    return [
        (
            "reference",
            has_torch,
            "plain torch on the CPU, the definition of every op"
            if has_torch
            else "torch is not installed",
        ),
        ("cpu", *_cpu_status()),
        ("cuda", False, "this version has no CUDA kernels yet"),
    ]


def _cpu_status() -> tuple[bool, str]:
    try:
        return True, f"native kernels, instruction set {_cpu_isa(0, 0)}"
    except (BackendUnavailable, UsageError) as error:
        return False, f"{error.message} ({error.hint})" if error.hint else error.message


def _cpu_isa(head_dim: int, heads_per_kv: int) -> str:
    """Return the instruction set that the native kernels use. Raises BackendUnavailable where they
    do not run, UsageError for one that the user asks for and this machine lacks."""
    from edge_runtime.kernels.cpu import library

    isa = library.choose_isa()
    if reason := library.limits(head_dim, heads_per_kv):
        raise BackendUnavailable(reason, "use --backend reference")
    return isa


def choose_backend(name: str, head_dim: int = 0, heads_per_kv: int = 0) -> tuple[str, str]:
    """Resolve `auto` and check availability for a model; return (name, why).

    head_dim, heads_per_kv (query heads for a KV head): 0 for any model. Raises BackendUnavailable,
    and UsageError for an unknown name or instruction set.
    """
    if name not in (*BACKENDS, "auto"):
        raise UsageError(
            f"backend: expected auto or one of {', '.join(BACKENDS)}, got {cut(name)!r}"
        )
    status = {n: (ok, reason) for n, ok, reason in backend_status()}
    lost = f"cuda: {status['cuda'][1]}"
    if name in ("auto", "cpu"):
        try:
            return "cpu", f"native kernels, instruction set {_cpu_isa(head_dim, heads_per_kv)}"
        except BackendUnavailable as error:
            if name == "cpu":
                raise
            lost = f"cpu: {error.message} ({error.hint})"
    ok, reason = status["cuda" if name == "cuda" else "reference"]
    if ok and name == "auto":
        return "reference", f"{reason}, slow; not {lost}"
    if ok:
        return name, reason
    if name == "auto":
        raise BackendUnavailable(
            f"no backend can run here: {lost}; reference: {reason}", TORCH_HINT
        )
    hint = TORCH_HINT if name == "reference" else "use --backend auto to see what runs here"
    raise BackendUnavailable(f"backend {name} is not available: {reason}", hint)


def fixed_bytes(
    num_weights: int, num_embedding: int, backend: str, *, group_size: int, workspace: int
) -> int:
    """Upper estimate of what a backend holds besides the KV cache.

    workspace: bytes of the activations of a chunk of a prompt.
    """
    if backend == "cpu":  # both planes and their multipliers
        weights = num_weights + num_weights // group_size * 2
        return weights + num_embedding + workspace + CPU_RUNTIME_BYTES
    assert backend == "reference", backend
    views = 2 * num_weights * 4  # one fp32 number a weight in each of two views
    mult = num_weights // 64 * 2 * 8  # one fp64 number a group in each
    wide = num_embedding * 8  # the largest linear once in fp64, for prompts
    return views + mult + wide + num_embedding + RUNTIME_BYTES


def attention_per_token_bytes(
    backend: str, num_heads: int, head_dim: int, threads: int | None
) -> int:
    """Bytes besides the KV cache that a backend needs for every token of context."""
    rope = 4 * head_dim  # cos and sin, fp32
    if backend != "cpu":
        return rope
    from edge_runtime.kernels.cpu.threads import usable_cores

    # what attention keeps of each block of the cache: of eight rows, and of 32 queries a thread
    vectors = (MAX_GAMMA + 1) * num_heads + 32 * (threads or usable_cores())
    return rope + 4 * vectors * (head_dim + 2) // KV_BLOCK


def float_fixed_bytes(num_weights: int, num_embedding: int) -> int:
    """Upper estimate of what the unquantised model (`--view fp`) holds besides its KV cache."""
    loading = 2 * num_embedding * 4  # a large tensor as it comes; the largest come first
    return (num_weights + num_embedding) * 4 + loading + RUNTIME_BYTES


def open_backend(
    name: str, weights: ModelWeights, geometry: Geometry, threads: int | None = None
) -> Backend:
    """Make a backend that `choose_backend` has approved; threads None keeps the default."""
    if name == "cpu":
        from edge_runtime.kernels.cpu import library
        from edge_runtime.kernels.cpu.backend import CpuBackend
        from edge_runtime.kernels.cpu.threads import usable_cores

        return CpuBackend(weights, geometry, threads or usable_cores(), library.choose_isa())
    assert name == "reference", name
    from edge_runtime.kernels.reference.ops import ReferenceBackend

    return ReferenceBackend(weights, geometry, threads)
