"""Draft tokens by look-up on the device: `decode.draft.NgramDraft`, without its index.

Invariant: tokens, length and result stay on the device. Of the n-grams 4, 3, 2 that end the text
(tokens, then what is drafted already) the first with an earlier occurrence in the tokens counts,
and of its occurrences the last that has a continuation; at most `gamma` ids follow it, cut before
the first negative id (an embedding row).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edge_runtime.kernels.cuda.launch import Kernel, cdiv, power_of_two
from edge_runtime.kernels.layout import MAX_GAMMA

ngram_blocks_kernel = Kernel("ngram_kernels", "ngram_blocks_kernel")
ngram_copy_kernel = Kernel("ngram_kernels", "ngram_copy_kernel", plain=(5, 6))

BLOCK = 1024
LONGEST = 4  # tokens of the longest n-gram
WIDTH = power_of_two(MAX_GAMMA)


@dataclass(frozen=True, slots=True)
class Draft:
    """ids int32 [8] (0 from `count` on), count int32 [1]; `partial` int32 [blocks, 3] is room."""

    ids: Tensor
    count: Tensor
    partial: Tensor


def new_draft(capacity: int, device: torch.device | str) -> Draft:
    """Allocate room to look up in texts of up to `capacity` tokens."""
    blocks = cdiv(capacity, BLOCK)
    return Draft(
        torch.empty(WIDTH, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
        torch.empty(blocks, 3, dtype=torch.int32, device=device),
    )


def look_up(
    tokens: Tensor,
    length: Tensor,
    drafted: Tensor,
    num_drafted: Tensor,
    gamma: int,
    out: Draft | None = None,
) -> Draft:
    """Continue the way the last few tokens continued before.

    tokens: int32 [capacity], of which `length` int32 [1] count; drafted: int32 [>= 1], of which
    `num_drafted` int32 [1] follow them; gamma: at most so many ids, up to 8.
    """
    assert 0 <= gamma <= WIDTH
    out = out or new_draft(tokens.shape[0], tokens.device)
    blocks = out.partial.shape[0]
    ngram_blocks_kernel[(blocks,)](
        tokens, length, drafted, num_drafted, out.partial, BLOCK=BLOCK, num_warps=4
    )
    ngram_copy_kernel[(1,)](
        tokens, length, out.partial, out.ids, out.count, blocks, gamma,
        BLOCKS=power_of_two(blocks), WIDTH=WIDTH, num_warps=1,
    )  # fmt: skip
    return out
