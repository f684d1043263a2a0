"""Greedy choice on the device: the lowest index among equal maxima of the real vocabulary.

Invariant: index and finite flag stay on the device. Every logit below `num_tokens` is
checked for NaN and infinity, also those that `allowed` excludes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edge_runtime.kernels.cuda.launch import EXACT, Kernel, cdiv, power_of_two

argmax_blocks_kernel = Kernel("head_kernels", "argmax_blocks_kernel", plain=(6,), pdl=True)
argmax_combine_kernel = Kernel("head_kernels", "argmax_combine_kernel", pdl=True)

BLOCK = 2048


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
    blocks = cdiv(num_tokens, BLOCK)
    return Choice(
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, blocks, dtype=torch.int64, device=device),
        torch.empty(rows, blocks, dtype=torch.int32, device=device),
    )


def argmax(
    logits: Tensor, num_tokens: int, allowed: Tensor | None = None, out: Choice | None = None
) -> Choice:
    """Choose greedily. logits: fp32 [rows, stride >= num_tokens], contiguous; allowed: int32
    [ceil(num_tokens / 32)] with bit i % 32 of word i / 32 set for a token that may win, or None."""
    rows, stride = logits.shape
    assert logits.is_contiguous()
    assert stride >= num_tokens
    out = out or new_choice(rows, num_tokens, logits.device)
    blocks = cdiv(num_tokens, BLOCK)
    argmax_blocks_kernel[(rows, blocks)](
        logits, logits if allowed is None else allowed, out.partial, out.flags, num_tokens, stride,
        blocks, HAS_ALLOWED=allowed is not None, BLOCK=BLOCK, num_warps=4, **EXACT,
    )  # fmt: skip
    argmax_combine_kernel[(rows,)](
        out.partial, out.flags, out.index, out.finite, blocks,
        BLOCKS=power_of_two(blocks), num_warps=1,
    )  # fmt: skip
    return out
