"""Intervals of ratios whose parts come from items: windows of a text, questions, answers.

Invariant: the item is the unit of sampling. Positions of one text are alike, so an interval that
counts each of them as independent is too short; the variance here is that of the items' residuals
(Cochran 1977, Sampling Techniques, 6.3: ratio estimator), with Student's t for few items.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_T_SMALL = {1: 12.706, 2: 4.303}  # 97.5 % quantiles, where the series below is not good enough
_Z = 1.959964


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval (None: one item says nothing of the spread).

    n: what was counted (positions, questions, drafted tokens); items: units of sampling.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    items: int

    @property
    def ci95(self) -> list[float] | None:
        """The interval as a document carries it."""
        return None if self.low is None or self.high is None else [self.low, self.high]

    def exp(self) -> Estimate:
        """The same of e to the value: perplexity from a mean negative log-likelihood."""
        low, high = (None if x is None else _exp(x) for x in (self.low, self.high))
        return Estimate(_exp(self.value), low, high, self.n, self.items)


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))


def t_quantile(df: int) -> float:
    """97.5 % quantile of Student's t (Abramowitz and Stegun 26.7.5; tabulated for 1 and 2)."""
    if df in _T_SMALL:
        return _T_SMALL[df]
    z: float = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / df ** (i + 1) for i, term in enumerate(terms))


def ratio(sums: Sequence[float], counts: Sequence[float]) -> Estimate:
    """Estimate Σ sums / Σ counts over items."""
    value, residuals = _linearised(sums, counts)
    return _estimate(value, residuals, counts)


def difference(
    sums: Sequence[float],
    counts: Sequence[float],
    other_sums: Sequence[float],
    other_counts: Sequence[float],
) -> Estimate:
    """Estimate the first ratio minus the other over the same items, in pairs."""
    value, residuals = _linearised(sums, counts)
    other, other_residuals = _linearised(other_sums, other_counts)
    paired = [a - b for a, b in zip(residuals, other_residuals, strict=True)]
    return _estimate(value - other, paired, counts)


def share(hits: Sequence[float], counts: Sequence[float]) -> Estimate:
    """Estimate a share, Σ hits / Σ counts, with Wilson's interval for the effective count.

    The effective count is n divided by the design effect: the variance over items against that of
    as many independent trials, never below 1 (Korn and Graubard 1998).
    """
    value, residuals = _linearised(hits, counts)
    n, items = sum(counts), _used(counts)
    if items < 2:
        return Estimate(value, None, None, int(n), items)
    binomial = value * (1 - value) / n
    design = max(1.0, _variance(residuals, items) / binomial) if binomial > 0 else 1.0
    size, t = n / design, t_quantile(items - 1)
    middle = (value + t * t / (2 * size)) / (1 + t * t / size)
    half = (
        t / (1 + t * t / size) * math.sqrt(value * (1 - value) / size + t * t / (4 * size * size))
    )
    low = 0.0 if value == 0 else max(0.0, middle - half)  # exactly, whatever rounding says
    high = 1.0 if value == 1 else min(1.0, middle + half)
    return Estimate(value, low, high, int(n), items)


def _linearised(sums: Sequence[float], counts: Sequence[float]) -> tuple[float, list[float]]:
    """Return the ratio, and what each item adds to its error: (sum - ratio · count) / Σ counts."""
    total = sum(counts)
    if total <= 0:
        return 0.0, [0.0] * len(counts)
    value = math.fsum(sums) / total
    return value, [(s - value * c) / total for s, c in zip(sums, counts, strict=True)]


def _used(counts: Sequence[float]) -> int:
    return sum(1 for c in counts if c > 0)


def _variance(residuals: Sequence[float], items: int) -> float:
    return items / (items - 1) * math.fsum(r * r for r in residuals)


def _estimate(value: float, residuals: Sequence[float], counts: Sequence[float]) -> Estimate:
    items, n = _used(counts), int(sum(counts))
    if items < 2:
        return Estimate(value, None, None, n, items)
    half = t_quantile(items - 1) * math.sqrt(_variance(residuals, items))
    return Estimate(value, value - half, value + half, n, items)
