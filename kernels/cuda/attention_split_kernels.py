"""Flash-decoding with the values of every block written out, as a Triton kernel.

Invariant: the bits of `attention_kernels.py` and `attention_values_kernels.py`, which halve the
work at the weights instead. Here a program reads keys and values of a block, so that a GPU of many
multiprocessors is busy from one row on; but what lies between this kernel and `combine_kernels.py`
is 528 bytes a block of a query vector in place of 144.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edge_runtime.kernels.cuda.attention_kernels import (
    BLOCK,
    WORDS,
    _dot_words,
    _full_block,
    _load_queries,
    _quantised_query,
    _scores,
    _softmax_block,
    _unpack,
)
from edge_runtime.kernels.cuda.overlap_kernels import wait_for_launch
from edge_runtime.kernels.cuda.unpack import load_plane


@triton.jit
def _value_dots(codes, w_high, w_low, FORM: tl.constexpr, ASM: tl.constexpr):
    """Codes [half, 64] times the two limbs -> int32 [half, Q]."""
    if FORM == WORDS:
        sums = _dot_words(codes, w_high, 0, ASM)
        sums = tl.sum(_dot_words(codes, w_low, sums * 256, ASM), 1)[:, None]
    else:
        sums = tl.dot(codes, w_high, out_dtype=tl.int32) * 256
        sums = tl.dot(codes, w_low, acc=sums, out_dtype=tl.int32)
    return sums


@triton.jit
def _load_values(
    base_ptr, refine_ptr, scale_ptr, block,
    HALF: tl.constexpr, HP: tl.constexpr, FORM: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Both planes of one block of a head's values and their scales / 16.

    base_ptr, refine_ptr: bytes [T/64, dims, 64] or words [T/64, dims, 16].
    """
    WIDTH: tl.constexpr = 16 if FORM == WORDS else 64
    d = tl.arange(0, HP)
    at = (d + block * HALF)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (d < HALF)[:, None]
    base = load_plane(base_ptr, at, inside, HP == HALF)
    refine = base
    if FULL:
        refine = load_plane(refine_ptr, at, inside, HP == HALF)
    scale = tl.load(scale_ptr + (tl.arange(0, BLOCK) + block * BLOCK))
    return base, refine, scale.to(tl.float32) * 0.0625


@triton.jit
def _values(
    codes, w_high, w_low, total8, step, FORM: tl.constexpr, FULL: tl.constexpr, ASM: tl.constexpr
):
    """One half of the dims of a block, fp32 [half, Q]."""
    sums = _value_dots(codes, w_high, w_low, FORM, ASM)
    if FULL:
        sums -= total8[None, :]
    return (-sums).to(tl.float32) * step[None, :]


@triton.jit
def _split_blocks(
    key_base, key_refine, value_base, value_refine, key_scale, value_scale_ptr, start, stop,
    q_low, q_high, q_sum8, factor, position, first_full, partial_ptr, stat_ptr, vector, valid,
    max_blocks, HALF: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, FORM: tl.constexpr,
    FULL: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Blocks start…stop - 1 for the queries that see them so: partial results."""
    DIMS: tl.constexpr = 4 * HP if FORM == WORDS else HP
    UNITS: tl.constexpr = HALF // 4 if FORM == WORDS else HALF
    d = tl.arange(0, DIMS)
    for block in tl.range(start, stop, num_stages=STAGES):
        left = position + 1 - block * BLOCK
        s = _scores(
            key_base, key_refine, key_scale, block, q_low, q_high, q_sum8, factor, left,
            UNITS, HP, FORM, FULL, ASM,
        )  # fmt: skip
        base, refine, value_scale = _load_values(
            value_base, value_refine, value_scale_ptr, block, HALF, DIMS, FORM, FULL
        )
        most, total, w_high, w_low, total8, step = _softmax_block(s, value_scale, left, FORM)
        keep = valid & (left > 0) & ((first_full <= block) == FULL)
        at = vector * (4 * max_blocks) + block
        tl.store(stat_ptr + at, most, mask=keep)
        tl.store(stat_ptr + at + max_blocks, total, mask=keep)
        at = ((vector * max_blocks + block) * D)[None, :] + d[:, None]
        inside = (d < HALF)[:, None] & keep[None, :]
        low, high = _unpack(base, refine, FORM, FULL, ASM)
        out = _values(low, w_high, w_low, total8, step, FORM, FULL, ASM)
        tl.store(partial_ptr + at, out, mask=inside)
        out = _values(high, w_high, w_low, total8, step, FORM, FULL, ASM)
        tl.store(partial_ptr + at + HALF, out, mask=inside)


@triton.jit(do_not_specialize=["num_queries", "heads"])
def attend_split(
    q_ptr,  # fp32 [M, heads, D]
    position_ptr,  # int32 [M]
    full_from_ptr,  # int32 [M]
    key_base_ptr,  # the cache of a layer: see cache.py; words of four bytes for WORDS
    key_refine_ptr,
    value_base_ptr,
    value_refine_ptr,
    key_scale_ptr,
    value_scale_ptr,
    partial_ptr,  # fp32 [M·heads, max_blocks, D]: values of every block
    stat_ptr,  # fp32 [M·heads, 4, max_blocks]: mb, lb
    num_queries,  # M · group
    heads,
    T,
    max_blocks,  # a multiple of 16
    softmax_scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    HP: tl.constexpr,  # D/2 rounded up (WORDS: D/8)
    BQ: tl.constexpr,  # query vectors of a program
    SPLIT: tl.constexpr,  # blocks of a program
    FORM: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """One split of one KV head against a tile of query vectors (row-major: row, head of group)."""
    HALF: tl.constexpr = D // 2
    wait_for_launch(PDL)
    kv_head = tl.program_id(1)
    tiles = tl.cdiv(num_queries, BQ)
    split = tl.program_id(0) // tiles
    query = (
        tl.program_id(0) - split * tiles
    ) * BQ  # tiles that read the same tokens run side by side
    query += tl.arange(0, BQ)
    valid = query < num_queries
    query = tl.minimum(query, num_queries - 1)
    row = query // GROUP
    head = kv_head * GROUP + query % GROUP
    # all of these before the branch: one latency, not three
    position = tl.load(position_ptr + row)
    first_full = _full_block(tl.load(full_from_ptr + row))
    x_low, x_high = _load_queries(q_ptr, row, head, heads, D, HP, FORM)
    start = split * SPLIT
    stop = tl.minimum(start + SPLIT, tl.max(position, 0) // BLOCK + 1)
    if start < stop:
        q_low, q_high, q_sum8, scale = _quantised_query(x_low, x_high, FORM, 0)
        factor = scale * softmax_scale
        if FORM == WORDS:  # numbers so far
            factor = tl.zeros_like(position).to(tl.float32) + factor
            q_sum8 = tl.zeros_like(position) + q_sum8
        unit: tl.constexpr = HALF // 4 if FORM == WORDS else HALF
        at = kv_head.to(tl.int64) * T
        key_base, key_refine = key_base_ptr + at * unit, key_refine_ptr + at * unit
        value_base, value_refine = value_base_ptr + at * unit, value_refine_ptr + at * unit
        key_scale, value_scale = key_scale_ptr + at, value_scale_ptr + at
        vector = row * heads + head
        # where queries differ, a block is walked both ways, each query keeping one result
        base_stop = tl.minimum(tl.maximum(tl.max(first_full, 0), start), stop)
        full_start = tl.minimum(tl.maximum(tl.min(first_full, 0), start), stop)
        _split_blocks(
            key_base, key_refine, value_base, value_refine, key_scale, value_scale, start,
            base_stop, q_low, q_high, q_sum8, factor, position, first_full, partial_ptr, stat_ptr,
            vector, valid, max_blocks, HALF, HP, D, FORM, False, ASM, STAGES,
        )  # fmt: skip
        _split_blocks(
            key_base, key_refine, value_base, value_refine, key_scale, value_scale, full_start,
            stop, q_low, q_high, q_sum8, factor, position, first_full, partial_ptr, stat_ptr,
            vector, valid, max_blocks, HALF, HP, D, FORM, True, ASM, STAGES,
        )  # fmt: skip
