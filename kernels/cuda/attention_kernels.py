"""Flash-decoding and prefill attention over the nested cache as Triton kernels.

Invariant: dots and value sums are integers, so M, tiles and splits cannot change bits; the floats
between them are fixed per block of 64 tokens, and blocks are added in ascending order. Formula:
`kernels/ops.py`; shapes: `attention.py` and `cache.py`.

Three forms of one block, by what the products run on:
    WORDS  one query vector: dp4a on words of four codes
    COLS   tensor cores, tokens (then dims) are rows, up to 32 query vectors are columns
    ROWS   tensor cores, query vectors are rows (prefill)
A weight i (15 bits) goes as two int8 limbs of -i = 256·high + low: of i, the high one overflows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edge_runtime.kernels.cuda import floats, numeric
from edge_runtime.kernels.cuda.floats import exp_nonpositive, halving_sum
from edge_runtime.kernels.cuda.numeric import codes_of, quantiser
from edge_runtime.kernels.cuda.unpack import dot4, w4_codes, w8_codes

WORDS, COLS, ROWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BLOCK = tl.constexpr(64)
MAGIC, MAGIC_BITS = floats.MAGIC, floats.MAGIC_BITS
HIGH_NIBBLES = tl.constexpr(-252645136)  # 0xF0F0F0F0


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
        low = (base << 4) & HIGH_NIBBLES
        high = base & HIGH_NIBBLES
        if FULL:
            low = low | (refine & ~HIGH_NIBBLES)
            high = high | ((refine >> 4) & ~HIGH_NIBBLES)
    elif FULL:
        low, high = w8_codes(base, refine, ASM)
    else:
        low, high = w4_codes(base, ASM)
    return low, high


@triton.jit
def _quarters(x):
    """[..., 4·n] -> every fourth, from 0, 1, 2 and 3 on: what one 128-bit load brings."""
    n: tl.constexpr = x.shape[len(x.shape) - 1] // 4
    if len(x.shape) == 2:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], n, 2, 2]))
    else:
        even, odd = tl.split(tl.reshape(x, [1, n, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _dot_words(codes, words, total, ASM: tl.constexpr):
    """Words of codes int32 [R, 4·n] times words [4·n], onto total: sums of four words [R, n]."""
    c0, c1, c2, c3 = _quarters(codes)
    w0, w1, w2, w3 = _quarters(words)
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
def _value_dots(codes, w_high, w_low, FORM: tl.constexpr, ASM: tl.constexpr):
    """Codes [half, 64] times the two limbs -> int32 [half, Q] (ROWS: [Q, half])."""
    if FORM == WORDS:
        sums = _dot_words(codes, w_high, 0, ASM)
        sums = tl.sum(_dot_words(codes, w_low, sums * 256, ASM), 1)[:, None]
    elif FORM == COLS:
        sums = tl.dot(codes, w_high, out_dtype=tl.int32) * 256
        sums = tl.dot(codes, w_low, acc=sums, out_dtype=tl.int32)
    else:
        sums = tl.dot(w_high, tl.trans(codes), out_dtype=tl.int32) * 256
        sums = tl.dot(w_low, tl.trans(codes), acc=sums, out_dtype=tl.int32)
    return sums


@triton.jit
def _load_plane(ptr, at, inside, EVEN: tl.constexpr):
    """Read once: it leaves L2 before the partial results do."""
    if EVEN:
        return tl.load(ptr + at, eviction_policy="evict_first")
    else:
        return tl.load(ptr + at, mask=inside, other=0, eviction_policy="evict_first")


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
    base = _load_plane(base_ptr, at, inside, HP == HALF)
    refine = base
    if FULL:
        refine = _load_plane(refine_ptr, at, inside, HP == HALF)
    key_scale = tl.load(scale_ptr + (token + block * BLOCK)).to(tl.float32) * 0.0625
    low, high = _unpack(base, refine, FORM, FULL, ASM)
    dots = _key_dots(low, high, q_low, q_high, FORM, ASM)
    if FULL:
        dots -= tl.expand_dims(q_sum8, AXIS)
    s = (dots.to(tl.float32) * tl.expand_dims(factor, AXIS)) * tl.expand_dims(key_scale, 1 - AXIS)
    seen = tl.expand_dims(token, 1 - AXIS) < tl.expand_dims(left, AXIS)
    return tl.where(seen, s, floats.NEG_INF)


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
    base = _load_plane(base_ptr, at, inside, HP == HALF)
    refine = base
    if FULL:
        refine = _load_plane(refine_ptr, at, inside, HP == HALF)
    scale = tl.load(scale_ptr + (tl.arange(0, BLOCK) + block * BLOCK))
    return base, refine, scale.to(tl.float32) * 0.0625


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
def _values(
    codes, w_high, w_low, total8, step, FORM: tl.constexpr, FULL: tl.constexpr, ASM: tl.constexpr
):
    """One half of the dims of a block, fp32 [half, Q] (ROWS: [Q, half])."""
    AXIS: tl.constexpr = 1 if FORM == ROWS else 0
    sums = _value_dots(codes, w_high, w_low, FORM, ASM)
    if FULL:
        sums -= tl.expand_dims(total8, AXIS)
    return (-sums).to(tl.float32) * tl.expand_dims(step, AXIS)


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
def _split_blocks(
    key_base, key_refine, value_base, value_refine, key_scale, value_scale_ptr, start, stop,
    q_low, q_high, q_sum8, factor, position, first_full, partial_ptr, out_at, stat_at, valid,
    max_blocks, HALF: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, FORM: tl.constexpr,
    FULL: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Blocks start…stop - 1 for the queries that see them so: partial results."""
    DIMS: tl.constexpr = 4 * HP if FORM == WORDS else HP
    UNITS: tl.constexpr = HALF // 4 if FORM == WORDS else HALF
    d = tl.arange(0, DIMS)
    for block in tl.range(start, stop, num_stages=STAGES):
        left = position + 1 - block * BLOCK
        if AHEAD:
            base, refine, value_scale = _load_values(
                value_base, value_refine, value_scale_ptr, block, HALF, DIMS, FORM, FULL
            )
        s = _scores(
            key_base, key_refine, key_scale, block, q_low, q_high, q_sum8, factor, left,
            UNITS, HP, FORM, FULL, ASM,
        )  # fmt: skip
        if not AHEAD:
            base, refine, value_scale = _load_values(
                value_base, value_refine, value_scale_ptr, block, HALF, DIMS, FORM, FULL
            )
        most, total, w_high, w_low, total8, step = _softmax_block(s, value_scale, left, FORM)
        keep = valid & (left > 0) & ((first_full <= block) == FULL)
        tl.store(partial_ptr + stat_at + block, most, mask=keep)
        tl.store(partial_ptr + stat_at + max_blocks + block, total, mask=keep)
        at = (out_at + block * D)[None, :] + d[:, None]
        inside = (d < HALF)[:, None] & keep[None, :]
        low, high = _unpack(base, refine, FORM, FULL, ASM)
        out = _values(low, w_high, w_low, total8, step, FORM, FULL, ASM)
        tl.store(partial_ptr + at, out, mask=inside)
        out = _values(high, w_high, w_low, total8, step, FORM, FULL, ASM)
        tl.store(partial_ptr + at + HALF, out, mask=inside)


@triton.jit(do_not_specialize=["num_queries", "heads", "max_blocks"])
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
    partial_ptr,  # fp32 [M·heads, (D + 2)·max_blocks]: of every block its values, then maxima,
    # then sums
    num_queries,  # M · group
    heads,
    T,
    max_blocks,
    softmax_scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    HP: tl.constexpr,  # D/2 rounded up (WORDS: D/8)
    BQ: tl.constexpr,  # query vectors of a program
    SPLIT: tl.constexpr,  # blocks of a program
    FORM: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,  # values of a block are asked for before its scores are made
    ASM: tl.constexpr,
):
    """One split of one KV head against a tile of query vectors (row-major: row, head of group)."""
    HALF: tl.constexpr = D // 2
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
        out_at = (row * heads + head) * (max_blocks * (D + 2))
        stat_at = out_at + max_blocks * D
        # where queries differ, a block is walked both ways, each query keeping one result
        base_stop = tl.minimum(tl.maximum(tl.max(first_full, 0), start), stop)
        full_start = tl.minimum(tl.maximum(tl.min(first_full, 0), start), stop)
        _split_blocks(
            key_base, key_refine, value_base, value_refine, key_scale, value_scale, start,
            base_stop, q_low, q_high, q_sum8, factor, position, first_full, partial_ptr, out_at,
            stat_at, valid, max_blocks, HALF, HP, D, FORM, False, ASM, STAGES, AHEAD,
        )  # fmt: skip
        _split_blocks(
            key_base, key_refine, value_base, value_refine, key_scale, value_scale, full_start,
            stop, q_low, q_high, q_sum8, factor, position, first_full, partial_ptr, out_at,
            stat_at, valid, max_blocks, HALF, HP, D, FORM, True, ASM, STAGES, AHEAD,
        )  # fmt: skip
