"""Chats as tests need them: one in this process with a typed script, one at a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_runtime import Engine, Sampling, Session
from edge_runtime.chat.energy import TurnEnergy
from edge_runtime.chat.lines import FENCE, is_open
from edge_runtime.chat.repl import Repl, Surroundings
from edge_runtime.chat.saved import ModelName
from edge_runtime.chat.settings import Settings
from edge_runtime.chat.throttle import ThrottleWatch
from edge_runtime.errors import UsageError

ENTER = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C and a resize reach it as they do at a terminal
{before}
from edge_runtime.cli import main
main(sys.argv[1:])
"""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")
UP, PASTE, END_OF_PASTE, CTRL_C, CTRL_D = "\x1b[A", "\x1b[200~", "\x1b[201~", "\x03", "\x04"
ALT_ENTER = "\x1b\r"


class Script:
    """A reader that returns lines, raises what is an exception, and then ends."""

    def __init__(self, *typed: str | type[BaseException]) -> None:
        self._left = list(typed)
        self.questions: list[str] = []

    def read(self) -> str:
        text = self._next()
        while is_open(text) and self._left:
            text += "\n" + self._next()
        if is_open(text) and text.strip() != FENCE * 2:
            raise EOFError
        return text

    def ask(self, question: str) -> str:
        self.questions.append(question)
        return self._next()

    def _next(self) -> str:
        if not self._left:
            raise EOFError
        line = self._left.pop(0)
        if isinstance(line, str):
            return line
        raise line


def make_repl(
    engine: Engine,
    *typed: str | type[BaseException],
    session: Session | None = None,
    root: Path = Path("/nowhere"),
    power: str = "none",
    **options: Any,
) -> Repl:
    """A chat that reads `typed`; options go to every answer, but new_tokens, temp and seed."""
    values = {"new-tokens": 6, "temp": 0.0, "seed": None}
    values |= {n.replace("_", "-"): options.pop(n) for n in [*options] if n in NAMES}
    defaults = dict(values)

    def parse(name: str, text: str) -> Any:
        if not text:
            return defaults[name]
        try:
            return float(text) if name == "temp" else int(text)
        except ValueError:
            raise UsageError(f"{name}: {text!r} is no number") from None

    def make(values: Mapping[str, Any]) -> dict[str, Any]:
        sampling = Sampling(temperature=values["temp"], seed=values["seed"] or 0)
        return {"max_new_tokens": values["new-tokens"], "sampling": sampling, **options}

    around = Surroundings(
        model=ModelName("tiny", "0" * 64),
        energy=TurnEnergy(power),
        throttle=ThrottleWatch(root, every_s=0.01),
    )
    return Repl(session or Session(engine), Settings(values, parse, make), Script(*typed), around)


NAMES = ("new_tokens", "temp", "seed")


class Terminal:
    """A chat in a child process that sees a terminal."""

    def __init__(
        self,
        *args: object,
        state: Path,
        term: str = "xterm",
        size: tuple[int, int] = (24, 80),
        before: str = "",
        stdout: int | None = None,
    ) -> None:
        """state: stands in for the user's state folder; before: run first in the child; stdout:
        where it goes in the terminal's place."""
        self._fd, child = pty.openpty()
        self.resize(*size)
        environment = {**os.environ, "NO_COLOR": "1", "TERM": term, "XDG_STATE_HOME": str(state)}
        for name in ("COLUMNS", "LINES"):  # pytest-xdist sets them, and they beat the terminal's
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENTER.format(before=before), *map(str, args)],
            stdin=child,
            stdout=child if stdout is None else stdout,
            stderr=child,
            env=environment,
            start_new_session=True,
        )
        os.close(child)
        self.seen = ""
        self._new = ""

    def until(self, text: str, *, interrupt: bool = False) -> str:
        """Read on until `text` comes and return what came before it, without control sequences;
        `interrupt` sends SIGINT while it does not."""
        deadline = time.monotonic() + 60
        while text not in (plain := CONTROL.sub("", self._new)):
            assert time.monotonic() < deadline, self.seen
            if interrupt:
                self.process.send_signal(signal.SIGINT)
            if select.select([self._fd], [], [], 0.5)[0]:
                try:
                    data = os.read(self._fd, 4096).decode("utf-8", "replace")
                except OSError:
                    raise AssertionError(f"it ended before {text!r}:\n{self.seen}") from None
                self.seen += data
                self._new += data
        before, _, self._new = plain.partition(text)
        return before

    def prompt(self) -> None:
        """Wait until it waits for a message: at a moment when nothing more comes."""
        self.until(">>>")
        while select.select([self._fd], [], [], 0.2)[0]:
            data = os.read(self._fd, 4096).decode("utf-8", "replace")
            self.seen += data
            self._new += data

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def hang_up(self) -> None:
        os.close(self._fd)
        self._fd = -1

    def end(self) -> int:
        deadline = time.monotonic() + 60
        while self._fd >= 0 and time.monotonic() < deadline:
            try:
                data = os.read(self._fd, 4096).decode("utf-8", "replace")
            except OSError:  # the last one has closed its end
                break
            self.seen += data
        code = self.process.wait(60)
        if self._fd >= 0:
            os.close(self._fd)
        assert "Traceback" not in self.seen
        return code
