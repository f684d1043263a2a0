"""A conversation: messages kept, the KV cache reused for what the next prompt shares with the last.

Invariant: the ids of a turn are those of rendering all messages at once, so reuse can never change
an answer; a turn that fails leaves the history as it was, one that is stopped keeps what was said.
A turn is a user's message and what follows it; the engine's cache keeps the common prefix over
another answer, turns taken back and turns dropped alike.
"""

from __future__ import annotations

import bisect
from collections.abc import Generator
from typing import Any

from edge_runtime.decode.engine import Engine
from edge_runtime.decode.generation import Generation
from edge_runtime.decode.request import Result, Token
from edge_runtime.errors import UsageError

Message = dict[str, str]
Tokens = Generator[Token, None, None]


class Session:
    """Multi-turn chat over one engine."""

    def __init__(
        self, engine: Engine, *, system: str | None = None, thinking: bool | None = None
    ) -> None:
        """system: the system prompt, or None for the template's own; thinking: see `think`."""
        self.engine = engine
        self.messages: list[Message] = []
        if system:
            self.messages.append({"role": "system", "content": system})
        self.thinking: bool | None = None
        if thinking is not None:
            self.think(thinking)
        self._generation: Generation | None = None
        self._cancelled = False
        self.last: Result | None = None

    # ---- turns

    def ask(self, text: str, *, drop: int = 0, **options: Any) -> Tokens:
        """Yield the answer to a user message; options as for `Engine.generate`.

        The turn is added to `messages` when the answer ends: by itself, by `cancel`, by a deadline,
        by Ctrl-C or because the caller stopped iterating; one stopped before its first word is
        forgotten. drop: so many of the oldest turns are left out, and forgotten with the turn's
        end. Raises what `Engine.generate` raises, leaving the history unchanged.
        """
        yield from self._answer(text, self._kept(self.messages, drop), options)

    def ask_again(self, *, drop: int = 0, **options: Any) -> Tokens:
        """Yield another answer to the last message, in place of the one that is there.

        As `ask`; where that one fails or is stopped before its first word, the old answer stays.
        Raises UsageError before the first turn.
        """
        before, text = self._last_turn()
        yield from self._answer(text, self._kept(before, drop), options)

    def undo(self) -> str:
        """Forget the last turn and return its message. Raises UsageError before the first."""
        self.messages, text = self._last_turn()
        return text

    def cancel(self) -> None:
        """Stop the running answer within one cycle; what was said so far is kept."""
        self._cancelled = True  # the prompt may still be on its way to the engine
        if self._generation is not None:
            self._generation.cancel()

    def clear(self) -> None:
        """Forget the conversation, keep the system prompt."""
        self.messages = [m for m in self.messages if m["role"] == "system"]

    @property
    def system(self) -> str | None:
        """The system prompt, or None for the template's own; may be set."""
        return next((m["content"] for m in self.messages if m["role"] == "system"), None)

    @system.setter
    def system(self, text: str | None) -> None:
        others = [m for m in self.messages if m["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *others] if text else others

    @property
    def num_turns(self) -> int:
        """Messages of the user in the history."""
        return len(_starts(self.messages))

    @property
    def last_text(self) -> str:
        """The last message of the user. Raises UsageError before the first turn."""
        return self._last_turn()[1]

    # ---- thinking

    @property
    def can_think(self) -> bool:
        """Whether the model's template lets thinking be chosen (`enable_thinking`)."""
        return "enable_thinking" in (self.engine.text.chat_template or "")

    def think(self, thinking: bool | None) -> None:
        """Turn thinking on or off; None: as the template does by itself. Raises UsageError."""
        if thinking is not None and not self.can_think:
            raise UsageError(
                "thinking: this model's chat template has no enable_thinking",
                "it answers in the one way that it knows",
            )
        self.thinking = thinking

    @property
    def template(self) -> dict[str, bool]:
        """What the chat template is given beside the messages: `Engine.generate`'s `template`."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking}

    def prompt(self, messages: list[Message]) -> list[int]:
        """Return the ids that a prompt of these messages has."""
        return self.engine.encode_chat(messages, **self.template)

    # ---- room

    def num_tokens(self, text: str | None = None, *, drop: int = 0, again: bool = False) -> int:
        """Return the tokens of the prompt that a message would make; of the history without one.

        again: as `ask_again` would ask it.
        """
        kept = self._kept(self._last_turn()[0] if again else self.messages, drop)
        messages = kept if text is None else [*kept, _user(text)]
        return len(self.prompt(messages)) if messages else 0

    def turns_to_drop(self, text: str, room: int, *, again: bool = False) -> int:
        """Return how many of the oldest turns must go to leave `room` tokens for the answer; all of
        them where even that is not enough."""
        limit = self.engine.context - room
        drops = range(self.num_turns - again + 1)

        def spare(drop: int) -> int:
            return limit - self.num_tokens(text, drop=drop, again=again)

        return min(bisect.bisect_left(drops, 0, key=spare), drops[-1])

    # ----

    def _answer(self, text: str, kept: list[Message], options: dict[str, Any]) -> Tokens:
        self._cancelled = False
        turn = [*kept, _user(text)]
        generation = self.engine.generate(turn, **({"template": self.template} | options))
        self._generation = generation
        if self._cancelled:
            generation.cancel()
        failed = False
        try:
            yield from generation
        except Exception:
            failed = True
            raise
        finally:
            self._generation = None
            if not failed:
                generation.close()
                self.last = generation.result
                said = generation.result.text
                if said or generation.result.finish_reason not in ("cancelled", "deadline"):
                    self.messages = [*turn, {"role": "assistant", "content": said}]

    def _last_turn(self) -> tuple[list[Message], str]:
        starts = _starts(self.messages)
        if not starts:
            raise UsageError("there is no message yet", "ask something first")
        return self.messages[: starts[-1]], self.messages[starts[-1]]["content"]

    def _kept(self, messages: list[Message], drop: int) -> list[Message]:
        if drop <= 0:
            return messages
        starts = [*_starts(messages), len(messages)]
        first = starts[min(drop, len(starts) - 1)]
        return [m for m in messages[:first] if m["role"] == "system"] + messages[first:]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _starts(messages: list[Message]) -> list[int]:
    """Where turns begin."""
    return [i for i, m in enumerate(messages) if m["role"] == "user"]
