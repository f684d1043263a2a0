"""The governor against a simulated engine: its cost when drafts fail, its finds when not."""

from __future__ import annotations

import random

import pytest

from edge_runtime.decode.governor import Governor, StepTimes, expected_tokens
from edge_runtime.kernels.layout import MAX_GAMMA

DRAFT, ROW = 0.55, 0.05


def verify(rows: int) -> float:
    return 1.0 + ROW * (rows - 1)


def run(governor: Governor, tokens: int, rate: float, seed: int = 0) -> float:
    """Return the cost, in target steps, of emitting `tokens` with drafts accepted at `rate`."""
    rng, cost, emitted = random.Random(seed), 0.0, 0
    while emitted < tokens:
        gamma = governor.base_gamma(min(MAX_GAMMA, tokens - emitted - 1))
        accepted = 0
        while accepted < gamma and rng.random() < rate:
            accepted += 1
        for _ in range(gamma):
            governor.times.add("w4", 1, DRAFT)
        governor.times.add("w8", gamma + 1, verify(gamma + 1))
        governor.judged(gamma, 0, accepted)
        cost += gamma * DRAFT + verify(gamma + 1)
        emitted += accepted + 1
    return cost


def test_a_hostile_text_costs_almost_nothing() -> None:
    """The bar of the backend: 1.03 times no drafting, and 4 draft steps, over 128 tokens."""
    cost = run(Governor(StepTimes(DRAFT)), 128, rate=0.0)
    assert cost <= 1.03 * 128 + 4 * DRAFT


@pytest.mark.parametrize("rate", [0.7, 0.8, 0.9, 0.97])
def test_near_the_best_fixed_length(rate: float) -> None:
    tokens = 4000
    best = min(
        tokens / expected_tokens(rate, g) * (g * DRAFT + verify(g + 1))
        for g in range(MAX_GAMMA + 1)
    )
    assert run(Governor(StepTimes(DRAFT)), tokens, rate) <= 1.05 * best


def test_never_much_slower_than_no_drafting() -> None:
    for rate in (0.1, 0.3, 0.5, 0.6):
        assert run(Governor(StepTimes(DRAFT)), 2000, rate) <= 1.04 * 2000


def test_it_comes_back_when_drafts_do() -> None:
    governor = Governor(StepTimes(DRAFT))
    run(governor, 200, rate=0.0)
    assert run(governor, 1000, rate=0.95) <= 0.8 * 1000


def test_no_more_than_asked() -> None:
    governor = Governor(StepTimes(0.01))  # a draft that costs nothing
    assert governor.base_gamma(0) == 0
    assert governor.base_gamma(1) == 1
    assert 1 <= governor.base_gamma(100) <= MAX_GAMMA


def test_sources_that_are_off() -> None:
    governor = Governor(StepTimes(0.01), use_base=False, use_ngram=False)
    assert governor.base_gamma(7) == 0
    assert governor.ngram_gamma(7, 0) == 0


def test_a_look_up_that_holds_replaces_the_base() -> None:
    governor = Governor(StepTimes(DRAFT))
    for _ in range(40):
        governor.judged(0, 4, 4)
    assert governor.base_gamma(7, found=7) == 0
    assert governor.ngram_gamma(7, 0) == MAX_GAMMA
    for _ in range(80):
        governor.judged(0, 1, 0)
    assert governor.base_gamma(7, found=7) > 0


def test_step_times_are_medians_and_scale_to_rows_not_measured() -> None:
    times = StepTimes(0.5)
    assert times.draft() == pytest.approx(0.5 * times.verify(1))
    for seconds in (1.0, 1.1, 50.0, 1.05, 0.9):
        times.add("w8", 1, seconds)
    assert times.verify(1) == 1.05
    assert times.verify(1) < times.verify(4) < 1.3 * times.verify(1)
    times.add("w4", 1, 0.7)
    assert times.draft() == 0.7


def test_rows_that_cost_much_are_seen_after_two_numbers_of_them() -> None:
    times = StepTimes(0.5)
    times.add("w8", 1, 10.0)
    assert times.verify(8) < 14.0
    times.add("w8", 3, 20.0)  # a long context: attention of every row
    assert times.verify(2) == 15.0
    assert times.verify(8) == 45.0
    times.add("w8", 4, 5.0)  # noise
    assert times.verify(8) == 5.0


def test_a_slow_moment_does_not_make_few_rows_dearer_than_many() -> None:
    times = StepTimes(0.55)
    times.add("w8", 2, 5.8)
    times.add("w8", 1, 7.1)  # the machine was busy
    times.add("w8", 4, 5.9)
    assert times.verify(1) == times.verify(2) == 5.8
    assert times.verify(3) == pytest.approx(5.85)
    assert times.verify(4) == 5.9


def test_more_rows_never_seem_cheaper_measured_or_not() -> None:
    times = StepTimes(0.55)
    for rows, seconds in ((2, 1.0), (3, 2.0), (8, 2.0)):
        times.add("w8", rows, seconds)
    found = [times.verify(rows) for rows in range(1, 9)]
    assert found == sorted(found)
    assert times.verify(5) == 2.0
