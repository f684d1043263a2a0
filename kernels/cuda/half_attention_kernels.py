"""Attention over a plain 16-bit cache by flash-decoding: the baseline of the nested cache.

A program walks one split of the tokens with the running maximum and sum of FlashAttention-2; a
second kernel joins the splits (Flash-Decoding). MASKED: a row sees the tokens up to its position,
which is read on the device, and programs past all rows' positions read nothing; else every row
sees every token, as timings want it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_queries", "heads"])
def attend16(
    q_ptr,  # 16-bit [M, heads, D]
    k_ptr,  # 16-bit [Hkv, T, D]
    v_ptr,
    position_ptr,  # int32 [M]
    part_ptr,  # fp32 [M·heads, splits, D]
    stat_ptr,  # fp32 [M·heads, splits, 2]: maximum (of exponents of 2), sum
    num_queries,  # M · group
    heads,
    T,
    scale,  # log2(e) / √D
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,  # D rounded up to a power of two
    BQ: tl.constexpr,  # query vectors, 16 at least
    BT: tl.constexpr,  # tokens of a step
    SPLIT: tl.constexpr,  # tokens of a program
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,  # else T is in whole splits and D is DP
):
    """One split of one KV head."""
    split, kv_head = tl.program_id(0), tl.program_id(1)
    query = tl.arange(0, BQ)
    inside = query < num_queries
    vector = query // GROUP * heads + kv_head * GROUP + query % GROUP
    d, t = tl.arange(0, DP), tl.arange(0, BT)
    start = split * SPLIT
    end = SPLIT
    if MASKED:
        position = tl.load(position_ptr + query // GROUP, mask=inside, other=-1)
        end = tl.minimum(SPLIT, tl.max(position, 0) + 1 - start)
        q = tl.load(
            q_ptr + vector[:, None] * D + d[None, :],
            mask=inside[:, None] & (d < D)[None, :],
            other=0.0,
        )
    else:
        q = tl.load(q_ptr + vector[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
    at = (kv_head.to(tl.int64) * T + start) * D
    k_ptr += at
    v_ptr += at
    most = tl.full((BQ,), float("-inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    y = tl.zeros((BQ, DP), tl.float32)
    for first in tl.range(0, end, BT, num_stages=STAGES):
        token = first + t
        if MASKED:  # what lies past a text may be anything
            k_mask = (token < end)[None, :] & (d < D)[:, None]
            v_mask = (token < end)[:, None] & (d < D)[None, :]
            k = tl.load(k_ptr + token[None, :] * D + d[:, None], mask=k_mask, other=0.0)
            v = tl.load(v_ptr + token[:, None] * D + d[None, :], mask=v_mask, other=0.0)
            s = tl.dot(q, k) * scale
            s = tl.where((start + token)[None, :] <= position[:, None], s, float("-inf"))
        else:
            k = tl.load(k_ptr + token[None, :] * D + d[:, None])
            v = tl.load(v_ptr + token[:, None] * D + d[None, :])
            s = tl.dot(q, k) * scale
        higher = tl.maximum(most, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(most - higher)
        total = total * shrink + tl.sum(p, 1)
        y = tl.dot(p.to(v.dtype), v, y * shrink[:, None])
        most = higher
    at = vector * tl.num_programs(0) + split
    if MASKED:  # a row that sees nothing of the split leaves nothing there
        inside = inside & (position >= start)
        tl.store(
            part_ptr + at[:, None] * D + d[None, :], y, mask=inside[:, None] & (d < D)[None, :]
        )
    else:
        tl.store(part_ptr + at[:, None] * D + d[None, :], y, mask=inside[:, None])
    tl.store(stat_ptr + at * 2, most, mask=inside)
    tl.store(stat_ptr + at * 2 + 1, total, mask=inside)


@triton.jit(do_not_specialize=["splits", "heads"])
def combine16(
    part_ptr,
    stat_ptr,
    position_ptr,
    y_ptr,  # [M, heads, D], 16 bits or fp32
    splits,
    heads,
    D: tl.constexpr,
    SPLITS: tl.constexpr,  # rounded up to a power of two
    SPLIT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Splits of one query vector, all at once; a program has 32 dims."""
    vector = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    d = tl.program_id(1) * 32 + tl.arange(0, 32)
    inside = split < splits
    if MASKED:
        inside = inside & (split * SPLIT <= tl.load(position_ptr + vector // heads))
    at = vector * splits + split
    most = tl.load(stat_ptr + at * 2, mask=inside, other=float("-inf"))
    total = tl.load(stat_ptr + at * 2 + 1, mask=inside, other=0.0)
    there = inside[:, None] & (d < D)[None, :]
    part = tl.load(part_ptr + at[:, None] * D + d[None, :], mask=there, other=0.0)
    weight = tl.exp2(most - tl.max(most, 0))
    y = tl.sum(part * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(y_ptr + vector * D + d, y.to(y_ptr.dtype.element_ty), mask=d < D)
