"""Intervals against plain sums, a jackknife and simulated truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edge_runtime.evaluate import stats


@pytest.mark.parametrize(
    ("df", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (100, 1.984)]
)
def test_t_quantiles(df: int, quantile: float) -> None:
    assert stats.t_quantile(df) == pytest.approx(quantile, abs=0.005)


def test_ratio_of_equal_counts_is_the_mean_with_its_standard_error() -> None:
    values = [1.0, 2.0, 4.0, 7.0]
    found = stats.ratio([v * 3 for v in values], [3] * 4)
    error = stats.t_quantile(3) * np.std(values, ddof=1) / 2
    assert found.value == pytest.approx(np.mean(values))
    assert found.ci95 == pytest.approx([found.value - error, found.value + error])
    assert (found.n, found.items) == (12, 4)


def test_ratio_is_near_the_jackknife() -> None:
    random = np.random.default_rng(1)
    counts = random.integers(20, 200, 40)
    sums = counts * random.normal(2.0, 0.3, 40)
    found = stats.ratio(sums.tolist(), counts.tolist())
    left_out = (sums.sum() - sums) / (counts.sum() - counts)
    error = math.sqrt(39 / 40 * ((left_out - left_out.mean()) ** 2).sum())
    assert found.high is not None
    assert found.high - found.value == pytest.approx(stats.t_quantile(39) * error, rel=0.05)


def test_differences_are_paired() -> None:
    random = np.random.default_rng(2)
    counts = [50] * 30
    common = random.normal(3.0, 1.0, 30) * 50  # what makes items hard, for both alike
    a, b = common + random.normal(1.0, 0.5, 30), common
    found = stats.difference(a.tolist(), counts, b.tolist(), counts)
    assert found.low is not None
    assert found.high is not None
    assert 0 < found.low < 1.0 / 50 < found.high
    wide = stats.ratio(a.tolist(), counts)
    assert wide.low is not None
    assert wide.high is not None
    assert found.high - found.low < 0.1 * (wide.high - wide.low)
    same = stats.difference(a.tolist(), counts, a.tolist(), counts)
    assert (same.value, same.ci95) == (0.0, [0.0, 0.0])


def test_share_of_single_trials_is_wilson() -> None:
    hits = [1.0] * 30 + [0.0] * 10
    found = stats.share(hits, [1] * 40)
    t, p, n = stats.t_quantile(39), 0.75, 40 / (40 / 39)
    middle = (p + t * t / (2 * n)) / (1 + t * t / n)
    half = t / (1 + t * t / n) * math.sqrt(p * (1 - p) / n + t * t / (4 * n * n))
    assert found.ci95 == pytest.approx([middle - half, middle + half])
    for value in (0.0, 1.0):
        low, high = stats.share([value] * 20, [1] * 20).ci95 or []
        assert low <= value <= high
        assert high - low > 0.1


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Items with their own rates: counting positions as independent would cover far less."""
    random = np.random.default_rng(3)
    held = 0
    for _ in range(400):
        rates = random.beta(8, 2, 25)
        counts = random.integers(50, 150, 25)
        hits = random.binomial(counts, rates)
        low, high = stats.share(hits.tolist(), counts.tolist()).ci95 or [1.0, 0.0]
        held += low <= 0.8 <= high
    assert 0.92 <= held / 400 <= 0.985


def test_one_item_has_no_interval_and_none_is_zero() -> None:
    assert stats.ratio([6.0], [3]).ci95 is None
    assert stats.share([2], [3]).ci95 is None
    assert stats.ratio([], []).value == 0.0
    assert stats.ratio([6.0, 0.0], [3, 0]).ci95 is None  # an item without positions is none


def test_exp() -> None:
    found = stats.ratio([1.0, 2.0, 3.0], [1, 1, 1]).exp()
    assert found.value == pytest.approx(math.exp(2.0))
    assert found.low is not None
    assert math.log(found.low) == pytest.approx(2.0 - stats.t_quantile(2) / math.sqrt(3))
