"""The solver under the quantiser: GPTQ by columns, and coordinate descent after it.

Invariant: with E = W - code · scale and the damped input Hessian H, no step makes tr(E·H·Eᵀ) of a
row worse than rounding that column to nearest would, and every code keeps its limits.

With H = M·Mᵀ, M upper triangular, the error of a row is tr(E·H·Eᵀ) = ‖E·M‖²; column j of E·M
involves the errors of columns up to j only, so the best target for column j given the codes before
it is

    t[j] = w[j] + Σ_{i<j} E[i] · M[i, j] / M[j, j],      E[i] = w[i] - code[i] · scale[i].

That is GPTQ's compensation (Frantar et al. 2022) without an inverse Hessian. Sweeps of coordinate
descent may follow: each code in turn is set to the best one while all others stay. With
r = Σ_i H[j, i] / H[j, j] · E[i] the best value of column j is w[j] - E[j] + r. Both have one form:
what the columns before j in its block add is a product with their codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edge_runtime.convert.fused import Fused
from edge_runtime.errors import CheckpointError
from edge_runtime.kernels.cuda import graphs

_BLOCK = 32  # columns solved one by one between two matrix products; divides every group
_DAMPING = (0.01, 0.1, 1.0)  # of the mean diagonal, tried in this order
TARGET_DAMPING = 0.1  # at least, for the target: it must be right beyond the calibration text too


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


def factor_hessian(H: torch.Tensor, *, name: str = "", least: float = 0.0) -> HessianFactor:
    """Factor the Hessian H = XᵀX [K, K] (any positive multiple), fp64 inside.

    least: share of the mean diagonal that is added to it in any case.

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
    for damping in (d for d in _DAMPING if d >= least):
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
    """
    n, K = W.shape
    WT, low, high = W.T.contiguous(), low.T, high.T
    problem = _Problem(WT, scale, factor, G)
    E = torch.empty_like(WT)
    codes = torch.empty(K, n, dtype=torch.int8, device=W.device)
    block, moved = _Block(n, W.device), torch.zeros((), dtype=torch.int64, device=W.device)
    for sweep in range(1 + sweeps):
        for a in range(0, K, _BLOCK):
            columns = slice(a, min(a + _BLOCK, K))
            T, C = problem.aim(columns, E, codes if sweep else None)
            free, kept = block.round(T, C, low[columns], high[columns])
            if sweep == sweeps:
                moved += (free.round_() != kept).sum()
            codes[columns] = kept
            problem.miss(columns, kept, E)
    return codes.T, int(moved)


def solve_nested(
    W: torch.Tensor,
    scale: torch.Tensor,
    draft: HessianFactor,
    target: HessianFactor,
    G: int,
    bound: float,
    sweeps: int,
) -> torch.Tensor:
    """Choose the base codes int8 [n, K] of W [n, K] with a refinement in sight; see `_choose`.

    scale fp64 [n, Kp/G], of the base. Draft and target are solved side by side, each with its own
    factor and errors, so that together tr(E8·H8·E8ᵀ) + bound² · tr(E4·H4·E4ᵀ) of a row becomes
    small. The refinement itself is left to a pass of its own.
    """
    n, K = W.shape
    WT = W.T.contiguous()
    problems = [_Problem(WT, scale, factor, G) for factor in (draft, target)]
    errors = torch.empty(2, K, n, device=W.device)
    codes = torch.empty(2, K, n, device=W.device)  # draft and target, both in base steps
    block = _NestedBlock(n, W.device, bound)
    for sweep in range(1 + sweeps):
        for a in range(0, K, _BLOCK):
            columns = slice(a, min(a + _BLOCK, K))
            aims = [
                problem.aim(columns, E, V if sweep else None)
                for problem, E, V in zip(problems, errors, codes, strict=True)
            ]
            T, C = (torch.stack(found) for found in zip(*aims, strict=True))
            kept = block.round(T, C)
            codes[:, columns] = kept
            for problem, E, V in zip(problems, errors, kept, strict=True):
                problem.miss(columns, V, E)
    return codes[0].T.to(torch.int8)


class _Problem:
    """A matrix to be solved: its columns side by side, its scales and its factor."""

    def __init__(
        self, WT: torch.Tensor, scale: torch.Tensor, factor: HessianFactor, G: int
    ) -> None:
        """WT fp32 [K, n]; scale fp64 [n, Kp/G]."""
        K = WT.shape[0]
        assert factor.coupling.shape == (K, K), f"a Hessian of {factor.coupling.shape[0]} for {K}"
        assert G % _BLOCK == 0, f"groups of {G} columns in blocks of {_BLOCK}"
        self._WT, self._factor, self._G = WT, factor, G
        self._step = scale.T.float().contiguous()
        self._inverse = reciprocal(scale).T.float().contiguous()

    def aim(
        self, columns: slice, E: torch.Tensor, codes: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return T [m, n] and C [m, m]: column j is rounded from T[j] - Σ_{i<j} C[j, i] · q[i].

        In steps of the scale. E [K, n]: errors; codes [K, n]: those of the sweep before, None in
        the first pass.
        """
        W, factor, inverse = (
            self._WT[columns],
            self._factor,
            self._inverse[columns.start // self._G],
        )
        if codes is None:
            C = factor.coupling[columns, columns]
            done = slice(columns.start)
            T = torch.addmm(W, factor.coupling[columns, done], E[done])
            before = W * inverse
        else:
            C = factor.pull[columns, columns].tril(-1)
            T = torch.addmm(W - E[columns], factor.pull[columns], E)
            before = codes[columns].float()
        return torch.addmm(T.mul_(inverse), C, before), C

    def miss(self, columns: slice, codes: torch.Tensor, E: torch.Tensor) -> None:
        """E[columns] = W - codes · scale. codes fp32 [m, n]."""
        step = self._step[columns.start // self._G]
        torch.addcmul(self._WT[columns], codes, step, value=-1, out=E[columns])


class _Steps:
    """The columns of one block, one after the other: all that cannot be done side by side.

    On a GPU launching such small steps costs more than they do: they are captured and replayed.
    """

    def __init__(self, n: int, device: torch.device, parts: int, planes: int) -> None:
        """n: rows of the matrix, which are independent of each other. parts: arrays [m, n]."""
        self.parts = torch.empty(parts, _BLOCK, n, device=device)
        self.coupling = torch.empty(planes, _BLOCK, _BLOCK, device=device)
        self._launched = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, C: torch.Tensor) -> None:
        """Do the steps of the first columns, as many as C [planes, m, m] has.

        C is strictly lower triangular.
        """
        m = C.shape[-1]
        self.coupling[:, :m, :m] = C
        if C.device.type != "cuda" or m < _BLOCK:
            self.columns(m)
        elif not self._launched:  # the first time loads the kernels
            self.columns(m)
            self._launched = True
        else:
            self._graph = self._graph or graphs.captured(lambda: self.columns(m))
            self._graph.replay()

    def columns(self, m: int) -> None:
        """Do the steps of m columns."""
        raise NotImplementedError


class _Block(_Steps):
    """Columns of one plane, within limits."""

    def __init__(self, n: int, device: torch.device) -> None:
        super().__init__(n, device, 4, 1)

    def round(
        self, T: torch.Tensor, C: torch.Tensor, low: torch.Tensor, high: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is rounded and the codes of the columns T [m, n], both fp32 [m, n].

        They are overwritten by the next call.
        """
        free, kept, lowest, highest = self.parts[:, : T.shape[0]]
        free.copy_(T)
        lowest.copy_(low)
        highest.copy_(high)
        self.run(C)
        return free, kept

    def columns(self, m: int) -> None:
        """Round and clamp."""
        free, kept, low, high = self.parts
        for j in range(m):
            if j:
                free[j].addmv_(kept[:j].T, self.coupling[0, j, :j], alpha=-1)
            torch.clamp(free[j], low[j], high[j], out=kept[j])
            kept[j].round_()


class _NestedBlock(_Steps):
    """Columns of draft and target, chosen together."""

    def __init__(self, n: int, device: torch.device, bound: float) -> None:
        super().__init__(n, device, 4, 2)
        self._weight = bound * bound

    def round(self, T: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
        """Return the codes of draft and target, fp32 [2, m, n], of T [2, m, n], in base steps.

        C [2, m, m]. The codes are overwritten by the next call.
        """
        m = T.shape[1]
        self.parts[:2, :m] = T
        self.run(C)
        return self.parts[2:, :m]

    def columns(self, m: int) -> None:
        """Choose."""
        free, kept = self.parts[:2], self.parts[2:]
        for j in range(m):
            if j:
                for T, codes, C in zip(free, kept, self.coupling, strict=True):
                    T[j].addmv_(codes[:j].T, C[j, :j], alpha=-1)
            _choose(free[0, j], free[1, j], self._weight, kept[0, j], kept[1, j])


@Fused
def _choose(
    draft: torch.Tensor,
    target: torch.Tensor,
    weight: float,
    base: torch.Tensor,
    code: torch.Tensor,
) -> None:
    """Write base codes and target codes for what draft and target want [n], all in base steps.

    A base q lets the target have q - 1/2 … q + 7/16 in steps of 1/16, so one q comes closest. The
    base moves from it one step towards the draft's wish where the target then misses its own by so
    little that miss² < weight · (what the squared error of the draft wins).
    """
    middle = target + 1 / 32
    near = middle.round().clamp_(-8, 7)
    wish = draft - near
    way = wish.sign()
    miss = 0.5 - way * (middle - near)
    move = miss * miss < weight * (2 * wish.abs() - 1)
    torch.clamp(near + way * move, -8, 7, out=base)
    lowest = (base - 0.5).clamp_(min=-8)
    torch.clamp(target, lowest, base + 7 / 16, out=code)
    code.mul_(16).round_().div_(16)


def reciprocal(x: torch.Tensor) -> torch.Tensor:
    """1/x, 0 where x is 0."""
    return torch.where(x == 0, 0.0, 1.0 / x)
