"""Floating-point steps of attention and of the KV write, beside those of `numeric.py`.

Invariant: each is a fixed sequence of IEEE fp32 operations (`kernels/reference/numeric.py`), for
kernels compiled with `enable_fp_fusion=False`. Sums whose order counts add two numbers at a time,
so that no layout a compiler picks can change it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edge_runtime.kernels.cuda import numeric
from edge_runtime.kernels.reference import numeric as reference

MAGIC = numeric.ROUND
MAGIC_BITS = tl.constexpr(0x4B400000)
NEG_INF = tl.constexpr(float("-inf"))
CUTOFF = tl.constexpr(reference.EXP_CUTOFF)
LOG2E = tl.constexpr(reference.LOG2E)
LN2_HI = tl.constexpr(reference.LN2_HI)
LN2_LO = tl.constexpr(reference.LN2_LO)
C0, C1, C2, C3, C4, C5 = (tl.constexpr(c) for c in reference.EXP_COEFFICIENTS)


@triton.jit
def exp_nonpositive(x):
    """exp(x) for x <= 0; unlike in `numeric.exp_nonpositive` NaN stays NaN."""
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
def halving_sum(x, AXIS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum WIDTH numbers, 256 at most, of an axis of [WIDTH], [WIDTH, Q] or [Q, WIDTH] by halves.

    Each step adds two numbers, in whichever order: the bits cannot depend on the layout.
    """
    Q: tl.constexpr = 1 if len(x.shape) == 1 else x.shape[1 - AXIS]
    for step in tl.static_range(8):
        if (WIDTH >> step) > 1:
            if AXIS == 0:
                x = tl.sum(tl.reshape(x, [2, WIDTH >> (step + 1), Q]), axis=0)
            else:
                x = tl.sum(tl.reshape(x, [Q, 2, WIDTH >> (step + 1)]), axis=1)
    return tl.reshape(x, [Q])
