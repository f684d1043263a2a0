"""Greedy choice on the device: the lowest index among equal maxima of the real vocabulary.

Invariant: index and finite flag stay on the device. A value and its index travel as one int64 whose
order is (value rising, index falling), so blocks may be combined in any order. Every logit below
`num_tokens` is checked for NaN and infinity, also those that `allowed` excludes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edge_runtime.kernels.cuda import require_triton

require_triton()

import triton  # noqa: E402 (the line above says what to install)
import triton.language as tl  # noqa: E402

from edge_runtime.kernels.cuda.numeric import EXACT, INFINITE, MAGNITUDE, peak_bits  # noqa: E402

BLOCK = 2048
LOWEST = tl.constexpr(-(2**63))  # below every key


@dataclass(frozen=True, slots=True)
class Choice:
    """index int32 [rows] and finite int32 [rows] (0: the row holds NaN or infinity); `partial`
    int64 [rows, blocks] and `flags` int32 [rows, blocks] are room between the two stages."""

    index: Tensor
    finite: Tensor
    partial: Tensor
    flags: Tensor


def new_choice(rows: int, num_tokens: int, device: torch.device | str) -> Choice:
    """Allocate room for `rows` choices."""
    blocks = triton.cdiv(num_tokens, BLOCK)
    return Choice(
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, blocks, dtype=torch.int64, device=device),
        torch.empty(rows, blocks, dtype=torch.int32, device=device),
    )


@triton.jit
def argmax_blocks_kernel(
    logits_ptr, allowed_ptr, partial_ptr, flags_ptr, V, stride, blocks,
    HAS_ALLOWED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """logits fp32 [rows, stride]; one program for BLOCK logits of a row."""
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
    partial_ptr, flags_ptr, index_ptr, finite_ptr, blocks, BLOCKS: tl.constexpr
):
    """One program a row combines its blocks."""
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    key = tl.load(partial_ptr + row * blocks + b, mask=b < blocks, other=LOWEST)
    flag = tl.load(flags_ptr + row * blocks + b, mask=b < blocks, other=1)
    best = tl.max(key, 0)
    index = tl.where(best == LOWEST, 0, 0xFFFFFFFF - (best & 0xFFFFFFFF))
    tl.store(index_ptr + row, index.to(tl.int32))
    tl.store(finite_ptr + row, tl.min(flag, 0))


def argmax(
    logits: Tensor, num_tokens: int, allowed: Tensor | None = None, out: Choice | None = None
) -> Choice:
    """Choose greedily. logits: fp32 [rows, stride >= num_tokens], contiguous; allowed: int32
    [ceil(num_tokens / 32)] with bit i % 32 of word i / 32 set for a token that may win, or None."""
    rows, stride = logits.shape
    assert logits.is_contiguous()
    assert stride >= num_tokens
    out = out or new_choice(rows, num_tokens, logits.device)
    blocks = triton.cdiv(num_tokens, BLOCK)
    argmax_blocks_kernel[(rows, blocks)](
        logits, logits if allowed is None else allowed, out.partial, out.flags, num_tokens, stride,
        blocks, HAS_ALLOWED=allowed is not None, BLOCK=BLOCK, num_warps=4, **EXACT,
    )  # fmt: skip
    argmax_combine_kernel[(rows,)](
        out.partial, out.flags, out.index, out.finite, blocks,
        BLOCKS=triton.next_power_of_2(blocks), num_warps=1,
    )  # fmt: skip
    return out
