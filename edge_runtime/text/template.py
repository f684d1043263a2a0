"""Chat templates: messages to the ids a model was trained on; content cannot forge markers.

Invariant: a special token in the result was written by the template, never by a message. What a
user types as `<|im_end|>` reaches the model as those ten characters.

How: templates come from strangers, so they run in Jinja's immutable sandbox without a loader, with
bounds on source and output. When no message spells a special token (the usual case) the rendered
text is encoded at once. When one does, each such name inside the messages is replaced by a random
mark before rendering; the template (its trims, splits and conditions) sees everything else as it
is. Afterwards the marks are turned back into their text and that text alone is encoded with special
tokens off, jointly with its neighbours, so the split of words at its edges is the usual one.

It does not bound the time a template may take: sandboxed loops are bounded by `range`'s limit and
by the output's size only.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from edge_runtime.errors import UsageError
from edge_runtime.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_SOURCE_CHARS = 200_000
_MAX_OUTPUT_CHARS = 50_000_000


class ChatTemplate:
    """One model's chat template, compiled on first use. `source` None: the model has none."""

    def __init__(self, source: str | None, *, bos_token: str = "", eos_token: str = "") -> None:
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._compiled: jinja2.Template | None = None

    @property
    def has_template(self) -> bool:
        """Whether chat is possible at all; without it only plain completion is."""
        return bool(self._source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt text. `variables` (e.g. enable_thinking) are passed to the template.

        Raises UsageError: no template, an unknown role, or the template's own complaint.
        """
        for message in messages:
            role = message.get("role")
            if role not in ROLES:
                raise UsageError(f"message role: expected one of {', '.join(ROLES)}, got {role!r}")
        template = self._compile()
        try:
            pieces = template.generate(
                **self._tokens
                | variables
                | {
                    "messages": [dict(m) for m in messages],
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
            return _join_bounded(pieces)
        except _Refusal as error:
            raise UsageError(f"the model's chat template refuses this: {error}") from None
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise UsageError(f"the model's chat template failed: {_one_line(error)}") from None
        except (LookupError, AttributeError, RecursionError) as error:
            raise UsageError(f"the model's chat template failed: {_one_line(error)}") from None

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        bos_id: int | None = None,
        add_bos: bool = False,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the prompt's ids; `add_bos` puts BOS first unless the template wrote it.

        Raises ContextError for text that cannot fit in `max_tokens`, before it is encoded.
        """
        marks = _Marks(tokenizer)
        try:
            safe_messages = [
                {k: v if k == "role" else marks.hide(v) for k, v in m.items()} for m in messages
            ]
            safe_tools = marks.hide(list(tools)) if tools else None
            variables = {k: marks.hide(v) for k, v in variables.items()}
        except RecursionError:
            raise UsageError("what the chat template gets is nested too deeply") from None
        text = self.render(
            safe_messages,
            add_generation_prompt=add_generation_prompt,
            tools=safe_tools,
            **variables,
        )
        segments = marks.segments(text)
        if max_tokens is not None:
            tokenizer.check_fits("".join(part for part, _ in segments), max_tokens)
        if marks.used:
            ids = tokenizer.encode_segments(segments)
        else:
            ids = tokenizer.encode(text, allow_special=True)
        if add_bos and bos_id is not None and ids[:1] != [bos_id]:
            ids.insert(0, bos_id)
        return ids

    def _compile(self) -> jinja2.Template:
        if not self._source:
            raise UsageError(
                "this model has no chat template", "use plain completion: generate --raw"
            )
        if len(self._source) > _MAX_SOURCE_CHARS:
            raise UsageError(
                f"the model's chat template is too long: expected at most {_MAX_SOURCE_CHARS} "
                f"characters, got {len(self._source)}"
            )
        if self._compiled is None:
            try:
                self._compiled = _environment().from_string(self._source)
            except (jinja2.TemplateError, RecursionError) as error:
                raise UsageError(
                    f"the model's chat template is not valid Jinja: {_one_line(error)}"
                ) from None
        return self._compiled


class _Refusal(Exception):
    """A template called `raise_exception`."""


class _Marks:
    """Random stand-ins for the names of special tokens inside message text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._nonce = f"Z{secrets.token_hex(12)}"
        self._texts: list[str] = []

    @property
    def used(self) -> bool:
        return bool(self._texts)

    def hide(self, value: Any) -> Any:
        """Copy a JSON-like value with every special-token name in its strings replaced."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, Mapping):
            return {self.hide(k): self.hide(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(v) for v in value]
        return value

    def _hide_text(self, text: str) -> str:
        pieces, at = [], 0
        for start, end in self._tokenizer.special_spans(text):
            pieces += [text[at:start], f"{self._nonce}x{len(self._texts)}Z"]
            self._texts.append(text[start:end])
            at = end
        return "".join([*pieces, text[at:]])

    def segments(self, text: str) -> list[tuple[str, bool]]:
        """Split rendered text into (text, may name special tokens)."""
        parts = re.split(f"{self._nonce}x([0-9]+)Z", text)
        return [
            (self._texts[int(part)], False) if i % 2 else (part, True)
            for i, part in enumerate(parts)
        ]


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with products and powers bounded: a short template must not fill memory."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse a repetition or a power whose result would be huge."""
        sizes = [len(v) if isinstance(v, (str, list, tuple)) else abs(v) for v in (left, right)]
        if operator == "**" or max(sizes[0], 1) * max(sizes[1], 1) > _MAX_OUTPUT_CHARS:
            raise _Refusal("it multiplies beyond reason")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: marks text for training, inert here."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Any) -> Any:
        """Return the block's body unchanged."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Plain JSON: Jinja's own filter escapes <, > and & for HTML, which models were not trained on.
    allowed = {k: v for k, v in options.items() if k in ("ensure_ascii", "separators", "sort_keys")}
    return json.dumps(value, indent=indent, **({"ensure_ascii": False} | allowed))


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(_one_line(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _join_bounded(pieces: Any) -> str:
    text, size = [], 0
    for piece in pieces:
        text.append(piece)
        size += len(piece)
        if size > _MAX_OUTPUT_CHARS:
            raise _Refusal(f"its output is longer than {_MAX_OUTPUT_CHARS} characters")
    return "".join(text)


def _one_line(value: object) -> str:
    return " ".join(str(value).split())[:300] or type(value).__name__
