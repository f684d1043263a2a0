"""The commands of a chat: a line that begins with `/` and a word.

Invariant: a command that fails says why and changes nothing. What they say goes to stderr.
"""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edge_runtime.chat import render, saved
from edge_runtime.errors import BitnestError, UsageError, cut
from edge_runtime.paths import usable

if TYPE_CHECKING:
    from edge_runtime.chat.repl import Repl

LEAVE = ("exit", "quit", "bye")
NAMES = (
    "help", "system", "set", "think", "regen", "undo", "clear",
    "save", "load", "stats", "context", "power",
)  # fmt: skip
ALONE = ("help", "?", "regen", "undo", "clear", "stats", "context", "power")
THINKING = {"on": True, "off": False, "auto": None}
HINTS = {  # for errors that bring none of their own
    "set": "write /set NAME VALUE, as in /set temp 0.7; /set NAME default takes it back",
    "think": "write /think on, /think off or /think auto",
    "save": "give another name",
    "load": "expected a file that /save wrote",
}
HELP = '''\
/help, /?        this list
/system TEXT     set the system prompt; "" for the model's own; no TEXT: show it
/set NAME VALUE  set temp, top-p, top-k, min-p, seed, new-tokens …, or one
                 to its `default`; no VALUE: show it, no NAME: show all
/think on|off    let the model think first, or not; auto: as it does by itself
/regen           another answer to the last message
/undo            take the last message and its answer back
/clear           forget the conversation, keep the system prompt
/save FILE       write the conversation and its settings
/load FILE       go on with a conversation from a file
/stats           figures of the last answer
/context         how much of the context is used, by what
/power           where joules come from, or why there are none
/exit, /quit     leave (so does Ctrl-D)
"""              begins and ends a message of several lines
Alt-Enter        begins another line; a pasted text keeps its lines
Ctrl-C           stops an answer; what was said is kept'''


class Commands:
    """What each command does to one chat."""

    def __init__(self, chat: Repl) -> None:
        self._chat = chat
        self._known: dict[str, Callable[[str], None]] = {
            name: getattr(self, f"_{name}") for name in NAMES
        }
        self._known["?"] = self._help

    def run(self, name: str, rest: str) -> None:
        """Run a command. Raises BitnestError when it cannot be done."""
        if name in self._known:
            try:
                if rest and name in ALONE:
                    raise UsageError(
                        f"/{name}: expected nothing behind it, got {cut(rest)!r}",
                        "/help lists the commands",
                    )
                self._known[name](rest)
            except BitnestError as error:
                error.hint = error.hint or HINTS.get(name, "")
                raise
            return
        near = difflib.get_close_matches(name, NAMES + LEAVE, n=1)
        guess = f" Did you mean /{near[0]}?" if near else ""
        self._say(f"Unknown command /{cut(name)}.{guess} /help lists the commands.")

    def _say(self, text: str) -> None:
        self._chat.say(text)

    def _lines(self, lines: list[str]) -> None:
        self._say("\n".join(lines))

    def _help(self, _: str) -> None:
        self._say(HELP)

    # ---- how it answers

    def _system(self, text: str) -> None:
        session = self._chat.session
        if text:
            session.system = None if text == '""' else text
            self._say("System prompt set." if session.system else "The model's own applies.")
            return
        self._say(session.system or "No system prompt of yours; the model's own applies.")

    def _set(self, rest: str) -> None:
        settings = self._chat.settings
        word, *value = rest.split(maxsplit=1)[:2] or [""]
        if not word:
            self._lines(settings.lines())
            return
        name = settings.name(word)
        if name is None:
            known = ", ".join(settings.values)
            raise UsageError(
                f"/set: unknown name {word[:40]!r}", f"write /set NAME VALUE; the names are {known}"
            )
        if value:
            settings.set(name, value[0].strip())
        shown = settings.values[name]
        self._say(f"{name}  {'new each time' if shown is None else shown}")

    def _think(self, word: str) -> None:
        session = self._chat.session
        if word and word not in THINKING:
            raise UsageError(f"/think: expected on, off or auto, got {word[:40]!r}")
        if word:
            session.think(THINKING[word])
        if not session.can_think:
            self._say("This model's template does not let thinking be chosen.")
            return
        now = next(name for name, value in THINKING.items() if value is session.thinking)
        self._say(f"Thinking: {now}.")

    # ---- what was said

    def _regen(self, _: str) -> None:
        self._chat.regenerate()

    def _undo(self, _: str) -> None:
        text = self._chat.session.undo()
        self._chat.asked_again = 0
        first = text.strip().splitlines()[0] if text.strip() else ""
        self._say(f"Taken back: {first[:60]}{'…' * (len(text) > 60)}")

    def _clear(self, _: str) -> None:
        self._chat.session.clear()
        self._say("The conversation is forgotten.")

    def _save(self, rest: str) -> None:
        session, chat = self._chat.session, self._chat
        if not rest:
            raise UsageError("/save: expected a file", "write /save FILE")
        path = _path(rest)
        said = [m for m in session.messages if m["role"] != "system"]
        document = saved.SavedChat(
            model=chat.model,
            system=session.system,
            thinking=session.thinking,
            settings=dict(chat.settings.values),
            messages=msgspec.convert(said, list[saved.Turn]),
        )
        saved.save(path, document)
        self._say(f"Saved {_turns(session.num_turns)} to {path}.")

    def _load(self, rest: str) -> None:
        session, chat = self._chat.session, self._chat
        if not rest:
            raise UsageError("/load: expected a file", "write /load FILE")
        document = saved.load(_path(rest))
        unknown = [name for name in document.settings if name not in chat.settings.values]
        if unknown:
            raise UsageError(f"{rest}: a damaged saved chat: unknown setting {unknown[0][:40]!r}")
        try:
            settings = chat.settings.restored(document.settings)
        except UsageError as error:
            raise UsageError(f"{rest}: a damaged saved chat: {error.message}") from None
        chat.settings, chat.asked_again = settings, 0
        session.messages = [{"role": t.role, "content": t.content} for t in document.messages]
        session.system = document.system
        session.thinking = document.thinking if session.can_think else None
        session.last = None
        self._say(f"Loaded {_turns(session.num_turns)}.")
        if document.model.sha256 != chat.model.sha256:
            name = document.model.name[:80]
            self._say(f"They were held with another model: {name}. This one goes on.")
        used = session.num_tokens()
        if used >= session.engine.context:
            self._say(f"They have {used} tokens, more than the context holds.")

    # ---- figures

    def _power(self, _: str) -> None:
        self._lines(self._chat.energy.lines())

    def _stats(self, _: str) -> None:
        last = self._chat.session.last
        if last is None:
            self._say("No answer yet.")
            return
        self._lines([*render.statistics(last), *self._chat.energy.last_lines()])

    def _context(self, _: str) -> None:
        session = self._chat.session
        most, used = session.engine.context, session.num_tokens()
        # a turn's share: what the prompt loses without it and those before it
        sizes = [session.num_tokens(drop=n) for n in range(session.num_turns + 1)]
        free = f"{most - used} are free" if used <= most else f"{used - most} too many"
        lines = [f"context  {used} of {most} tokens, {used / most:.0%}; {free}"]
        if sizes[-1]:
            lines.append(f"system   {sizes[-1]} tokens, with what the template adds")
        for number, (size, rest) in enumerate(itertools.pairwise(sizes), start=1):
            lines.append(f"turn {number:<3} {size - rest} tokens")
        if session.last is not None:
            lines.append(f"cache    {session.last.cached_tokens} of the last prompt were in it")
        self._lines(lines)


def _path(text: str) -> Path:
    """Return the path that a user means; terminals quote what is dragged into them."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return usable(os.path.expanduser(text))


def _turns(count: int) -> str:
    return "1 turn" if count == 1 else f"{count} turns"
