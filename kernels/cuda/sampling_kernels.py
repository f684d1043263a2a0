"""The stages of `sampling.py`; arguments and layouts are explained there.

Invariant: a score is ((penalised logit) - peak) / temperature in fp64, one rounding a step, as in
`kernels/sampling.py`; at temperature 0 the penalised logit itself is compared.
"""

from __future__ import annotations

from edge_runtime.kernels.cuda import require_triton

require_triton()

import triton  # noqa: E402 (the line above says what to install)
import triton.language as tl  # noqa: E402

from edge_runtime.kernels.cuda.noise import (  # noqa: E402
    GUMBEL_ERROR,
    exp64,
    gumbel,
    rough_exp,
    rough_gumbel,
)
from edge_runtime.kernels.cuda.numeric import INFINITE, peak_bits  # noqa: E402

NOTHING = tl.constexpr(2**31 - 1)  # no token
TOTAL_ERROR = tl.constexpr(2.0**-34)  # relative, of a sum of up to 2^18 rough exponentials


@triton.jit
def _flag(condition):
    """A scalar comparison of floats, in a form that Triton's interpreter broadcasts rightly."""
    return condition.to(tl.int32) != 0


@triton.jit
def _penalised(
    logits_ptr, seen_ptr, allowed_ptr, floats_ptr, row, i, V, stride, HAS_SEEN, HAS_ALLOWED
):
    """Penalised logits of tokens i as fp64, and which of them may be chosen."""
    keep = i < V
    s = tl.load(logits_ptr + row * stride + i, mask=keep, other=0.0).to(tl.float64)
    if HAS_SEEN:
        repetition = tl.load(floats_ptr + row * 5 + 3)
        presence = tl.load(floats_ptr + row * 5 + 4)
        seen = tl.load(seen_ptr + row * V + i, mask=keep, other=0)
        s = tl.where((seen & 1) != 0, tl.where(s > 0, s / repetition, s * repetition), s)
        s = tl.where((seen & 2) != 0, s - presence, s)
    if HAS_ALLOWED:
        words = tl.load(allowed_ptr + (i >> 5), mask=keep, other=0)
        keep = keep & (((words >> (i & 31)) & 1) != 0)
    return s, keep


@triton.jit
def _row_peak(peaks_ptr, row, blocks, BLOCKS):
    """The row's largest penalised logit, fp64."""
    b = tl.arange(0, BLOCKS)
    peaks = tl.load(peaks_ptr + row * blocks + b, mask=b < blocks, other=float("-inf"))
    return tl.max(peaks, 0)


@triton.jit
def peaks_kernel(
    logits_ptr, seen_ptr, allowed_ptr, ints_ptr, floats_ptr, peaks_ptr, flags_ptr, V, stride,
    blocks, HAS_SEEN: tl.constexpr, HAS_ALLOWED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Largest penalised logit of BLOCK tokens, and whether all their logits are finite."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    s, keep = _penalised(
        logits_ptr, seen_ptr, allowed_ptr, floats_ptr, row, i, V, stride, HAS_SEEN, HAS_ALLOWED
    )
    x = tl.load(logits_ptr + row * stride + i, mask=i < V, other=0.0)
    finite = peak_bits(x) < INFINITE
    tl.store(peaks_ptr + row * blocks + block, tl.max(tl.where(keep, s, float("-inf")), 0))
    tl.store(flags_ptr + row * blocks + block, finite.to(tl.int32))


@triton.jit
def screen_kernel(
    logits_ptr, seen_ptr, allowed_ptr, ints_ptr, floats_ptr, peaks_ptr, bounds_ptr, V, stride,
    blocks, groups, HAS_SEEN: tl.constexpr, HAS_ALLOWED: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Per GROUP tokens, the largest upper and the largest lower bound of score + noise, fp32."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    s, keep = _penalised(
        logits_ptr, seen_ptr, allowed_ptr, floats_ptr, row, i, V, stride, HAS_SEEN, HAS_ALLOWED
    )
    temperature = tl.load(floats_ptr + row * 5)
    min_p = tl.load(floats_ptr + row * 5 + 2).to(tl.float32)
    below = (s - _row_peak(peaks_ptr, row, blocks, BLOCKS)).to(tl.float32)
    greedy = _flag(temperature == 0)
    tiny = _flag((temperature < 1e-30) & (temperature > 0))  # 1 / temperature does not fit fp32
    step = 1.0 / tl.where(greedy | tiny, 1.0, temperature)
    score = tl.maximum(below * step.to(tl.float32), -1e30)
    noise = rough_gumbel(
        tl.load(ints_ptr + row * 3), tl.load(ints_ptr + row * 3 + 1), i.to(tl.int32)
    )
    value = tl.where(greedy, score, score + noise)
    error = GUMBEL_ERROR - 1e-5 * score
    floor = tl.where(min_p > 0, tl.log(tl.maximum(min_p, 1e-37)), float("-inf"))
    floor = tl.where(greedy | tiny, float("-inf"), floor)
    upper = tl.where(keep & (score + error >= floor), value + error, float("-inf"))
    lower = tl.where(keep & (score - error >= floor), value - error, float("-inf"))
    upper = tl.where(tiny & keep, float("inf"), upper)
    lower = tl.where(tiny, float("-inf"), lower)
    at = row * groups + block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    tl.store(bounds_ptr + at, tl.max(tl.reshape(upper, (BLOCK // GROUP, GROUP)), 1))
    rows = tl.num_programs(0)
    at += rows.to(tl.int64) * groups
    tl.store(bounds_ptr + at, tl.max(tl.reshape(lower, (BLOCK // GROUP, GROUP)), 1))


@triton.jit
def decide_kernel(
    logits_ptr, seen_ptr, allowed_ptr, ints_ptr, floats_ptr, peaks_ptr, flags_ptr, bounds_ptr,
    index_ptr, finite_ptr, V, stride, blocks, groups, HAS_SEEN: tl.constexpr,
    HAS_ALLOWED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """One program a row: fp64 for the groups that may hold the winner."""
    row = tl.program_id(0).to(tl.int64)
    peak = _row_peak(peaks_ptr, row, blocks, BLOCKS)
    seed = tl.load(ints_ptr + row * 3)
    position = tl.load(ints_ptr + row * 3 + 1)
    temperature = tl.load(floats_ptr + row * 5)
    min_p = tl.load(floats_ptr + row * 5 + 2)
    greedy = _flag(temperature == 0)
    divisor = tl.where(greedy, 1.0, temperature)
    g = tl.arange(0, GROUPS)
    rows = tl.num_programs(0)
    upper = tl.load(bounds_ptr + row * groups + g, mask=g < groups, other=float("-inf"))
    lower = tl.load(bounds_ptr + (rows + row) * groups + g, mask=g < groups, other=float("-inf"))
    line = tl.max(lower, 0)
    hopeful = (g < groups) & (upper >= line) & (upper > float("-inf"))
    best = peak * 0.0 + float("-inf")
    index = NOTHING + 0 * tl.min(g, 0)
    group = tl.min(tl.where(hopeful, g, NOTHING), 0)
    while group < groups:
        i = group * GROUP + tl.arange(0, GROUP)
        s, keep = _penalised(
            logits_ptr, seen_ptr, allowed_ptr, floats_ptr, row, i, V, stride, HAS_SEEN, HAS_ALLOWED
        )
        score = (s - peak) / divisor
        keep = keep & (greedy | (exp64(score) >= min_p))
        value = tl.where(greedy, s, score + gumbel(seed, position, i))
        value = tl.where(keep, value, float("-inf"))
        most = tl.max(value, 0)
        first = tl.min(tl.where(keep & (value == most), i, NOTHING), 0)
        index = tl.where(most > best, first, index)
        best = tl.where(most > best, most, best)
        group = tl.min(tl.where(hopeful & (g > group), g, NOTHING), 0)
    tl.store(index_ptr + row, tl.where(index == NOTHING, 0, index))
    b = tl.arange(0, BLOCKS)
    flags = tl.load(flags_ptr + row * blocks + b, mask=b < blocks, other=1)
    tl.store(finite_ptr + row, tl.min(flags, 0))


@triton.jit
def scores_kernel(
    logits_ptr, seen_ptr, allowed_ptr, ints_ptr, floats_ptr, peaks_ptr, scores_ptr, V, stride,
    blocks, HAS_SEEN: tl.constexpr, HAS_ALLOWED: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Scores fp64, -inf for tokens that may not be chosen."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    s, keep = _penalised(
        logits_ptr, seen_ptr, allowed_ptr, floats_ptr, row, i, V, stride, HAS_SEEN, HAS_ALLOWED
    )
    temperature = tl.load(floats_ptr + row * 5)
    divisor = tl.where(temperature == 0, 1.0, temperature)
    score = (s - _row_peak(peaks_ptr, row, blocks, BLOCKS)) / divisor + 0.0
    tl.store(scores_ptr + row * V + i, tl.where(keep, score, float("-inf")), mask=i < V)


@triton.jit
def sums_kernel(sorted_ptr, ints_ptr, sums_ptr, V, blocks, BLOCK: tl.constexpr):
    """Sum of rough exponentials of BLOCK of the top-k scores."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    top_k = tl.load(ints_ptr + row * 3 + 2)
    count = tl.where((top_k > 0) & (top_k < V), top_k, V)
    i = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(sorted_ptr + row * V + i, mask=i < count, other=float("-inf"))
    tl.store(sums_ptr + row * blocks + block, tl.sum(rough_exp(x), 0))


@triton.jit
def _add_up(sorted_ptr, mass_ptr, row, V, count, start, mass, until, GROUP):
    """Running sum of exp64 of sorted scores from `start` on, in order and written to mass, until it
    is above `until`. Returns where it stopped and the sum."""
    while (start < count) & (mass <= until):
        i = start + tl.arange(0, GROUP)
        x = tl.load(sorted_ptr + row * V + i, mask=i < count, other=float("-inf"))
        tl.debug_barrier()
        tl.store(mass_ptr + row * V + i, exp64(x), mask=i < count)
        tl.debug_barrier()
        stop = tl.minimum(start + GROUP, count)
        for j in range(start, stop):
            mass = mass + tl.load(mass_ptr + row * V + j)
            tl.store(mass_ptr + row * V + j, mass)
        tl.debug_barrier()
        start = stop
    return start, mass


@triton.jit
def _count_below(mass_ptr, row, V, stop, line, GROUP):
    """How many of the first `stop` running sums lie below `line`."""
    total = tl.zeros((GROUP,), tl.int32)
    for first in range(0, stop, GROUP):
        i = first + tl.arange(0, GROUP)
        mass = tl.load(mass_ptr + row * V + i, mask=i < stop, other=float("inf"))
        total += (mass < line).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def cut_kernel(
    sorted_ptr, sums_ptr, ints_ptr, floats_ptr, mass_ptr, keep_ptr, V, blocks,
    BLOCKS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program a row: how many sorted tokens top-k and top-p leave."""
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(ints_ptr + row * 3 + 2)
    count = tl.where((top_k > 0) & (top_k < V), top_k, V).to(tl.int32)
    top_p = tl.load(floats_ptr + row * 5 + 1)
    greedy = _flag(tl.load(floats_ptr + row * 5) == 0)
    keep = tl.where(greedy, 1, count)
    if (top_p < 1) & (greedy == 0):
        b = tl.arange(0, BLOCKS)
        total = tl.sum(tl.load(sums_ptr + row * blocks + b, mask=b < blocks, other=0.0), 0)
        low = top_p * total * (1.0 - TOTAL_ERROR)
        high = top_p * total * (1.0 + TOTAL_ERROR)
        start, mass = _add_up(
            sorted_ptr, mass_ptr, row, V, count, 0 * count, total * 0.0, high, GROUP
        )
        left = _count_below(mass_ptr, row, V, start, low, GROUP)
        right = _count_below(mass_ptr, row, V, start, high, GROUP)
        if left != right:
            start, mass = _add_up(
                sorted_ptr, mass_ptr, row, V, count, start, mass, float("inf"), GROUP
            )
            left = _count_below(mass_ptr, row, V, start, top_p * mass, GROUP)
        keep = tl.minimum(left + 1, count)
    tl.store(keep_ptr + row, keep)


@triton.jit
def draw_kernel(
    sorted_ptr, order_ptr, ints_ptr, floats_ptr, keep_ptr, values_ptr, ids_ptr, V, blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Best score + noise of BLOCK of the tokens that are left, and its lowest id."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    keep = tl.load(keep_ptr + row)
    ids_ptr = ids_ptr.to(tl.pointer_type(tl.int32))
    if block * BLOCK < keep:
        i = block * BLOCK + tl.arange(0, BLOCK)
        score = tl.load(sorted_ptr + row * V + i, mask=i < keep, other=float("-inf"))
        token = tl.load(order_ptr + row * V + i, mask=i < keep, other=0).to(tl.int32)
        greedy = _flag(tl.load(floats_ptr + row * 5) == 0)
        likely = (i < keep) & (greedy | (exp64(score) >= tl.load(floats_ptr + row * 5 + 2)))
        noise = gumbel(tl.load(ints_ptr + row * 3), tl.load(ints_ptr + row * 3 + 1), token)
        value = tl.where(likely, score + noise, float("-inf"))
        best = tl.max(value, 0)
        tl.store(values_ptr + row * blocks + block, best)
        first = tl.min(tl.where(likely & (value == best), token, NOTHING), 0)
        tl.store(ids_ptr + row * blocks + block, first)
    else:
        tl.store(values_ptr + row * blocks + block, float("-inf"))
        tl.store(ids_ptr + row * blocks + block, NOTHING)


@triton.jit
def combine_kernel(
    values_ptr, ids_ptr, flags_ptr, index_ptr, finite_ptr, blocks, BLOCKS: tl.constexpr
):
    """One program a row combines its blocks."""
    row = tl.program_id(0).to(tl.int64)
    ids_ptr = ids_ptr.to(tl.pointer_type(tl.int32))
    b = tl.arange(0, BLOCKS)
    value = tl.load(values_ptr + row * blocks + b, mask=b < blocks, other=float("-inf"))
    token = tl.load(ids_ptr + row * blocks + b, mask=b < blocks, other=NOTHING)
    flags = tl.load(flags_ptr + row * blocks + b, mask=b < blocks, other=1)
    first = tl.min(tl.where(value == tl.max(value, 0), token, NOTHING), 0)
    tl.store(index_ptr + row, tl.where(first == NOTHING, 0, first))
    tl.store(finite_ptr + row, tl.min(flags, 0))
