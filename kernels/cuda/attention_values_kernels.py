"""Softmax weights times values of the nested cache, blocks ascending, as a Triton kernel.

Invariant: the order over blocks is that of `kernels/ops.py`, one rounded product and one rounded
sum a block. The sums of a block are integers, so blocks are multiplied side by side, a warp each,
and only their results wait for one another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edge_runtime.kernels.cuda import floats
from edge_runtime.kernels.cuda.attention_kernels import BLOCK, COLS, _full_block, _unpack
from edge_runtime.kernels.cuda.floats import exp_nonpositive


@triton.jit
def _add_ascending(y, terms, WIDTH: tl.constexpr):
    """y [R, Q, 2] and then terms [WIDTH, R, Q, 2], one after the other; WIDTH is 16 at most."""
    for i in tl.static_range(WIDTH):
        term = terms
        for step in tl.static_range(4):
            if (WIDTH >> step) > 1:  # of what is left, the half that i lies in
                pairs = tl.reshape(term, [2, WIDTH >> (step + 1), y.shape[0], y.shape[1], 2])
                first, second = tl.split(tl.permute(pairs, [1, 2, 3, 4, 0]))
                term = first if (i & (WIDTH >> (step + 1))) == 0 else second
        y += tl.reshape(term, y.shape)
    return y


@triton.jit
def _values(codes, w_high, w_low, total8, step, FULL: tl.constexpr):
    """One half of the dims of n blocks: codes [n, R, 64], limbs [n, 64, Q] -> fp32 [n, R, Q]."""
    sums = tl.dot(codes, w_high, out_dtype=tl.int32) * 256
    sums = tl.dot(codes, w_low, acc=sums, out_dtype=tl.int32)
    if FULL:
        sums -= total8[:, None, :]
    return (-sums).to(tl.float32) * step[:, None, :]


@triton.jit
def _load_values(ptr, at, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptr + at, eviction_policy="evict_first")
    else:
        return tl.load(ptr + at, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _add_blocks(
    y, total, top, base_ptr, refine_ptr, weight_ptr, stat_ptr, start, stop, position, first_full,
    max_blocks, HALF: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
    ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add blocks start…stop - 1, WIDTH a step, for the queries that see them so.

    base_ptr, refine_ptr: bytes [T/64, HALF, 64] from this program's rows on; weight_ptr [Q],
    stat_ptr [Q]: of each query.
    """
    token = tl.arange(0, BLOCK)
    d = tl.program_id(0) * R + tl.arange(0, R)
    for first in tl.range(start, stop, WIDTH, num_stages=STAGES):
        block = first + tl.arange(0, WIDTH)
        mine = (block < stop)[:, None] & (position[None, :] >= (block * BLOCK)[:, None])
        mine &= (first_full[None, :] <= block[:, None]) == FULL
        block = tl.minimum(block, stop - 1)
        at = ((block * HALF)[:, None, None] + d[None, :, None]) * BLOCK + token[None, None, :]
        inside = (d < HALF)[None, :, None]
        base = _load_values(base_ptr, at, inside, HALF % R == 0)
        refine = base
        if FULL:
            refine = _load_values(refine_ptr, at, inside, HALF % R == 0)
        at = (block * (2 * BLOCK))[:, None, None] + token[None, :, None]
        w_high = tl.load(weight_ptr[None, None, :] + at)
        w_low = tl.load(weight_ptr[None, None, :] + at + BLOCK)
        stat = stat_ptr[None, :] + block[:, None]
        most = tl.load(stat)
        block_sum = tl.load(stat + max_blocks)
        step = tl.load(stat + 2 * max_blocks)
        total8 = tl.load(stat + 3 * max_blocks).to(tl.int32, bitcast=True)
        # blocks that a query does not see are garbage, perhaps NaN: 0 takes their place
        c = exp_nonpositive(tl.where(mine, most - top[None, :], floats.NEG_INF))
        low, high = _unpack(base, refine, COLS, FULL, ASM)
        low = _values(low, w_high, w_low, total8, step, FULL)
        high = _values(high, w_high, w_low, total8, step, FULL)
        terms = tl.join(low, high) * c[:, None, :, None]
        y = _add_ascending(y, tl.where(mine[:, None, :, None], terms, 0.0), WIDTH)
        sums = tl.where(mine, block_sum * c, 0.0)[:, None, :, None]
        total = _add_ascending(total, tl.join(sums, sums), WIDTH)
    return y, total


@triton.jit(do_not_specialize=["num_queries", "heads"])
def add_values(
    position_ptr,  # int32 [M]
    full_from_ptr,  # int32 [M]
    value_base_ptr,  # the cache of a layer: see cache.py
    value_refine_ptr,
    weight_ptr,  # int8 [M·heads, max_blocks, 2, 64]: see `weigh_blocks`
    stat_ptr,  # fp32 [M·heads, 4, max_blocks]
    y_ptr,  # fp32 [M, heads, D]
    num_queries,  # M · group
    heads,
    T,
    max_blocks,  # a multiple of 16
    GROUP: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,  # rows of bytes of a program: 2·R dims
    BQ: tl.constexpr,  # query vectors of a program
    WIDTH: tl.constexpr,  # blocks of a step
    CHUNK: tl.constexpr,  # blocks of a step of the maximum
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Some dims of a tile of query vectors: (Σ ob·c) / (Σ lb·c), c = exp(mb - max mb)."""
    HALF: tl.constexpr = D // 2
    kv_head = tl.program_id(1)
    query = tl.program_id(2) * BQ + tl.arange(0, BQ)
    valid = query < num_queries
    query = tl.minimum(query, num_queries - 1)
    row = query // GROUP
    vector = row * heads + kv_head * GROUP + query % GROUP
    position = tl.load(position_ptr + row)
    first_full = _full_block(tl.load(full_from_ptr + row))
    weight_ptr += vector * max_blocks * (2 * BLOCK)
    stat_ptr += vector * (4 * max_blocks)
    at = kv_head.to(tl.int64) * T * HALF
    value_base_ptr += at
    value_refine_ptr += at

    stop = tl.max(position, 0) // BLOCK + 1
    chunk = tl.full((BQ, CHUNK), floats.NEG_INF, tl.float32)
    for first in range(0, stop, CHUNK):
        block = first + tl.arange(0, CHUNK)[None, :]
        seen = block * BLOCK <= position[:, None]
        most = tl.load(stat_ptr[:, None] + block, mask=seen, other=floats.NEG_INF)
        chunk = tl.maximum(chunk, most)
    top = tl.max(chunk, 1)

    # where queries differ, a block is walked both ways, each query keeping one result
    base_stop = tl.minimum(tl.max(first_full, 0), stop)
    full_start = tl.minimum(tl.min(first_full, 0), stop)
    y = tl.zeros((R, BQ, 2), tl.float32)
    total = tl.zeros((1, BQ, 2), tl.float32)
    y, total = _add_blocks(
        y, total, top, value_base_ptr, value_refine_ptr, weight_ptr, stat_ptr, 0, base_stop,
        position, first_full, max_blocks, HALF, R, WIDTH, False, ASM, STAGES,
    )  # fmt: skip
    y, total = _add_blocks(
        y, total, top, value_base_ptr, value_refine_ptr, weight_ptr, stat_ptr, full_start, stop,
        position, first_full, max_blocks, HALF, R, WIDTH, True, ASM, STAGES,
    )  # fmt: skip
    d = (tl.program_id(0) * R + tl.arange(0, R))[:, None, None]
    half = tl.arange(0, 2)[None, None, :] * HALF
    inside = (d < HALF) & valid[None, :, None]
    at = (vector * D)[None, :, None] + d + half
    tl.store(y_ptr + at, tl.div_rn(y, total + tl.zeros_like(y)), mask=inside)
