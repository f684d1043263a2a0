"""The dual-plane linear as Triton kernels: one on tensor cores for every M, one of dp4a for few.

Invariant: integers only up to the last two products, so tile, order, M and form cannot change bits.
Formula and shapes: `linear.py`. Weights are the M operand of the tensor core, tokens its N operand:
a step of 1 row costs what a step of 8 does, and both planes are unpacked in the registers that the
tensor core reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edge_runtime.kernels.cuda.overlap_kernels import start_next_launch, wait_for_launch
from edge_runtime.kernels.cuda.unpack import (
    dot4,
    load_plane,
    multiply_add,
    quarters,
    w4_codes,
    w8_codes,
    word_codes,
)


@triton.jit
def _group(acc, w, r, xl, xh, start, mult, W8: tl.constexpr, ASM: tl.constexpr):
    """acc + mult · (start + dot): plane bytes uint8 [BN, G/2], x int8 [G/2, BM] twice, start int32
    [BM] (-8·Σx, in the w8 view), mult int16 [BN], acc int64 [BN, BM]."""
    if W8:
        low, high = w8_codes(w, r, ASM)
        start, _ = tl.broadcast(start[None, :], acc)  # the tensor core adds it
        dots = tl.dot(low, xl, acc=start, out_dtype=tl.int32)
    else:
        low, high = w4_codes(w, ASM)
        dots = tl.dot(low, xl, out_dtype=tl.int32)
    dots = tl.dot(high, xh, acc=dots, out_dtype=tl.int32)
    mult, _ = tl.broadcast(mult.to(tl.int32)[:, None], dots)
    return multiply_add(dots, mult, acc, ASM)


@triton.jit
def _pair_of_32(
    acc,
    x_ptr,
    sum_ptr,
    base_ptr,
    refine_ptr,
    mult_ptr,
    rows,
    cols,
    mult_stride,
    half_k,
    g,
    ROWS: tl.constexpr,
    W8: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add groups g and g + 1 of 32 inputs: their 2 · 16 plane bytes are one K of the tensor core,
    read once, and each group meets an x whose other half is zero. The second may not exist."""
    j = tl.arange(0, 32)
    live = g * 16 + j < half_k
    byte = (g + j // 16) * (16 * ROWS) + j % 16
    w = tl.load(base_ptr + byte[None, :], mask=live[None, :], other=0)
    r = w
    if W8:
        r = tl.load(refine_ptr + byte[None, :], mask=live[None, :], other=0)
    at = x_ptr + (g * 32 + (j // 16) * 32 + j % 16)[:, None]
    live = live[:, None] & cols[None, :]
    xl = tl.load(at, mask=live, other=0)
    xh = tl.load(at + 16, mask=live, other=0)
    for k in tl.static_range(2):
        mine = (j // 16 == k)[:, None]
        none = tl.zeros_like(xl)
        at_g = tl.minimum(g + k, half_k // 16 - 1)
        start = cols.to(tl.int32)
        if W8:
            eight = tl.where(at_g == g + k, 8, 0)  # a group that is not there has no sum
            start = -eight * tl.load(sum_ptr + at_g, mask=cols, other=0)
        mult = tl.load(mult_ptr + at_g * mult_stride, mask=rows, other=0)
        xl_k, xh_k = tl.where(mine, xl, none), tl.where(mine, xh, none)
        acc = _group(acc, w, r, xl_k, xh_k, start, mult, W8, ASM)
    return acc


@triton.jit(do_not_specialize=["M", "N"])
def linear_mma(
    x_ptr,  # int8 [M, 2·half_k]
    sum_ptr,  # int32 [M, 2·half_k/G]
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
    mult_stride,
    half_k,
    G: tl.constexpr,
    W8: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,  # BN divides N
    ROWS: tl.constexpr,  # of a tile of the planes; 1 is the canonical order
    BN: tl.constexpr,  # weight rows of a program
    BM: tl.constexpr,  # tokens of a program
    UNROLL: tl.constexpr,  # groups of a loop step; divides their number
    AHEAD: tl.constexpr,  # multipliers are read one group ahead
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """One tile [BN weight rows, BM tokens] of y; tokens run fastest, so that weights stay in L2."""
    H: tl.constexpr = G // 2
    start_next_launch(PDL)
    wait_for_launch(PDL)
    num_m = tl.cdiv(M, BM)
    pid = tl.program_id(0)
    pid_n = pid // num_m
    rn = pid_n * BN + tl.arange(0, BN)
    rm = (pid - pid_n * num_m) * BM + tl.arange(0, BM)
    rows, cols = rn < N, rm < M
    cm = tl.minimum(rm, M - 1)
    cn = rn if EVEN else tl.minimum(rn, N - 1)
    H_ROWS: tl.constexpr = H * ROWS  # bytes from a group to the next
    row = (cn // ROWS * ROWS).to(tl.int64) * half_k + cn % ROWS * H
    base_ptr += row[:, None]
    refine_ptr += row[:, None]
    x_ptr += cm[None, :] * (2 * half_k)
    groups = half_k // H
    sum_ptr += cm * groups
    mult_ptr += rn
    acc = tl.zeros((BN, BM), tl.int64)
    if G == 32:  # the tensor core takes 32 bytes a time: two groups a step
        for pair in tl.range(0, tl.cdiv(groups, 2), num_stages=STAGES):
            acc = _pair_of_32(
                acc,
                x_ptr,
                sum_ptr,
                base_ptr,
                refine_ptr,
                mult_ptr,
                rows,
                cols,
                mult_stride,
                half_k,
                2 * pair,
                ROWS,
                W8,
                ASM,
            )
    else:
        j = tl.arange(0, H)
        base_ptr += j[None, :]
        refine_ptr += j[None, :]
        x_ptr += j[:, None]
        ahead = tl.load(mult_ptr, mask=rows, other=0)
        for step in tl.range(0, groups // UNROLL, num_stages=STAGES):
            for u in tl.static_range(UNROLL):
                g = step * UNROLL + u
                w = tl.load(base_ptr + g * H_ROWS)
                r = w
                if W8:
                    r = tl.load(refine_ptr + g * H_ROWS)
                # a row of x that is not there is not read: many programs reading one line is slow
                xl = tl.load(x_ptr + g * G, mask=cols[None, :], other=0)
                xh = tl.load(x_ptr + g * G + H, mask=cols[None, :], other=0)
                mult = ahead
                if AHEAD:
                    at = mult_ptr + tl.minimum(g + 1, groups - 1) * mult_stride
                    ahead = tl.load(at, mask=rows, other=0)
                elif EVEN:
                    mult = tl.load(mult_ptr + g * mult_stride)
                else:
                    mult = tl.load(mult_ptr + g * mult_stride, mask=rows, other=0)
                start = cm
                if W8:
                    start = -8 * tl.load(sum_ptr + g, mask=cols, other=0)
                acc = _group(acc, w, r, xl, xh, start, mult, W8, ASM)
    y = acc.to(tl.float32) * tl.load(x_scale_ptr + cm)[None, :]
    y *= tl.load(scale_ptr + cn)[:, None]
    if BIAS:
        y += tl.load(bias_ptr + cn)[:, None]
    at = rm.to(tl.int64)[None, :] * N + rn[:, None]
    mask = rows[:, None] & cols[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=mask, other=0.0)
    tl.store(y_ptr + at, y, mask=mask)


@triton.jit
def _nothing():
    """No tensors yet: their number is a constant of the kernel."""
    return ()


@triton.jit
def _quads(
    base_ptr, refine_ptr, mult_ptr, first, N, q, QUADS: tl.constexpr, Q: tl.constexpr,
    BN: tl.constexpr, BQ: tl.constexpr, EVEN: tl.constexpr, W8: tl.constexpr,
):  # fmt: skip
    """Words of both planes, int32 [BQ, 4], and multipliers [BQ] of quads q, of each of BN rows;
    anything past the end of a row, which meets an x of 0."""
    WHOLE: tl.constexpr = QUADS % BQ == 0
    words = q[:, None] * 4 + tl.arange(0, 4)[None, :]
    live = q < QUADS
    base, refine, mult = _nothing(), _nothing(), _nothing()
    for n in tl.static_range(BN):
        row = (first + n if EVEN else tl.minimum(first + n, N - 1)).to(tl.int64)
        at = row * (QUADS * 4) + words
        group = row * (QUADS // Q) + q // Q
        w = load_plane(base_ptr, at, live[:, None], WHOLE)
        r = w
        if W8:
            r = load_plane(refine_ptr, at, live[:, None], WHOLE)
        m = tl.load(mult_ptr + group) if WHOLE else tl.load(mult_ptr + group, mask=live)
        base += (w,)
        refine += (r,)
        mult += (m.to(tl.int32),)
    return base, refine, mult


@triton.jit
def _dot_quads(a, b, total, ASM: tl.constexpr):
    """total [BQ] + the products of the bytes of words [BQ, 4]."""
    if ASM:
        total = total[:, None]
        a0, a1, a2, a3 = quarters(a)
        b0, b1, b2, b3 = quarters(b)
        total = dot4(a1, b1, dot4(a0, b0, total, ASM), ASM)
        total = dot4(a3, b3, dot4(a2, b2, total, ASM), ASM)
        return tl.reshape(total, (total.shape[0],))
    else:
        return total + tl.sum(dot4(a, b, tl.zeros_like(a), ASM), 1)


@triton.jit
def _add_quads(
    acc, base, refine, mult, x_ptr, sum_ptr, q, M: tl.constexpr, QUADS: tl.constexpr,
    G: tl.constexpr, BN: tl.constexpr, BQ: tl.constexpr, W8: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc with quads q: int64 [BQ] of each row of x and of the weights."""
    Q: tl.constexpr = G // 32
    codes = _nothing()
    for n in tl.static_range(BN):
        codes += word_codes(base[n], refine[n], W8, ASM)
    words = ((q // Q) * (G // 4) + (q % Q) * 4)[:, None] + tl.arange(0, 4)[None, :]
    live = q < QUADS
    more = _nothing()
    for m in tl.static_range(M):
        at = x_ptr + m * (QUADS * 8) + words
        if QUADS % BQ:
            low = tl.load(at, mask=live[:, None], other=0)
            high = tl.load(at + G // 8, mask=live[:, None], other=0)
        else:
            low = tl.load(at)
            high = tl.load(at + G // 8)
        start = tl.zeros((BQ,), tl.int32)
        if W8:  # once a group: its first quad takes the correction of all
            at = sum_ptr + m * (QUADS // Q) + q // Q
            start = -8 * tl.load(at, mask=live & (q % Q == 0), other=0)
        for n in tl.static_range(BN):
            dots = _dot_quads(codes[2 * n], low, start, ASM)
            dots = _dot_quads(codes[2 * n + 1], high, dots, ASM)
            more += (multiply_add(dots, mult[n], acc[m * BN + n], ASM),)
    return more


@triton.jit
def _together(acc, first: tl.constexpr, BN: tl.constexpr):
    """Tensors [BQ] from place `first` on as one [BQ, BN], which is summed at once."""
    if BN == 2:
        return tl.join(acc[first], acc[first + 1])
    else:
        tl.static_assert(BN == 4)
        even = tl.join(acc[first], acc[first + 2])
        odd = tl.join(acc[first + 1], acc[first + 3])
        return tl.reshape(tl.join(even, odd), (even.shape[0], 4))


@triton.jit(do_not_specialize=["N"])
def linear_dot4(
    x_ptr,  # int32 words of int8 [M, Kp]
    sum_ptr,  # int32 [M, Kp/G]
    x_scale_ptr,  # fp32 [M]
    base_ptr,  # int32 words of uint8 [N, Kp/2]
    refine_ptr,  # the same; not read in the w4 view
    mult_ptr,  # int16 [N, Kp/G]
    scale_ptr,  # fp32 [N]
    bias_ptr,  # fp32 [N]
    residual_ptr,  # fp32 [M, N]
    y_ptr,  # fp32 [M, N]
    N,
    M: tl.constexpr,  # rows of x, all of them in every program
    QUADS: tl.constexpr,  # Kp/32: a quad is four words of a plane, 32 weights of one group
    G: tl.constexpr,
    W8: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,  # whether BN divides N
    BN: tl.constexpr,  # weight rows of a program, 2 or 4
    BQ: tl.constexpr,  # quads of a loop step, each in one lane
    ASM: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Few rows of x: a lane owns a quad of inputs, and all weight rows of the program meet its
    words of x. 128-bit loads, 8 dp4a a quad and row.

    Weights are read a step ahead, the first before the activations are there. All tensors have one
    layout, a quad a lane, so that nothing goes through shared memory but the last sums.
    """
    start_next_launch(PDL)
    n0 = tl.program_id(0) * BN
    rn = n0 + tl.arange(0, BN)
    cn = tl.minimum(rn, N - 1)
    q = tl.arange(0, BQ)
    w, r, mult = _quads(base_ptr, refine_ptr, mult_ptr, n0, N, q, QUADS, G // 32, BN, BQ, EVEN, W8)
    scale = tl.load(scale_ptr + cn)
    wait_for_launch(PDL)
    acc = _nothing()
    for i in tl.static_range(M * BN):  # noqa: B007
        acc += (tl.zeros((BQ,), tl.int64),)
    for start in range(BQ, QUADS, BQ):
        w_now, r_now, mult_now = w, r, mult
        w, r, mult = _quads(
            base_ptr, refine_ptr, mult_ptr, n0, N, start + q, QUADS, G // 32, BN, BQ, EVEN, W8
        )
        at = start - BQ + q
        acc = _add_quads(
            acc, w_now, r_now, mult_now, x_ptr, sum_ptr, at, M, QUADS, G, BN, BQ, W8, ASM
        )
    at = (QUADS - 1) // BQ * BQ + q
    acc = _add_quads(acc, w, r, mult, x_ptr, sum_ptr, at, M, QUADS, G, BN, BQ, W8, ASM)
    for m in tl.static_range(M):
        sums = tl.sum(_together(acc, m * BN, BN), axis=0)
        y = (sums.to(tl.float32) * tl.load(x_scale_ptr + m)) * scale
        if BIAS:
            y += tl.load(bias_ptr + cn)
        if RESIDUAL:
            y += tl.load(residual_ptr + m * N + cn)
        tl.store(y_ptr + m * N + rn, y, mask=rn < N)
