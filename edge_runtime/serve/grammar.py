"""JSON and JSON schemas as a rule about an answer, by llguidance.

Invariant: the ids that may follow are a function of the answer (`decode/constraint.py`): the
matcher is moved to the answer asked about, and steps are taken back where a draft was rejected.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_runtime.decode.constraint import Ids
from edge_runtime.errors import BackendUnavailable, UsageError, cut

if TYPE_CHECKING:
    from edge_runtime.decode.engine import Engine
    from edge_runtime.text.tokenizer import Tokenizer

ANY_OBJECT = {"type": "object"}
MAX_SCHEMA_CHARS = 100_000
# one line: where any white space may stand, small models write nothing else
FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Makes rules for one engine's vocabulary, which is told to llguidance once, on first use."""

    def __init__(self, engine: Engine) -> None:
        self._tokenizer, self._num_tokens = engine.tokenizer, engine.num_tokens
        self._eos_ids = sorted(engine.eos_ids)
        self._vocabulary: Any = None

    def of_schema(self, schema: dict[str, Any]) -> Grammar:
        """Return the rule of a JSON schema. Raises UsageError, BackendUnavailable."""
        if importlib.util.find_spec("llguidance") is None:
            raise BackendUnavailable(
                "response_format needs llguidance, which is not installed",
                "pip install 'bitnest-edge[serve]'",
            )
        from llguidance import LLMatcher

        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA_CHARS:
            raise UsageError(
                f"response_format: expected a schema of at most {MAX_SCHEMA_CHARS} characters, "
                f"got {len(text)}"
            )
        try:
            rules = LLMatcher.grammar_from_json_schema(text, overrides=FORM)
            matcher = LLMatcher(self._told(), rules, log_level=0)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"response_format: {cut(' '.join(str(error).split()), 300)}") from None
        if matcher.is_error():
            reason = cut(" ".join(matcher.get_error().split()), 300)
            raise UsageError(f"response_format: the schema cannot be followed: {reason}")
        return Grammar(matcher, self._num_tokens, self._eos_ids)

    def _told(self) -> Any:
        if self._vocabulary is None:
            from llguidance import LLTokenizer, TokenizerWrapper

            known = TokenizerWrapper(_Vocabulary(self._tokenizer, self._num_tokens, self._eos_ids))
            self._vocabulary = LLTokenizer(known, self._num_tokens, eos_token=self._eos_ids)
        return self._vocabulary


class _Vocabulary:
    """What llguidance asks a tokenizer for."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, num_tokens: int, eos_ids: list[int]) -> None:
        ids = range(num_tokens)
        self.eos_token_id = eos_ids[0]
        self.tokens = [tokenizer.token_bytes(i, skip_special=False) for i in ids]
        self.special_token_ids = [i for i in ids if tokenizer.is_special(i)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"), allow_special=False)


class Grammar:
    """A `Constraint`: one answer's matcher."""

    def __init__(self, matcher: Any, num_tokens: int, eos_ids: list[int]) -> None:
        self._matcher, self._num_tokens, self._eos_ids = matcher, num_tokens, eos_ids
        self._taken: list[int] = []  # tokens that the matcher stands behind

    def allowed(self, answer: Sequence[int]) -> Ids:
        """Return the ids that may follow; after the end, those that end an answer."""
        self._move(answer)
        self._check()
        if len(self._taken) < len(answer) or self._matcher.is_stopped():
            return np.array(self._eos_ids, np.int64)
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        ids = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: self._num_tokens])
        return ids if len(ids) else np.array(self._eos_ids, np.int64)

    def _check(self) -> None:
        """Raise where the matcher has given up: what it allows then is no answer of the schema."""
        if self._matcher.is_error():
            reason = cut(" ".join(self._matcher.get_error().split()), 300)
            raise UsageError(f"response_format: the schema is too much to follow: {reason}")

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
