"""What the command line logs, as a terminal gets it."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest

from edge_runtime import log


def test_the_log_keeps_control_characters_from_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    seen = Terminal()
    log.configure(stream=seen)
    logger = logging.getLogger("edge_runtime.cli")
    logger.info("a %s", "\x1b]0;x\x07\tb")
    logger.info("quiet\x1b[0m", extra={"quiet": True})
    logger.warning("%s", Path("\x9b2J"))
    assert seen.getvalue().splitlines() == [
        "a ␛]0;x␇\tb", "\x1b[2mquiet␛[0m\x1b[0m", "\x1b[33mwarning:\x1b[0m ␡2J"
    ]  # fmt: skip


def test_the_symbols_of_control_characters() -> None:
    assert log.printable("a\x1b[31m\x9b\tb\n\x7f") == "a␛[31m␡\tb\n␡"
    assert log.printable("👩\u200d👧 é\u00a0x") == "👩\u200d👧 é\u00a0x"
