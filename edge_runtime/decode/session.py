"""A conversation: messages kept, the KV cache reused for what the next prompt shares with the last.

Invariant: the ids of a turn are those of rendering all messages at once, so reuse can never change
an answer; a turn that fails leaves the history as it was, one that is stopped keeps what was said.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edge_runtime.decode.engine import Engine
from edge_runtime.decode.generation import Generation
from edge_runtime.decode.request import Result, Token


class Session:
    """Multi-turn chat over one engine."""

    def __init__(self, engine: Engine, *, system: str | None = None) -> None:
        """system: the system prompt, or None for the template's own."""
        self.engine = engine
        self.messages: list[dict[str, str]] = []
        if system:
            self.messages.append({"role": "system", "content": system})
        self._generation: Generation | None = None
        self.last: Result | None = None

    def ask(self, text: str, **options: Any) -> Iterator[Token]:
        """Yield the answer to a user message; options as for `Engine.generate`.

        The turn is added to `messages` when the answer ends: by itself, by `cancel`, by a deadline,
        by Ctrl-C or because the caller stopped iterating; one stopped before its first word is
        forgotten. Raises what `Engine.generate` raises,
        leaving the history unchanged.
        """
        turn = [*self.messages, {"role": "user", "content": text}]
        generation = self.engine.generate(turn, **options)
        self._generation = generation
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

    def cancel(self) -> None:
        """Stop the running answer within one cycle; what was said so far is kept."""
        if self._generation is not None:
            self._generation.cancel()

    def clear(self) -> None:
        """Forget the conversation, keep the system prompt."""
        self.messages = [m for m in self.messages if m["role"] == "system"]
