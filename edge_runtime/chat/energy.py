"""Joules of the turns of a chat.

Invariant: without a source nothing is shown and `why` says why; an explicit source that does not
work is an error. While a chat waits for its user the time counts as idle, and reading stops after a
minute of it; the record is begun anew after an hour, so that it stays small.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from edge_runtime.power import Meter, PowerUnavailable, WindowEnergy, open_meter
from edge_runtime.power.energy import IDLE

WAIT_S = 60.0  # at the prompt, until reading stops
SETTLED_S = 2.0  # after an answer, until the sensor shows idle
SHORTEST_IDLE_S = 1.0
RECORD_S = 3600.0


class TurnEnergy:
    """A meter that runs during turns; `start` it before the first."""

    def __init__(self, source: str) -> None:
        """Open a source by its name. Raises PowerUnavailable for one that was named, UsageError."""
        self._name = source
        self._meter: Meter | None = None
        self._timer: threading.Timer | None = None
        self._begun_s = self._waiting_s = 0.0
        self._turns = 0
        self._last: WindowEnergy | None = None
        self.why = "not asked for" if source == "none" else ""
        if source != "none":
            self._open()

    @property
    def has_source(self) -> bool:
        """Whether joules are measured."""
        return self._meter is not None

    def close(self) -> None:
        """Stop reading."""
        self._cancel_timer()
        if self._meter is not None:
            self._meter.stop(tail=False)

    # ---- turns

    def begin(self) -> None:
        """A turn begins: what went before was idle."""
        self._cancel_timer()
        if self._meter is None:
            return
        now = time.monotonic()
        if self._waiting_s:
            begin, end = self._waiting_s + SETTLED_S, min(now, self._waiting_s + WAIT_S)
            if end - begin >= SHORTEST_IDLE_S:
                self._meter.window(IDLE).add(begin, end)
        if self._begun_s and now - self._begun_s > RECORD_S:
            self._meter.stop(tail=False)
            self._open()
        self._start()

    def end(self, begin_s: float, first_s: float, num_tokens: int) -> dict[str, Any] | None:
        """A turn is over; return the energy of its decoding, as documents carry it.

        begin_s, first_s: when it began and when its first token was there, monotonic; num_tokens:
        those after the first. None: there is no source, or the turn was too short for it (`lines`).
        """
        meter, now = self._meter, time.monotonic()
        self._waiting_s = now
        if meter is None:
            return None
        self._timer = threading.Timer(WAIT_S, meter.stop, kwargs={"tail": False})
        self._timer.daemon = True
        self._timer.start()
        if meter.ended:
            self.why = "; ".join(meter.notes)
        self._turns += 1
        meter.window(f"turn {self._turns}").add(begin_s, now)
        if num_tokens < 1 or first_s >= now:
            self._last = None
            return None
        name = f"decode {self._turns}"
        meter.window(name).add(first_s, now)
        self._last = energy = meter.energy(name)
        if energy.gross_j is None:
            return None
        return {
            "source": meter.source,
            "rail": meter.rail,
            "gross_j": energy.gross_j,
            "net_j": energy.net_j,
            "j_per_token": energy.gross_j / num_tokens,
        }

    # ---- for people

    def last_lines(self) -> list[str]:
        """Return what /stats says of the last turn."""
        if self._meter is None:
            return [f"energy   not measured: {self.why}"]
        last = self._last
        if last is None:
            return ["energy   the last answer was too short"]
        if last.gross_j is None or last.low_j is None or last.high_j is None:
            return [f"energy   {last.note or 'unknown'}"]
        whole = self._meter.energy(f"turn {self._turns}").gross_j
        parts = [f"{last.gross_j:.2f} ± {(last.high_j - last.low_j) / 2:.2f} J decoding"]
        parts += [f"{whole:.2f} J with the prompt"] if whole is not None else []
        parts += [f"net {last.net_j:.2f} J"] if last.net_j is not None else []
        return [f"energy   {', '.join(parts)}; {self._meter.rail} by {self._meter.source}"]

    def lines(self) -> list[str]:
        """Return what /power says: the source, what it reads, or why there is none."""
        if self._meter is None:
            return [f"No joules: {self.why}"]
        meter = self._meter
        lines = [f"power from {meter.source}: {meter.rail} ({meter.scope})"]
        if (sample := meter.latest()) is not None:
            rails = "  ".join(f"{name} {mw / 1000:.2f} W" for name, mw in sample.rails.items())
            age = time.monotonic() - sample.time_s
            when = "now" if age < 2 else f"{age:.0f} s ago"
            lines.append(f"{when} {sample.total_mw / 1000:.2f} W   {rails}".rstrip())
        idle = meter.idle_mw()
        lines.append("idle: not seen yet" if idle is None else f"idle {idle / 1000:.2f} W")
        return [*lines, *meter.why, *meter.notes]

    # ----

    def _open(self) -> None:
        try:
            self._meter = open_meter(self._name)
        except PowerUnavailable as error:
            self._fail(error)
            return
        self._start()
        self._begun_s = self._waiting_s = time.monotonic()

    def _start(self) -> None:
        if self._meter is None:
            return
        try:
            self._meter.start()
        except PowerUnavailable as error:
            self._fail(error)

    def _fail(self, error: PowerUnavailable) -> None:
        """Of `auto` a source may be missing; one that was named may only fail later on."""
        if self._name != "auto" and self._turns == 0:
            raise error
        self._meter, self.why = None, error.message

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            with contextlib.suppress(RuntimeError):
                self._timer.join(2.0)
            self._timer = None
