"""Logging to stderr with the standard library.

Invariant: importing the package configures nothing; a program that embeds it owns its logging. Only
the command line calls `configure`. Colour is used on a terminal that wants it (`NO_COLOR`, `TERM`);
no other control character of what is logged, which may come from any file, reaches it.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

ROOT = "edge_runtime"
QUIET, NORMAL = "\x1b[2m", "\x1b[0m"
_COLOURS = {logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31"}


def use_colour(stream: TextIO) -> bool:
    """Say whether `stream` is a terminal on which colour is welcome (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def dim(text: str, stream: TextIO) -> str:
    """Return text in a quiet colour where colour is welcome."""
    return f"{QUIET}{text}{NORMAL}" if use_colour(stream) else text


def printable(text: str) -> str:
    """Replace control characters, which could rewrite a terminal, by their visible symbols."""
    return "".join(c if c in "\n\t" or c.isprintable() else _symbol(c) for c in text)


def _symbol(c: str) -> str:
    code = ord(c)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F or 0x80 <= code < 0xA0:
        return "\u2421"
    return c  # unprintable to Python, harmless to a terminal: joiners, unassigned


class _Formatter(logging.Formatter):
    """`warning: text`; information without a prefix; debugging with its module and time.

    extra={"quiet": True}: information in a quiet colour.
    """

    def __init__(self, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        text = printable(super().format(record))
        if record.levelno == logging.INFO:
            quiet = self._colour and getattr(record, "quiet", False)
            return f"{QUIET}{text}{NORMAL}" if quiet else text
        if record.levelno < logging.INFO:
            return f"{record.relativeCreated / 1000:8.3f} {record.name}: {text}"
        label = record.levelname.lower() + ":"
        code = _COLOURS.get(record.levelno)
        if self._colour and code:
            label = f"\x1b[{code}m{label}{NORMAL}"
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
