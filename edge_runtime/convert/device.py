"""Where a conversion computes: this machine's processor, or a GPU that torch can use.

Invariant: `auto` takes a GPU that has the memory for it, and says why it took what it took. It is
plain torch on both, in fp32 and fp64 without TF32, and needs no Triton.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from edge_runtime import machine
from edge_runtime.convert import resources
from edge_runtime.errors import BackendUnavailable, BudgetError, UsageError, cut
from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels.cuda.memory import SIGNS

NAMES = ("auto", "cpu", "cuda")
CPU = torch.device("cpu")
SLACK = 1.5  # of what is planned, for pieces that do not fit each other


def choose(name: str, spec: ModelSpec, calibration_tokens: int) -> tuple[torch.device, str]:
    """Return where to convert a model, and why. Raises BackendUnavailable, UsageError."""
    if name not in NAMES:
        raise UsageError(f"backend: expected one of {', '.join(NAMES)}, got {cut(name)!r}")
    if name == "cpu":
        return CPU, "torch on the CPU"
    device, reason = usable_gpu()
    if name == "cuda":
        if device is None:
            raise BackendUnavailable(
                f"backend cuda is not available: {reason}",
                "use --backend auto to see what runs here",
            )
        return device, reason
    if device is not None:
        try:
            resources.check_memory(spec, calibration_tokens, room(device))
        except BudgetError as error:
            device, reason = None, error.message
    return (CPU, f"torch on the CPU; not cuda: {reason}") if device is None else (device, reason)


def usable_gpu() -> tuple[torch.device | None, str]:
    """Return the GPU that torch would use and its name, or None and what is missing."""
    if not torch.cuda.is_available():
        found = "finds no GPU" if torch.version.cuda else "is a CPU build"
        return None, f"torch {torch.__version__} {found}"
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=device)
    except RuntimeError as error:  # no driver for it, or another process has it alone
        return None, str(error).splitlines()[0]
    return device, f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"


def room(device: torch.device) -> resources.Room:
    """Return what is free where a conversion on this device would run."""
    host = machine.available_bytes()
    if device.type != "cuda":
        return resources.Room(host)
    if torch.cuda.get_device_properties(device).is_integrated:
        return resources.Room(host, shared=True)
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return resources.Room(host, free + kept)


@contextlib.contextmanager
def computing_on(device: torch.device, spec: ModelSpec, calibration_tokens: int) -> Iterator[None]:
    """Compute without TF32, hold torch to what was planned and some more, start the device's peak
    anew, and tell running out of it in words."""
    if device.type != "cuda":
        yield
        return
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    need = resources.device_bytes(spec, calibration_tokens)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(most_bytes(need, spec, room(device)) / total, device)
    tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    torch.cuda.reset_peak_memory_stats(device)
    try:
        yield
    except RuntimeError as error:  # torch's OutOfMemoryError is one
        if not any(sign in str(error) for sign in SIGNS):
            raise
        raise BudgetError(
            f"GPU memory: conversion was planned with {need / 2**30:.1f} GiB and found no more: "
            + str(error).splitlines()[0],
            "close other programs that use the GPU; the same command continues",
        ) from error
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        release(device)


def most_bytes(need_bytes: int, spec: ModelSpec, there: resources.Room) -> int:
    """Return what torch may hold of a device: some more than is planned, but not more than is free,
    on a shared pool beside what the host needs. As long as the device has more, torch keeps freed
    pieces beside new ones, up to three times the plan; at a limit it gives them back first."""
    most = int(SLACK * need_bytes)
    if there.shared and there.host_bytes is not None:
        return max(need_bytes, min(most, there.host_bytes - resources.host_bytes(spec)))
    return max(need_bytes, min(most, there.device_bytes or most))


def release(device: torch.device) -> None:
    """Give back what torch keeps of a GPU's memory: a layer's pieces do not fit the next step, and
    what graphs worked in is not used again."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_bytes(device: torch.device) -> int | None:
    """Return the most memory that torch has held on a GPU since `computing_on`, else None."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
