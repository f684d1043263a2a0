"""Kernels of the 16-bit baseline: norm, RoPE with the write to a plain cache, silu·mul.

Numbers are fp16 or bf16 in memory, fp32 in between; no bits are promised. A program is a row, a
head of a row, or a piece of one, as in the kernels of the nested model.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm16(x_ptr, weight_ptr, y_ptr, K, eps, BLOCK: tl.constexpr):
    """y = x / rms(x) · weight of one row of [M, K]; BLOCK is K rounded up to a power of two."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * K + i, mask=i < K, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / K + eps)
    y = x * factor * tl.load(weight_ptr + i, mask=i < K, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * K + i, y.to(y_ptr.dtype.element_ty), mask=i < K)


@triton.jit
def silu_mul16(x_ptr, y_ptr, K, BLOCK: tl.constexpr):
    """y = silu(gate) · up for x [M, 2K] = [gate | up]; a program is BLOCK numbers of a row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * K + i, mask=i < K, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * K + K + i, mask=i < K, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * K + i, y.to(y_ptr.dtype.element_ty), mask=i < K)


@triton.jit(do_not_specialize=["heads", "kv_heads"])
def rope16(
    qkv_ptr,  # [M, (heads + 2·kv_heads)·D], 16 bits or fp32
    bias_ptr,  # [(heads + 2·kv_heads)·D], added first
    position_ptr,  # int32 [M]
    cos_ptr,  # fp32 [tokens, D/2]
    sin_ptr,
    q_norm_ptr,  # [D]
    k_norm_ptr,
    q_ptr,  # [M, heads, D], out
    key_ptr,  # [kv_heads, T, D], out
    value_ptr,
    heads,
    kv_heads,
    T,
    eps,
    D: tl.constexpr,
    HP: tl.constexpr,  # D/2 rounded up to a power of two
    BIAS: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    """Head program_id(1) of row program_id(0): of q, then of k, then of v."""
    HALF: tl.constexpr = D // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(position_ptr + row).to(tl.int64)
    i = tl.arange(0, HP)
    inside = i < HALF
    x_ptr = qkv_ptr + (row * (heads + 2 * kv_heads) + head) * D + i
    low = tl.load(x_ptr, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + HALF, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        low += tl.load(bias_ptr + head * D + i, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(bias_ptr + head * D + HALF + i, mask=inside, other=0.0).to(tl.float32)
    if head < heads + kv_heads:
        if QK_NORM:
            norm_ptr = k_norm_ptr + i
            if head < heads:
                norm_ptr = q_norm_ptr + i
            factor = 1.0 / tl.sqrt(tl.sum(low * low + high * high, 0) / D + eps)
            low = low * factor * tl.load(norm_ptr, mask=inside, other=0.0).to(tl.float32)
            high = high * factor * tl.load(norm_ptr + HALF, mask=inside, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + position * HALF + i, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + position * HALF + i, mask=inside, other=0.0)
        turned = low * cos - high * sin
        high = high * cos + low * sin
        low = turned
    if head < heads:
        out = q_ptr + (row * heads + head) * D + i
    elif head < heads + kv_heads:
        out = key_ptr + ((head - heads).to(tl.int64) * T + position) * D + i
    else:
        out = value_ptr + ((head - heads - kv_heads).to(tl.int64) * T + position) * D + i
    tl.store(out, low.to(q_ptr.dtype.element_ty), mask=inside)
    tl.store(out + HALF, high.to(q_ptr.dtype.element_ty), mask=inside)
