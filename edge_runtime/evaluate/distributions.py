"""Log-probabilities, and how far one distribution is from another: exact, fp64, in nats.

Invariant: logits are fp32 as the backend made them; everything after is fp64, a few rows at a time,
so that a block of logits never has more than a few megabytes of company.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
WORK_BYTES = 1 << 20  # of one fp64 array
LOG_2 = float(np.log(2.0))
LEAST = 1e-300  # of p + q, so that 0 · log 0 is 0


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Cut rows of `width` numbers into blocks of about WORK_BYTES of fp64."""
    step = max(1, WORK_BYTES // (8 * width))
    for a in range(0, rows, step):
        yield slice(a, min(a + step, rows))


def softmax(logits: npt.NDArray[np.floating]) -> tuple[F64, F64]:
    """(p, log p) of each row: log p = x - max - log Σ exp(x - max). [M, V] -> fp64 [M, V]."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    p = np.exp(x)
    total = p.sum(-1, keepdims=True)
    p /= total
    x -= np.log(total)
    return p, x


def negative_log_likelihood(logits: F32, targets: I64) -> float:
    """Σ -log p(target) over rows. logits: fp32 [M, V]; targets: [M]."""
    total = 0.0
    for rows in row_blocks(*logits.shape):
        x = logits[rows].astype(np.float64)
        top = x.max(-1)
        log_sum = top + np.log(np.exp(x - top[:, None]).sum(-1))
        total += float((log_sum - x[np.arange(len(x)), targets[rows]]).sum())
    return total


@dataclass(slots=True)
class Divergence:
    """Sums over rows: equal first choices, KL(p ‖ q) and Jensen-Shannon divergence in nats."""

    same: int = 0
    kl: float = 0.0
    js: float = 0.0

    def add(self, other: Divergence) -> None:
        """Add the sums of more rows."""
        self.same += other.same
        self.kl += other.kl
        self.js += other.js


Pair = tuple[str, str]


def compare(logits: Mapping[str, F32], pairs: Sequence[Pair]) -> dict[Pair, Divergence]:
    """Compare p and q, named by each pair, row by row. logits by name: fp32 [M, V].

    KL(p ‖ q) = Σ p (log p - log q); JS = (KL(p ‖ m) + KL(q ‖ m)) / 2 with m = (p + q) / 2. First
    choices are those of the contract: the lowest index among equal maxima.
    """
    first = {name: rows.argmax(-1) for name, rows in logits.items()}
    found = {(p, q): Divergence(same=int((first[p] == first[q]).sum())) for p, q in pairs}
    for rows in row_blocks(*next(iter(logits.values())).shape):
        both = {name: softmax(values[rows]) for name, values in logits.items()}
        for pair, divergence in found.items():
            (p, log_p), (q, log_q) = both[pair[0]], both[pair[1]]
            log_m = np.log(np.maximum(p + q, LEAST)) - LOG_2
            divergence.kl += float((p * (log_p - log_q)).sum())
            divergence.js += float((p * (log_p - log_m) + q * (log_q - log_m)).sum()) / 2
    return found
