"""The linear for many rows (a prompt) against 16-bit products: native code and that of an Orin.

On the whole GPU the peer is cuBLAS; on a slice of it the fastest of some fp16 tiles on tensor cores
(`mma.sync`), compiled for sm_87 as well. The slice launches it (`slice.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edge_runtime.kernels.cuda.launch import EXACT, ORIN, Kernel
from edge_runtime.kernels.cuda.tiles import ROW_TILES
from edge_runtime.kernels.cuda.timing import linears, peers
from edge_runtime.kernels.cuda.timing.entry import Entry
from edge_runtime.kernels.cuda.timing.timer import Timer

GEMM16 = Kernel("timing.gemm16", "gemm16")
ROWS = (288, 1024)
COPIES = 3
GEMM16_TILES = ((128, 128, 4, 3), (64, 256, 4, 3), (64, 128, 4, 4), (128, 128, 8, 3))


def native(N: int, K: int, M: int, group: int) -> list[Entry]:
    """The w8 view and cuBLAS."""
    ws = [linears.weights(N, K, linears.native_row_tile(), group) for _ in range(COPIES)]
    x = linears.activation(M, K, group)
    half = peers.halves(N, K, COPIES)
    return [linears.native_entry("prefill", ws, x, "w8"), peers.cublas("prefill", half, M)]


def on_slice(timer: Timer, N: int, K: int, M: int, group: int) -> list[Entry]:
    """The w8 view and fp16 tiles, all as code for sm_87; the fastest tile counts."""
    shape = f"{N}x{K}"
    ws = [linears.weights(N, K, ROW_TILES[ORIN], group) for _ in range(COPIES)]
    x = linears.activation(M, K, group)
    ours = linears.native_entry("prefill", ws, x, "w8", timer.run)
    return [ours, *_gemm16(timer, N, K, M, shape)]


def _gemm16(timer: Timer, N: int, K: int, M: int, shape: str) -> list[Entry]:
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.float16}
    w, x = torch.randn(COPIES, N, K, **half), torch.randn(M, K, **half)
    y = torch.empty(M, N, **half)
    found = []
    for BM, BN, warps, stages in GEMM16_TILES:
        if N % BN or K % 32:
            continue  # its loads have no masks
        launched = GEMM16[(-(-M // BM) * (N // BN),)]
        tile = {"BM": BM, "BN": BN, "STAGES": stages, "num_warps": warps}
        call = _gemm16_call(partial(launched, **tile, **EXACT), x, w, y)
        timer.run(partial(call, 0))
        found.append(Entry("prefill", M, call, COPIES, 2 * N * K, shape, "fp16", peer=True))
    return found


def _gemm16_call(
    launched: Callable[..., object], x: Tensor, w: Tensor, y: Tensor
) -> Callable[[int], object]:
    (M, K), N = x.shape, w.shape[1]
    return lambda i: launched(x, w[i], y, M, N, K)
