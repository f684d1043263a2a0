"""Backends by name, and why one is or is not there. Imports no torch until a backend is opened.

Invariant: `backend_status` says for every backend whether it can run here and the reason; nothing
falls back without that reason being shown.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from edge_runtime.errors import BackendUnavailable, UsageError, cut

if TYPE_CHECKING:  # planning needs sizes, not numpy
    from edge_runtime.kernels.ops import Backend, Geometry, ModelWeights

BACKENDS = ("reference", "cpu", "cuda")
INSTALL_TORCH = "pip install torch==2.13.0"
TORCH_HINT = f"install it with: {INSTALL_TORCH} (on a Jetson use NVIDIA's build for your JetPack)"


def backend_status() -> list[tuple[str, bool, str]]:
    """Return (name, available, reason) for every backend."""
    return [
        ("reference", *_reference_status()),
        ("cpu", *_cpu_status()),
        ("cuda", *cuda_status()),
    ]


def _reference_status() -> tuple[bool, str]:
    if importlib.util.find_spec("torch") is None:
        return False, "torch is not installed"
    return True, "plain torch on the CPU, the definition of every op"


def cuda_status() -> tuple[bool, str]:
    """Return whether the cuda backend is there, and the reason. Imports torch where it may be."""
    if reason := cuda_missing():
        return False, reason
    from edge_runtime.kernels import cuda

    try:
        return True, cuda.found()
    except BackendUnavailable as error:
        return False, error.message


def use_folder(folder: Path, option: str) -> None:
    """Let the cuda backend take machine code from a folder (`cuda.saved`), in this process and in
    those that it starts; option: who chose it. Raises BackendUnavailable for a broken one."""
    from edge_runtime.kernels.cuda import launch

    launch.use_folder(folder, option)
    os.environ[launch.FOLDER_VARIABLE] = str(folder.absolute())


def cuda_missing() -> str:
    """Return what the cuda backend lacks as far as can be seen without torch; empty if nothing."""
    from edge_runtime.kernels.cuda import launch

    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if importlib.util.find_spec("triton") is None and launch.folder() is None:
        return launch.NEITHER
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 keeps kernels off the GPU"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1) is here"
    return ""


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
    if name == "cpu":  # looking for a GPU would import torch
        return "cpu", f"native kernels, instruction set {_cpu_isa(head_dim, heads_per_kv)}"
    lost = ""
    if name != "reference":
        ok, reason = cuda_status()
        if ok:
            return "cuda", reason
        lost = f"cuda: {reason}"
    if name == "auto":
        try:
            isa = _cpu_isa(head_dim, heads_per_kv)
            return "cpu", f"native kernels, instruction set {isa}; not {lost}"
        except BackendUnavailable as error:
            lost = f"cpu: {error.message} ({error.hint}); {lost}"
    if name != "cuda":
        ok, reason = _reference_status()
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


def open_backend(
    name: str,
    weights: ModelWeights,
    geometry: Geometry,
    threads: int | None = None,
    layout: str = "nest",
) -> Backend:
    """Make a backend that `choose_backend` has approved; threads: of a CPU, None: the default.

    layout: how cuda holds the model (`plan.footprint`): nest, w8 or two_copies; others nest it.
    """
    if name == "cpu":
        from edge_runtime.kernels.cpu import library
        from edge_runtime.kernels.cpu.backend import CpuBackend
        from edge_runtime.kernels.cpu.threads import usable_cores

        return CpuBackend(weights, geometry, threads or usable_cores(), library.choose_isa())
    if name == "cuda":
        from edge_runtime.kernels.cuda.backend import CudaBackend
        from edge_runtime.kernels.cuda.half_backend import Kv16Backend, TwoCopiesBackend

        backends = {"nest": CudaBackend, "w8": Kv16Backend, "two_copies": TwoCopiesBackend}
        return backends[layout](weights, geometry)
    assert (name, layout) == ("reference", "nest"), (name, layout)
    from edge_runtime.kernels.reference.ops import ReferenceBackend

    return ReferenceBackend(weights, geometry, threads)
