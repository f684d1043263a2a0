"""The dual-plane linear for the many rows of a prompt, on tensor cores, straight from the planes.

Invariant: the integers of `linear_kernels.linear_mma`, so tile and strips cannot change bits. Where
that kernel takes 8·Σx off every group, this one takes it off once a tile: Σ_g m · 8·Σx is itself a
product of small integers, [rows, groups] x [groups, tokens], in two int8 digits each:

    m = 256·high + low + 128,  Σx = 128·high + low     Σ_g m·Σx = 256·A + B + 128·total

With groups of 128 the correction costs 4 of 128 products. A tile's tokens go in one strip or two:
a strip's dots are added to its int64 sums before the next strip's are made, which halves what the
registers hold at once. The weights' codes are unpacked once for both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edge_runtime.kernels.cuda.unpack import multiply_add, w4_codes, w8_codes

CHUNK = tl.constexpr(32)  # groups of a step of the correction: one K of the tensor core


@triton.jit(do_not_specialize=["M"])
def sum_digits(
    sum_ptr,  # int32 [M, groups] of any strides
    digit_ptr,  # int8 [2, rows, padded groups]
    total_ptr,  # int32 [rows]
    M,
    groups,
    rows,
    sum_stride,  # from row to row
    sum_step,  # from group to group
    GP: tl.constexpr,  # padded groups, a multiple of CHUNK
    BLOCK: tl.constexpr,  # rows of a program
):
    """Sums of groups as two digits, the low one first, and their total; zeros beyond the sums."""
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, GP, CHUNK):
        g = start + tl.arange(0, CHUNK)
        live = (m < M)[:, None] & (g < groups)[None, :]
        at = m.to(tl.int64)[:, None] * sum_stride + g[None, :] * sum_step
        s = tl.load(sum_ptr + at, mask=live, other=0)
        at = digit_ptr + m.to(tl.int64)[:, None] * GP + g[None, :]
        tl.store(at, (s & 127).to(tl.int8))
        tl.store(at + rows.to(tl.int64) * GP, (s >> 7).to(tl.int8))
        total += tl.sum(s, 1)
    tl.store(total_ptr + m, total)


@triton.jit
def _corrected(
    mult_ptr,
    digit_ptr,
    total_ptr,
    rn,
    rm,
    N,
    groups,
    mult_stride,
    digit_rows,
    GP: tl.constexpr,
    ASM: tl.constexpr,
):
    """-8 · Σ_g m · Σx: int64 [BN, BS]."""
    total = tl.load(total_ptr + rm).to(tl.int64) * (-8 * 128)
    acc = tl.zeros((rn.shape[0], rm.shape[0]), tl.int64) + total[None, :]
    k = tl.arange(0, CHUNK)
    at = digit_ptr + rm.to(tl.int64)[None, :] * GP + k[:, None]
    for start in range(0, GP, CHUNK):
        live = (rn < N)[:, None] & (start + k < groups)[None, :]
        m_at = mult_ptr + rn[:, None] + (start + k)[None, :] * mult_stride
        m = tl.load(m_at, mask=live, other=0)  # any digits do where there is no group: its Σx is 0
        s_low = tl.load(at + start)
        s_high = tl.load(at + digit_rows.to(tl.int64) * GP + start)
        for high in tl.static_range(2):
            digit = (m >> 8 if high else (m & 255) - 128).to(tl.int8)
            dots = tl.dot(digit, s_high, out_dtype=tl.int32) * 128
            dots = tl.dot(digit, s_low, acc=dots, out_dtype=tl.int32)
            factor = tl.full(dots.shape, -8 * 256 if high else -8, tl.int32)
            acc = multiply_add(dots, factor, acc, ASM)
    return acc


@triton.jit
def _strip(acc, low, high, x_ptr, mult, H: tl.constexpr, ASM: tl.constexpr):
    """acc + mult · dot: codes int8 [BN, H] of two halves of a group, x int8 [H, BS] at x_ptr and H
    further on, mult int32 [BN]."""
    xl = tl.load(x_ptr)
    xh = tl.load(x_ptr + H)
    dots = tl.dot(low, xl, out_dtype=tl.int32)
    dots = tl.dot(high, xh, acc=dots, out_dtype=tl.int32)
    mult, _ = tl.broadcast(mult[:, None], dots)
    return multiply_add(dots, mult, acc, ASM)


@triton.jit
def _scaled(acc, x_scale_ptr, scale_ptr, bias_ptr, rn, rm, M, N, BIAS: tl.constexpr):
    y = acc.to(tl.float32) * tl.load(x_scale_ptr + rm, mask=rm < M, other=0.0)[None, :]
    y *= tl.load(scale_ptr + rn, mask=rn < N, other=0.0)[:, None]
    if BIAS:
        y += tl.load(bias_ptr + rn, mask=rn < N, other=0.0)[:, None]
    return y


@triton.jit
def _store(y, residual_ptr, y_ptr, n, m, M, N, RESIDUAL: tl.constexpr):
    """y fp32 [BN, BS] goes to weight rows from n on, tokens from m on."""
    i, t = tl.arange(0, y.shape[0]), tl.arange(0, y.shape[1])
    at = t[None, :] * N + i[:, None]  # 32 bits an element: whole addresses would spill
    mask = (i < N - n)[:, None] & (t < M - m)[None, :]
    start = m.to(tl.int64) * N + n
    if RESIDUAL:
        y += tl.load(residual_ptr + start + at, mask=mask, other=0.0)
    tl.store(y_ptr + start + at, y, mask=mask)


@triton.jit(do_not_specialize=["M", "N"])
def linear_prompt(
    x_ptr,  # int8 [M, 2·half_k]
    digit_ptr,  # int8 [2, digit_rows, GP]; not read in the w4 view
    total_ptr,  # int32 [digit_rows]
    x_scale_ptr,  # fp32 [M]
    base_ptr,  # uint8 [N/ROWS, 2·half_k/G, ROWS, G/2], N padded to ROWS
    refine_ptr,  # the same; not read in the w4 view
    mult_ptr,  # int16 [2·half_k/G, mult_stride]
    scale_ptr,  # fp32 [N]
    bias_ptr,  # fp32 [N]
    residual_ptr,  # fp32 [M, N]
    y_ptr,  # fp32 [M, N]
    M,
    N,
    digit_rows,  # M padded to whole tiles
    mult_stride,
    half_k,
    G: tl.constexpr,  # 64 or 128
    GP: tl.constexpr,
    W8: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile of the planes; 1 is the canonical order
    BN: tl.constexpr,  # weight rows of a program
    BS: tl.constexpr,  # tokens of a strip
    TWO: tl.constexpr,  # strips
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """One tile [BN weight rows, one or two strips of BS tokens] of y; tokens run fastest, so that
    weights stay in L2."""
    H: tl.constexpr = G // 2
    STRIPS: tl.constexpr = 2 if TWO else 1
    num_m = tl.cdiv(M, BS * STRIPS)
    pid = tl.program_id(0)
    rn = pid // num_m * BN + tl.arange(0, BN)
    rm = pid % num_m * (BS * STRIPS) + tl.arange(0, BS)
    rm2 = rm + BS
    groups = half_k // H
    cn = tl.minimum(rn, N - 1)
    j = tl.arange(0, H)
    row = (cn // ROWS * ROWS).to(tl.int64) * half_k + cn % ROWS * H
    w_at = row[:, None] + j[None, :]
    x_at = x_ptr + tl.minimum(rm, M - 1).to(tl.int64)[None, :] * (2 * half_k) + j[:, None]
    x_at2 = x_ptr + tl.minimum(rm2, M - 1).to(tl.int64)[None, :] * (2 * half_k) + j[:, None]
    if W8:
        acc = _corrected(
            mult_ptr, digit_ptr, total_ptr, rn, rm, N, groups, mult_stride, digit_rows, GP, ASM
        )
        acc2 = acc
        if TWO:
            acc2 = _corrected(
                mult_ptr, digit_ptr, total_ptr, rn, rm2, N, groups, mult_stride, digit_rows, GP, ASM
            )
    else:
        acc = tl.zeros((BN, BS), tl.int64)
        acc2 = acc
    mult_ptr += rn
    ahead = tl.load(mult_ptr, mask=rn < N, other=0)
    for g in tl.range(0, groups, num_stages=STAGES):
        w = tl.load(base_ptr + w_at + g * (H * ROWS))
        if W8:
            r = tl.load(refine_ptr + w_at + g * (H * ROWS))
            low, high = w8_codes(w, r, ASM)
        else:
            low, high = w4_codes(w, ASM)
        mult = ahead.to(tl.int32)
        ahead = tl.load(
            mult_ptr + tl.minimum(g + 1, groups - 1) * mult_stride, mask=rn < N, other=0
        )
        acc = _strip(acc, low, high, x_at + g * G, mult, H, ASM)
        if TWO:
            acc2 = _strip(acc2, low, high, x_at2 + g * G, mult, H, ASM)
    # both strips in 32 bits before the residual is read: registers would spill
    y = _scaled(acc, x_scale_ptr, scale_ptr, bias_ptr, rn, rm, M, N, BIAS)
    if TWO:
        y2 = _scaled(acc2, x_scale_ptr, scale_ptr, bias_ptr, rn, rm2, M, N, BIAS)
    n, m = pid // num_m * BN, pid % num_m * (BS * STRIPS)
    _store(y, residual_ptr, y_ptr, n, m, M, N, RESIDUAL)
    if TWO:
        _store(y2, residual_ptr, y_ptr, n, m + BS, M, N, RESIDUAL)
