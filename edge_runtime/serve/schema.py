"""JSON schemas as llguidance's grammars, under limits; and the vocabulary that it is told.

Invariant: a matcher is made in one way, here, by the server as by the helper that tries a schema
first (`trial.py`), so what passed there is made here in the same time and memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from edge_runtime.errors import UsageError, cut

if TYPE_CHECKING:
    from edge_runtime.decode.engine import Engine

MAX_SCHEMA_CHARS = 100_000
MAX_REASON_CHARS = 300
# one line: where any white space may stand, small models write nothing else
FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# a step takes tens of milliseconds at most; a state takes 1 to 2 kB
LIMITS: Any = {
    "step_lexer_fuel": 200_000, "step_max_items": 50_000, "max_items_in_row": 2000,
    "max_lexer_states": 50_000, "initial_lexer_fuel": 1_000_000, "max_grammar_size": 500_000,
}  # fmt: skip


def installed() -> bool:
    """Whether llguidance is there."""
    return importlib.util.find_spec("llguidance") is not None


class Vocabulary(msgspec.Struct, dict=True):
    """Tokens as llguidance asks a tokenizer for them; names of these fields are its own. `encode`
    is set where the model's tokenizer is."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_ids: list[int]
    bos_token_id: None = None

    @classmethod
    def of(cls, engine: Engine) -> Vocabulary:
        """Return an engine's."""
        tokenizer, ids = engine.tokenizer, range(engine.num_tokens)
        found = cls(
            [tokenizer.token_bytes(i, skip_special=False) for i in ids],
            [i for i in ids if tokenizer.is_special(i)],
            sorted(engine.eos_ids),
        )
        found.encode = lambda text: tokenizer.encode(
            text.decode("utf-8", "replace"), allow_special=False
        )
        return found

    @property
    def eos_token_id(self) -> int:
        """The first of those that end an answer."""
        return self.eos_ids[0]

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of text that a grammar forces."""
        return self.encode(text)

    @cached_property
    def encode(self) -> Callable[[bytes], list[int]]:
        """Without the tokenizer: the longest token first, which costs what the usual one does."""
        ids = {token: i for i, token in enumerate(self.tokens)}
        longest = max(map(len, ids))

        def greedy(text: bytes) -> list[int]:
            found, at = [], 0
            while at < len(text):
                sizes = range(min(longest, len(text) - at), 0, -1)
                size = next((n for n in sizes if text[at : at + n] in ids), 0)
                found += [ids[text[at : at + size]]] if size else []
                at += size or 1
            return found

        return greedy

    def told(self) -> Any:
        """Tell llguidance: a tenth of a second for 50,000 tokens."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(self), len(self.tokens), eos_token=self.eos_ids)


def matcher(told: Any, text: str) -> Any:
    """Return the matcher of a schema's text. Raises UsageError."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        rules = LLMatcher.grammar_from_json_schema(text, overrides=FORM)
        found = LLMatcher(told, rules, log_level=0, limits=LLParserLimits(**LIMITS))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"response_format: {_short(error)}") from None
    if found.is_error():
        raise UsageError(
            f"response_format: the schema cannot be followed: {_short(found.get_error())}"
        )
    return found


def mask(found: Any) -> bytes:
    """Return which tokens may follow, a bit for each. Raises UsageError where the matcher has
    given up: what it allows then is no answer of the schema."""
    bits: bytes = b"" if found.is_error() else found.compute_bitmask()
    if found.is_error():
        raise UsageError(
            f"response_format: the schema is too much to follow: {_short(found.get_error())}"
        )
    return bits


def _short(reason: object) -> str:
    """Without the matcher's state, which llguidance adds."""
    text = " ".join(str(reason).partition("<state>")[0].split())
    return cut(
        text.replace("NoExtensionBias", "no text that it allows has an end"), MAX_REASON_CHARS
    )
