"""Seeded sampling on the device: the token that `kernels/sampling.py` chooses.

Invariant: same token as `choose`, for every parameter. Parameters, tokens seen and result stay on
the device, so a captured graph samples at new positions with new parameters.

fp64 is slow on an Orin, so it is spent where it decides:
- Without top-k and top-p, a first pass computes logit + noise in fp32 with a bound of its error,
  and keeps the largest upper bound of every 128 tokens. Only groups whose upper bound reaches the
  largest lower bound are computed in fp64: usually one.
- top-k and top-p sort the scores (torch, stable: equal scores stay in the order of their ids).
  Top-p compares a running sum, in order, with a share of the total. The total is first known to
  2^-34 from a sum in any order; where both ends of that interval cut at the same token (all but one
  in a million) that is the cut, else the sum runs on to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edge_runtime.kernels.cuda.launch import EXACT, Kernel, cdiv, power_of_two
from edge_runtime.kernels.sampling import Parameters

peaks_kernel = Kernel("sampling_kernels", "peaks_kernel")
scores_kernel = Kernel("sampling_kernels", "scores_kernel")
screen_kernel = Kernel("sampling_kernels", "screen_kernel")
decide_kernel = Kernel("sampling_kernels", "decide_kernel")
sums_kernel = Kernel("sampling_kernels", "sums_kernel")
cut_kernel = Kernel("sampling_kernels", "cut_kernel")
draw_kernel = Kernel("sampling_kernels", "draw_kernel")
combine_kernel = Kernel("sampling_kernels", "combine_kernel")

BLOCK = 1024  # tokens of one program
GROUP = 128  # tokens that are computed in fp64 together

PENALISED_SEEN, PENALISED_OWN = 1, 2  # bits of `seen`: in prompt or answer; in the answer


@dataclass(frozen=True, slots=True)
class Settings:
    """Parameters of each row. ints: int64 [rows, 3], seed (its 64 bits), position, top_k; floats:
    fp64 [rows, 5], temperature, top_p, min_p, repetition and presence penalty."""

    ints: Tensor
    floats: Tensor

    @classmethod
    def of(
        cls, parameters: Sequence[Parameters], positions: Sequence[int], device: torch.device | str
    ) -> Settings:
        """Copy parameters to the device."""
        ints = [
            (p.seed - (2**64 if p.seed >= 2**63 else 0), at, min(p.top_k, 2**31 - 1))
            for p, at in zip(parameters, positions, strict=True)
        ]
        floats = [
            (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty)
            for p in parameters
        ]
        return cls(
            torch.tensor(ints, dtype=torch.int64, device=device),
            torch.tensor(floats, dtype=torch.float64, device=device),
        )


@dataclass(frozen=True, slots=True)
class Room:
    """index, finite: int32 [rows], the result. The rest is room between stages: peaks fp64 and
    flags int32 [rows, blocks], bounds fp32 [2, rows, groups], sums fp64 [rows, blocks]; scores,
    mass: fp64 and order: int64 [rows, V], keep int32 [rows], None without truncation."""

    index: Tensor
    finite: Tensor
    peaks: Tensor
    flags: Tensor
    bounds: Tensor
    sums: Tensor
    scores: Tensor | None
    sorted: Tensor | None
    order: Tensor | None
    mass: Tensor | None
    keep: Tensor

    def part(self, rows: int) -> Room:
        """Room for the first `rows` choices, in the same place."""
        groups = self.bounds.shape[2]
        bounds = self.bounds.view(-1)[: 2 * rows * groups].view(2, rows, groups)
        wide = (self.scores, self.sorted, self.order, self.mass)
        scores, in_order, order, mass = (None if t is None else t[:rows] for t in wide)
        return Room(
            self.index[:rows], self.finite[:rows], self.peaks[:rows], self.flags[:rows], bounds,
            self.sums[:rows], scores, in_order, order, mass, self.keep[:rows],
        )  # fmt: skip


def new_room(rows: int, num_tokens: int, device: torch.device | str, *, truncate: bool) -> Room:
    """Allocate room for `rows` choices; truncate: with top-k or top-p."""
    blocks = cdiv(num_tokens, BLOCK)
    groups = blocks * (BLOCK // GROUP)

    def new(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def wide(dtype: torch.dtype) -> Tensor | None:
        return new(rows, num_tokens, dtype=dtype) if truncate else None

    return Room(
        index=new(rows, dtype=torch.int32),
        finite=new(rows, dtype=torch.int32),
        peaks=new(rows, blocks, dtype=torch.float64),
        flags=new(rows, blocks, dtype=torch.int32),
        bounds=new(2, rows, groups, dtype=torch.float32),
        sums=new(rows, blocks, dtype=torch.float64),
        scores=wide(torch.float64),
        sorted=wide(torch.float64),
        order=wide(torch.int64),
        mass=wide(torch.float64),
        keep=new(rows, dtype=torch.int32),
    )


def sample(
    logits: Tensor,
    num_tokens: int,
    settings: Settings,
    *,
    truncate: bool,
    seen: Tensor | None = None,
    allowed: Tensor | None = None,
    out: Room | None = None,
) -> Room:
    """Choose a token a row. logits: fp32 [rows, stride >= num_tokens], contiguous.

    truncate: whether any row has top_k or top_p < 1. seen: uint8 [rows, num_tokens] of the bits
    PENALISED_*, or None. allowed: int32 [ceil(num_tokens / 32)] bits of the tokens that may be
    chosen, at least one, or None.
    """
    rows, stride = logits.shape
    assert logits.is_contiguous()
    assert stride >= num_tokens
    r = out or new_room(rows, num_tokens, logits.device, truncate=truncate)
    blocks = cdiv(num_tokens, BLOCK)
    source = (
        logits,
        logits if seen is None else seen,
        logits if allowed is None else allowed,
        settings.ints,
        settings.floats,
    )
    sizes = (num_tokens, stride, blocks)
    flags = {"HAS_SEEN": seen is not None, "HAS_ALLOWED": allowed is not None, "BLOCK": BLOCK}
    all_blocks = power_of_two(blocks)
    peaks_kernel[(rows, blocks)](*source, r.peaks, r.flags, *sizes, **flags, num_warps=4, **EXACT)
    if truncate:
        assert r.scores is not None
        assert r.sorted is not None
        assert r.order is not None
        scores_kernel[(rows, blocks)](
            *source, r.peaks, r.scores, *sizes, **flags, BLOCKS=all_blocks, num_warps=4, **EXACT
        )
        torch.sort(r.scores, dim=-1, descending=True, stable=True, out=(r.sorted, r.order))
        _draw_sorted(r, settings, num_tokens, blocks, all_blocks)
        return r
    groups = r.bounds.shape[2]
    screen_kernel[(rows, blocks)](
        *source, r.peaks, r.bounds, *sizes, groups, **flags, BLOCKS=all_blocks, GROUP=GROUP,
        num_warps=4, **EXACT,
    )  # fmt: skip
    decide_kernel[(rows,)](
        *source, r.peaks, r.flags, r.bounds, r.index, r.finite, *sizes, groups, **flags,
        BLOCKS=all_blocks, GROUPS=power_of_two(groups), GROUP=GROUP, num_warps=4,
        **EXACT,
    )  # fmt: skip
    return r


def _draw_sorted(
    r: Room, settings: Settings, num_tokens: int, blocks: int, all_blocks: int
) -> None:
    """Cut the sorted scores and draw among those that are left."""
    rows = r.index.shape[0]
    sums_kernel[(rows, blocks)](
        r.sorted, settings.ints, r.sums, num_tokens, blocks, BLOCK=BLOCK, num_warps=4, **EXACT
    )
    cut_kernel[(rows,)](
        r.sorted, r.sums, settings.ints, settings.floats, r.mass, r.keep, num_tokens, blocks,
        BLOCKS=all_blocks, GROUP=GROUP, num_warps=2, **EXACT,  # with 4 Triton 3.6 spills on sm_87
    )  # fmt: skip
    draw_kernel[(rows, blocks)](
        r.sorted, r.order, settings.ints, settings.floats, r.keep, r.peaks, r.bounds, num_tokens,
        blocks, BLOCK=BLOCK, num_warps=4, **EXACT,
    )  # fmt: skip
    combine_kernel[(rows,)](
        r.peaks, r.bounds, r.flags, r.index, r.finite, blocks, BLOCKS=all_blocks, num_warps=1
    )
