"""Energy of windows on a simulated clock: a known power curve, seen late and in steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edge_runtime.power.curve import Curve, merged
from edge_runtime.power.energy import WindowEnergy, idle_mw, measure
from edge_runtime.power.lag import ASSUMED

RUNS = 50
STEP_MW = 40.0
DT = 1e-3

Shape = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def steady(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.ones_like(x)


def two_phases(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.where(x < 0.3 * x[-1], 1.3, 1.0)


def waves(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return 1 + 0.15 * np.sin(2 * np.pi * rng.uniform(0.3, 3) * x + rng.uniform(0, 6.3))


def restless(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return 1 + np.repeat(rng.normal(0, 0.1, len(x) // 50 + 1), 50)[: len(x)]


SHAPES = (steady, two_phases, waves, restless)


class Run:
    """One run: idle, work of a shape for a while, then idle again as long as is looked at."""

    def __init__(
        self, seed: int, seconds: float, shape: Shape, after_s: float = 1.6, delay_s: float = 0.0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.begin = 3.0 + rng.uniform(0, 0.1)
        self.end = self.begin + seconds
        t = np.arange(0, self.end + after_s + 0.5, DT)
        idle, tau = rng.uniform(3000, 7000), rng.uniform(0.2, 0.6)
        work = (t >= self.begin) & (t < self.end)
        power = np.full(len(t), idle)
        load = idle + rng.uniform(4000, 18000)
        power[work] = load * shape(t[work] - self.begin, rng)
        lagging = np.empty(len(t))
        level, share = idle, 1 - np.exp(-DT / tau)
        for i, p in enumerate(power):
            level += (p - level) * share
            lagging[i] = level
        self.t, self.power, self.idle, self.tau = t, power, idle, tau
        self.times = np.arange(rng.uniform(0, 0.1), self.end + after_s, 0.1)
        seen = np.interp(self.times - delay_s, t, lagging)
        self.mw = np.round(seen / STEP_MW) * STEP_MW

    def truth_j(self, begin: float, end: float) -> float:
        inside = (self.t >= begin) & (self.t < end)
        return float(self.power[inside].sum() * DT / 1000)

    def curve(self) -> Curve:
        return Curve(self.times, self.mw, [(self.begin, self.end)], STEP_MW)

    def window(self) -> WindowEnergy:
        return measure(self.curve(), "work", [(self.begin, self.end)], None)


@pytest.mark.parametrize("delay_s", [0.0, 0.03])
@pytest.mark.parametrize(("seconds", "share"), [(3, 0.03), (10, 0.01)])
def test_energy_is_right(seconds: int, share: float, delay_s: float) -> None:
    worst = 0.0
    for seed in range(RUNS):
        run = Run(seed, seconds, SHAPES[seed % len(SHAPES)], delay_s=delay_s)
        energy, truth = run.window(), run.truth_j(run.begin, run.end)
        assert energy.gross_j is not None
        assert energy.note == ""
        worst = max(worst, abs(energy.gross_j / truth - 1))
    print(f"{seconds} s, delay {delay_s} s: worst of {RUNS} runs {worst:.2%}")
    assert worst <= share


def test_a_second_has_its_interval_alone() -> None:
    inside, widths = 0, []
    for seed in range(RUNS):
        run = Run(seed, 1, SHAPES[seed % len(SHAPES)])
        energy, truth = run.window(), run.truth_j(run.begin, run.end)
        assert energy.gross_j is None
        assert energy.net_j is None
        assert "too short" in energy.note
        assert energy.low_j is not None
        assert energy.high_j is not None
        inside += energy.low_j <= truth <= energy.high_j
        widths.append((energy.high_j - energy.low_j) / 2 / truth)
    print(f"1 s: {inside} of {RUNS} intervals hold the truth; ±{np.mean(widths):.1%} on average")
    assert inside >= 0.9 * RUNS
    assert np.mean(widths) < 0.1


@pytest.mark.parametrize("shape", [steady, waves])
def test_a_run_killed_in_the_middle_counts_up_to_its_last_line(shape: Shape) -> None:
    inside = 0
    for seed in range(RUNS):
        run = Run(seed, 6, shape)
        known = run.times < run.begin + 3.7
        last = float(run.times[known][-1])
        curve = Curve(run.times[known], run.mw[known], [(run.begin, run.end)], STEP_MW)
        energy = measure(curve, "work", [(run.begin, run.end)], 1000.0)
        assert energy.duration_s == pytest.approx(6)
        assert last - run.begin <= energy.covered_s <= last - run.begin + 0.21
        assert "counted up to the last reading" in energy.note
        truth = run.truth_j(run.begin, run.begin + energy.covered_s)
        assert energy.gross_j is not None
        assert energy.net_j == pytest.approx(energy.gross_j - energy.covered_s)
        inside += energy.low_j <= truth <= energy.high_j
    assert inside >= 0.9 * RUNS


def test_the_lag_is_found() -> None:
    for seed in range(10):
        run = Run(seed, 3, two_phases)
        lag = run.curve().lag
        assert lag.low_s <= run.tau <= lag.high_s
        assert "from the end of 1 run" in lag.how


def test_without_a_step_the_lag_is_the_prior() -> None:
    times = np.arange(0, 10, 0.1)
    curve = Curve(times, np.full(100, 5000.0), [(3.0, 6.0)], STEP_MW)
    assert curve.lag == ASSUMED
    energy = measure(curve, "work", [(3.0, 6.0)], 5000.0)
    assert energy.gross_j == pytest.approx(15.0, rel=1e-3)
    assert energy.net_j == pytest.approx(0.0, abs=0.02)


def test_a_source_without_lag_is_seen_to_have_none() -> None:
    times = np.arange(0, 10, 0.1) + 0.05
    mw = np.where((times > 3) & (times < 6), 15000.0, 5000.0)
    curve = Curve(times, mw, [(3.0, 6.0)], STEP_MW)
    assert curve.lag.high_s < 0.1
    assert measure(curve, "work", [(3.0, 6.0)], None).gross_j == pytest.approx(45, rel=0.01)


def test_phases_side_by_side_add_up() -> None:
    for seed in range(10):
        run = Run(seed, 10, two_phases)
        border = run.begin + 3.0
        curve = Curve(run.times, run.mw, [(run.begin, border), (border, run.end)], STEP_MW)
        spans = [(run.begin, border), (border, run.end)]
        parts = [measure(curve, "part", [span], None).gross_j for span in spans]
        whole = measure(curve, "whole", [(run.begin, run.end)], None).gross_j
        assert sum(parts) == pytest.approx(whole, rel=1e-9)
        for part, span in zip(parts, spans, strict=True):
            assert part == pytest.approx(run.truth_j(*span), rel=0.03)


def test_short_steps_are_attributed_by_time() -> None:
    run = Run(1, 10, steady)
    steps = np.arange(run.begin, run.end - 0.011, 0.01)
    draft = [(s, s + 0.003) for s in steps]
    verify = [(s + 0.003, s + 0.01) for s in steps]
    curve = Curve(run.times, run.mw, [*draft, *verify], STEP_MW)
    found = {
        name: measure(curve, name, spans, run.idle)
        for name, spans in (("draft", draft), ("verify", verify))
    }
    whole = run.truth_j(run.begin, run.end)
    for name, share in (("draft", 0.3), ("verify", 0.7)):
        assert found[name].note == "attributed by time"
        assert found[name].gross_j == pytest.approx(share * whole, rel=0.01)
        assert found[name].duration_s == pytest.approx(share * 10, rel=0.01)
        net = found[name].gross_j - run.idle * share * 10 / 1000
        assert found[name].net_j == pytest.approx(net, rel=0.01)


def test_idle_power_is_found_after_work_too() -> None:
    for seed in range(10):
        run = Run(seed, 3, steady, after_s=3.0)
        for span in ((0.2, 2.8), (run.end + 0.3, run.end + 2.9)):
            assert idle_mw(run.curve(), [span]) == pytest.approx(run.idle, rel=0.02)


@pytest.mark.parametrize("late_s", [0.0, 0.08])
@pytest.mark.parametrize("seconds", [0.5, 3.0])
def test_a_counter_that_moves_now_and_then(seconds: float, late_s: float) -> None:
    """300 W over 100 W, counted every 0.1 s and seen late, read every 0.02 s."""
    for phase in np.arange(0.0, 0.1, 0.013):
        begin, end = 3.0 + phase, 3.0 + phase + seconds
        times = np.arange(0.0, end + 1.7, 0.02)
        moved = np.floor((times - late_s) / 0.1 + 1e-9) * 0.1
        counted = 100_000 * moved + 200_000 * np.clip(moved - begin, 0, seconds)
        curve = Curve(times, np.full(len(times), 1.0), [(begin, end)], 1.0, counted)
        energy = measure(curve, "work", [(begin, end)], 100_000.0)
        assert energy.gross_j == pytest.approx(300 * seconds, rel=0.03)
        assert energy.low_j <= 300 * seconds <= energy.high_j


def test_holes_widen_the_interval() -> None:
    run = Run(3, 10, steady)
    kept = (run.times < run.begin + 3) | (run.times > run.begin + 6)
    curve = Curve(run.times[kept], run.mw[kept], [(run.begin, run.end)], STEP_MW)
    energy = measure(curve, "work", [(run.begin, run.end)], None)
    assert "no readings for 3" in energy.note
    whole = run.window()
    assert energy.high_j - energy.low_j > 3 * (whole.high_j - whole.low_j)
    assert energy.low_j <= run.truth_j(run.begin, run.end) <= energy.high_j


@pytest.mark.parametrize(
    ("spans", "note"), [([], "no interval"), ([(100.0, 101.0)], "no reading"), ([(2.0, 2.0)], "no")]
)
def test_nothing_to_measure(spans: list[tuple[float, float]], note: str) -> None:
    curve = Curve(np.array([0.0, 1.0, 2.0]), np.full(3, 5000.0), [], STEP_MW)
    energy = measure(curve, "work", spans, None)
    assert energy.gross_j is None
    assert energy.low_j is None
    assert energy.note.startswith(note)


def test_merged() -> None:
    assert merged([(5, 6), (0, 1), (1.1, 2), (0.5, 0.7)], 0.2) == [(0, 2), (5, 6)]
    assert merged([], 1) == []
