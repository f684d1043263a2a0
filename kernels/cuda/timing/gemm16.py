"""y = x · wᵀ in fp16 on tensor cores: the yardstick of prefill on a slice of a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gemm16(x_ptr, w_ptr, y_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr):
    """x: fp16 [M, K], w: fp16 [N, K], y: fp16 [M, N], with fp32 sums; N in tiles, K in 32s."""
    num_m = tl.cdiv(M, BM)
    pid = tl.program_id(0)
    rm = pid % num_m * BM + tl.arange(0, BM)
    rn = pid // num_m * BN + tl.arange(0, BN)
    k = tl.arange(0, 32)
    x = x_ptr + tl.minimum(rm, M - 1)[:, None] * K + k[None, :]
    w = w_ptr + rn[None, :] * K + k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for i in tl.range(0, K // 32, num_stages=STAGES):
        acc = tl.dot(tl.load(x + i * 32), tl.load(w + i * 32), acc)
    tl.store(y_ptr + rm[:, None] * N + rn[None, :], acc.to(tl.float16), mask=(rm < M)[:, None])
