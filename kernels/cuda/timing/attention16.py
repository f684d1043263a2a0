"""Attention in fp16 by flash-decoding, and a plain read: the yardsticks of the nested cache.

A program walks one split of the tokens with the running maximum and sum of FlashAttention-2; a
second kernel joins the splits (Flash-Decoding). Every row sees every token: masks would only cost
time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend16(
    q_ptr,  # fp16 [M, heads, D]
    k_ptr,  # fp16 [Hkv, T, D]
    v_ptr,
    part_ptr,  # fp32 [M·heads, splits, D]
    stat_ptr,  # fp32 [M·heads, splits, 2]: maximum (of exponents of 2), sum
    num_queries,  # M · group
    heads,
    T,
    scale,  # log2(e) / √D
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BQ: tl.constexpr,  # query vectors, 16 at least
    BT: tl.constexpr,  # tokens of a step
    SPLIT: tl.constexpr,  # tokens of a program
    STAGES: tl.constexpr,
):
    """One split of one KV head; T in whole splits."""
    split, kv_head = tl.program_id(0), tl.program_id(1)
    query = tl.arange(0, BQ)
    inside = query < num_queries
    vector = query // GROUP * heads + kv_head * GROUP + query % GROUP
    d, t = tl.arange(0, D), tl.arange(0, BT)
    q = tl.load(q_ptr + vector[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
    at = (kv_head.to(tl.int64) * T + split * SPLIT) * D
    k_ptr += at
    v_ptr += at
    most = tl.full((BQ,), float("-inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    y = tl.zeros((BQ, D), tl.float32)
    for first in tl.range(0, SPLIT, BT, num_stages=STAGES):
        k = tl.load(k_ptr + (first + t)[None, :] * D + d[:, None])
        v = tl.load(v_ptr + (first + t)[:, None] * D + d[None, :])
        s = tl.dot(q, k) * scale
        higher = tl.maximum(most, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(most - higher)
        total = total * shrink + tl.sum(p, 1)
        y = tl.dot(p.to(tl.float16), v, y * shrink[:, None])
        most = higher
    at = vector * tl.num_programs(0) + split
    tl.store(part_ptr + at[:, None] * D + d[None, :], y, mask=inside[:, None])
    tl.store(stat_ptr + at * 2, most, mask=inside)
    tl.store(stat_ptr + at * 2 + 1, total, mask=inside)


@triton.jit
def combine16(
    part_ptr,
    stat_ptr,
    y_ptr,  # fp16 [M, heads, D]
    splits,
    D: tl.constexpr,
    SPLITS: tl.constexpr,  # rounded up to a power of two
):
    """Splits of one query vector, all at once; a program has 32 dims."""
    vector = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    d = tl.program_id(1) * 32 + tl.arange(0, 32)
    inside = split < splits
    at = vector * splits + split
    most = tl.load(stat_ptr + at * 2, mask=inside, other=float("-inf"))
    total = tl.load(stat_ptr + at * 2 + 1, mask=inside, other=0.0)
    part = tl.load(part_ptr + at[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
    weight = tl.exp2(most - tl.max(most, 0))
    y = tl.sum(part * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(y_ptr + vector * D + d, y.to(tl.float16))


@triton.jit
def read(x_ptr, y_ptr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Or over int32 numbers, BLOCK · STEPS a program, each read once."""
    i = tl.arange(0, BLOCK)
    x_ptr += tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    found = tl.zeros((BLOCK,), tl.int32)
    for step in tl.static_range(STEPS):
        found = found | tl.load(x_ptr + step * BLOCK + i)
    tl.store(y_ptr + tl.program_id(0), tl.max(found, 0))
