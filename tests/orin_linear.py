"""Compile the linear for an Orin in processes of their own, for `test_linear_sm87.py`."""

from __future__ import annotations

from edge_runtime.kernels.cuda.compile import Compiled
from edge_runtime.kernels.cuda.linear_binary import compile_linear
from edge_runtime.kernels.cuda.tiles import ROW_TILES, choose
from edge_runtime.kernels.ops import View

N = 100


def build(group: int, K: int, view: View, M: int) -> Compiled:
    """Odd N, bias and residual."""
    return compile_linear(
        choose(87, view, M, N, group), view, group, groups=K // group, row_tile=ROW_TILES[87],
        even=False, bias=True, residual=True,
    )  # fmt: skip
