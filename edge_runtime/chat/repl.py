"""The chat at a terminal: a line is a turn, one that begins with `/` and a word is a command.

Invariant: whatever a turn meets (an error, Ctrl-C), the chat goes on; a failed turn leaves the
history as it was, a stopped one keeps what was said. Answers go to stdout, the rest to stderr.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from edge_runtime.chat import render
from edge_runtime.chat.interrupt import StopOnInterrupt
from edge_runtime.decode.session import Session
from edge_runtime.errors import BitnestError

PROMPT, MORE = ">>> ", "... "
FENCE = '"""'
LEAVE = "To leave: /exit or Ctrl-D."
HELP = '''\
/help          this list
/clear         forget the conversation, keep the system prompt
/system TEXT   set the system prompt; without TEXT show it
/stats         figures of the last answer
/exit, /quit   leave (so does Ctrl-D)
"""            begins and ends a message of several lines
Ctrl-C         stops an answer; what was said is kept'''

ReadLine = Callable[[str], str]


class Repl:
    """One chat over a session; `run` returns when the user leaves."""

    def __init__(
        self, session: Session, options: dict[str, Any], read_line: ReadLine | None = None
    ) -> None:
        """`options` go to every `Session.ask`; `read_line` raises EOFError at the end of input."""
        self.session = session
        self._options = options
        self._read_line = read_line or read_terminal_line
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self._say(HELP),
            "?": lambda _: self._say(HELP),
            "clear": self._clear,
            "system": self._system,
            "stats": self._stats,
        }

    def run(self) -> None:
        """Read and answer until /exit or the end of input."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() then has editing and a history)
        self._say("Type a message. /help lists the commands.")
        while True:
            try:
                if not self._step():
                    return
            except EOFError:
                print(file=sys.stderr)
                return
            except KeyboardInterrupt:
                self._say("\n" + LEAVE)

    def _step(self) -> bool:
        """Read one message and act on it; False when the user leaves."""
        text, is_line = self._read_message()
        if not text.strip():
            return True
        word, *rest = text.split(maxsplit=1)
        if not is_line:
            self.turn(text)
        elif word in ("/exit", "/quit", "/bye"):
            return False
        elif word.startswith("/") and (word[1:].isalpha() or word[1:] in self._commands):
            self._command(word[1:], "".join(rest).strip())
        else:
            self.turn(text)
        return True

    def turn(self, text: str) -> None:
        """Ask and show the answer; an expected error is shown and forgotten."""
        session = self.session
        writer = render.TextWriter(sys.stdout)
        try:
            with StopOnInterrupt(session.cancel):
                render.stream_answer(session.ask(text, **self._options), writer)
        except BitnestError as error:
            if writer.num_chars:
                writer.end()
            self._say(f"error: {error.message}")
            if error.hint:
                self._say(f"hint: {error.hint}")
            return
        except KeyboardInterrupt:
            writer.end()
            self._say("Broken off; what was said is kept.")
            return
        assert session.last is not None
        render.finish_answer(session.last, writer)
        self._say(render.dim(render.figures(session.last), sys.stderr))

    def _read_message(self) -> tuple[str, bool]:
        """Read one line, or several between two fences, which are never a command."""
        line = self._read_line(PROMPT)
        if not line.lstrip().startswith(FENCE):
            return line, True
        lines = [line.lstrip().removeprefix(FENCE)]
        while not lines[-1].rstrip().endswith(FENCE):
            lines.append(self._read_line(MORE))
        lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
        return "\n".join(lines).strip("\n"), False

    def _command(self, name: str, rest: str) -> None:
        if name in self._commands:
            self._commands[name](rest)
        else:
            self._say(f"Unknown command /{name}. /help lists the commands.")

    def _clear(self, _: str) -> None:
        self.session.clear()
        self._say("The conversation is forgotten.")

    def _system(self, text: str) -> None:
        others = [m for m in self.session.messages if m["role"] != "system"]
        if text:
            self.session.messages = [{"role": "system", "content": text}, *others]
            self._say("System prompt set.")
            return
        found = [m["content"] for m in self.session.messages if m["role"] == "system"]
        self._say(found[0] if found else "No system prompt of yours; the model's own applies.")

    def _stats(self, _: str) -> None:
        last = self.session.last
        for line in render.statistics(last) if last else ["No answer yet."]:
            self._say(line)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def read_terminal_line(prompt: str) -> str:
    """Read a line from stdin; the prompt goes to the terminal, never into a redirected stdout."""
    if sys.stdout.isatty():
        return input(prompt)
    sys.stderr.write(prompt)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")
