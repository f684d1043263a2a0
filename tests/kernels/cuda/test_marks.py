"""Waiting for the end of a cycle: slept through, with few looks, and never past what is needed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from edge_runtime.kernels.cuda import cycle


class Clock:
    """Time that passes by sleeping and, a little, by looking."""

    def __init__(self) -> None:
        self.now, self.looks = 100.0, 0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


class Event:
    """One that comes at a time."""

    def __init__(self, clock: Clock, at: float) -> None:
        self.clock, self.at = clock, at

    def query(self) -> bool:
        self.clock.looks += 1
        self.clock.now += 1e-6
        return self.clock.now >= self.at

    def synchronize(self) -> None:
        self.clock.now = max(self.clock.now, self.at)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(cycle, "time", made)
    return made


def marks(clock: Clock, end: float) -> Any:
    made = cycle._Marks(False)
    made._events = [Event(clock, end) for _ in range(6)]
    return made


@pytest.mark.parametrize("expected", [3e-4, 0.011, 0.4])
@pytest.mark.parametrize("late", [0.5, 0.97, 0.99, 1.0, 1.02, 1.3])
@pytest.mark.parametrize("arrived", [0.0, 0.4, 2.0])
def test_an_end_about_when_it_is_expected(
    clock: Clock, expected: float, late: float, arrived: float
) -> None:
    begun = clock.now
    end = begun + late * expected
    clock.now += arrived * expected  # the host did something else before
    marks(clock, end).wait(0, begun, expected)
    soonest = max(end, begun + cycle.SLEEP_PART * expected, begun + arrived * expected)
    assert end <= clock.now <= soonest + (cycle.LOOK_PART + 0.001) * expected + 1e-4
    if 0.97 <= late <= 1.02:
        assert clock.looks <= 4


def test_an_end_of_which_nothing_is_known(clock: Clock) -> None:
    end = clock.now + 7
    marks(clock, end).wait(2, clock.now, None)
    assert (clock.now, clock.looks) == (end, 0)


def test_marks_of_cycles_that_overlap(clock: Clock) -> None:
    """Two cycles wait to be read: no mark is put again before both its cycles are read."""
    made, put = cycle._Marks(False), set()
    waiting: list[tuple[int, int]] = []
    for number in itertools.count():
        if number == 50:
            return
        if len(waiting) == 2 or (waiting and number % 7 == 0):
            begin, read = waiting.pop(0)
            assert made.seconds(begin, read) == pytest.approx(1.0)
            put -= {begin, read % 3}
        begin = made.begin(number, follows=bool(waiting))
        if not waiting:
            assert begin not in put
        clock.now += 1.0
        assert number % 3 not in put
        made.end(number)
        put |= {number % 3}
        waiting.append((begin, number))
