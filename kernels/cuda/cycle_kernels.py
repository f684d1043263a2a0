"""Bookkeeping of a draft-verify cycle on the device, as Triton kernels of one program each.

Invariant: all that a cycle needs to know (tokens, their number, what was drafted) lies on the
device and is read there, so that one captured graph serves every cycle of its kind.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edge_runtime.kernels.cuda.overlap_kernels import start_next_launch, wait_for_launch
from edge_runtime.kernels.cuda.sizes import REPORT_HEADER

LENGTH, COUNT = tl.constexpr(0), tl.constexpr(1)  # of the state: tokens known, cycles done
HEADER = tl.constexpr(REPORT_HEADER)
NEVER = tl.constexpr(2**31 - 1)  # first full token of a row that reads base planes alone


@triton.jit
def _full_from(position, recent, BLOCK: tl.constexpr):
    """`layout.full_from`; recent: -1 kv8, 0 kv4."""
    first = tl.maximum(0, position + 1 - tl.maximum(recent, 0)) // BLOCK * BLOCK
    first = tl.where(recent < 0, 0, first)
    return tl.where(recent == 0, NEVER, first)


@triton.jit(do_not_specialize=["step", "recent"])
def draft_row(
    state_ptr,  # int32 [2]
    token_ptr,  # int32 [capacity]
    choice_ptr,  # int32 [1], what the step before chose
    drafted_ptr,  # int32 [WIDTH]
    id_ptr,  # int32 [1], out
    position_ptr,  # int32 [1], out
    full_from_ptr,  # int32 [1], out
    sampled_ptr,  # int64 [1, 3], `sampling.Settings.ints`; its position, out
    step,
    recent,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLED: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """The row of a draft step, the first or a later one; what the step before chose is noted."""
    start_next_launch(PDL)
    wait_for_launch(PDL)
    position = tl.load(state_ptr + LENGTH) - 1 + step
    if FIRST:
        token = tl.load(token_ptr + position)
    else:
        token = tl.load(choice_ptr)
        tl.store(drafted_ptr + step - 1, token)
    tl.store(id_ptr, token)
    tl.store(position_ptr, position)
    tl.store(full_from_ptr, _full_from(position, recent, BLOCK))
    if SAMPLED:
        tl.store(sampled_ptr + 1, (position + 1).to(tl.int64))


@triton.jit(do_not_specialize=["base", "rows"])
def verify_rows(
    state_ptr,  # int32 [2]
    token_ptr,  # int32 [capacity]
    drafted_ptr,  # int32 [WIDTH], `base` of them
    looked_ptr,  # int32 [WIDTH or less], ids that a look-up found after those
    id_ptr,  # int32 [rows], out
    position_ptr,  # int32 [rows], out
    full_from_ptr,  # int32 [rows], out
    sampled_ptr,  # int64 [rows, 3]
    base,
    rows,
    SAMPLED: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """The last token, then the draft: so many rows."""
    start_next_launch(PDL)
    wait_for_launch(PDL)
    r = tl.arange(0, WIDTH)
    last = tl.load(state_ptr + LENGTH) - 1
    token = tl.load(token_ptr + last + 0 * r)
    drafted = tl.load(drafted_ptr + r - 1, mask=(r > 0) & (r <= base), other=0)
    looked = tl.load(looked_ptr + r - 1 - base, mask=(r > base) & (r < rows), other=0)
    token = tl.where(r == 0, token, tl.where(r <= base, drafted, looked))
    tl.store(id_ptr + r, token, mask=r < rows)
    tl.store(position_ptr + r, last + r, mask=r < rows)
    tl.store(full_from_ptr + r, 0 * r, mask=r < rows)
    if SAMPLED:
        tl.store(sampled_ptr + r * 3 + 1, (last + 1 + r).to(tl.int64), mask=r < rows)


@triton.jit(do_not_specialize=["base", "rows"])
def accept(
    state_ptr,  # int32 [2]
    token_ptr,  # int32 [capacity + WIDTH]
    id_ptr,  # int32 [rows], what was verified
    choice_ptr,  # int32 [rows], what the target chose after each
    finite_ptr,  # int32 [rows]
    looked_ptr,  # int32 [1], how many tokens a look-up found
    forced_ptr,  # int32: how many follow, then tokens accepted in turns, whatever was chosen
    report_ptr,  # int32 [2, HEADER + WIDTH]
    base,
    rows,
    LOOKED: tl.constexpr,
    FORCED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Take the draft while the target agrees with it, and the target's token after that."""
    r = tl.arange(0, WIDTH)
    length = tl.load(state_ptr + LENGTH)
    cycle = tl.load(state_ptr + COUNT)
    drafted = cycle * 0 + base
    if LOOKED:
        drafted += tl.load(looked_ptr)
    chosen = tl.load(choice_ptr + r, mask=r < rows, other=0)
    finite = tl.load(finite_ptr + r, mask=r < rows, other=1)
    guess = tl.load(id_ptr + r + 1, mask=r < rows - 1, other=-1)
    differs = (guess != chosen) | (r >= drafted)
    taken = tl.min(tl.where(differs, r, WIDTH), 0)
    if FORCED:
        taken = tl.minimum(tl.load(forced_ptr + 1 + cycle % tl.load(forced_ptr)), drafted)
        chosen = tl.where(r < taken, guess, chosen)
    tl.store(token_ptr + length + r, chosen, mask=r <= taken)
    report_ptr += cycle % 2 * (HEADER + WIDTH)
    tl.store(report_ptr, taken + 1)
    tl.store(report_ptr + 1, drafted)
    tl.store(report_ptr + 2, tl.min(tl.where(r <= taken, finite, 1), 0))
    tl.store(report_ptr + HEADER + r, chosen)
    tl.store(state_ptr + LENGTH, length + taken + 1)
    tl.store(state_ptr + COUNT, cycle + 1)
