"""Log-probabilities of emitted tokens: of the target's own distribution, before temperature."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MOST_ALTERNATIVES = 20  # as the field's servers allow


class LogProbs(NamedTuple):
    """Natural logarithms. top: the likeliest ids, best first, lower id first where equal."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


def log_probs(logits: npt.NDArray[np.float32], chosen: int, count: int) -> LogProbs:
    """Return those of one row of logits [V], with `count` alternatives."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    if not count:
        return LogProbs(float(wide[chosen]))
    likely = np.flatnonzero(wide >= np.partition(wide, -count)[-count])
    best = sorted((-wide[i], int(i)) for i in likely)[:count]
    return LogProbs(float(wide[chosen]), tuple((i, float(-value)) for value, i in best))
