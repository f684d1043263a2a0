"""Throttling and power guards of a board, told the moment they change."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import boards
import pytest

from edge_runtime.chat.throttle import ThrottleWatch

ALERT = "sys/class/thermal/cooling_device1/cur_state"  # gpu-throttle-alert
COUNTER = "sys/class/hwmon/hwmon3/oc{}_event_cnt"


@pytest.fixture
def board(tmp_path: Path) -> Path:
    return boards.make(tmp_path, **boards.NX16, over_current=(0, 0, 7))


def test_a_quiet_board_says_nothing(board: Path) -> None:
    watch = ThrottleWatch(board)
    assert watch.is_jetson
    assert watch.look() == []


def test_each_change_is_told_once(board: Path) -> None:
    watch = ThrottleWatch(board)
    boards.write(board, ALERT, "1\n")
    assert watch.look() == ["throttling: gpu-throttle-alert, cpu at 51 C: the board runs slower"]
    assert watch.look() == []
    boards.write(board, ALERT, "0\n")
    assert watch.look() == ["throttling is over"]


def test_throttling_from_the_start(tmp_path: Path) -> None:
    hot = boards.make(tmp_path, **boards.NX16, throttling=("cpu-throttle-alert",))
    assert "cpu-throttle-alert" in ThrottleWatch(hot).look()[0]


def test_a_power_guard_is_told_once_a_turn(board: Path) -> None:
    watch = ThrottleWatch(board, every_s=0.005)
    said: list[str] = []
    for turn in (1, 2):
        with watch.during(said.append):
            for count in range(1, 4):
                boards.write(board, COUNTER.format(1), f"{10 * turn + count}\n")
                time.sleep(0.03)
        assert len(said) == turn, said
    assert "under-voltage event" in said[0]


def test_the_moment_it_happens(board: Path) -> None:
    watch, said = ThrottleWatch(board, every_s=0.01), threading.Event()
    with watch.during(lambda line: said.set()):
        time.sleep(0.05)
        assert not said.is_set()
        boards.write(board, ALERT, "1\n")
        assert said.wait(2.0)  # while the turn still runs


def test_another_machine_has_no_thread(tmp_path: Path) -> None:
    watch = ThrottleWatch(tmp_path)
    before = threading.active_count()
    with watch.during(lambda line: None):
        assert threading.active_count() == before
    assert watch.look() == []
