"""Power through the user's own jetson-stats (`jtop`), which this project never installs.

Invariant: jtop is imported only to be asked. Its own total is taken only where it names one rail;
else it is the sum of all rails, branches included.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from typing import Any

from edge_runtime.power.rails import total_rule
from edge_runtime.power.source import Emit, PolledSource, PowerUnavailable, Sample

PROBE_S = 3.0


class JtopSource(PolledSource):
    """Power from the jtop service."""

    name = "jtop"

    def __init__(self, interval_s: float) -> None:
        super().__init__(interval_s)
        self._client: Any = None

    def probe(self) -> str:
        """Connect and read once."""
        self._connect()
        try:
            end = time.monotonic() + PROBE_S
            while True:
                try:
                    self.read()
                    return f"reads {self.rail}"
                except PowerUnavailable:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.1)
        finally:
            self.stop()

    def _connect(self) -> None:
        try:
            module = importlib.import_module("jtop")
        except ImportError:
            raise PowerUnavailable("jetson-stats is not installed") from None
        try:
            self._client = module.jtop(interval=self.interval_s)
            self._client.start()
        except Exception as error:  # its own exceptions derive from nothing narrower
            self._client = None
            raise PowerUnavailable(f"jtop: {type(error).__name__}: {error}") from None

    def start(self, emit: Emit) -> None:
        """Connect and poll."""
        self._connect()
        super().start(emit)

    def stop(self) -> None:
        """End polling and close the connection."""
        super().stop()
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):  # closing what the service already closed
                client.close()

    def read(self) -> Sample:
        """Return what the service sent last."""
        try:
            power = self._client.power
        except Exception as error:
            raise PowerUnavailable(f"jtop: {type(error).__name__}: {error}") from None
        now = time.monotonic()
        rails = rails_of(power)
        rule = total_rule(rails)
        if rule is None:
            raise PowerUnavailable(f"no known total among its rails {', '.join(rails) or '(none)'}")
        if not self.rail:
            self.rail, self.scope = rule.name, rule.scope
        if rule.name != self.rail:
            raise PowerUnavailable(f"{self.rail} is missing from its rails")
        return Sample(time_s=now, total_mw=sum(rails[n] for n in rule.rails), rails=rails)


def rails_of(power: object) -> dict[str, int]:
    """Return {rail: mW} of jtop's dictionary; entries may be empty or missing."""
    rails = power.get("rail") if isinstance(power, dict) else None
    if not isinstance(rails, dict):
        return {}
    return {
        str(name): round(entry["power"])
        for name, entry in rails.items()
        if isinstance(entry, dict)
        and isinstance(entry.get("power"), int | float)
        and str(name).upper() != "NC"
    }
