"""Log-probabilities, and how far one distribution is from another: exact, fp64, in nats.

Invariant: logits are fp32 as the backend made them; everything after is fp64, a few rows at a time,
so that a block of logits never has more than a few megabytes of company.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
WORK_BYTES = 4 << 20  # of one fp64 array
LOG_2 = float(np.log(2.0))


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Cut rows of `width` numbers into blocks of about WORK_BYTES of fp64."""
    step = max(1, WORK_BYTES // (8 * width))
    for a in range(0, rows, step):
        yield slice(a, min(a + step, rows))


def log_softmax(logits: npt.NDArray[np.floating]) -> F64:
    """log p of each row: x - max - log Σ exp(x - max). fp32 [M, V] -> fp64 [M, V]."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


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


def compare(logits: F32, others: dict[str, F32]) -> dict[str, Divergence]:
    """Compare q of each of `others` with p of `logits`, row by row; all fp32 [M, V].

    KL(p ‖ q) = Σ p (log p - log q); JS = (KL(p ‖ m) + KL(q ‖ m)) / 2 with m = (p + q) / 2. First
    choices are those of the contract: the lowest index among equal maxima.
    """
    found = {name: Divergence() for name in others}
    first = logits.argmax(-1)
    for name, other in others.items():
        found[name].same = int((other.argmax(-1) == first).sum())
    for rows in row_blocks(*logits.shape):
        log_p = log_softmax(logits[rows])
        p = np.exp(log_p)
        for name, other in others.items():
            log_q = log_softmax(other[rows])
            q = np.exp(log_q)
            log_m = np.logaddexp(log_p, log_q) - LOG_2
            found[name].kl += float((p * (log_p - log_q)).sum())
            found[name].js += float((p * (log_p - log_m) + q * (log_q - log_m)).sum()) / 2
    return found
