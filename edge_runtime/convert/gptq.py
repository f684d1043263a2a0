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
from edge_runtime.kernels.cuda import graphs

_BLOCK = 32  # columns solved one by one between two matrix products; divides every group
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
    A = H.flip(0, 1).double()  # Cholesky of the flipped matrix gives the upper factor M
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
    A /= A.diagonal().clone()[:, None]
    pull = A.float().flip(0, 1)
    del A
    L /= L.diagonal().clone()  # columns by their diagonal: L[i, j] / L[j, j]
    coupling = L.float().T.flip(0, 1).contiguous().tril_(-1)
    return HessianFactor(coupling=coupling, pull=pull, damping=damping, dead=int(dead.sum()))


def solve_columns(
    W: torch.Tensor,
    scale: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    factor: HessianFactor,
    G: int,
    sweeps: int,
) -> tuple[torch.Tensor, int]:
    """Round W [n, K] fp32 column by column within [low, high]; the recurrence above, then sweeps.

    scale fp64 [n, Kp/G]; low and high int8 [n, K], any strides. Returns the codes int8 [n, K] and
    how many of them the limits moved. Works on [K, n], so that a column is contiguous.

    A sweep has the same form as the first pass: with r = Σ_i pull[j, i] · E[i] the best value of
    column j is w[j] - E[j] + r, and what the columns before it in its block add to that is
    pull[j, i] times the step of their codes.
    """
    n, K = W.shape
    assert factor.coupling.shape == (K, K), f"a Hessian of {factor.coupling.shape[0]} for {K}"
    assert G % _BLOCK == 0, f"groups of {G} columns in blocks of {_BLOCK}"
    WT, low, high = W.T.contiguous(), low.T, high.T
    step = scale.T.float().contiguous()
    inverse = reciprocal(scale).T.float().contiguous()
    E = torch.empty_like(WT)
    codes = torch.empty(K, n, dtype=torch.int8, device=W.device)
    block, moved = _Block(n, W.device), torch.zeros((), dtype=torch.int64, device=W.device)
    for sweep in range(1 + sweeps):
        moved.zero_()
        for a in range(0, K, _BLOCK):
            columns, g = slice(a, min(a + _BLOCK, K)), a // G
            if sweep == 0:
                C = factor.coupling[columns, columns]
                T = torch.addmm(WT[columns], factor.coupling[columns, :a], E[:a])
                before = WT[columns] * inverse[g]
            else:
                C = factor.pull[columns, columns].tril(-1)
                T = torch.addmm(WT[columns] - E[columns], factor.pull[columns], E)
                before = codes[columns].float()
            T = torch.addmm(T.mul_(inverse[g]), C, before)
            kept, clipped = block.round(T, C, low[columns], high[columns])
            moved += clipped
            codes[columns] = kept
            torch.addcmul(WT[columns], kept, step[g], value=-1, out=E[columns])
    return codes.T, int(moved)


class _Block:
    """The columns of one block, one after the other: all that cannot be done side by side.

    In units of the block's scale, column j is rounded from T[j] - Σ_{i<j} C[j, i] · q[i].
    On a GPU launching such small steps costs more than they do: they are captured and replayed.
    """

    def __init__(self, n: int, device: torch.device) -> None:
        """n: rows of the matrix, which are independent of each other."""
        self._parts = torch.empty(4, _BLOCK, n, device=device).unbind()
        self._coupling = torch.empty(_BLOCK, _BLOCK, device=device)
        self._launched = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def round(
        self, T: torch.Tensor, C: torch.Tensor, low: torch.Tensor, high: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes fp32 [m, n] of the columns T [m, n] and how many the limits moved.

        C [m, m] is strictly lower triangular. The codes are overwritten by the next call.
        """
        m = T.shape[0]
        free, kept, lowest, highest = (part[:m] for part in self._parts)
        free.copy_(T)
        lowest.copy_(low)
        highest.copy_(high)
        self._coupling[:m, :m] = C
        if T.device.type != "cuda" or m < _BLOCK:
            self._columns(m)
        elif not self._launched:  # the first time loads the kernels
            self._columns(m)
            self._launched = True
        else:
            self._graph = self._graph or graphs.captured(lambda: self._columns(m))
            self._graph.replay()
        return kept, (free.round_() != kept).sum()

    def _columns(self, m: int) -> None:
        free, kept, low, high = self._parts
        for j in range(m):
            if j:
                free[j].addmv_(kept[:j].T, self._coupling[j, :j], alpha=-1)
            torch.clamp(free[j], low[j], high[j], out=kept[j])
            kept[j].round_()


def reciprocal(x: torch.Tensor) -> torch.Tensor:
    """1/x, 0 where x is 0."""
    return torch.where(x == 0, 0.0, 1.0 / x)
