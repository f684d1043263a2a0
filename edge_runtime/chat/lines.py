"""Where messages are read: with editing and history at a terminal, plainly anywhere else.

Invariant: a reader returns a whole message, raises EOFError at the end of input and
KeyboardInterrupt at Ctrl-C. prompt_toolkit is imported only where stdin and stdout are terminals
that can move their cursor. A message of several lines is pasted (bracketed), written with Alt-Enter
between its lines, or stands between two `\"\"\"`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from edge_runtime.chat.history import HistoryFile

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT, MORE = ">>> ", "... "
FENCE = '"""'
NO_EDITING = (
    "prompt_toolkit is not installed: lines are read without history across runs; "
    "pip install 'bitnest-edge[chat]' brings it"
)


class Reader(Protocol):
    """Reads what a user types."""

    def read(self) -> str:
        """Read a message or a command."""

    def ask(self, question: str) -> str:
        """Read an answer to a question, which is kept in no history."""


def open_reader(history: HistoryFile, commands: Sequence[str]) -> tuple[Reader, str]:
    """Return the reader for this terminal, and what its user should know of it, or nothing."""
    able = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") not in _PLAIN
    if not able:
        return PlainReader(), ""
    if importlib.util.find_spec("prompt_toolkit") is None:
        return PlainReader(), NO_EDITING
    return EditingReader(history, commands), ""


_PLAIN = (None, "", "dumb")


def is_open(text: str) -> bool:
    """Whether a message begins with a fence and its other one is still to come."""
    if not text.lstrip().startswith(FENCE):
        return False
    return not text.lstrip().removeprefix(FENCE).rstrip().endswith(FENCE)


def without_fences(text: str) -> str:
    """Return what stands between two fences."""
    inner = text.strip().removeprefix(FENCE).removesuffix(FENCE)
    return inner.strip("\n")


def clean(text: str) -> str:
    """Return text without halves of characters, which a terminal may send and no file takes."""
    return text.encode("utf-8", "replace").decode()


class PlainReader:
    """A line at a time; where Python has readline, `input` lets it be edited."""

    def __init__(self) -> None:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401

    def read(self) -> str:
        """Read a line, and on to the closing fence where it begins with one."""
        text = self.ask(PROMPT)
        while is_open(text):
            text += "\n" + self.ask(MORE)
        return text

    def ask(self, question: str) -> str:
        """Read a line; the prompt goes to the terminal, never into a redirected stdout."""
        if sys.stdout.isatty():
            return clean(input(question))
        sys.stderr.write(question)
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return clean(line.rstrip("\r\n"))


class EditingReader:
    """prompt_toolkit: editing, history across runs, several lines, Tab for commands."""

    def __init__(self, history: HistoryFile, commands: Sequence[str]) -> None:
        """The terminal is not asked where its cursor is: on a serial line nobody may answer."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import InMemoryHistory
        from prompt_toolkit.shortcuts import CompleteStyle

        os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
        self._history = history
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory(history.load()),
            multiline=True,
            prompt_continuation=MORE,
            key_bindings=_bindings(),
            completer=WordCompleter([f"/{name}" for name in commands], sentence=True),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            enable_history_search=False,
        )

    def read(self) -> str:
        """Read a message; Enter ends it, unless a fence is open."""
        text = clean(self._session.prompt(PROMPT))
        self._history.append(text)
        return text

    def ask(self, question: str) -> str:
        """Read one line."""
        from prompt_toolkit import prompt

        return prompt(question)


def _bindings() -> KeyBindings:
    """Enter sends, Alt-Enter begins another line."""
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        if is_open(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
