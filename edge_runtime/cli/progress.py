"""Progress of something long: a bar with the time left on a terminal, else a line now and then.

Invariant: everything goes to stderr; with `--quiet` nothing does. The time left is the mean of the
last few steps times the steps left, so that a run which skips finished steps soon tells the truth.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from typing import Any, TextIO

from edge_runtime import log

LINE_EVERY_S = 5.0
_LAST_STEPS = 6


def seconds_text(seconds: float) -> str:
    """Return a duration for people: `42 s`, `6 min 10 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


class Progress:
    """Call it with (steps done, steps in all, what is being done); use as a context manager."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._quiet = not logging.getLogger(log.ROOT).isEnabledFor(logging.INFO)
        self._steps: deque[float] = deque(maxlen=_LAST_STEPS)
        self._step_began = time.monotonic()
        self._last_line = float("-inf")
        self._done = 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        """Show the bar, if the stream is a terminal."""
        if self._stream.isatty() and not self._quiet:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=Console(file=self._stream),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("starting", total=None, left="")
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __call__(self, done: int, total: int, what: str) -> None:
        """Show that `done` of `total` steps are over and `what` runs now."""
        now = time.monotonic()
        if done > self._done:
            each = (now - self._step_began) / (done - self._done)
            self._steps.append(each)
            self._step_began, self._done = now, done
        left = self._left(total)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=what, left=left)
        elif not self._quiet and (done == total or now - self._last_line >= LINE_EVERY_S):
            self._last_line = now
            share = f"{100 * done // max(1, total)} %"
            self._stream.write(" · ".join(part for part in (what, share, left) if part) + "\n")
            self._stream.flush()

    def _left(self, total: int) -> str:
        if not self._steps or self._done >= total:
            return ""
        mean = sum(self._steps) / len(self._steps)
        return f"{seconds_text(mean * (total - self._done))} left"
