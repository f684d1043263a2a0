"""Code for sm_87 on as many multiprocessors as an Orin NX has: bytes per clock of each.

A green context holds 8 multiprocessors of a big GPU, with far more bandwidth than they need, so
that a figure says what the instructions of a kernel allow. An Orin NX 16 GB at 918 MHz needs 13.9
bytes per clock and multiprocessor for the bandwidth of its pins and some 10.9 for what it reaches.
On a GPU with fewer than 16 multiprocessors, as an Orin is, the slice is the whole of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edge_runtime.errors import BackendUnavailable
from edge_runtime.kernels.cuda import driver
from edge_runtime.kernels.cuda.compile import ORIN
from edge_runtime.kernels.cuda.linear import DeviceLinear, Digits
from edge_runtime.kernels.cuda.linear_binary import compile_linear, launch_linear
from edge_runtime.kernels.cuda.tiles import ROW_TILES, Tile, choose
from edge_runtime.kernels.cuda.timing import linears
from edge_runtime.kernels.cuda.timing.entry import Entry, Sizes, num_copies
from edge_runtime.kernels.cuda.timing.timer import Timer
from edge_runtime.kernels.ops import View

NUM_SMS = 8
SMALL_GPU_SMS = 16  # with fewer the slice is the whole GPU
SHAPES = ("gate_up", "o")  # the largest linear of a layer and the smallest


def capability() -> int:
    """Compute capability of the current GPU: 87 is 8.7."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


@contextlib.contextmanager
def open_slice() -> Iterator[Timer]:
    """Make a slice current and yield its timer; torch allocates in it, on the same GPU.

    Raises BackendUnavailable where code for sm_87 or green contexts are not to be had.
    """
    if capability() < ORIN:
        raise BackendUnavailable(f"code for sm_{ORIN} does not run on sm_{capability()}")
    if torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count < (
        SMALL_GPU_SMS
    ):
        yield Timer()
        return
    context = _green_context()
    context.set_context()
    try:
        yield Timer(NUM_SMS)
    finally:
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


@dataclass(frozen=True, slots=True)
class Loaded:
    """A linear compiled for sm_87 with the table's tile, in the current context."""

    function: driver.Function
    tile: Tile
    view: View
    rows: int
    group_size: int

    @classmethod
    def build(cls, view: View, N: int, K: int, M: int, group: int) -> Loaded:
        """Compile and load: the cubin on an Orin, elsewhere the PTX, which the driver compiles."""
        from edge_runtime.kernels.cuda.launch import triton_columns

        tile = choose(ORIN, view, M, N, group, triton_columns())
        built = compile_linear(
            tile, view, group, groups=-(-K // group), row_tile=ROW_TILES[ORIN],
            even=N % tile.rows == 0,
        )  # fmt: skip
        return cls(driver.load(built, ptx=capability() != ORIN), tile, view, M, group)

    def entry(self, name: str, ws: list[DeviceLinear], timer: Timer) -> Entry:
        """Check the bits on the first matrix; return what is timed."""
        N, K = ws[0].num_outputs, ws[0].num_inputs
        x = linears.activation(self.rows, K, self.group_size)
        out = torch.full((self.rows, N), float("nan"), device="cuda")
        call = self._call(ws, x, out, timer)
        timer.run(lambda: call(0))
        linears.check_ends(out, ws[0], x[0], x[1], self.view)
        size = linears.num_bytes(N, K, self.group_size, self.view)
        return Entry(name, self.rows, call, len(ws), size, f"{N}x{K}", self.view)

    def _call(
        self,
        ws: list[DeviceLinear],
        x: tuple[Tensor, Tensor, Tensor | Digits],
        out: Tensor,
        timer: Timer,
    ) -> Callable[[int], object]:
        return lambda i: launch_linear(
            self.function, self.tile, *x, ws[i], out, stream=timer.handle
        )


def entries(s: Sizes, timer: Timer) -> Iterator[Entry]:
    """The linears of `SHAPES` in both views."""
    for name in SHAPES:
        N, K = s.linears[name]
        n = num_copies(linears.num_bytes(N, K, s.group_size, "w4"))
        ws = [linears.weights(N, K, ROW_TILES[ORIN], s.group_size) for _ in range(n)]
        for M in s.rows:
            for view in linears.VIEWS:
                yield Loaded.build(view, N, K, M, s.group_size).entry(name, ws, timer)
