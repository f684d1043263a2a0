"""Logging to stderr with the standard library.

Invariant: importing the package configures nothing; a program that embeds it owns its logging. Only
the command line calls `configure`. Colour is used on a terminal that wants it (`NO_COLOR`, `TERM`).
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

ROOT = "edge_runtime"
_COLOURS = {logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31"}


def use_colour(stream: TextIO) -> bool:
    """Say whether `stream` is a terminal on which colour is welcome (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


class _Formatter(logging.Formatter):
    """`warning: text`; information without a prefix; debugging with its module and time."""

    def __init__(self, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno == logging.INFO:
            return text
        if record.levelno < logging.INFO:
            return f"{record.relativeCreated / 1000:8.3f} {record.name}: {text}"
        label = record.levelname.lower() + ":"
        code = _COLOURS.get(record.levelno)
        if self._colour and code:
            label = f"\x1b[{code}m{label}\x1b[0m"
        return f"{label} {text}"


def configure(verbosity: int = 0, stream: TextIO | None = None) -> None:
    """Send this package's log to stderr: -1 errors, 0 information, 1 debugging. Safe to repeat."""
    out = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(out)
    handler.setFormatter(_Formatter(use_colour(out)))
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.propagate = False
    levels = {-1: logging.ERROR, 0: logging.INFO, 1: logging.DEBUG}
    logger.setLevel(levels[max(-1, min(1, verbosity))])
