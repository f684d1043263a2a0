"""Numpy twins of the floating-point ops, written from the formulas of `kernels/ops.py` alone.

Plain float32 steps in the stated order: IEEE divisions, no fused multiply-add, 32 strided lanes
ascending and then a halving tree. Nothing here looks at the torch code.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

F = np.float32
F32 = npt.NDArray[np.float32]

# exp(r) = 1 + r + r² · P(r), Cephes' expf; x = n·ln2 + r with ln2 in two parts
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1)
EXP += (5.0000001201e-1,)


def exp(x: F32) -> F32:
    """The contract's exp of non-positive numbers."""
    x = np.asarray(x, dtype=F)
    with np.errstate(invalid="ignore"):
        safe = np.maximum(x, F(-87))
        n = np.rint(safe * F(1.4426950408889634))
        r = (safe - n * F(0.693359375)) - n * F(-2.12194440e-4)
    p = np.full_like(r, F(EXP[0]))
    for c in EXP[1:]:
        p = p * r + F(c)
    y = ((p * (r * r)) + r) + F(1)
    return np.where(x < F(-87), F(0), np.ldexp(y, n.astype(np.int32))).astype(F)


def lane_sum(x: F32) -> F32:
    """Sum a vector [n]: lane l adds x[l], x[l + 32], … ascending; then 16, 8, 4, 2, 1."""
    lanes = [F(0)] * 32
    for i, value in enumerate(x):
        lanes[i % 32] = value if i < 32 else lanes[i % 32] + value
    width = 32
    while width > 1:
        width //= 2
        lanes = [lanes[i] + lanes[i + width] for i in range(width)]
    return lanes[0]


def quantise(x: F32) -> tuple[npt.NDArray[np.int64], F32]:
    """(codes, scale) of a vector."""
    peak = np.abs(x).max()
    if peak < F(2.0**-100):
        return np.zeros(x.shape, dtype=np.int64), F(0)
    codes = np.rint(x * (F(127) / peak))
    return np.clip(codes, -127, 127).astype(np.int64), peak / F(127)


def rms_norm(x: F32, eps: float) -> F32:
    """x · (1 / sqrt(Σx² / H + eps)) of a vector."""
    return x * (F(1) / np.sqrt(lane_sum(x * x) / F(len(x)) + F(eps)))


def silu_mul(g: F32, u: F32) -> F32:
    """(g · s) · u with s the sigmoid of g."""
    e = exp(-np.abs(g))
    s = np.where(g >= 0, F(1), e) / (F(1) + e)
    return (g * s) * u


def rope(x: F32, cos: F32, sin: F32) -> F32:
    """Rotate the pairs (i, i + D/2) of a vector [D]."""
    half = len(x) // 2
    a, b = x[:half], x[half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin])


def half_up(x: np.float32) -> np.float16:
    """The smallest fp16 that is not below x, found by looking at all of them; at most 65504."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(F)
    return np.float16(halves[min(int(np.searchsorted(halves, x)), len(halves) - 1)])


def kv_nest(x: F32) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], np.float16]:
    """(q4, qr, scale) of a vector."""
    scale = half_up(np.abs(x).max() / F(7.4375))
    s = F(scale)
    if s == 0:
        zero = np.zeros(len(x), dtype=np.int64)
        return zero, zero, scale
    q4 = np.clip(np.rint(x / s), -8, 7)
    qr = np.clip(np.rint((x - q4.astype(F) * s) / (s / F(16))), np.where(q4 == -8, 0, -8), 7)
    return q4.astype(np.int64), qr.astype(np.int64), scale


def attend_row(q: F32, keys: tuple[Any, F32], values: tuple[Any, F32], length: int) -> F32:
    """One query head [D] over `length` tokens: integer codes [T, D] and fp16 scales as fp32 [T]."""
    D = len(q)
    codes, q_scale = quantise(q)
    factor = q_scale * (F(1) / np.sqrt(F(D)))
    blocks = []
    for start in range(0, length, 64):
        tokens = range(start, min(start + 64, length))
        s = np.array(
            [(F(int(codes @ keys[0][t])) * factor) * (keys[1][t] / F(16)) for t in tokens], F
        )
        peak = s.max()
        p = exp(s - peak)
        w = p * np.array([values[1][t] / F(16) for t in tokens], F)
        w_peak = w.max()
        out = np.zeros(D, F)
        if w_peak >= F(2.0**-100):
            fixed = np.rint(w * (F(32767) / w_peak)).astype(np.int64)
            total = fixed @ values[0][tokens.start : tokens.stop].astype(np.int64)
            out = total.astype(F) * (w_peak / F(32767))
        blocks.append((peak, lane_sum(p), out))
    highest = max(b[0] for b in blocks)
    total, out = F(0), np.zeros(D, F)
    for peak, mass, part in blocks:
        c = exp(np.array([peak - highest], F))[0]
        out = out + part * c
        total = total + mass * c
    return out / total


def philox4x32(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 as in Salmon et al. 2011, all four words, in Python integers."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k0, p1 & 0xFFFFFFFF, p0 >> 32 ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def ulps(got: F32, exact: npt.NDArray[np.float64]) -> float:
    """Largest error in units of the last place of fp32."""
    return float((np.abs(got.astype(np.float64) - exact) / np.spacing(exact.astype(F))).max())


def rms_ratio(got: Any, exact: Any) -> float:
    """RMS of the error over RMS of the reference."""
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    return math.sqrt(float(((got - exact) ** 2).mean()) / float((exact**2).mean()))
