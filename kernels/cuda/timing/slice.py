"""Code for sm_87 on as many multiprocessors as an Orin NX has: bytes per clock of each.

A green context holds 8 multiprocessors of a big GPU, with far more bandwidth than they need, so
that a figure says what the instructions of a kernel allow. An Orin NX 16 GB at 918 MHz needs 13.9
bytes per clock and multiprocessor for the bandwidth of its pins and some 10.9 for what it reaches.
On a GPU with fewer than 16 multiprocessors, as an Orin is, the slice is the whole of it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from edge_runtime.errors import BackendUnavailable
from edge_runtime.kernels.cuda import launch
from edge_runtime.kernels.cuda.launch import ORIN
from edge_runtime.kernels.cuda.record import Built
from edge_runtime.kernels.cuda.tiles import ROW_TILES
from edge_runtime.kernels.cuda.timing import linears
from edge_runtime.kernels.cuda.timing.entry import Entry, Sizes, num_copies
from edge_runtime.kernels.cuda.timing.timer import Timer

NUM_SMS = 8
SMALL_GPU_SMS = 16  # with fewer the slice is the whole GPU
SHAPES = ("gate_up", "o")  # the largest linear of a layer and the smallest


def capability() -> int:
    """Compute capability of the current GPU: 87 is 8.7."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


@contextlib.contextmanager
def open_slice() -> Iterator[Timer]:
    """Make a slice current with a stream of it, launch code for sm_87 there, and yield its timer;
    torch works in it, too. What is met first within is compiled.

    Raises BackendUnavailable where code for sm_87 or green contexts are not to be had.
    """
    if capability() < ORIN:
        raise BackendUnavailable(f"code for sm_{ORIN} does not run on sm_{capability()}")
    if torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count < (
        SMALL_GPU_SMS
    ):
        timer = Timer()
        with timer.current(), launch.using(Built(ORIN)):
            yield timer
        return
    context = _green_context()
    context.set_context()
    try:
        timer = Timer(NUM_SMS)
        with timer.current(), launch.using(Built(ORIN)):
            yield timer
    finally:
        gc.collect()  # what was made within goes before the context does
        context.pop_context()


def _green_context() -> Any:
    try:
        from torch.cuda.green_contexts import GreenContext
    except ImportError:
        raise BackendUnavailable(
            f"torch {torch.__version__} has no green contexts (2.9 and later have)"
        ) from None
    try:
        return GreenContext.create(num_sms=NUM_SMS)
    except RuntimeError as error:  # of a driver or a build without them
        reason = (str(error).splitlines() or ["unknown"])[0]
        raise BackendUnavailable(f"no green context of {NUM_SMS} multiprocessors: {reason}") from (
            error
        )


def entries(s: Sizes, timer: Timer) -> Iterator[Entry]:
    """The linears of `SHAPES` in both views."""
    for name in SHAPES:
        N, K = s.linears[name]
        n = num_copies(linears.num_bytes(N, K, s.group_size, "w4"))
        ws = [linears.weights(N, K, ROW_TILES[ORIN], s.group_size) for _ in range(n)]
        for M in s.rows:
            x = linears.activation(M, K, s.group_size)
            for view in linears.VIEWS:
                yield linears.native_entry(name, ws, x, view, timer.run)
