"""The quantisers as Triton kernels; formulas in `kernels/ops.py`, launches in `activations.py`.

A row of the residual stream stays in registers from the first read to the codes. The sum of squares
has a fixed order (32 strided lanes ascending), so each warp walks it, re-reading the row from L1,
UNROLL loads at a time. A feed-forward row is spread over programs, and its peak is found between
two launches: on one multiprocessor of an Orin it would take about 10 us.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edge_runtime.kernels.cuda.numeric import (
    LANES,
    codes_of,
    fold_lanes,
    peak_bits,
    quantiser,
    silu_mul,
)
from edge_runtime.kernels.cuda.overlap_kernels import start_next_launch, wait_for_launch


@triton.jit
def _store_quantised(x, most, i, block, row, codes_ptr, scale_ptr, sums_ptr, Kp, G, BLOCK):
    """Write codes, scale and group sums of x fp32 [BLOCK], which is 0 from K on, at places i of
    block number `block`; most: bits of the whole row's peak."""
    inverse, scale = quantiser(most)
    codes = codes_of(x, inverse)
    tl.store(codes_ptr + row * Kp + i, codes.to(tl.int8), mask=i < Kp)
    tl.store(scale_ptr + row, scale, mask=block == 0)
    group = block * (BLOCK // G) + tl.arange(0, BLOCK // G)
    sums = tl.sum(tl.reshape(codes, (BLOCK // G, G)), 1)
    tl.store(sums_ptr + row * (Kp // G) + group, sums, mask=group < Kp // G)


@triton.jit
def quantise_kernel(
    x_ptr, codes_ptr, scale_ptr, sums_ptr, K, Kp, G: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """x fp32 [M, K]; one program a row."""
    start_next_launch(PDL)
    wait_for_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * K + i, mask=i < K, other=0.0)
    _store_quantised(x, peak_bits(x), i, 0, row, codes_ptr, scale_ptr, sums_ptr, Kp, G, BLOCK)


@triton.jit
def norm_quantise_kernel(
    x_ptr, codes_ptr, scale_ptr, sums_ptr, K, Kp, eps, G: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """x fp32 [M, K] is divided by its root mean square first."""
    start_next_launch(PDL)
    wait_for_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * K
    i = tl.arange(0, BLOCK)
    x = tl.load(x_row + i, mask=i < K, other=0.0)
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.float32)
    for first in range(0, K, LANES * UNROLL):
        for step in tl.static_range(UNROLL):
            at = first + step * LANES + lane
            part = tl.load(x_row + at, mask=at < K, other=0.0)
            total = total + part * part
    size = (row * 0 + K).to(tl.float32)  # K may be a constant
    mean = tl.div_rn(fold_lanes(total), size)
    factor = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    y = tl.where(i < K, x * factor, 0.0)
    _store_quantised(y, peak_bits(y), i, 0, row, codes_ptr, scale_ptr, sums_ptr, Kp, G, BLOCK)


@triton.jit
def silu_mul_kernel(
    x_ptr, y_ptr, peak_ptr, K, y_stride, chunks, CHUNK: tl.constexpr, PDL: tl.constexpr = False
):
    """y = silu(gate) · up and the bits of its peak, for x fp32 [M, 2K] = [gate | up]; one program
    for CHUNK numbers of a row. y may lie over the gate."""
    start_next_launch(PDL)
    wait_for_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    gate = tl.load(x_ptr + row * 2 * K + i, mask=i < K, other=0.0)
    up = tl.load(x_ptr + row * 2 * K + K + i, mask=i < K, other=0.0)
    y = silu_mul(gate, up)
    tl.store(y_ptr + row * y_stride + i, y, mask=i < K)
    tl.store(peak_ptr + row * chunks + chunk, peak_bits(y))


@triton.jit
def quantise_chunks_kernel(
    y_ptr, peak_ptr, codes_ptr, scale_ptr, sums_ptr, K, Kp, y_stride, chunks,
    G: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Quantise rows whose chunks' peaks are known; one program for CHUNK numbers of a row."""
    start_next_launch(PDL)
    wait_for_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    c = tl.arange(0, CHUNKS)
    most = tl.max(tl.load(peak_ptr + row * chunks + c, mask=c < chunks, other=0), 0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    y = tl.load(y_ptr + row * y_stride + i, mask=i < K, other=0.0)
    _store_quantised(y, most, i, chunk, row, codes_ptr, scale_ptr, sums_ptr, Kp, G, CHUNK)
