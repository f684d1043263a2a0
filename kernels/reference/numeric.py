"""The floating-point half of the contract, op by op: sums, exp, the int8 quantiser, KV nesting.

Invariant: every function is a fixed sequence of IEEE fp32 operations per element, without fused
multiply-add; whatever backend repeats that sequence gets the same bits. Formulas: `kernels/ops.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from edge_runtime.kernels.layout import LANES, padded

EXP_CUTOFF = -87.0  # exp below it is 0: the smallest result stays a normal number
HALF_MAX = 65504.0  # the largest fp16: a vector that needs a larger scale saturates
KV_STEPS = 7 + 7 / 16  # of a scale: what base and refinement reach together
TINY = 2.0**-100  # a vector whose peak lies below it counts as zero: 1 / peak stays finite
LOG2E = 1.4426950408889634
LN2_HI = 0.693359375  # nine bits: n · LN2_HI is exact
LN2_LO = -2.12194440e-4
# exp(r) = 1 + r + r² · P(r), |r| <= ln2/2; coefficients of Cephes' expf (Moshier, 1984-2000)
EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


def lane_sum(x: Tensor) -> Tensor:
    """Sum the last axis, fp32 [..., n] -> [...]: strided lanes ascending, then a halving tree."""
    n = x.shape[-1]
    if n % LANES:
        x = torch.nn.functional.pad(x, (0, padded(n, LANES) - n))
    parts = x.unflatten(-1, (-1, LANES)).unbind(-2)
    total: Tensor = parts[0]
    for part in parts[1:]:
        total = total + part
    width = LANES
    while width > 1:
        width //= 2
        total = total[..., :width] + total[..., width : 2 * width]
    return total[..., 0]


def exp_nonpositive(x: Tensor) -> Tensor:
    """exp(x) for x <= 0, fp32, error about 1 ulp; 0 below -87."""
    x_safe = x.clamp_min(EXP_CUTOFF)
    n = torch.round(x_safe * LOG2E)
    r = (x_safe - n * LN2_HI) - n * LN2_LO
    p = torch.full_like(r, EXP_COEFFICIENTS[0])
    for c in EXP_COEFFICIENTS[1:]:
        p = p * r + c
    y = ((p * (r * r)) + r) + 1.0
    power = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x < EXP_CUTOFF, torch.zeros_like(y), y * power)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes (as fp32 integers) [..., n] and fp32 scale [...] of the last axis."""
    peak = x.abs().amax(-1)
    peak = torch.where(peak < TINY, torch.zeros_like(peak), peak)
    # not `127 / peak`: torch turns that into reciprocal(peak) · 127, which rounds twice
    inverse = torch.where(peak > 0, torch.full_like(peak, 127.0) / peak, torch.zeros_like(peak))
    codes = torch.round(x * inverse[..., None]).clamp(-127, 127)
    return codes, peak / 127.0


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """RMSNorm without weights over the last axis."""
    mean = lane_sum(x * x) / x.shape[-1]
    return x * _sqrt(mean + eps).reciprocal()[..., None]


def _sqrt(x: Tensor) -> Tensor:
    """IEEE square root: on a CPU torch's comes from a vector library, off by an ulp at times."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    e = exp_nonpositive(-gate.abs())
    s = torch.where(gate >= 0, torch.ones_like(e), e) / (1.0 + e)
    return (gate * s) * up


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2). x: [M, heads, D]; cos, sin: [M, D/2]."""
    a, b = x.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last axis (a power of two), butterflies of
    rising stride, then one product with 1/√D (R3)."""
    D = x.shape[-1]
    stride = 1
    while stride < D:
        a, b = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        stride *= 2
    return x * float(np.float32(1.0) / np.sqrt(np.float32(D)))


def kv_nest(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nest vectors along the last axis: (q4, q_r, fp16 scale). Source: BitNest A.2."""
    s = _half_up(x.abs().amax(-1) / KV_STEPS)
    wide = s.float()[..., None]
    safe = torch.where(wide > 0, wide, torch.ones_like(wide))
    q4 = torch.round(x / safe).clamp(-8, 7)
    rest = x - q4 * safe
    low = torch.where(q4 == -8, 0.0, -8.0)
    qr = torch.maximum(torch.round(rest / (safe / 16.0)), low).clamp_max(7)
    return q4, qr, s


def _half_up(x: Tensor) -> Tensor:
    """The smallest fp16 number that is >= x (x >= 0), at most HALF_MAX."""
    x = x.clamp_max(HALF_MAX)
    half = x.half()
    bumped = (half.view(torch.int16) + 1).view(torch.float16)
    return torch.where(half.float() < x, bumped, half)
