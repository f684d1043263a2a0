"""A kernel that shows what `kernels/cuda/noise.py` computes; imported after Triton was found."""

from __future__ import annotations

import triton
import triton.language as tl

from edge_runtime.kernels.cuda.noise import exp64, gumbel, log64, rough_exp, rough_gumbel


@triton.jit
def functions_kernel(x_ptr, ints_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """x: fp64 [2, n], arguments of exp and log; out: fp64 [5, n]."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(ints_ptr)
    position = tl.load(ints_ptr + 1)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, exp64(x))
    tl.store(out_ptr + n + i, log64(tl.load(x_ptr + n + i)))
    tl.store(out_ptr + 2 * n + i, gumbel(seed, position, i))
    tl.store(out_ptr + 3 * n + i, rough_gumbel(seed, position, i).to(tl.float64))
    tl.store(out_ptr + 4 * n + i, rough_exp(x))
