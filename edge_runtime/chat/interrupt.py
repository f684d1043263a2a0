"""Ctrl-C while an answer is made: the first one asks it to stop, the second one insists.

Invariant: the handler that was there before is there again afterwards.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopOnInterrupt:
    """A context in which SIGINT calls `stop`; a second one raises KeyboardInterrupt as usual."""

    def __init__(self, stop: Callable[[], None]) -> None:
        """`stop` is called from the signal handler, so it must only set a flag."""
        self._stop = stop
        self._before: Any = None
        self.pressed = False

    def __enter__(self) -> StopOnInterrupt:
        """Take over SIGINT; outside the main thread nothing can, and nothing is done."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        """Give SIGINT back."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        self._stop()
