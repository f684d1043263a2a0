"""The floating-point sequences of `kernels/reference/numeric.py` as Triton functions, same bits.

Invariant: IEEE fp32 with round to nearest even and no fused multiply-add, so every kernel that
calls these is launched with `enable_fp_fusion=False` (`launch.EXACT`). What it does not do: decide
which NaN comes out; a value that is NaN in the reference is NaN here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edge_runtime.kernels.layout import LANES as _LANES

LANES = tl.constexpr(_LANES)
TINY = tl.constexpr(2.0**-100)
ROUND = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding it rounds |x| < 2^22 to the nearest even
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)  # bits of |x| from here on are infinity and NaN
NOT_A_NUMBER = tl.constexpr(0x7FC00000)


@triton.jit
def round_even(x):
    """The nearest integer, ties to even, of |x| < 2^22."""
    return (x + ROUND) - ROUND


@triton.jit
def exp_nonpositive(x):
    """exp(x) for x <= 0 by the contract's polynomial; 0 below -87."""
    safe = tl.maximum(x, -87.0)
    n = round_even(safe * 1.4426950408889634)
    r = (safe - n * 0.693359375) - n * -2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    y = ((p * (r * r)) + r) + 1.0
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.0, 0.0, y * power)


@triton.jit
def silu_mul(gate, up):
    """silu(gate) · up."""
    e = exp_nonpositive(-tl.abs(gate))
    s = tl.div_rn(tl.where(gate >= 0, 1.0, e), 1.0 + e)
    return (gate * s) * up


@triton.jit
def fold_lanes(x):
    """Sum fp32 [32] by the halving tree 16, 8, 4, 2, 1; each step adds two numbers."""
    x = tl.sum(tl.reshape(x, (2, 16)), 0)
    x = tl.sum(tl.reshape(x, (2, 8)), 0)
    x = tl.sum(tl.reshape(x, (2, 4)), 0)
    x = tl.sum(tl.reshape(x, (2, 2)), 0)
    return tl.sum(x, 0)


@triton.jit
def peak_bits(x):
    """Bits of max|x| of a block fp32 [n]; infinity and NaN, whose bits are the largest, win."""
    return tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE, 0)


@triton.jit
def quantiser(most):
    """(127 / peak, peak / 127) for the bits of a peak; (0, 0) below TINY, (0, NaN) from infinity
    on."""
    finite = most < INFINITE
    peak = most.to(tl.float32, bitcast=True)
    live = finite & (peak >= TINY)
    safe = tl.where(live, peak, 1.0)
    inverse = tl.where(live, tl.div_rn(127.0, safe), 0.0)
    scale = tl.where(live, tl.div_rn(safe, 127.0), 0.0)
    nan = tl.full((), NOT_A_NUMBER, tl.int32).to(tl.float32, bitcast=True)
    return inverse, tl.where(finite, scale, nan)


@triton.jit
def codes_of(x, inverse):
    """clamp(rne(x · inverse), ±127) as int32; 0 for NaN."""
    c = round_even(x * inverse)
    c = tl.where(c > 127.0, 127.0, c)
    c = tl.where(c < -127.0, -127.0, c)
    return tl.where(c == c, c, 0.0).to(tl.int32)
