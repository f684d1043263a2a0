"""Values of blocks into the answer of attention: ascending, as a Triton kernel.

Invariant: the order over blocks is that of `kernels/ops.py`, one rounded product and one rounded
sum a block, whatever the splits were.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edge_runtime.kernels.cuda import floats
from edge_runtime.kernels.cuda.attention_kernels import BLOCK
from edge_runtime.kernels.cuda.floats import exp_nonpositive


@triton.jit
def _add_ascending(y, terms, WIDTH: tl.constexpr):
    """y [N] and then terms [WIDTH, N], one after the other; WIDTH is 64 at most."""
    for i in tl.static_range(WIDTH):
        term = terms
        for step in tl.static_range(6):
            if (WIDTH >> step) > 1:  # of what is left, the half that i lies in
                pairs = tl.reshape(term, [2, WIDTH >> (step + 1), y.shape[0]])
                first, second = tl.split(tl.permute(pairs, [1, 2, 0]))
                term = first if (i & (WIDTH >> (step + 1))) == 0 else second
        y += tl.reshape(term, y.shape)
    return y


@triton.jit(do_not_specialize=["heads"])
def combine(
    partial_ptr,  # fp32 [M·heads, max_blocks, D]: values of every block
    stat_ptr,  # fp32 [M·heads, 4, max_blocks]: mb, lb
    position_ptr,  # int32 [M]
    y_ptr,  # fp32 [M, heads, D]
    heads,
    max_blocks,
    D: tl.constexpr,
    CHUNK: tl.constexpr,  # blocks of a step of the maximum
    WIDTH: tl.constexpr,  # blocks of a step of the sum
    STAGES: tl.constexpr,
):
    """32 dims of one query vector: (Σ ob·c) / (Σ lb·c), c = exp(mb - max mb); one warp."""
    vector = tl.program_id(0)
    blocks = tl.load(position_ptr + vector // heads) // BLOCK + 1
    stat_ptr += vector * (4 * max_blocks)
    partial_ptr += vector.to(tl.int64) * max_blocks * D
    chunk = tl.full((CHUNK,), floats.NEG_INF, tl.float32)
    for first in range(0, blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        most = tl.load(stat_ptr + block, mask=block < blocks, other=floats.NEG_INF)
        chunk = tl.maximum(chunk, most)
    top = tl.max(chunk, 0)

    d = tl.program_id(1) * 32 + tl.arange(0, 32)
    y = tl.zeros((32,), tl.float32)
    total = tl.zeros((32,), tl.float32)
    for first in tl.range(0, blocks, WIDTH, num_stages=STAGES):
        block = first + tl.arange(0, WIDTH)
        there = block < blocks
        block = tl.minimum(block, blocks - 1)  # past it the last one again, its weight 0
        at = block[:, None] * D + d[None, :]
        if D % 32 == 0:
            values = tl.load(partial_ptr + at)
        else:
            values = tl.load(partial_ptr + at, mask=(d < D)[None, :], other=0.0)
        c = tl.where(there, exp_nonpositive(tl.load(stat_ptr + block) - top), 0.0)
        y = _add_ascending(y, values * c[:, None], WIDTH)
        sums = (tl.load(stat_ptr + max_blocks + block) * c)[:, None] + tl.zeros_like(values)
        total = _add_ascending(total, sums, WIDTH)
    y_ptr += vector.to(tl.int64) * D
    tl.store(y_ptr + d, tl.div_rn(y, total), mask=d < D)
