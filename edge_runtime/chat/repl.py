"""The chat at a terminal: a message is a turn, one line that begins with `/` and a word a command.

Invariant: whatever a turn meets (an error, Ctrl-C), the chat goes on; a failed turn leaves the
history as it was, a stopped one keeps what was said. Nothing of a conversation is cut without being
asked for. Answers go to stdout, the rest to stderr.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from edge_runtime import log
from edge_runtime.chat import render
from edge_runtime.chat.commands import LEAVE, Commands
from edge_runtime.chat.energy import TurnEnergy
from edge_runtime.chat.interrupt import StopOnInterrupt
from edge_runtime.chat.lines import FENCE, Reader, without_fences
from edge_runtime.chat.saved import ModelName
from edge_runtime.chat.settings import Settings
from edge_runtime.chat.throttle import ThrottleWatch
from edge_runtime.decode.request import Result
from edge_runtime.decode.session import Session, Tokens
from edge_runtime.errors import BitnestError

HOW_TO_LEAVE = "To leave: /exit or Ctrl-D."
LEAST_ROOM = 32  # tokens; with fewer left for an answer the context counts as full
TEMPLATE = 128  # tokens that a template may add to each message
FULL = """\
The context is full: this prompt has {prompt} tokens, the context holds {context} with its answer.
  d   drop the {turns} and answer; the rest is read anew ({kept} tokens)
  s   stop: nothing is sent; /undo, /clear or a shorter message make room"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a chat has around it."""

    model: ModelName
    energy: TurnEnergy
    throttle: ThrottleWatch


class Repl:
    """One chat over a session; `run` returns when the user leaves."""

    def __init__(
        self, session: Session, settings: Settings, reader: Reader, around: Surroundings
    ) -> None:
        """`settings` make the options of every turn."""
        self.session, self.settings = session, settings
        self.model, self.energy, self._throttle = around.model, around.energy, around.throttle
        self.asked_again = 0  # how often the last message was answered anew
        self._reader = reader
        self._commands = Commands(self)

    def run(self) -> None:
        """Read and answer until /exit or the end of input."""
        self.say("Type a message. /help lists the commands.")
        for line in self._throttle.look():
            self.say(line)
        try:
            while True:
                try:
                    if not self._step():
                        return
                except EOFError:
                    print(file=sys.stderr)
                    return
                except KeyboardInterrupt:
                    self.say("\n" + HOW_TO_LEAVE)
        finally:
            self.energy.close()

    def _step(self) -> bool:
        """Read one message and act on it; False when the user leaves."""
        text = self._reader.read()
        if not text.strip():
            return True
        word, *rest = text.split(maxsplit=1)
        if text.lstrip().startswith(FENCE):
            if (inner := without_fences(text)).strip():
                self.turn(inner)
        elif "\n" in text.strip() or not word.startswith("/"):
            self.turn(text)
        elif (name := word[1:].lower()) in LEAVE:
            return False
        elif name.isalpha() or name == "?":
            with self._told():
                self._commands.run(name, "".join(rest).strip())
        else:
            self.turn(text)
        return True

    def turn(self, text: str) -> None:
        """Ask and show the answer; an error is shown and forgotten."""
        with self._told():
            if (drop := self._make_room(text, again=False)) is not None:
                self.asked_again = 0
                self._show(self.session.ask(text, drop=drop, **self.settings.options()))

    def regenerate(self) -> None:
        """Answer the last message again. Raises UsageError where there is none."""
        if (drop := self._make_room(self.session.last_text, again=True)) is None:
            return
        self.asked_again += 1
        options = self.settings.options(self.asked_again)
        if options["sampling"].temperature == 0:
            self.say("Greedy: the answer is the same again. /set temp 0.8 lets it differ.")
        self._show(self.session.ask_again(drop=drop, **options))

    def say(self, text: str, *, quiet: bool = False) -> None:
        """Tell the user something that is no answer; it may quote a file, whose control characters
        are shown and not obeyed."""
        text = log.printable(text)
        print(log.dim(text, sys.stderr) if quiet else text, file=sys.stderr, flush=True)

    # ----

    def _show(self, tokens: Tokens) -> None:
        """Show an answer as it comes, and its figures."""
        session = self.session
        writer = render.TextWriter(sys.stdout, dims=session.can_think)
        self.energy.begin()
        begin = time.monotonic()

        def told_beside(line: str) -> None:
            writer.interject(lambda: self.say(line))

        try:
            with (
                contextlib.closing(tokens),  # a turn that is broken off ends here, not later
                StopOnInterrupt(session.cancel),
                self._throttle.during(told_beside),
            ):
                render.stream_answer(tokens, writer)
        except KeyboardInterrupt:
            writer.end()
            self.energy.end(begin, begin, 0)
            self.say("Broken off; what was said is kept.")
            return
        except BaseException:
            if writer.num_chars:
                writer.end()
            self.energy.end(begin, begin, 0)
            raise
        last = session.last
        assert last is not None
        last.energy = self.energy.end(begin, begin + last.ttft_s, last.new_tokens - 1)
        if last.finish_reason == "cancelled" and not last.text:
            self.say("Stopped before the first word; the message is forgotten.")
            return
        render.finish_answer(last, writer)
        self._say_figures(last)

    def _say_figures(self, result: Result) -> None:
        line = render.figures(result)
        if self.settings.options()["sampling"].temperature > 0:
            line += f"{render.SEPARATOR}seed {result.seed}"
        self.say(render.folded(line, sys.stderr), quiet=True)

    def _make_room(self, text: str, again: bool) -> int | None:
        """Return how many of the oldest turns to leave out, as the user chose; None: do not ask."""
        session = self.session
        context, turns = session.engine.context, session.num_turns - again
        most = self.settings.options()["max_new_tokens"]
        least = min(LEAST_ROOM, most, context // 4)
        texts = [text, *(m["content"] for m in session.messages)]
        if sum(len(t.encode()) + TEMPLATE for t in texts) + least <= context:
            return 0  # surely fits, for a token has at least a byte: no need to count
        prompt = session.num_tokens(text, again=again)
        if prompt + least <= context or not turns:
            return 0  # what does not fit at all the engine refuses, with the numbers
        drop = session.turns_to_drop(text, min(most, context // 4), again=again)
        kept = session.num_tokens(text, drop=drop, again=again)
        if kept + least > context:
            return 0  # dropping turns does not help: the engine says so
        oldest = "oldest turn" if drop == 1 else f"{drop} oldest turns"
        self.say(FULL.format(prompt=prompt, context=context, turns=oldest, kept=kept))
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            if self._reader.ask("d or s? [s] ").strip().lower() in ("d", "drop"):
                return drop
        self.say("Not sent.")
        return None

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Tell an error and go on: a conversation must not be lost to one."""
        try:
            yield
        except BitnestError as error:
            self.say(f"error: {error.message}")
            if error.hint:
                self.say(f"hint: {error.hint}")
        except OSError:
            raise  # stdout is gone
        except Exception as error:  # a bug: told, and the history is as before
            if os.environ.get("BITNEST_DEBUG", "") not in ("", "0"):
                self.say("".join(traceback.format_exception(error)).rstrip())
            self.say(f"error: a bug in bitnest-edge: {type(error).__name__}: {error}")
            self.say("hint: the conversation is as it was before; /save FILE keeps it")
