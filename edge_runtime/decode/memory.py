"""What fits: the longest context within a budget, and what this process took.

Invariant: a context that does not fit is refused with the numbers before anything is allocated.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
from typing import Any

import psutil

from edge_runtime import machine
from edge_runtime.decode import arguments
from edge_runtime.errors import BudgetError, UsageError
from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels.cuda.sizes import CONTEXT_BYTES
from edge_runtime.plan import footprint
from edge_runtime.plan.footprint import Layout


def fit_context(
    spec: ModelSpec,
    ctx: str | int,
    backend: str,
    budget_bytes: int | None,
    reserve_bytes: int,
    *,
    view: str = "nest",
    layout: Layout = "nest",
    group_size: int | None = None,
    threads: int | None = None,
) -> int:
    """Resolve --ctx: as asked, or the model's own maximum as far as memory allows.

    Raises BudgetError with the numbers, UsageError for an impossible value.
    """
    account = account_here(
        spec, backend, view=view, layout=layout, group_size=group_size, threads=threads
    )
    available = room_bytes(account.fixed["runtime"], reserve_bytes, backend)
    limit = available if budget_bytes is None else min(available, budget_bytes)
    fixed, fits = account.fixed_bytes, account.max_context(limit)
    asked = arguments.context(ctx)
    if asked is None:
        context = min(spec.max_position, fits)
    else:
        context = asked
        longest = spec.max_position
        if spec.rope.kind == "dynamic":  # made to go beyond what the model was trained on
            longest = int(longest * spec.rope.factor)
        if context > longest:
            raise UsageError(
                f"context: this model was made for at most {longest} positions, got "
                + arguments.shown(context)
            )
    if context > fits or context < 2:
        raise BudgetError(
            f"memory: weights and workspace take about {fixed / 2**20:.0f} MiB and "
            f"{max(context, 2)} tokens of context "
            f"{(account.total_bytes(max(context, 2)) - fixed) / 2**20:.0f} MiB, "
            f"{max(0, limit) / 2**20:.0f} MiB are available"
            + ("" if limit == available else f" within the budget of {limit / 2**20:.0f} MiB"),
            f"the largest context that fits is {fits}"
            if fits >= 2
            else "raise --budget, lower --reserve, or use a smaller model",
        )
    return context


def account_here(
    spec: ModelSpec,
    backend: str,
    *,
    view: str = "nest",
    layout: Layout = "nest",
    group_size: int | None = None,
    threads: int | None = None,
) -> footprint.Footprint:
    """Make the account of an engine on this machine, with the GPU it would run on.

    layout: of the quantised views; the fp view is fp16 on a GPU, fp32 elsewhere.
    """
    gpu: dict[str, Any] = {}
    if backend == "cuda":
        found = _gpu_pool()
        gpu = {"arch": found.arch, "discrete": found.discrete}
    if view == "fp":
        layout = "fp16" if backend == "cuda" else "fp"
    return footprint.footprint(
        spec,
        layout=layout,
        backend=backend,
        group_size=group_size,
        threads=threads,
        **gpu,
    )


def _gpu_pool() -> Any:
    from edge_runtime.kernels.cuda.memory import pool

    return pool()


def room_bytes(runtime_bytes: int, reserve_bytes: int, backend: str = "") -> int:
    """Memory that this process can have in all: what is free beyond the reserve, and what of its
    runtime (which an account counts) it has already. On cuda, of a GPU's own memory if it has."""
    if backend == "cuda" and (gpu := _gpu_pool()).discrete:
        own = min(CONTEXT_BYTES, runtime_bytes)  # it is there since the GPU was looked at
        return int(gpu.free_bytes) + own - footprint.reserve_bytes(reserve_bytes, gpu.total_bytes)
    free = machine.available_bytes()
    if free is None:
        free = psutil.virtual_memory().available
    own = min(anonymous_bytes(), runtime_bytes)
    return free + own - footprint.reserve_bytes(reserve_bytes, machine.total_bytes())


def trim_heap() -> None:
    """Give what the C library keeps of freed memory back to the system (glibc; elsewhere nothing).

    Reading a tokenizer of 49,152 ids leaves 26 MiB of it.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def anonymous_bytes() -> int:
    """Memory that is this process's alone; libraries may be there, and paid for, anyway."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def peak_rss_bytes() -> int:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
