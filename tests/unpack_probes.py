"""Kernels that run the helpers of `kernels.cuda.unpack` alone, in both forms."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from edge_runtime.kernels.cuda.unpack import (
    dot4,
    multiply_add,
    w4_codes,
    w8_codes,
    word_codes,
)

BLOCK = 1024


@triton.jit
def _codes(
    base_ptr, refine_ptr, low_ptr, high_ptr, W8: tl.constexpr, WORDS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    base = tl.load(base_ptr + i)
    if WORDS:
        low, high = word_codes(base, tl.load(refine_ptr + i), W8, ASM)
    elif W8:
        low, high = w8_codes(base, tl.load(refine_ptr + i), ASM)
    else:
        low, high = w4_codes(base, ASM)
    tl.store(low_ptr + i, low)
    tl.store(high_ptr + i, high)


@triton.jit
def _words(a_ptr, b_ptr, c_ptr, out_ptr, DOT4: tl.constexpr, ASM: tl.constexpr):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    a, b = tl.load(a_ptr + i), tl.load(b_ptr + i)
    if DOT4:
        tl.store(out_ptr + i, dot4(a, b, tl.zeros_like(a), ASM))
    else:
        tl.store(out_ptr + i, multiply_add(a, b, tl.load(c_ptr + i), ASM))


def probe(form: str, tensors: list[torch.Tensor], assembly: bool) -> list[torch.Tensor]:
    """Run a helper over tensors of 65536: base, refine uint8, a, b int32, c int64."""
    base, refine, a, b, c = tensors
    grid = (base.numel() // BLOCK,)
    if form.endswith("codes"):
        low, high = (torch.zeros_like(base, dtype=torch.int8) for _ in range(2))
        words = form.endswith("word_codes")
        planes = [p.view(torch.int32) if words else p for p in (base, refine, low, high)]
        grid = (planes[0].numel() // BLOCK,)
        _codes[grid](*planes, W8=form.startswith("w8"), WORDS=words, ASM=assembly)
        return [low, high]
    out = torch.zeros_like(a if form == "dot4" else c)
    _words[grid](a, b, c, out, DOT4=form == "dot4", ASM=assembly)
    return [out]
