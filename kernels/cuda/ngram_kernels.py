"""The look-up of draft tokens as Triton kernels; launched by `ngram.py`.

The search is a maximum over end positions, so programs may be combined in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tail(tokens_ptr, drafted_ptr, length, drafted, back):
    """The token `back` places before the end of tokens + drafted."""
    at = length + drafted - 1 - back
    old = tl.load(tokens_ptr + tl.maximum(tl.minimum(at, length - 1), 0))
    new = tl.load(drafted_ptr + tl.maximum(at - length, 0))
    return tl.where(at < length, old, new)


@triton.jit
def ngram_blocks_kernel(
    tokens_ptr, length_ptr, drafted_ptr, count_ptr, partial_ptr, BLOCK: tl.constexpr
):
    """One program for BLOCK end positions; 0: no match ends there."""
    length = tl.load(length_ptr)
    drafted = tl.load(count_ptr)
    block = tl.program_id(0)
    end = block * BLOCK + tl.arange(0, BLOCK)  # where the continuation would begin
    same = end < length
    # the reference keeps the last four of the committed tokens and all drafted ones; as a block,
    # since Triton's interpreter broadcasts no scalar comparison as a mask
    known = tl.minimum(length, 4) + drafted + 0 * end
    best2 = 0
    best3 = 0
    best4 = 0
    for back in tl.static_range(4):
        token = _tail(tokens_ptr, drafted_ptr, length, drafted, back)
        at = end - 1 - back
        there = tl.load(tokens_ptr + at, mask=same & (at >= 0), other=0)
        same = same & (at >= 0) & (there == token) & (known > back)
        found = tl.max(tl.where(same, end, 0), 0)
        if back == 1:
            best2 = found
        if back == 2:
            best3 = found
        if back == 3:
            best4 = found
    tl.store(partial_ptr + block * 3, best4)
    tl.store(partial_ptr + block * 3 + 1, best3)
    tl.store(partial_ptr + block * 3 + 2, best2)


@triton.jit(do_not_specialize=["blocks", "gamma"])
def ngram_copy_kernel(
    tokens_ptr, length_ptr, partial_ptr, ids_ptr, num_ptr, blocks, gamma,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: the longest n-gram's last match, and what followed it."""
    length = tl.load(length_ptr)
    b = tl.arange(0, BLOCKS)
    best4 = tl.max(tl.load(partial_ptr + b * 3, mask=b < blocks, other=0), 0)
    best3 = tl.max(tl.load(partial_ptr + b * 3 + 1, mask=b < blocks, other=0), 0)
    best2 = tl.max(tl.load(partial_ptr + b * 3 + 2, mask=b < blocks, other=0), 0)
    at = tl.where(best4 > 0, best4, tl.where(best3 > 0, best3, best2))
    i = tl.arange(0, WIDTH)
    inside = (at + 0 * i > 0) & (i < gamma) & (at + i < length)
    token = tl.load(tokens_ptr + at + i, mask=inside, other=-1)
    count = tl.min(tl.where(token < 0, i, WIDTH), 0)
    tl.store(ids_ptr + i, tl.where(i < count, token, 0))
    tl.store(num_ptr, count)
