"""What makes numbers incomparable is said."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from edge_runtime.measure import state


def board(**fields: Any) -> dict[str, Any]:
    found = state.snapshot()
    found["load"] = 0.0
    clock = {"now_mhz": 900.0, "min_mhz": 900.0, "max_mhz": 900.0}
    found["board"] |= {"model": "Jetson", "mode": "MAXN", "gpu": clock} | fields
    return found


def test_a_quiet_machine_gives_no_warning() -> None:
    before = state.snapshot() | {"load": 0.0}
    assert state.warnings(before, before) == []
    before = board(throttling=[], over_current={"oc1": 4})
    assert state.warnings(before, deepcopy(before)) == []


def test_each_reason() -> None:
    busy = state.snapshot() | {"load": 3.0, "cores": 2}
    assert "load 3.0 on 2 cores" in state.warnings(busy, busy)[0]
    slow = board(mode="15W")
    assert "power mode 15W" in state.warnings(slow, slow)[0]
    loose = board(gpu={"now_mhz": 300.0, "min_mhz": 300.0, "max_mhz": 900.0})
    assert "jetson_clocks" in state.warnings(loose, loose)[0]
    before, after = board(over_current={"oc3": 4}), board(over_current={"oc3": 9})
    assert "oc3 rose by 5" in state.warnings(before, after)[0]
    hot = board(throttling=["gpu-throttle-alert"])
    assert "gpu-throttle-alert" in state.warnings(board(), hot)[0]
    assert "changed while measuring" in state.warnings(board(), board(mode="30W"))[0]
