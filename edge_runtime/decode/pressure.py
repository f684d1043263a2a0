"""Whether the machine still has the memory that was to be left to others.

Invariant: looking costs some microseconds and is done between cycles, at most four times a second;
there is no thread. What an engine does about it (`Engine.relieve`, refusing new work) changes speed
and who is served, never a token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from edge_runtime import machine
from edge_runtime.errors import BudgetError
from edge_runtime.plan.footprint import reserve_bytes

LOOK_EVERY_S = 0.25
STALLED_PERCENT = 10.0  # of the last 10 s in which nothing could run for want of memory


class MemoryPressure(BudgetError):
    """New work is refused while other processes have taken the memory that was to stay free."""


@dataclass(slots=True)
class MemoryWatch:
    """Watches the machine for one engine."""

    reserve_bytes: int = 0
    root: Path = machine.ROOT
    low: bool = False  # at the last look
    fell: bool = False  # then, and not at the one before
    looks: int = field(default=0, repr=False)
    _next: float = field(default=0.0, repr=False)

    def __post_init__(self) -> None:
        """Keep a little free even where no reserve was asked for."""
        self.reserve_bytes = reserve_bytes(self.reserve_bytes, machine.total_bytes(self.root))

    def due(self) -> bool:
        """Look if the last look is old; return whether it was made and memory is low."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + LOOK_EVERY_S
        return bool(self.look())

    def look(self) -> str:
        """Look now; return why memory is low, or nothing."""
        self.looks += 1
        why = self._why()
        self.fell = bool(why) and not self.low
        self.low = bool(why)
        return why

    def _why(self) -> str:
        available = machine.available_bytes(self.root)
        if available is not None and available < self.reserve_bytes:
            return (
                f"{available / 2**20:.0f} MiB are available and {self.reserve_bytes / 2**20:.0f} "
                "MiB are to stay free"
            )
        stalled = machine.stalled_percent(self.root)
        if stalled is not None and stalled >= STALLED_PERCENT:
            return f"processes waited for memory {stalled:.0f} % of the last 10 s"
        return ""

    def refuse_new_work(self) -> None:
        """Raise MemoryPressure while memory is low."""
        if why := self.look():
            raise MemoryPressure(
                f"memory: other processes took the reserve: {why}",
                "end something else, lower --reserve, or try again: it is looked at each time",
            )
