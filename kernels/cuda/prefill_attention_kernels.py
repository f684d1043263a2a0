"""Attention of many rows over the nested cache in one pass without partial results (prefill).

Invariant: the same steps per block and the same order over blocks as `attention_kernels.py`, so the
same bits. A program walks the keys twice: first for the maximum, which the weight of every block
needs, then to add blocks as they come.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edge_runtime.kernels.cuda import floats
from edge_runtime.kernels.cuda.attention_kernels import (
    BLOCK,
    ROWS,
    _full_block,
    _load_queries,
    _quantised_query,
    _scores,
    _softmax_block,
    _unpack,
)
from edge_runtime.kernels.cuda.unpack import load_plane


@triton.jit
def _load_values(
    base_ptr, refine_ptr, scale_ptr, block, HALF: tl.constexpr, HP: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Both planes [dims, 64] of one block of a head's values and their scales / 16."""
    token = tl.arange(0, BLOCK)
    d = tl.arange(0, HP)
    at = (d + block * HALF)[:, None] * BLOCK + token[None, :]
    inside = (d < HALF)[:, None]
    base = load_plane(base_ptr, at, inside, HP == HALF)
    refine = base
    if FULL:
        refine = load_plane(refine_ptr, at, inside, HP == HALF)
    scale = tl.load(scale_ptr + (token + block * BLOCK))
    return base, refine, scale.to(tl.float32) * 0.0625


@triton.jit
def _values(codes, w_high, w_low, total8, step, FULL: tl.constexpr):
    """One half of the dims of a block, fp32 [Q, half]."""
    codes = tl.trans(codes)
    sums = tl.dot(w_high, codes, out_dtype=tl.int32) * 256
    sums = tl.dot(w_low, codes, acc=sums, out_dtype=tl.int32)
    if FULL:
        sums -= total8[:, None]
    return (-sums).to(tl.float32) * step[:, None]


@triton.jit
def _most_of(
    top, key_base, key_refine, key_scale, start, stop, q_low, q_high, q_sum8, factor, position,
    first_full, HALF: tl.constexpr, HP: tl.constexpr, FULL: tl.constexpr, ASM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The largest score of each query in blocks start…stop - 1, and `top`."""
    for block in tl.range(start, stop, num_stages=STAGES):
        s = _scores(
            key_base, key_refine, key_scale, block, q_low, q_high, q_sum8, factor,
            position + 1 - block * BLOCK, HALF, HP, ROWS, FULL, ASM,
        )  # fmt: skip
        mine = (first_full <= block) == FULL
        top = tl.maximum(top, tl.where(mine, tl.max(s, 1), floats.NEG_INF))
    return top


@triton.jit
def _add_blocks(
    y_low, y_high, total, top, key_base, key_refine, value_base, value_refine, key_scale,
    value_scale, start, stop, q_low, q_high, q_sum8, factor, position, first_full,
    HALF: tl.constexpr, HP: tl.constexpr, FULL: tl.constexpr, ASM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add blocks start…stop - 1, ascending, for the queries that see them so."""
    for block in tl.range(start, stop, num_stages=STAGES):
        left = position + 1 - block * BLOCK
        s = _scores(
            key_base, key_refine, key_scale, block, q_low, q_high, q_sum8, factor, left,
            HALF, HP, ROWS, FULL, ASM,
        )  # fmt: skip
        base, refine, scale = _load_values(
            value_base, value_refine, value_scale, block, HALF, HP, FULL
        )
        most, block_sum, w_high, w_low, total8, step = _softmax_block(s, scale, left, ROWS)
        # a block that no token of which is seen has weight exp(-inf) = 0 and sums of 0
        mine = (first_full <= block) == FULL
        c = tl.where(mine, floats.exp_nonpositive(most - top), 0.0)
        total += block_sum * c
        low, high = _unpack(base, refine, ROWS, FULL, ASM)
        y_low += _values(low, w_high, w_low, total8, step, FULL) * c[:, None]
        y_high += _values(high, w_high, w_low, total8, step, FULL) * c[:, None]
    return y_low, y_high, total


@triton.jit(do_not_specialize=["num_queries", "heads"])
def attend_rows(
    q_ptr,  # fp32 [M, heads, D]
    position_ptr,  # int32 [M]
    full_from_ptr,  # int32 [M]
    key_base_ptr,  # the cache of a layer: see cache.py
    key_refine_ptr,
    value_base_ptr,
    value_refine_ptr,
    key_scale_ptr,
    value_scale_ptr,
    y_ptr,  # fp32 [M, heads, D]
    num_queries,  # M · group
    heads,
    T,
    softmax_scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    HP: tl.constexpr,  # D/2 rounded up
    BQ: tl.constexpr,  # query vectors of a program
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """One tile of query vectors of one KV head against all tokens that they see."""
    HALF: tl.constexpr = D // 2
    kv_head = tl.program_id(1)
    # the last rows see most: they go first
    query = (tl.num_programs(0) - 1 - tl.program_id(0)) * BQ + tl.arange(0, BQ)
    valid = query < num_queries
    query = tl.minimum(query, num_queries - 1)
    row = query // GROUP
    head = kv_head * GROUP + query % GROUP
    position = tl.load(position_ptr + row)
    first_full = _full_block(tl.load(full_from_ptr + row))
    x_low, x_high = _load_queries(q_ptr, row, head, heads, D, HP, ROWS)
    q_low, q_high, q_sum8, scale = _quantised_query(x_low, x_high, ROWS, 1)
    factor = scale * softmax_scale
    at = kv_head.to(tl.int64) * T
    key_base, key_refine = key_base_ptr + at * HALF, key_refine_ptr + at * HALF
    value_base, value_refine = value_base_ptr + at * HALF, value_refine_ptr + at * HALF
    key_scale, value_scale = key_scale_ptr + at, value_scale_ptr + at

    stop = tl.max(position, 0) // BLOCK + 1
    # where queries differ, a block is walked both ways, each query keeping one result
    base_stop = tl.minimum(tl.max(first_full, 0), stop)
    full_start = tl.minimum(tl.min(first_full, 0), stop)
    top = tl.full((BQ,), floats.NEG_INF, tl.float32)
    top = _most_of(
        top, key_base, key_refine, key_scale, 0, base_stop, q_low, q_high, q_sum8, factor,
        position, first_full, HALF, HP, False, ASM, STAGES,
    )  # fmt: skip
    top = _most_of(
        top, key_base, key_refine, key_scale, full_start, stop, q_low, q_high, q_sum8, factor,
        position, first_full, HALF, HP, True, ASM, STAGES,
    )  # fmt: skip
    y_low = tl.zeros((BQ, HP), tl.float32)
    y_high = tl.zeros((BQ, HP), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    y_low, y_high, total = _add_blocks(
        y_low, y_high, total, top, key_base, key_refine, value_base, value_refine, key_scale,
        value_scale, 0, base_stop, q_low, q_high, q_sum8, factor, position, first_full,
        HALF, HP, False, ASM, STAGES,
    )  # fmt: skip
    y_low, y_high, total = _add_blocks(
        y_low, y_high, total, top, key_base, key_refine, value_base, value_refine, key_scale,
        value_scale, full_start, stop, q_low, q_high, q_sum8, factor, position, first_full,
        HALF, HP, True, ASM, STAGES,
    )  # fmt: skip
    d = tl.arange(0, HP)
    at = ((row * heads + head) * D)[:, None] + d[None, :]
    inside = valid[:, None] & (d < HALF)[None, :]
    tl.store(y_ptr + at, tl.div_rn(y_low, total[:, None] + tl.zeros_like(y_low)), mask=inside)
    tl.store(
        y_ptr + at + HALF, tl.div_rn(y_high, total[:, None] + tl.zeros_like(y_high)), mask=inside
    )
