"""Joules of a profile: windows of a power meter by row and phase, as plain data."""

from __future__ import annotations

import dataclasses
from typing import Any

from edge_runtime.power import Meter, PowerUnavailable, open_meter


class Joules:
    """A meter that runs while a profile is measured; use as a context manager."""

    def __init__(self, source: str) -> None:
        """Open a source by its name. Raises PowerUnavailable and UsageError."""
        self._meter: Meter = open_meter(source)
        if self._meter.source == "none":
            raise PowerUnavailable("no power source was asked for (--power-source none)")
        self._names: set[str] = set()

    def __enter__(self) -> Joules:
        """Start reading."""
        self._meter.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop reading."""
        self._meter.__exit__(*error)

    def measure_idle(self, seconds: float) -> None:
        """Take the power of a quiet stretch for idle."""
        self._meter.measure_idle(seconds)

    def add(self, name: str, started: float, ended: float) -> None:
        """Count an interval of the monotonic clock, in s, to a window."""
        self._names.add(name)
        self._meter.window(name).add(started, ended)

    def stop(self) -> None:
        """Sample past the end of the last window, then stop."""
        self._meter.stop()

    def document(self, name: str) -> dict[str, Any] | None:
        """Return the energy of a window; None: there was none of that name."""
        if name not in self._names:
            return None
        return dataclasses.asdict(self._meter.energy(name))

    def summary(self) -> dict[str, Any]:
        """Say where joules come from."""
        lag = self._meter.lag()
        return {
            "source": self._meter.source,
            "rail": self._meter.rail,
            "scope": self._meter.scope,
            "why": self._meter.why,
            "notes": self._meter.notes,
            "idle_mw": self._meter.idle_mw(),
            "lag": None if lag is None else dataclasses.asdict(lag),
        }
