"""What a source of power readings is, and one that is polled by a thread.

Invariant: a sample's time is this process's monotonic clock when it was read; a sample without its
total is not delivered. A source reports why it ended; it never raises in its thread.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from edge_runtime.errors import BackendUnavailable, BitnestError
from edge_runtime.power.tegrastats import Record

MAX_FAILED_READS = 20


class PowerUnavailable(BackendUnavailable):
    """No source of power readings, or not the one that was asked for; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One reading. `energy_mj` only from a source that counts energy itself."""

    time_s: float
    total_mw: float
    rails: dict[str, int] = field(default_factory=dict)
    energy_mj: float | None = None
    record: Record | None = None


Emit = Callable[[Sample], None]


class Source(ABC):
    """A source of samples. `rail` and `scope` are known once `probe` returned."""

    name = ""
    rail = ""
    scope = ""
    live = True  # readings are of this machine now

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.ended: str | None = None  # why no more samples will come
        self.notes: list[str] = []

    @abstractmethod
    def probe(self) -> str:
        """Read once and say what was found. Raises PowerUnavailable with the reason."""

    @abstractmethod
    def start(self, emit: Emit) -> None:
        """Deliver samples to `emit` from another thread until `stop`."""

    @abstractmethod
    def stop(self) -> None:
        """End the thread, and the child if there is one. Safe to repeat."""


class PolledSource(Source):
    """A source that is read at its own interval."""

    def __init__(self, interval_s: float) -> None:
        super().__init__(interval_s)
        self._halt = threading.Event()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def read(self) -> Sample:
        """Read now. Raises PowerUnavailable when there is no total."""

    def start(self, emit: Emit) -> None:
        """Poll in a daemon thread."""
        self._halt.clear()
        self.ended = None
        self._thread = threading.Thread(
            target=self._poll, args=(emit,), name=f"power-{self.name}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._halt.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
            self._thread = None

    def _poll(self, emit: Emit) -> None:
        due = time.monotonic()
        failed = 0
        while not self._halt.is_set():
            try:
                emit(self.read())
                failed = 0
            except BitnestError as error:
                failed += 1
                if self.live and failed >= MAX_FAILED_READS:
                    self.ended = f"{failed} readings in a row failed: {error.message}"
                    return
            # a reader that was held up goes on at the next full interval, without a burst
            now = time.monotonic()
            due += self.interval_s * max(1, -(-(now - due) // self.interval_s))
            self._halt.wait(max(0.0, due - now))
