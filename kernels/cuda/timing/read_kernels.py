"""A plain read of memory: what attention's bytes a second are held against."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read(x_ptr, y_ptr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Or over int32 numbers, BLOCK · STEPS a program, each read once."""
    i = tl.arange(0, BLOCK)
    x_ptr += tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    found = tl.zeros((BLOCK,), tl.int32)
    for step in tl.static_range(STEPS):
        found = found | tl.load(x_ptr + step * BLOCK + i)
    tl.store(y_ptr + tl.program_id(0), tl.max(found, 0))
