"""The solver under the quantiser: GPTQ by columns, and coordinate descent after it.

Invariant: with E = W - code · scale and the damped input Hessian H, no step makes tr(E·H·Eᵀ) of a
row worse than rounding that column to nearest would, and every code keeps its limits.

With H = M·Mᵀ, M upper triangular, the error of a row is tr(E·H·Eᵀ) = ‖E·M‖²; column j of E·M
involves the errors of columns up to j only, so the best target for column j given the codes before
it is

    t[j] = w[j] + Σ_{i<j} E[i] · M[i, j] / M[j, j],      E[i] = w[i] - code[i] · scale[i].

That is GPTQ's compensation (Frantar et al. 2022) without an inverse Hessian. Sweeps of coordinate
descent may follow: each code in turn is set to the best one while all others stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edge_runtime.errors import CheckpointError

_BLOCK = 32  # columns solved one by one between two matrix products
_DAMPING = (0.01, 0.1, 1.0)  # of the mean diagonal, tried in this order


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


def solve_columns(
    W: torch.Tensor,
    scale: torch.Tensor,
    low: torch.Tensor | float,
    high: torch.Tensor | float,
    factor: HessianFactor,
    G: int,
    sweeps: int,
) -> tuple[torch.Tensor, int]:
    """Round W [n, K] fp32 column by column within [low, high]; the recurrence above.

    scale fp64 [n, Kp/G]; low and high are numbers or [K, n]. Returns the codes int8 [n, K] and
    how many of them the limits moved. Works on [K, n], so that a column is contiguous.
    """
    n, K = W.shape
    assert factor.coupling.shape == (K, K), f"a Hessian of {factor.coupling.shape[0]} for {K}"
    WT = W.T.contiguous()
    step = scale.T.float().contiguous()
    inverse = reciprocal(scale).T.float().contiguous()
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


def reciprocal(x: torch.Tensor) -> torch.Tensor:
    """1/x, 0 where x is 0."""
    return torch.where(x == 0, 0.0, 1.0 / x)
