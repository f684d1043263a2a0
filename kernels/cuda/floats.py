"""The floating-point steps of the contract as Triton functions (`kernels/reference/numeric.py`).

Invariant: each is a fixed sequence of IEEE fp32 operations. The caller compiles with
`enable_fp_fusion=False`; `/` is not IEEE in Triton, `div_rn` is. Sums whose order counts add two
numbers at a time, so that no layout a compiler picks can change it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edge_runtime.kernels.reference import numeric

MAGIC = tl.constexpr(12582912.0)  # 1.5 · 2^23: x + MAGIC - MAGIC rounds to even, |x| < 2^22
MAGIC_BITS = tl.constexpr(0x4B400000)
TINY = tl.constexpr(numeric.TINY)
NEG_INF = tl.constexpr(float("-inf"))
INFINITY_BITS = tl.constexpr(0x7F800000)
CUTOFF = tl.constexpr(numeric.EXP_CUTOFF)
LOG2E = tl.constexpr(numeric.LOG2E)
LN2_HI = tl.constexpr(numeric.LN2_HI)
LN2_LO = tl.constexpr(numeric.LN2_LO)
C0, C1, C2, C3, C4, C5 = (tl.constexpr(c) for c in numeric.EXP_COEFFICIENTS)


@triton.jit
def round_even(x):
    """Nearest integer, ties to even, |x| < 2^22."""
    return (x + MAGIC) - MAGIC


@triton.jit
def exp_nonpositive(x):
    """exp(x) for x <= 0; NaN stays NaN."""
    low = x < CUTOFF
    safe = tl.where(low, CUTOFF, x)
    shifted = safe * LOG2E + MAGIC
    n = shifted - MAGIC
    r = (safe - n * LN2_HI) - n * LN2_LO
    p = r * C0 + C1
    p = p * r + C2
    p = p * r + C3
    p = p * r + C4
    p = p * r + C5
    y = ((p * (r * r)) + r) + 1.0
    # the bits of `shifted` end in n; those of MAGIC leave by the shift
    power = ((shifted.to(tl.int32, bitcast=True) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(low, 0.0, y * power)


@triton.jit
def magnitude_bits(x):
    """Bits of |x|: they order as |x| does, with infinity and then NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def int8_factors(bits):
    """Bits of max|x| -> (127 / max|x|, max|x| / 127); (0, NaN) where it is not finite."""
    peak = bits.to(tl.float32, bitcast=True)
    peak = tl.where(peak < TINY, 0.0, peak)
    used = (peak > 0) & (bits < INFINITY_BITS)
    inverse = tl.where(used, tl.div_rn(127.0, tl.where(used, peak, 1.0)), 0.0)
    return inverse, tl.where(bits < INFINITY_BITS, tl.div_rn(peak, 127.0), float("nan"))


@triton.jit
def int8_codes(x, inverse):
    """Codes of x as fp32 integers within ±127; 0 for NaN."""
    c = round_even(x * inverse)
    return tl.where(c == c, tl.minimum(tl.maximum(c, -127.0), 127.0), 0.0)


@triton.jit
def halving_sum(x, AXIS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum WIDTH numbers of an axis of [WIDTH], [WIDTH, Q] or [Q, WIDTH]: halves onto halves.

    Each step adds two numbers, in whichever order: the bits cannot depend on the layout.
    """
    if len(x.shape) == 1:
        Q: tl.constexpr = 1
    else:
        Q: tl.constexpr = x.shape[1 - AXIS]
    width: tl.constexpr = WIDTH // 2
    if AXIS == 0:
        x = tl.sum(tl.reshape(x, [2, width, Q]), axis=0)
    else:
        x = tl.sum(tl.reshape(x, [Q, 2, width]), axis=1)
    if width > 1:
        return halving_sum(x, AXIS, width)
    else:
        return tl.reshape(x, [Q])
