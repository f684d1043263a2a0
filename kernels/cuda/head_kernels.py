"""The greedy choice as Triton kernels; launched by `head.py`.

A value and its index travel as one int64 whose order is (value rising, index falling), so blocks
may be combined in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edge_runtime.kernels.cuda.numeric import INFINITE, MAGNITUDE, peak_bits
from edge_runtime.kernels.cuda.overlap_kernels import start_next_launch, wait_for_launch

LOWEST = tl.constexpr(-(2**63))  # below every key


@triton.jit(do_not_specialize=["blocks"])
def argmax_blocks_kernel(
    logits_ptr, allowed_ptr, partial_ptr, flags_ptr, V, stride, blocks,
    HAS_ALLOWED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """logits fp32 [rows, stride]; one program for BLOCK logits of a row."""
    start_next_launch(PDL)
    wait_for_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * stride + i, mask=i < V, other=0.0)
    magnitude = peak_bits(x)
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 and 0 are equal
    order = bits ^ ((bits >> 31) & MAGNITUDE)
    key = (order.to(tl.int64) << 32) | (0xFFFFFFFF - i.to(tl.int64))
    keep = i < V
    if HAS_ALLOWED:
        words = tl.load(allowed_ptr + (i >> 5), mask=keep, other=0)
        keep = keep & (((words >> (i & 31)) & 1) != 0)
    tl.store(partial_ptr + row * blocks + block, tl.max(tl.where(keep, key, LOWEST), 0))
    tl.store(flags_ptr + row * blocks + block, (magnitude < INFINITE).to(tl.int32))


@triton.jit
def argmax_combine_kernel(
    partial_ptr, flags_ptr, index_ptr, finite_ptr, blocks, BLOCKS: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """One program a row combines its blocks."""
    start_next_launch(PDL)
    wait_for_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    key = tl.load(partial_ptr + row * blocks + b, mask=b < blocks, other=LOWEST)
    flag = tl.load(flags_ptr + row * blocks + b, mask=b < blocks, other=1)
    best = tl.max(key, 0)
    index = tl.where(best == LOWEST, 0, 0xFFFFFFFF - (best & 0xFFFFFFFF))
    tl.store(index_ptr + row, index.to(tl.int32))
    tl.store(finite_ptr + row, tl.min(flag, 0))
