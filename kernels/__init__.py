"""Backends by name, and why one is or is not there. Imports no torch until a backend is opened.

Invariant: `backend_status` says for every backend whether it can run here and the reason; nothing
falls back without that reason being shown.
"""

from __future__ import annotations

import importlib.util

from edge_runtime.errors import BackendUnavailable, UsageError, cut
from edge_runtime.kernels.ops import Backend, Geometry, ModelWeights

BACKENDS = ("reference", "cpu", "cuda")
RUNTIME_BYTES = 500 << 20  # interpreter, torch, tokenizer, scratch, what the allocator keeps
CPU_RUNTIME_BYTES = 65 << 20  # interpreter, libraries, tokenizer
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
    from edge_runtime.kernels.cpu import library

    try:
        return True, f"native kernels, instruction set {library.choose_isa()}"
    except (BackendUnavailable, UsageError) as error:
        return False, str(error)


def choose_backend(name: str) -> tuple[str, str]:
    """Resolve `auto` and check availability; return (name, why). Raises BackendUnavailable."""
    status = {n: (ok, reason) for n, ok, reason in backend_status()}
    if name == "auto":
        for candidate in ("cuda", "cpu", "reference"):
            if status[candidate][0]:
                return candidate, status[candidate][1]
        reasons = "; ".join(f"{n}: {r}" for n, (_, r) in status.items())
        raise BackendUnavailable(f"no backend can run here ({reasons})", TORCH_HINT)
    if name not in status:
        raise UsageError(
            f"backend: expected auto or one of {', '.join(BACKENDS)}, got {cut(name)!r}"
        )
    ok, reason = status[name]
    if not ok:
        hint = TORCH_HINT if name == "reference" else "use --backend auto to see what runs here"
        raise BackendUnavailable(f"backend {name} is not available: {reason}", hint)
    return name, reason


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
