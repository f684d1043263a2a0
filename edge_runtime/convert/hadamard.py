"""Rotations: ±1 Hadamard matrices by construction, and a random orthogonal matrix where none is.

Invariant: `Rotation.dense()` is orthogonal, and a Hadamard rotation is a function of (n, seed)
alone, to the bit, on every machine: its signs are integers of a seeded generator.

How: with q prime and χ the quadratic character mod q, the matrix Q[i, j] = χ(i - j) gives an order
q + 1 (Paley I, q ≡ 3 mod 4) or 2(q + 1) (Paley II, q ≡ 1 mod 4); Sylvester doubles any order.
All splits n = core · 2^k are tried, the smallest core first. Source: Paley 1933; QuaRot and
SpinQuant for the use as R1 and R2 (bitnest paper, equation 4). Prime powers and other
constructions are not tried: those n get an orthogonal matrix by QR, rounded to fp32, whose last
bits may depend on the LAPACK used (R1 is stored in the checkpoint, so nothing recomputes it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from edge_runtime.errors import UnsupportedModel


@dataclass(frozen=True, eq=False, slots=True)
class Rotation:
    """An orthogonal matrix R = matrix · scale, [n, n]: int8 signs (hadamard) or fp32 (orthogonal).

    Row vectors are rotated as x · R, column vectors as Rᵀ · x.
    """

    matrix: torch.Tensor
    scale: float
    kind: Literal["hadamard", "orthogonal"]

    @property
    def size(self) -> int:
        """The n of [n, n]."""
        return self.matrix.shape[0]

    def to(self, device: torch.device) -> Rotation:
        """Return the rotation with its matrix on a device."""
        return Rotation(self.matrix.to(device), self.scale, self.kind)

    def dense(self) -> torch.Tensor:
        """Return R as fp64 [n, n]."""
        return self.matrix.double() * self.scale


def hadamard(n: int) -> torch.Tensor:
    """Return a ±1 matrix as int8 [n, n] with H · Hᵀ = n · I.

    Raises UnsupportedModel when neither Paley construction times a power of two reaches n.
    """
    core = _core_order(n)
    if core is None:
        raise UnsupportedModel(f"no Hadamard matrix of order {n} (Paley I/II times a power of two)")
    H = _paley(core)
    pair = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    while H.shape[0] < n:
        H = torch.kron(pair, H)
    return H


def random_rotation(n: int, seed: int) -> Rotation:
    """Return a random rotation of size n: diag(±1) · H / √n, or a QR factor where no H exists."""
    rng = torch.Generator().manual_seed(seed)
    if _core_order(n) is None:
        return Rotation(_random_orthogonal(n, rng), 1.0, "orthogonal")
    signs = torch.randint(0, 2, (n, 1), generator=rng).mul_(2).sub_(1).to(torch.int8)
    return Rotation(signs * hadamard(n), 1.0 / math.sqrt(n), "hadamard")


def _core_order(n: int) -> int | None:
    """Return the smallest core with n = core · 2^k that is 1 or a Paley order, else None."""
    assert n > 0, n
    core = n
    while core % 2 == 0:
        core //= 2
    while core <= n:
        if core == 1 or _is_paley1(core) or _is_paley2(core):
            return core
        core *= 2
    return None


def _is_paley1(n: int) -> bool:
    return n % 4 == 0 and _is_prime(n - 1)


def _is_paley2(n: int) -> bool:
    return n % 4 == 0 and (n // 2 - 1) % 4 == 1 and _is_prime(n // 2 - 1)


def _is_prime(q: int) -> bool:
    return q > 1 and all(q % d for d in range(2, math.isqrt(q) + 1))


def _paley(n: int) -> torch.Tensor:
    """Return the Paley matrix of order n, a core order, as int8 [n, n]."""
    if n == 1:
        return torch.ones(1, 1, dtype=torch.int8)
    if _is_paley1(n):
        S = _bordered(n - 1)
        S[1:, 0] = -1  # skew: S + Sᵀ = 0
        return S + torch.eye(n, dtype=torch.int8)
    half = n // 2
    plus = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    minus = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8)
    return torch.kron(_bordered(half - 1), plus) + torch.kron(
        torch.eye(half, dtype=torch.int8), minus
    )


def _bordered(q: int) -> torch.Tensor:
    """Return [[0, 1], [1, Q]] with Q[i, j] = χ(i - j) mod the prime q, int8 [q + 1, q + 1]."""
    chi = torch.full((q,), -1, dtype=torch.int8)
    chi[[i * i % q for i in range(q)]] = 1
    chi[0] = 0
    index = torch.arange(q)
    C = torch.ones(q + 1, q + 1, dtype=torch.int8)
    C[0, 0] = 0
    C[1:, 1:] = chi[(index[:, None] - index[None, :]) % q]
    return C


def _random_orthogonal(n: int, rng: torch.Generator) -> torch.Tensor:
    """Return the QR factor of a random matrix, signs fixed by R's diagonal, fp32 [n, n]."""
    # sums of integers: nearly normal, and free of any library's log and cos
    A = torch.zeros(n, n, dtype=torch.float64)
    for _ in range(4):
        A += torch.randint(-(1 << 20), (1 << 20) + 1, (n, n), generator=rng)
    Q, R = torch.linalg.qr(A)
    orthogonal: torch.Tensor = Q * R.diagonal().sign()
    return orthogonal.float()
