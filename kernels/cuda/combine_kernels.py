"""Partial results of attention into its answer: blocks of 64 tokens, ascending, as a Triton kernel.

Invariant: the order over blocks is that of `kernels/ops.py`, one rounded product and one rounded
sum a block, whatever the splits were.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edge_runtime.kernels.cuda import floats
from edge_runtime.kernels.cuda.attention_kernels import BLOCK
from edge_runtime.kernels.cuda.floats import exp_nonpositive


@triton.jit(do_not_specialize=["heads", "max_blocks"])
def combine(
    partial_ptr,  # fp32 [M·heads, (D + 2)·max_blocks]: see `attend_split`
    position_ptr,  # int32 [M]
    y_ptr,  # fp32 [M, heads, D]
    heads,
    max_blocks,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    UNROLL: tl.constexpr,  # blocks whose loads are in flight together
):
    """Blocks of one query vector, ascending: (Σ ob·c) / (Σ lb·c), c = exp(block max - max).

    A program is one warp with 31 dims; its last lane adds up the block sums.
    """
    vector = tl.program_id(0)
    blocks = tl.load(position_ptr + vector // heads) // BLOCK + 1
    partial_ptr += vector.to(tl.int64) * max_blocks * (D + 2)
    most_ptr = partial_ptr + max_blocks * D
    i = tl.arange(0, CHUNK)
    most = tl.full((CHUNK,), floats.NEG_INF, tl.float32)
    for b in range(0, blocks, CHUNK):
        there = b + i < blocks
        most = tl.maximum(most, tl.load(most_ptr + b + i, mask=there, other=floats.NEG_INF))
    top = tl.max(most, 0)

    lane = tl.arange(0, 32)
    last = lane == 31
    d = tl.program_id(1) * 31 + lane
    stride = tl.where(last, 1, D)
    at = tl.where(last, max_blocks * (D + 1), tl.minimum(d, D - 1))
    y = tl.zeros((32,), tl.float32)
    whole = blocks // UNROLL * UNROLL
    for b in range(0, whole, UNROLL):
        for part in tl.static_range(UNROLL // 32):
            first = b + 32 * part
            c = exp_nonpositive(tl.load(most_ptr + first + lane) - top)
            for u in tl.static_range(32):
                weight = tl.gather(c, lane * 0 + u, 0)  # of block first + u, in every lane
                y += tl.load(partial_ptr + (at + stride * (first + u))) * weight
    for b in range(whole, blocks):
        weight = exp_nonpositive(tl.load(most_ptr + b) - top)
        y += tl.load(partial_ptr + (at + stride * b)) * weight
    total = tl.sum(tl.where(last, y, 0.0), 0) + tl.zeros_like(y)
    y_ptr += vector.to(tl.int64) * D
    tl.store(y_ptr + d, tl.div_rn(y, total), mask=(lane < 31) & (d < D))
