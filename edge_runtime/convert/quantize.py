"""Weights to nested codes: scales, a W4 base, and a refinement that makes it the W8 target.

Invariant: scales are fixed before anything is solved, and every later step sees only their stored
form: the refinement scale of group g in row n is m[n, g] · S[n], exactly, with m int16 (signed)
and S fp32; the base scale is 16 times that. The base is never changed by the refinement.

How: s4 = -w/8 for the weight w of largest magnitude in the group, so that w maps to the code -8.
Both passes are GPTQ. With the input Hessian H = M·Mᵀ, M upper triangular, the error of a row is
tr(E·H·Eᵀ) = ‖E·M‖²; column j of E·M involves the errors of columns up to j only, so the best
target for column j given the codes before it is

    t[j] = w[j] + Σ_{i<j} E[i] · M[i, j] / M[j, j],      E[i] = w[i] - code[i] · scale[i].

That is GPTQ's compensation without an inverse Hessian. Sweeps of coordinate descent may follow:
each code in turn is set to the best one while all others stay. The base keeps t within `bound` base
steps of the original weight (bounded GPTQ): a free base strays so far that the refinement cannot
reach back. The refinement is the same pass over w - q4·s4 with scale s4/16 and the box of legal
nibbles. Sources: bitnest paper A.1 (equations 5 to 10; "closed" is equation 9), GPTQ (Frantar et
al. 2022); the bound, the box and the figures behind both are in tools/LOG.md.

It does not search for clipping scales (harmful to the target) and does not reorder columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from edge_runtime.errors import CheckpointError

GROUP_SIZES = (128, 64, 32)
MULT_MAX = 32767
# Sweeps of coordinate descent after the greedy pass. The refinement gains a point of target
# agreement by them; on the base they win two for the draft and cost the target one (tools/LOG.md).
BASE_SWEEPS, REFINE_SWEEPS = 0, 3
_BLOCK = 32  # columns solved one by one between two matrix products
_CHUNK_VALUES = 1 << 20  # weights of one row chunk: bounds the scratch memory of a thread
_CHUNK_ROWS = 256  # at least: a chunk reads the whole factor
_DAMPING = (0.01, 0.1, 1.0)  # of the mean diagonal, tried in this order


class Scales(NamedTuple):
    """Refinement scales m · S, mult int16 [N, Kp/G], row_scale fp32 [N]; 16 · m · S of the base."""

    mult: torch.Tensor
    row_scale: torch.Tensor


class Refinement(NamedTuple):
    """Refinement codes int8 [N, Kp] and the share of weights whose free rounding was clipped."""

    codes: torch.Tensor
    clipped: float


class PlainCodes(NamedTuple):
    """Plain W8: codes int8 [N, Kp] in [-127, 127] and their scales, as in `Scales`."""

    codes: torch.Tensor
    mult: torch.Tensor
    row_scale: torch.Tensor


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class HessianFactor:
    """What the solver needs of one input's Hessian; shared by all matrices that read this input.

    coupling[j, i] = M[i, j] / M[j, j] for i < j, else 0, and pull[j, i] = H[j, i] / H[j, j], both
    fp32 [K, K]. `damping` is the share of the mean diagonal that was added, `dead` the number of
    inputs that were always zero.
    """

    coupling: torch.Tensor
    pull: torch.Tensor
    damping: float
    dead: int


def group_size_for(sizes: Iterable[int]) -> int:
    """Return the largest of 128, 64, 32 that divides every size; 32 (and zero padding) if none."""
    known = tuple(sizes)
    return next((G for G in GROUP_SIZES if all(K % G == 0 for K in known)), GROUP_SIZES[-1])


def factor_hessian(H: torch.Tensor, *, name: str = "") -> HessianFactor:
    """Factor the Hessian H = XᵀX [K, K] (any positive multiple), fp64 inside.

    A dead input (zero diagonal) is cut loose from the others: its weights are rounded to nearest.
    When the Cholesky factorisation fails the damping is raised tenfold, up to the mean diagonal.
    Raises CheckpointError when H is not finite or not a Hessian at all.
    """
    A = H.double().flip(0, 1)  # Cholesky of the flipped matrix gives the upper factor M
    if not bool(torch.isfinite(A.sum())):
        raise CheckpointError(f"calibration of {name or 'a matrix'}: NaN or infinity in its inputs")
    diagonal = A.diagonal().clone()
    dead = diagonal <= 0
    A[dead] = 0.0
    A[:, dead] = 0.0
    mean = float(diagonal[~dead].mean()) if not bool(dead.all()) else 1.0
    diagonal[dead] = mean
    for damping in _DAMPING:
        A.diagonal().copy_(diagonal + damping * mean)
        L, info = torch.linalg.cholesky_ex(A)
        if int(info) == 0:
            break
    else:
        raise CheckpointError(f"calibration of {name or 'a matrix'}: its Hessian is not positive")
    pull = (A / A.diagonal()[:, None]).float().flip(0, 1).contiguous()
    del A
    L /= L.diagonal().clone()  # columns by their diagonal: L[i, j] / L[j, j]
    coupling = L.float().T.flip(0, 1).tril(-1).contiguous()
    return HessianFactor(coupling=coupling, pull=pull, damping=damping, dead=int(dead.sum()))


def fit_scales(W: torch.Tensor, G: int, *, name: str = "") -> Scales:
    """Return the scales of W [N, K]: s4 = -w/8, w the weight of largest magnitude in its group.

    A tie of +w and -w takes +w. An all-zero group has m = 0, an all-zero row S = 0. Raises
    CheckpointError when W is not finite.
    """
    low, high = _group_range(W, G, name)
    return _encode_scales(torch.where(high >= -low, high, low).double() / (-8 * 16))


def solve_base(
    W: torch.Tensor,
    factor: HessianFactor | None,
    mult: torch.Tensor,
    row_scale: torch.Tensor,
    G: int,
    *,
    bound: float | None = 0.25,
    method: Literal["gptq", "rtn"] = "gptq",
    sweeps: int = BASE_SWEEPS,
    name: str = "",
) -> torch.Tensor:
    """Return the base codes q4 int8 [N, Kp] in [-8, 7] of W [N, K].

    "gptq" keeps the value that is rounded within `bound` base steps of the original weight (None:
    no limit); "rtn" rounds to nearest and needs no factor. Groups with m = 0 and padding get 0.
    """
    _check_finite(W, name)
    q4 = torch.zeros(W.shape[0], mult.shape[1] * G, dtype=torch.int8)

    def solve(rows: slice) -> int:
        scale = 16 * _scales(mult[rows], row_scale[rows])
        T = _steps(W[rows], scale, G)
        if method == "rtn" or bound == 0:
            q4[rows, : W.shape[1]] = T.round_().clamp_(-8, 7)
            return 0
        assert factor is not None, "gptq needs a Hessian"
        low: torch.Tensor | float = -8.0
        high: torch.Tensor | float = 7.0
        if bound is not None:  # rounding is monotone: bound the code instead of the value
            low = (T - bound).round_().clamp_(-8, 7).float().T.contiguous()
            high = (T + bound).round_().clamp_(-8, 7).float().T.contiguous()
        q4[rows, : W.shape[1]], moved = _solve(W[rows].float(), scale, low, high, factor, G, sweeps)
        return moved

    _each_chunk(W, solve)
    return q4


def solve_refine(
    W: torch.Tensor,
    factor: HessianFactor | None,
    q4: torch.Tensor,
    mult: torch.Tensor,
    row_scale: torch.Tensor,
    G: int,
    *,
    method: Literal["gptq", "closed"] = "gptq",
    sweeps: int = REFINE_SWEEPS,
    name: str = "",
) -> Refinement:
    """Return the refinement qr int8 [N, Kp] of W [N, K] over the fixed base q4.

    qr is in [-8, 7], and in [0, 7] where q4 = -8, so that 16·q4 + qr is a legal int8. "gptq"
    solves for qr within that box; "closed" rounds and clips each weight alone (equation 9).
    """
    _check_finite(W, name)
    N, K = W.shape
    qr = torch.zeros(q4.shape, dtype=torch.int8)

    def solve(rows: slice) -> int:
        scale = _scales(mult[rows], row_scale[rows])
        base = q4[rows, :K]
        residual = W[rows].double() - base.double().mul_(16).mul_(_spread(scale, G, K))
        low = torch.where(base == -8, 0.0, -8.0)
        if method == "closed":
            free = _steps(residual, scale, G).round_()
            codes = free.clamp(max=7.0).maximum(low)
            qr[rows, :K] = codes
            return int((free != codes).sum())
        assert factor is not None, "gptq needs a Hessian"
        low = low.T.contiguous()
        qr[rows, :K], moved = _solve(residual.float(), scale, low, 7.0, factor, G, sweeps)
        return moved

    return Refinement(qr, _each_chunk(W, solve) / max(1, N * K))


def rtn8(W: torch.Tensor, G: int, *, name: str = "") -> PlainCodes:
    """Return plain W8, round to nearest with s = max|w|/127 per group: the target's yardstick."""
    low, high = _group_range(W, G, name)
    mult, row_scale = _encode_scales(torch.maximum(high, -low).double() / 127)
    codes = torch.zeros(W.shape[0], mult.shape[1] * G, dtype=torch.int8)

    def solve(rows: slice) -> int:
        T = _steps(W[rows], _scales(mult[rows], row_scale[rows]), G)
        codes[rows, : W.shape[1]] = T.round_().clamp_(-127, 127)
        return 0

    _each_chunk(W, solve)
    return PlainCodes(codes, mult, row_scale)


def dequantize(
    code: torch.Tensor,
    mult: torch.Tensor,
    row_scale: torch.Tensor,
    G: int,
    K: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return code · m · S [N, K] (padding dropped), fp64 inside, cast to `dtype` once.

    The draft is the code 16·q4 and the target 16·q4 + qr, int8 or int16.
    """
    out = torch.empty(code.shape[0], K, dtype=dtype)

    def fill(rows: slice) -> int:
        scale = _spread(_scales(mult[rows], row_scale[rows]), G, K)
        out[rows] = code[rows, :K].double().mul_(scale)
        return 0

    _each_chunk(out, fill)
    return out


def relative_error(W: torch.Tensor, W_hat: torch.Tensor, H: torch.Tensor) -> float:
    """Return tr(E·H·Eᵀ) / tr(W·H·Wᵀ) with E = W - W_hat; 0 when both are 0."""
    H = H.float()
    error = norm = 0.0
    for i in range(0, W.shape[0], 4096):
        R = W[i : i + 4096].float()
        E = R - W_hat[i : i + 4096].float()
        error += float((E @ H).double().mul_(E).sum())
        norm += float((R @ H).double().mul_(R).sum())
    if norm > 0:
        return max(0.0, error) / norm
    return 0.0 if error <= 0 else float("inf")


def _solve(
    W: torch.Tensor,
    scale: torch.Tensor,
    low: torch.Tensor | float,
    high: torch.Tensor | float,
    factor: HessianFactor,
    G: int,
    sweeps: int,
) -> tuple[torch.Tensor, int]:
    """Round W [n, K] fp32 column by column within [low, high]; the recurrence of the module head.

    scale fp64 [n, Kp/G]; low and high are numbers or [K, n]. Returns the codes int8 [n, K] and
    how many of them the limits moved. Works on [K, n], so that a column is contiguous.
    """
    n, K = W.shape
    assert factor.coupling.shape == (K, K), f"a Hessian of {factor.coupling.shape[0]} for {K}"
    WT = W.T.contiguous()
    step = scale.T.float().contiguous()
    inverse = _reciprocal(scale).T.float().contiguous()
    E = torch.empty(K, n)
    codes = torch.empty(K, n, dtype=torch.int8)
    free, kept = torch.empty(_BLOCK, n), torch.empty(_BLOCK, n)
    moved = 0
    for a in range(0, K, _BLOCK):
        z = min(a + _BLOCK, K)
        T = torch.addmm(WT[a:z], factor.coupling[a:z, :a], E[:a])
        for j in range(a, z):
            t, q = free[j - a], kept[j - a]
            torch.addmv(T[j - a], E[a:j].T, factor.coupling[j, a:j], out=t)
            t.mul_(inverse[j // G]).round_()
            lo = low if isinstance(low, float) else low[j]
            hi = high if isinstance(high, float) else high[j]
            _clamp(t, lo, hi, q)
            torch.addcmul(WT[j], q, step[j // G], value=-1, out=E[j])
        codes[a:z] = kept[: z - a]
        moved += int((free[: z - a] != kept[: z - a]).sum())
    for _ in range(sweeps):
        moved = _descend(WT, E, codes, step, inverse, low, high, factor.pull, G)
    return codes.T, moved


def _descend(
    WT: torch.Tensor,
    E: torch.Tensor,
    codes: torch.Tensor,
    step: torch.Tensor,
    inverse: torch.Tensor,
    low: torch.Tensor | float,
    high: torch.Tensor | float,
    pull: torch.Tensor,
    G: int,
) -> int:
    """One sweep of coordinate descent: each code in turn becomes the best one, the others fixed.

    With r = Σ_i pull[j, i] · E[i] the best value of column j is w[j] - E[j] + r. Changes E, codes
    [K, n] in place (the error never grows) and returns how many codes the limits moved.
    """
    K, n = WT.shape
    D, kept = torch.empty(_BLOCK, n), torch.empty(n)
    moved = 0
    for a in range(0, K, _BLOCK):
        z = min(a + _BLOCK, K)
        R = pull[a:z] @ E
        for j in range(a, z):
            t = torch.addmv(R[j - a], D[: j - a].T, pull[j, a:j])
            t.add_(WT[j]).sub_(E[j]).mul_(inverse[j // G]).round_()
            lo = low if isinstance(low, float) else low[j]
            hi = high if isinstance(high, float) else high[j]
            _clamp(t, lo, hi, kept)
            moved += int((t != kept).sum())
            codes[j] = kept
            after = torch.addcmul(WT[j], kept, step[j // G], value=-1)
            torch.sub(after, E[j], out=D[j - a])
            E[j] = after
    return moved


def _clamp(
    t: torch.Tensor, low: torch.Tensor | float, high: torch.Tensor | float, out: torch.Tensor
) -> None:
    """out = min(max(t, low), high), each limit a number or a tensor."""
    if isinstance(low, torch.Tensor):
        torch.maximum(t, low, out=out)
    else:
        torch.clamp(t, min=low, out=out)
    if isinstance(high, torch.Tensor):
        torch.minimum(out, high, out=out)
    else:
        out.clamp_(max=high)


def _encode_scales(scale: torch.Tensor) -> Scales:
    """Write scales fp64 [N, Kp/G] as int16 multiples of one fp32 per row, the largest ±32767.

    A row whose S would not be a normal fp32 counts as all zero.
    """
    row_scale = (scale.abs().amax(1) / MULT_MAX).float()
    row_scale = torch.where(row_scale < torch.finfo(torch.float32).tiny, 0.0, row_scale)
    mult = (scale * _reciprocal(row_scale.double())[:, None]).round_()
    return Scales(mult.clamp_(-MULT_MAX, MULT_MAX).to(torch.int16), row_scale)


def _group_range(W: torch.Tensor, G: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and largest weight of each group, [N, Kp/G]; padding counts as 0."""
    _check_finite(W, name)
    N, K = W.shape
    low, high = torch.zeros(2, N, -(-K // G))

    def fill(rows: slice) -> int:
        padded = torch.nn.functional.pad(W[rows].float(), (0, -K % G))
        grouped = padded.view(padded.shape[0], -1, G)
        low[rows], high[rows] = grouped.amin(2), grouped.amax(2)
        return 0

    _each_chunk(W, fill)
    return low, high


def _scales(mult: torch.Tensor, row_scale: torch.Tensor) -> torch.Tensor:
    """m · S as fp64 [n, Kp/G]: 15 by 24 bits, exact."""
    return mult.double() * row_scale.double()[:, None]


def _spread(scale: torch.Tensor, G: int, K: int) -> torch.Tensor:
    """Repeat [n, Kp/G] to one value per weight [n, K]."""
    return scale.repeat_interleave(G, 1)[:, :K]


def _steps(W: torch.Tensor, scale: torch.Tensor, G: int) -> torch.Tensor:
    """W / scale as fp64 [n, K], 0 where the scale is 0."""
    divisor = _spread(torch.where(scale == 0, torch.inf, scale), G, W.shape[1])
    return W.double() / divisor


def _reciprocal(x: torch.Tensor) -> torch.Tensor:
    """1/x, 0 where x is 0."""
    return torch.where(x == 0, 0.0, 1.0 / x)


def _each_chunk(W: torch.Tensor, work: Callable[[slice], int]) -> int:
    """Run `work` on row chunks of W side by side and return the sum of its results.

    One thread per chunk instead of torch's own: its barrier in each of the many small steps costs
    20 times the step on a busy machine. Chunks do not depend on the number of threads, so neither
    do the results.
    """
    size = max(_CHUNK_ROWS, _CHUNK_VALUES // max(1, W.shape[1]))
    chunks = [slice(i, min(i + size, W.shape[0])) for i in range(0, W.shape[0], size)]
    inference = torch.is_inference_mode_enabled()  # belongs to a thread: pass it on

    def run(rows: slice) -> int:
        with torch.inference_mode(inference):
            return work(rows)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(run, chunks))
    finally:
        torch.set_num_threads(threads)


def _check_finite(W: torch.Tensor, name: str) -> None:
    """Raise CheckpointError if W [N, K] holds NaN or infinity."""
    if W.numel() and not all(bool(torch.isfinite(x)) for x in torch.aminmax(W)):
        row, column = torch.nonzero(~torch.isfinite(W))[0].tolist()
        raise CheckpointError(
            f"{name or 'a matrix'}: weight [{row}, {column}] is {W[row, column].item()}"
        )
