"""Noise and fp64 functions of `kernels/sampling.py` as Triton functions, same bits.

Invariant: IEEE fp64 without fused multiply-add (launch with `EXACT`); noise is a function of (seed,
position, token id). `rough_gumbel` and `rough_exp` are cheap, for screening only: an Orin does 64
times fewer fp64 operations than fp32 ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(float.fromhex("0x1.62e42fefa39efp-1"))
ROUND64 = tl.constexpr(6755399441055744.0)  # 1.5 · 2^52
MASK32 = tl.constexpr(0xFFFFFFFF)
GUMBEL_ERROR = tl.constexpr(1e-3)  # far above what rough_gumbel is off by


@triton.jit
def philox(seed, position, ids):
    """First output word of Philox4x32-10 as uint32. seed, position: int64; ids: int32 [n]."""
    k0 = (seed & MASK32).to(tl.uint32)
    k1 = ((seed >> 32) & MASK32).to(tl.uint32)
    c2 = ids.to(tl.uint32)
    zero = c2 * 0
    c0 = zero + (position & MASK32).to(tl.uint32)
    c1 = zero + ((position >> 32) & MASK32).to(tl.uint32)
    c3 = zero
    m0 = zero + 0xD2511F53
    m1 = zero + 0xCD9E8D57
    w0 = zero + k0
    w1 = zero + k1
    for _ in tl.static_range(10):
        high0 = tl.umulhi(m0, c0)
        high1 = tl.umulhi(m1, c2)
        low0 = m0 * c0
        low1 = m1 * c2
        c0 = high1 ^ c1 ^ w0
        c1 = low1
        c2 = high0 ^ c3 ^ w1
        c3 = low0
        w0 = w0 + 0x9E3779B9
        w1 = w1 + 0xBB67AE85
    return c0


@triton.jit
def exp64(x):
    """exp of x <= 0: 2^n · Taylor(r); 0 below -700."""
    safe = tl.where(x < -700.0, -700.0, x)
    n = (safe / LN2 + ROUND64) - ROUND64
    r = safe - n * LN2
    total = r * 0.0 + 1.0
    for step in tl.static_range(14):
        total = total * r / (14.0 - step) + 1.0
    power = ((n.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.where(x < -700.0, 0.0, total * power)


@triton.jit
def log64(x):
    """log of normal x > 0: e·ln2 + 2·atanh((m - 1) / (m + 1))."""
    bits = x.to(tl.int64, bitcast=True)
    e = ((bits >> 52) & 0x7FF) - 1022
    m = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    small = m < 0.7071067811865476
    m = tl.where(small, m * 2.0, m)
    e = tl.where(small, e - 1, e)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    total = z * 0.0 + 1.0 / 25.0
    for step in tl.static_range(12):
        total = total * z + 1.0 / (23.0 - 2 * step)
    return e.to(tl.float64) * LN2 + 2.0 * s * total


@triton.jit
def gumbel(seed, position, ids):
    """-log(-log(u)), u = (word + 1/2) / 2^32, fp64."""
    word = philox(seed, position, ids).to(tl.float64)
    return -log64(-log64((word + 0.5) * 2.3283064365386963e-10))


@triton.jit
def rough_gumbel(seed, position, ids):
    """The same in fp32, off by less than GUMBEL_ERROR: near u = 1 it starts from 1 - u."""
    word = philox(seed, position, ids)
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    d = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    near = d * (1.0 + d * (0.5 + d * (0.33333333 + d * 0.25)))
    t = tl.where(d < 0.015625, near, -tl.log(tl.minimum(u, 0.99)))
    return -tl.log(t)


@triton.jit
def rough_exp(x):
    """exp of x <= 0 in fp64 without divisions, relative error below 1e-12; 0 below -700."""
    safe = tl.where(x < -700.0, -700.0, x)
    n = (safe * 1.4426950408889634 + ROUND64) - ROUND64
    r = safe - n * LN2
    p = r * 2.505210838544172e-8 + 2.755731922398589e-7  # 1/11!, 1/10!
    p = p * r + 2.7557319223985893e-6
    p = p * r + 2.48015873015873e-5
    p = p * r + 1.984126984126984e-4
    p = p * r + 1.388888888888889e-3
    p = p * r + 8.333333333333333e-3
    p = p * r + 4.1666666666666664e-2
    p = p * r + 1.6666666666666666e-1
    p = p * r + 0.5
    p = (p * r + 1.0) * r + 1.0
    power = ((n.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.where(x < -700.0, 0.0, p * power)
