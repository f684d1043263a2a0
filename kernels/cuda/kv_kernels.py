"""RoPE and the quantised KV write as one Triton kernel; a program is one head of one row.

Invariant: the float steps of `kernels/reference/numeric.py`, in their order. Every row writes bytes
of its own token alone. Formulas: `kernels/ops.py`; shapes: `kv.py` and `cache.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edge_runtime.kernels.cuda import floats
from edge_runtime.kernels.cuda.floats import halving_sum
from edge_runtime.kernels.cuda.numeric import round_even
from edge_runtime.kernels.cuda.overlap_kernels import start_next_launch, wait_for_launch

BLOCK = tl.constexpr(64)
HALF_MAX = tl.constexpr(65504.0)
KV_STEPS = tl.constexpr(7.4375)
HALF_NAN = tl.constexpr(0x7E00)


@triton.jit
def _inverse_rms(x_ptr, eps, D: tl.constexpr):
    """1 / sqrt(Σx² / D + eps) of D numbers: 32 strided lanes ascending, then halves."""
    lane = tl.arange(0, 32)
    lanes = tl.zeros((32,), tl.float32)
    for part in tl.static_range((D + 31) // 32):
        x = tl.load(x_ptr + part * 32 + lane, mask=part * 32 + lane < D, other=0.0)
        lanes += x * x
    total = halving_sum(lanes, 0, 32)  # [1]
    mean = tl.div_rn(total, total * 0.0 + D) + eps
    return tl.div_rn(mean * 0.0 + 1.0, tl.sqrt_rn(mean))


@triton.jit
def _butterfly(x, d, STRIDE: tl.constexpr):
    """(a, b) -> (a + b, a - b) on pairs (i, i + STRIDE)."""
    other = tl.gather(x, d ^ STRIDE, 0)
    return tl.where((d & STRIDE) == 0, x + other, other - x)


@triton.jit
def _hadamard(low, high, HALF: tl.constexpr, softmax_scale):
    """Walsh-Hadamard of [low | high], strides rising, then times 1/√D. HALF is a power of two."""
    d = tl.arange(0, HALF)
    for bit in tl.static_range(16):
        if (1 << bit) < HALF:
            low = _butterfly(low, d, 1 << bit)
            high = _butterfly(high, d, 1 << bit)
    return (low + high) * softmax_scale, (low - high) * softmax_scale


@triton.jit
def _half_up(x):
    """Bits of the smallest fp16 number >= x (x >= 0), at most 65504; NaN stays NaN."""
    safe = tl.where(x < HALF_MAX, x, HALF_MAX)
    half = safe.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    bits += (half.to(tl.float32) < safe).to(tl.int32)
    return tl.where(x == x, bits, HALF_NAN)


@triton.jit
def _nibbles(x, safe):
    """(q4, q_r) of x over a scale, int32."""
    q = tl.div_rn(x, safe)
    q = round_even(tl.minimum(tl.maximum(q, -8.0), 7.0))
    rest = x - q * safe
    r = tl.div_rn(rest, safe * 0.0625)
    r = round_even(tl.minimum(tl.maximum(r, -8.0), 7.0))
    r = tl.where((q == -8.0) & (r < 0.0), 0.0, r)
    return q.to(tl.int32), r.to(tl.int32)


@triton.jit(do_not_specialize=["heads", "kv_heads"])
def rope_kv(
    qkv_ptr,  # fp32 [M, (heads + 2·kv_heads)·D]
    position_ptr,  # int32 [M]
    cos_ptr,  # fp32 [tokens, D/2]
    sin_ptr,
    q_norm_ptr,  # fp32 [D]
    k_norm_ptr,
    q_ptr,  # fp32 [M, heads, D]
    key_base_ptr,  # the cache of a layer: see cache.py
    key_refine_ptr,
    value_base_ptr,
    value_refine_ptr,
    key_scale_ptr,  # fp16, as int16
    value_scale_ptr,
    heads,
    kv_heads,
    T,
    eps,
    softmax_scale,  # 1/√D, which the Hadamard transform ends in
    D: tl.constexpr,
    HP: tl.constexpr,  # D/2 rounded up to a power of two
    QK_NORM: tl.constexpr,
    ROTATE: tl.constexpr,  # R3
    PDL: tl.constexpr = False,
):
    """Head program_id(1) of row program_id(0): of q, then of k, then of v."""
    start_next_launch(PDL)
    wait_for_launch(PDL)
    HALF: tl.constexpr = D // 2
    row = tl.program_id(0)
    head = tl.program_id(1)
    position = tl.load(position_ptr + row)
    x_ptr = qkv_ptr + row.to(tl.int64) * ((heads + 2 * kv_heads) * D) + head * D
    d = tl.arange(0, HP)
    inside = d < HALF
    low = tl.load(x_ptr + d, mask=inside, other=0.0)
    high = tl.load(x_ptr + HALF + d, mask=inside, other=0.0)
    if head < heads + kv_heads:
        if QK_NORM:
            factor = _inverse_rms(x_ptr, eps, D)
            norm_ptr = k_norm_ptr
            if head < heads:
                norm_ptr = q_norm_ptr
            low = (low * factor) * tl.load(norm_ptr + d, mask=inside, other=0.0)
            high = (high * factor) * tl.load(norm_ptr + HALF + d, mask=inside, other=0.0)
        at = position.to(tl.int64) * HALF + d
        cos = tl.load(cos_ptr + at, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + at, mask=inside, other=0.0)
        a = low * cos - high * sin
        high = high * cos + low * sin
        low = a
        if ROTATE:
            low, high = _hadamard(low, high, HALF, softmax_scale)
    if head < heads:
        out = q_ptr + (row.to(tl.int64) * heads + head) * D + d
        tl.store(out, low, mask=inside)
        tl.store(out + HALF, high, mask=inside)
    else:
        bits = tl.max(tl.maximum(floats.magnitude_bits(low), floats.magnitude_bits(high)), 0)
        scale = _half_up(tl.div_rn(bits.to(tl.float32, bitcast=True), KV_STEPS))
        wide = scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        safe = tl.where(wide > 0, wide, 1.0) + tl.zeros_like(low)
        q_low, r_low = _nibbles(low, safe)
        q_high, r_high = _nibbles(high, safe)
        base = ((q_low & 15) | ((q_high & 15) << 4)).to(tl.uint8)
        refine = ((r_low + 8) | ((r_high + 8) << 4)).to(tl.uint8)
        if head < heads + kv_heads:
            token = (head - heads).to(tl.int64) * T + position
            at = token * HALF + d
            tl.store(key_base_ptr + at, base, mask=inside)
            tl.store(key_refine_ptr + at, refine, mask=inside)
            tl.store(key_scale_ptr + token, scale.to(tl.int16))
        else:
            first = (head - heads - kv_heads).to(tl.int64) * T
            at = (first + position // BLOCK * BLOCK) * HALF + d * BLOCK + position % BLOCK
            tl.store(value_base_ptr + at, base, mask=inside)
            tl.store(value_refine_ptr + at, refine, mask=inside)
            tl.store(value_scale_ptr + first + position, scale.to(tl.int16))
