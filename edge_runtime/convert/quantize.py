"""Weights to nested codes: scales, a W4 base, and a refinement that makes it the W8 target.

Invariant: scales are fixed before anything is solved, and every later step sees only their stored
form: the refinement scale of group g in row n is m[n, g] · S[n], exactly, with m int16 (signed)
and S fp32; the base scale is 16 times that. The base is never changed by the refinement.

How: s4 = -w/8 for the weight w of largest magnitude in the group, so that w maps to the code -8.
Both passes solve with `gptq.py`. The base is chosen with the refinement in sight: a free base
strays so far that the refinement cannot reach back; `bound` says how much of that a better draft
is worth. The refinement is a pass over w - q4·s4 with scale s4/16 and the box of legal nibbles.
Sources: bitnest paper A.1 (equations 5 to 10; "closed" is equation 9), GPTQ (Frantar et al. 2022);
the figures behind the bound and the box are in tools/LOG.md.

It does not search for clipping scales (harmful to the target) and does not reorder columns.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import torch

from edge_runtime.convert.gptq import HessianFactor, reciprocal, solve_columns, solve_nested
from edge_runtime.errors import CheckpointError

MULT_MAX = 32767
BASE_SWEEPS, REFINE_SWEEPS = 2, 3  # of coordinate descent after the greedy pass (tools/LOG.md)
_CHUNK_VALUES = 1 << 20  # weights of one row chunk: bounds the scratch memory of a thread
_CHUNK_ROWS = 256  # at least: a chunk reads the whole factor
DEVICE_VALUES = 3 << 25  # of a chunk on a device, where chunks follow each other


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
    target: HessianFactor | None = None,
    name: str = "",
) -> torch.Tensor:
    """Return the base codes q4 int8 [N, Kp] in [-8, 7] of W [N, K].

    "gptq" lets the target miss about `bound` base steps for the draft's sake (None: any number;
    the base is solved alone, once); "rtn" rounds to nearest and needs no factor. `target` is the
    factor that the refinement will be solved with, if it is another. Groups with m = 0 and padding
    get 0.
    """
    _check_finite(W, name)
    q4 = torch.zeros(W.shape[0], mult.shape[1] * G, dtype=torch.int8, device=W.device)

    def solve(rows: slice) -> int:
        scale = 16 * _scales(mult[rows], row_scale[rows])
        if method == "rtn" or bound == 0:
            q4[rows, : W.shape[1]] = _steps(W[rows], scale, G).round_().clamp_(-8, 7)
            return 0
        assert factor is not None, "gptq needs a Hessian"
        part = W[rows].float()
        if bound is not None:
            q4[rows, : W.shape[1]] = solve_nested(
                part, scale, factor, target or factor, G, bound, sweeps
            )
            return 0
        low, high = (
            torch.full((), limit, dtype=torch.int8, device=W.device).expand_as(part)
            for limit in (-8, 7)
        )
        q4[rows, : W.shape[1]], moved = solve_columns(part, scale, low, high, factor, G, 0)
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
    qr = torch.zeros_like(q4)

    def solve(rows: slice) -> int:
        scale = _scales(mult[rows], row_scale[rows])
        base = q4[rows, :K]
        residual = W[rows].double() - base.double().mul_(16).mul_(_spread(scale, G, K))
        low = torch.where(base == -8, 0, -8).to(torch.int8)
        if method == "closed":
            free = _steps(residual, scale, G).round_()
            codes = free.clamp(max=7.0).maximum(low.double())
            qr[rows, :K] = codes
            return int((free != codes).sum())
        assert factor is not None, "gptq needs a Hessian"
        high = torch.full((), 7, dtype=torch.int8, device=W.device).expand_as(low)
        qr[rows, :K], moved = solve_columns(residual.float(), scale, low, high, factor, G, sweeps)
        return moved

    return Refinement(qr, _each_chunk(W, solve) / max(1, N * K))


def rtn8(W: torch.Tensor, G: int, *, name: str = "") -> PlainCodes:
    """Return plain W8, round to nearest with s = max|w|/127 per group: the target's yardstick."""
    low, high = _group_range(W, G, name)
    mult, row_scale = _encode_scales(torch.maximum(high, -low).double() / 127)
    codes = torch.zeros(W.shape[0], mult.shape[1] * G, dtype=torch.int8, device=W.device)

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
    out = torch.empty(code.shape[0], K, dtype=dtype, device=code.device)

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


def _encode_scales(scale: torch.Tensor) -> Scales:
    """Write scales fp64 [N, Kp/G] as int16 multiples of one fp32 per row, the largest ±32767.

    A row whose S would not be a normal fp32 counts as all zero.
    """
    row_scale = (scale.abs().amax(1) / MULT_MAX).float()
    row_scale = torch.where(row_scale < torch.finfo(torch.float32).tiny, 0.0, row_scale)
    mult = (scale * reciprocal(row_scale.double())[:, None]).round_()
    return Scales(mult.clamp_(-MULT_MAX, MULT_MAX).to(torch.int16), row_scale)


def _group_range(W: torch.Tensor, G: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and largest weight of each group, [N, Kp/G]; padding counts as 0."""
    _check_finite(W, name)
    N, K = W.shape
    low, high = torch.zeros(2, N, -(-K // G), device=W.device)

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


def _each_chunk(W: torch.Tensor, work: Callable[[slice], int]) -> int:
    """Run `work` on row chunks of W side by side and return the sum of its results.

    One thread per chunk instead of torch's own: its barrier in each of the many small steps costs
    20 times the step on a busy machine. Chunks do not depend on the number of threads, so neither
    do the results. On another device chunks are large and follow each other.
    """
    if W.device.type != "cpu":
        return sum(work(rows) for rows in _row_chunks(W, DEVICE_VALUES))
    chunks = _row_chunks(W, _CHUNK_VALUES)
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


def _row_chunks(W: torch.Tensor, num_values: int) -> list[slice]:
    """Cut the rows of W [N, K] into chunks of about so many values."""
    size = max(_CHUNK_ROWS, num_values // max(1, W.shape[1]))
    return [slice(i, min(i + size, W.shape[0])) for i in range(0, W.shape[0], size)]


def _check_finite(W: torch.Tensor, name: str) -> None:
    """Raise CheckpointError if W [N, K] holds NaN or infinity."""
    if W.numel() and not all(bool(torch.isfinite(x)) for x in torch.aminmax(W)):
        row, column = torch.nonzero(~torch.isfinite(W))[0].tolist()
        raise CheckpointError(
            f"{name or 'a matrix'}: weight [{row}, {column}] is {W[row, column].item()}"
        )
