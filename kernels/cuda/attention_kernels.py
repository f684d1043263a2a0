"""Keys of the nested cache to softmax weights, a block of 64 tokens at a time, as Triton kernels.

Invariant: dots are integers, so M, tiles and splits cannot change bits; the floats after them are
fixed per block. Formula: `kernels/ops.py`; shapes: `attention.py` and `cache.py`.

`weigh_blocks` is the first half of decoding: every block alone, in any order. The second half
(`attention_values_kernels.py`) adds blocks up in ascending order. What lies between them is two
bytes a token and 16 bytes a block, a quarter of what the values of every block would take.

Three forms of one block, by what the products run on:
    WORDS  one query vector: dp4a on words of four codes
    COLS   tensor cores, tokens are rows, query vectors are columns
    ROWS   tensor cores, query vectors are rows (prefill)
A weight i (15 bits) goes as two int8 limbs of -i = 256·high + low: of i, the high one overflows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edge_runtime.kernels.cuda import floats, numeric
from edge_runtime.kernels.cuda.attention_tiles import FORMS
from edge_runtime.kernels.cuda.floats import exp_nonpositive, halving_sum
from edge_runtime.kernels.cuda.numeric import codes_of, quantiser
from edge_runtime.kernels.cuda.unpack import (
    dot4,
    load_plane,
    quarters,
    w4_codes,
    w8_codes,
    word_codes,
)

WORDS, COLS, ROWS = (tl.constexpr(FORMS[name]) for name in ("words", "cols", "rows"))
BLOCK = tl.constexpr(64)
MAGIC, MAGIC_BITS = floats.MAGIC, floats.MAGIC_BITS


@triton.jit
def _quantised_query(x_low, x_high, FORM: tl.constexpr, AXIS: tl.constexpr):
    """Halves of query vectors fp32, dims on AXIS (WORDS: [D/8, 4]) -> codes, 8·Σ codes, scale."""
    bits = tl.maximum(floats.magnitude_bits(x_low), floats.magnitude_bits(x_high))
    if FORM == WORDS:
        inverse, scale = quantiser(tl.max(tl.max(bits, 1), 0))
        low = codes_of(x_low, inverse)
        high = codes_of(x_high, inverse)
        total = tl.sum(tl.sum(low + high, 1), 0)
        at = 8 * tl.arange(0, 4)[None, :]
        low = _int32(tl.sum((low & 255) << at, 1))
        high = _int32(tl.sum((high & 255) << at, 1))
    else:
        inverse, scale = quantiser(tl.max(bits, AXIS))
        low = codes_of(x_low, tl.expand_dims(inverse, AXIS))
        high = codes_of(x_high, tl.expand_dims(inverse, AXIS))
        total = tl.sum(low + high, AXIS)
        low, high = low.to(tl.int8), high.to(tl.int8)
    return low, high, 8 * total, scale


@triton.jit
def _int32(x):
    """The same numbers: the interpreter sums int32 as int64 and keeps that inside."""
    return x.to(tl.int64).to(tl.int32)


@triton.jit
def _unpack(base, refine, FORM: tl.constexpr, FULL: tl.constexpr, ASM: tl.constexpr):
    """Plane bytes (WORDS: words) -> codes + 8 (base alone: 16·q4) of low and of high nibbles."""
    if FORM == WORDS:
        # without assembly, which takes 18 registers more here: fewer programs on an SM
        low, high = word_codes(base, refine, FULL, False)
    elif FULL:
        low, high = w8_codes(base, refine, ASM)
    else:
        low, high = w4_codes(base, ASM)
    return low, high


@triton.jit
def _dot_words(codes, words, total, ASM: tl.constexpr):
    """Words of codes int32 [R, 4·n] times words [4·n], onto total: sums of four words [R, n]."""
    c0, c1, c2, c3 = quarters(codes)
    w0, w1, w2, w3 = quarters(words)
    total += tl.zeros_like(c0)
    total = dot4(c0, w0, total, ASM)
    total = dot4(c1, w1, total, ASM)
    total = dot4(c2, w2, total, ASM)
    return dot4(c3, w3, total, ASM)


@triton.jit
def _key_dots(low, high, q_low, q_high, FORM: tl.constexpr, ASM: tl.constexpr):
    """Codes [64, half] of two halves times query codes -> int32 [64, Q] (ROWS: [Q, 64])."""
    if FORM == WORDS:
        dots = _dot_words(high, q_high, 0, ASM)
        dots = tl.sum(_dot_words(low, q_low, dots, ASM), 1)
        # the sum lies four times in neighbouring lanes: this lays it out once, over all lanes
        dots = tl.gather(dots, tl.arange(0, BLOCK), 0)[:, None]
    elif FORM == COLS:
        dots = tl.dot(low, q_low, out_dtype=tl.int32)
        dots = tl.dot(high, q_high, acc=dots, out_dtype=tl.int32)
    else:
        dots = tl.dot(q_low, tl.trans(low), out_dtype=tl.int32)
        dots = tl.dot(q_high, tl.trans(high), acc=dots, out_dtype=tl.int32)
    return dots


@triton.jit
def _scores(
    base_ptr, refine_ptr, scale_ptr, block, q_low, q_high, q_sum8, factor, left,
    HALF: tl.constexpr, HP: tl.constexpr, FORM: tl.constexpr, FULL: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Scores of one block fp32 [64, Q] (ROWS: [Q, 64]), -inf where a query may not see.

    base_ptr, refine_ptr: bytes or words of one head's keys, [T, HALF]; left: tokens of this block
    that each query sees.
    """
    AXIS: tl.constexpr = 1 if FORM == ROWS else 0
    token = tl.arange(0, BLOCK)
    d = tl.arange(0, HP)
    at = (token + block * BLOCK)[:, None] * HALF + d[None, :]
    inside = (d < HALF)[None, :]
    base = load_plane(base_ptr, at, inside, HP == HALF)
    refine = base
    if FULL:
        refine = load_plane(refine_ptr, at, inside, HP == HALF)
    key_scale = tl.load(scale_ptr + (token + block * BLOCK)).to(tl.float32) * 0.0625
    low, high = _unpack(base, refine, FORM, FULL, ASM)
    dots = _key_dots(low, high, q_low, q_high, FORM, ASM)
    if FULL:
        dots -= tl.expand_dims(q_sum8, AXIS)
    s = (dots.to(tl.float32) * tl.expand_dims(factor, AXIS)) * tl.expand_dims(key_scale, 1 - AXIS)
    seen = tl.expand_dims(token, 1 - AXIS) < tl.expand_dims(left, AXIS)
    return tl.where(seen, s, floats.NEG_INF)


@triton.jit
def _softmax_block(s, value_scale, left, FORM: tl.constexpr):
    """Scores of one block -> block max, block sum, both limbs of -i, -8·Σ i, step (wm / 32767)."""
    AXIS: tl.constexpr = 1 if FORM == ROWS else 0
    token = tl.arange(0, BLOCK)
    most = tl.max(s, AXIS)
    p = exp_nonpositive(s - tl.expand_dims(tl.maximum(most, -3e38), AXIS))
    block_sum = halving_sum(p, AXIS, BLOCK)
    seen = tl.expand_dims(token, 1 - AXIS) < tl.expand_dims(left, AXIS)
    w = tl.where(seen, p * tl.expand_dims(value_scale, 1 - AXIS), 0.0)  # a dead scale may be NaN
    bits = tl.max(floats.magnitude_bits(w), AXIS)
    peak = bits.to(tl.float32, bitcast=True)
    peak = tl.where(peak < numeric.TINY, 0.0, peak)
    used = (peak > 0) & (bits < numeric.INFINITE)
    inverse = tl.where(used, tl.div_rn(32767.0, tl.where(used, peak, 1.0)), 0.0)
    step = tl.where(bits < numeric.INFINITE, tl.div_rn(peak, 32767.0), float("nan"))
    w = w * tl.expand_dims(inverse, AXIS) + MAGIC
    minus = MAGIC_BITS - w.to(tl.int32, bitcast=True)  # -i
    total8 = 8 * tl.sum(minus, AXIS)
    if FORM == WORDS:
        shift = 8 * tl.arange(0, 4)[None, :]
        minus = tl.reshape(minus, [16, 4])
        w_high = _int32(tl.sum((((minus + 128) >> 8) & 255) << shift, 1))
        w_low = _int32(tl.sum((minus & 255) << shift, 1))
    else:
        w_high = ((minus + 128) >> 8).to(tl.int8)
        w_low = minus.to(tl.int8)
    return most, block_sum, w_high, w_low, total8, step


@triton.jit
def _load_queries(
    q_ptr, row, head, heads, D: tl.constexpr, HP: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """Query vectors [Q] of q fp32 [M, heads, D] as two halves, zero past D/2."""
    if FORM == WORDS:
        d = 4 * tl.arange(0, HP)[:, None] + tl.arange(0, 4)[None, :]
        at = tl.max((row * heads + head) * D, 0)
    elif FORM == COLS:
        d = tl.arange(0, HP)[:, None]
        at = ((row * heads + head) * D)[None, :]
    else:
        d = tl.arange(0, HP)[None, :]
        at = ((row * heads + head) * D)[:, None]
    inside = d < D // 2
    low = tl.load(q_ptr + (at + d), mask=inside, other=0.0)
    high = tl.load(q_ptr + (at + d + D // 2), mask=inside, other=0.0)
    return low, high


@triton.jit
def _full_block(full_from):
    """The first block that is read with both planes."""
    return full_from // BLOCK + (full_from % BLOCK > 0).to(tl.int32)


@triton.jit
def _weigh(
    key_base, key_refine, key_scale, value_scale_ptr, start, stop, q_low, q_high, q_sum8, factor,
    position, first_full, weight_ptr, stat_ptr, vector, valid, max_blocks,
    HALF: tl.constexpr, HP: tl.constexpr, FORM: tl.constexpr, FULL: tl.constexpr,
    ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Weights and statistics of blocks start…stop - 1 for the queries that see them so."""
    UNITS: tl.constexpr = HALF // 4 if FORM == WORDS else HALF
    token = tl.arange(0, BLOCK)
    for block in tl.range(start, stop, num_stages=STAGES):
        left = position + 1 - block * BLOCK
        value_scale = tl.load(value_scale_ptr + (token + block * BLOCK)).to(tl.float32) * 0.0625
        s = _scores(
            key_base, key_refine, key_scale, block, q_low, q_high, q_sum8, factor, left,
            UNITS, HP, FORM, FULL, ASM,
        )  # fmt: skip
        most, total, w_high, w_low, total8, step = _softmax_block(s, value_scale, left, FORM)
        keep = valid & (left > 0) & ((first_full <= block) == FULL)
        at = vector * max_blocks + block
        if FORM == WORDS:
            word = tl.arange(0, BLOCK // 4)
            tl.store(weight_ptr + at * (BLOCK // 2) + word, w_high, mask=keep)
            tl.store(weight_ptr + at * (BLOCK // 2) + word + BLOCK // 4, w_low, mask=keep)
        else:
            cell = (at * (2 * BLOCK))[None, :] + token[:, None]
            tl.store(weight_ptr + cell, w_high, mask=keep[None, :])
            tl.store(weight_ptr + cell + BLOCK, w_low, mask=keep[None, :])
        at = vector * (4 * max_blocks) + block
        tl.store(stat_ptr + at, most, mask=keep)
        tl.store(stat_ptr + at + max_blocks, total, mask=keep)
        tl.store(stat_ptr + at + 2 * max_blocks, step, mask=keep)
        bits = (total8 + tl.zeros_like(left)).to(tl.float32, bitcast=True)
        tl.store(stat_ptr + at + 3 * max_blocks, bits, mask=keep)


@triton.jit(do_not_specialize=["num_queries", "heads"])
def weigh_blocks(
    q_ptr,  # fp32 [M, heads, D]
    position_ptr,  # int32 [M]
    full_from_ptr,  # int32 [M]
    key_base_ptr,  # the cache of a layer: see cache.py; words of four bytes for WORDS
    key_refine_ptr,
    key_scale_ptr,
    value_scale_ptr,
    weight_ptr,  # int8 [M·heads, max_blocks, 2, 64], limbs of -i, high ones first (WORDS: words)
    stat_ptr,  # fp32 [M·heads, 4, max_blocks]: mb, lb, wm / 32767 and, as int32, -8·Σ i
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
):
    """One split of one KV head against a tile of query vectors (row-major: row, head of group)."""
    HALF: tl.constexpr = D // 2
    kv_head = tl.program_id(1)
    tiles = tl.cdiv(num_queries, BQ)
    split = tl.program_id(0) // tiles
    # tiles that read the same tokens run side by side
    query = (tl.program_id(0) - split * tiles) * BQ + tl.arange(0, BQ)
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
        key_scale, value_scale = key_scale_ptr + at, value_scale_ptr + at
        vector = row * heads + head
        # where queries differ, a block is walked both ways, each query keeping one result
        base_stop = tl.minimum(tl.maximum(tl.max(first_full, 0), start), stop)
        full_start = tl.minimum(tl.maximum(tl.min(first_full, 0), start), stop)
        _weigh(
            key_base, key_refine, key_scale, value_scale, start, base_stop, q_low, q_high, q_sum8,
            factor, position, first_full, weight_ptr, stat_ptr, vector, valid, max_blocks,
            HALF, HP, FORM, False, ASM, STAGES,
        )  # fmt: skip
        _weigh(
            key_base, key_refine, key_scale, value_scale, full_start, stop, q_low, q_high, q_sum8,
            factor, position, first_full, weight_ptr, stat_ptr, vector, valid, max_blocks,
            HALF, HP, FORM, True, ASM, STAGES,
        )  # fmt: skip
