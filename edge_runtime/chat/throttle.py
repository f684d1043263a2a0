"""Heat and power guards that slow a Jetson down, noticed while an answer is made.

Invariant: looking reads a few small files of the kernel, changes nothing and never fails. Each
change is told once; a power guard's events once a turn, for some boards count them all the time.
On another machine nothing is read and no thread is started.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from edge_runtime.machine import read
from edge_runtime.profiles.detect import (
    over_current,
    temperatures_c,
    throttling,
    why_no_jetson,
)

EVERY_S = 0.5
# which guards the counters stand for: board_checks.over_current
GUARDS = {
    "oc1": "under-voltage",
    "oc2": "average over-current",
    "oc3": "instantaneous over-current",
}


class ThrottleWatch:
    """Looks at one board."""

    def __init__(self, root: Path, every_s: float = EVERY_S) -> None:
        """root: stands in for /."""
        self._root, self._every_s = root, every_s
        self._alerts: set[str] = set()
        self._counts: dict[str, int] = {}
        self._told: set[str] = set()
        model, release = read(root / "proc/device-tree/model"), read(root / "etc/nv_tegra_release")
        self.is_jetson = why_no_jetson(root, model, release) is None
        if self.is_jetson:
            self._counts = over_current(root) or {}

    def look(self) -> list[str]:
        """Return what changed since the last look, as lines for people."""
        alerts = set(throttling(self._root) or ())
        lines = []
        if new := sorted(alerts - self._alerts):
            lines.append(f"throttling: {', '.join(new)}{self._heat()}: the board runs slower")
        if self._alerts and not alerts:
            lines.append("throttling is over")
        self._alerts = alerts
        counts = over_current(self._root) or {}
        for name, count in counts.items():
            risen = count - self._counts.get(name, 0)
            if risen > 0 and name not in self._told:
                self._told.add(name)
                guard = GUARDS.get(name, name)
                lines.append(f"power: {risen} {guard} event{'s' * (risen > 1)}: clocks were cut")
        self._counts = counts
        return lines

    @contextlib.contextmanager
    def during(self, say: Callable[[str], None]) -> Iterator[None]:
        """Look while a turn runs; `say` is called from another thread."""
        if not self.is_jetson:
            yield
            return
        self._told.clear()
        over = threading.Event()
        thread = threading.Thread(
            target=self._watch, args=(over, say), name="throttle-watch", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _watch(self, over: threading.Event, say: Callable[[str], None]) -> None:
        while True:
            for line in self.look():
                say(line)
            if over.wait(self._every_s):
                return

    def _heat(self) -> str:
        temperatures = temperatures_c(self._root) or {}
        hottest = max(temperatures.items(), key=lambda one: one[1], default=None)
        return f", {hottest[0]} at {hottest[1]:.0f} C" if hottest else ""
