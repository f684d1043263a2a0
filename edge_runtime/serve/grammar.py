"""JSON and JSON schemas as a rule about an answer, by llguidance.

Invariant: the ids that may follow are a function of the answer (`decode/constraint.py`): the
matcher is moved to the answer asked about, and steps are taken back where a draft was rejected.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_runtime.decode.constraint import Ids
from edge_runtime.errors import BackendUnavailable, UsageError
from edge_runtime.serve import schema
from edge_runtime.serve.schema import MAX_SCHEMA_CHARS, Vocabulary
from edge_runtime.serve.trial import Trials, Verdict
from edge_runtime.serve.worker import QueueFull

if TYPE_CHECKING:
    from edge_runtime.decode.engine import Engine

ANY_OBJECT = {"type": "object"}
MOST_WAITING = 8  # schemas that are not known yet
RETRY_S = 5


class Grammars:
    """Makes rules for one engine's vocabulary, which is told to llguidance at the start."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._told: Any = None
        self._trials: Trials | None = None
        self._turn, self._waiting = asyncio.Lock(), 0

    def start(self) -> None:
        """Tell the vocabulary, here and to the helper that tries schemas; nothing without
        llguidance."""
        if schema.installed():
            vocabulary = Vocabulary.of(self._engine)
            self._trials = Trials(vocabulary)
            self._trials.start()
            self._told = vocabulary.told()

    def stop(self) -> None:
        """End the helper."""
        if self._trials is not None:
            self._trials.stop()

    async def tried(self, wanted: dict[str, Any]) -> str:
        """Return the text of a schema that can be followed within the limits. Raises UsageError,
        BackendUnavailable."""
        if self._trials is None:
            raise BackendUnavailable(
                "response_format needs llguidance, which is not installed",
                "pip install 'bitnest-edge[serve]'",
            )
        try:
            text = json.dumps(wanted)
        except RecursionError:
            raise UsageError("response_format: the schema is nested too deeply") from None
        if len(text) > MAX_SCHEMA_CHARS:
            raise UsageError(
                f"response_format: expected a schema of at most {MAX_SCHEMA_CHARS} characters, "
                f"got {len(text)}"
            )
        if (verdict := self._trials.known(text)) is None:
            verdict = await self._trial(self._trials, text)
        verdict.check()
        return text

    async def _trial(self, trials: Trials, text: str) -> Verdict:
        """Try it when its turn comes: one thread is taken of those that others need too."""
        if self._waiting >= MOST_WAITING:
            raise QueueFull(f"{self._waiting} schemas are being tried", RETRY_S)
        self._waiting += 1
        try:
            async with self._turn:
                return await asyncio.to_thread(trials.run, text)
        finally:
            self._waiting -= 1

    def of_schema(self, text: str) -> Grammar:
        """Return the rule of a schema that was tried. Raises UsageError."""
        found = schema.matcher(self._told, text)
        return Grammar(found, self._engine.num_tokens, sorted(self._engine.eos_ids))


class Grammar:
    """A `Constraint`: one answer's matcher."""

    def __init__(self, matcher: Any, num_tokens: int, eos_ids: list[int]) -> None:
        self._matcher, self._num_tokens, self._eos_ids = matcher, num_tokens, eos_ids
        self._taken: list[int] = []  # tokens that the matcher stands behind

    def allowed(self, answer: Sequence[int]) -> Ids:
        """Return the ids that may follow; after the end, those that end an answer."""
        self._move(answer)
        ended = len(self._taken) < len(answer) or self._matcher.is_stopped()
        if ended and not self._matcher.is_error():
            return np.array(self._eos_ids, np.int64)
        bits = np.frombuffer(schema.mask(self._matcher), np.uint8)
        ids = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: self._num_tokens])
        return ids if len(ids) else np.array(self._eos_ids, np.int64)

    def _move(self, answer: Sequence[int]) -> None:
        shared = 0
        for mine, wanted in zip(self._taken, answer, strict=False):
            if mine != wanted:
                break
            shared += 1
        if shared < len(self._taken):
            self._matcher.rollback(len(self._taken) - shared)
            del self._taken[shared:]
        for token in answer[shared:]:
            if self._matcher.is_stopped() or not self._matcher.consume_token(token):
                return
            self._taken.append(token)
