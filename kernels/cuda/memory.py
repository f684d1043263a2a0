"""Device memory: blocks cut into pieces, what is free, and running out of it as an error in words.

Invariant: a block is exactly as large as the pieces that are taken from it. On a Jetson device and
host share one pool, so free is MemAvailable there: the driver's own count takes files that the
kernel would drop for used memory.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edge_runtime import machine
from edge_runtime.errors import BudgetError
from edge_runtime.kernels.cuda import launch, sizes

# of the driver, of Triton, of torch on a CPU; on a Jetson torch may die of asking NVML instead
SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "NVML_SUCCESS")


class Block:
    """One allocation, cut from its beginning; every piece begins on a line."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._whole = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the next piece, not initialised."""
        size = math.prod(shape) * dtype.itemsize
        start = self._used
        self._used += sizes.piece(size)
        assert self._used <= self._whole.numel(), (self._used, self._whole.numel())
        return self._whole[start : start + size].view(dtype).view(*shape)

    def put(self, source: Tensor) -> Tensor:
        """Return a piece with a copy of a tensor."""
        return self.take(source.shape, source.dtype).copy_(source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Where tensors of a device lie. arch: 87 is compute capability 8.7; discrete: memory of its
    own; None: not known."""

    arch: int
    discrete: bool
    free_bytes: int | None
    total_bytes: int | None


def usual_device() -> torch.device:
    """The GPU, or the CPU in Triton's interpreter, as tests without a GPU use it."""
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


def pool(device: torch.device | None = None) -> Pool:
    """Look at a device, the usual one by default; the interpreter's counts as an Orin."""
    device = device or usual_device()
    if device.type != "cuda":
        free, total = machine.available_bytes(), machine.total_bytes()
        return Pool(arch=launch.arch(device), discrete=False, free_bytes=free, total_bytes=total)
    found = torch.cuda.get_device_properties(device)
    arch = launch.arch(device)
    if found.is_integrated:  # asked first: on such a chip the driver's free is another thing
        free, total = machine.available_bytes(), machine.total_bytes()
        return Pool(arch=arch, discrete=False, free_bytes=free, total_bytes=total)
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Pool(arch=arch, discrete=True, free_bytes=free, total_bytes=total)


PASS_HINT = "free memory of the GPU, or open the model with a lower --ctx"


@contextlib.contextmanager
def asking_for(what: str, num_bytes: int, device: torch.device, hint: str) -> Iterator[None]:
    """Turn running out of memory within into a BudgetError that names what was asked for.

    num_bytes: of `what`; what failed may be a part of it.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch's OutOfMemoryError is a RuntimeError
        if not (isinstance(error, MemoryError) or any(sign in str(error) for sign in SIGNS)):
            raise
        if device.type == "cuda":
            torch.cuda.empty_cache()
        free = pool(device).free_bytes
        raise BudgetError(
            f"GPU memory: {what} takes {num_bytes / 2**20:.1f} MiB, "
            + ("what is free is not known" if free is None else f"{free / 2**20:.1f} MiB are free"),
            hint,
        ) from error
