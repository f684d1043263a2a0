"""What requests may hold, as the OpenAI API names it; every field is known or refused.

Policy: an unknown field is an error that names it. Some fields are taken and change nothing (user,
metadata, …); `NEUTRAL` ones are taken where they ask for nothing special. Source: OpenAI API
reference, "Chat" and "Completions"; top_k, min_p, repetition_penalty, ignore_eos and
chat_template_kwargs are named as other servers of the field do; deadline_s is ours.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw

from edge_runtime.decode.arguments import MAX_NEW_TOKENS
from edge_runtime.decode.logprobs import MOST_ALTERNATIVES
from edge_runtime.decode.sampling import Sampling
from edge_runtime.errors import UsageError, cut

MAX_STOPS = 16
# what the template gets otherwise, and arguments of who renders it
TEMPLATE_NAMES = {
    "messages", "tools", "add_generation_prompt", "self", "tokenizer", "bos_id", "add_bos",
    "bos_token", "eos_token", "max_tokens",
}  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
}

Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=MAX_NEW_TOKENS)]
Seed = Annotated[int, Meta(extra_json_schema={"minimum": -(2**63), "maximum": 2**63 - 1})]
NOT_READ: Any = msgspec.field(default_factory=Raw)
Stop = str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """A piece of a message; only text is understood."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One message of a conversation, as the model's template gets it; an answer may come back with
    whatever OpenAI's client writes beside its content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    parsed: Raw = NOT_READ  # the content once more, as its reader understood it
    # taken where they hold nothing
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None

    def __post_init__(self) -> None:
        """Refuse what no template is given."""
        for name in ("refusal", "annotations", "audio", "function_call"):
            if getattr(self, name) not in (None, "", [], {}):
                raise ValueError(f"`{name}` of a message is not supported beyond null")

    def for_template(self) -> dict[str, Any]:
        """Return plain data: parts of text are joined, `developer` is what templates call `system`.

        Raises UsageError.
        """
        text = self.content
        if isinstance(text, list):
            text = "".join(part.text for part in text)
        role = "system" if self.role == "developer" else self.role
        found: dict[str, Any] = {"role": role, "content": text or ""}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        if self.tool_calls:
            found["tool_calls"] = [_tool_call(call) for call in self.tool_calls]
        return found


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as data, which the API has as the text of a JSON object;
    templates write them as JSON themselves. Raises UsageError."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(text, type=dict[str, Any]) if text.strip() else {}
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise UsageError(
            f"tool_calls: expected a JSON object as the text of `arguments`, got {cut(text)!r} "
            f"({_reason(error)})"
        ) from None
    return call | {"function": function | {"arguments": arguments}}


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """The schema of an answer; strict is always so."""

    name: str = ""
    schema: dict[str, Any] = {}
    description: str = ""
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """What form the answer has."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """include_usage: one more chunk at the end with the numbers of tokens."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of request take."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 24)] | None = None
    min_p: Share | None = None
    presence_penalty: Annotated[float, Meta(ge=-1000, le=1000)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    seed: Seed | None = None
    stop: Stop = None
    deadline_s: Annotated[float, Meta(gt=0, le=86400)] | None = None
    ignore_eos: bool | None = False
    # taken, and never decoded
    user: Raw = NOT_READ
    metadata: Raw = NOT_READ
    store: Raw = NOT_READ
    service_tier: Raw = NOT_READ
    safety_identifier: Raw = NOT_READ
    prompt_cache_key: Raw = NOT_READ
    parallel_tool_calls: Raw = NOT_READ
    # taken where they ask for nothing special
    n: Any = UNSET
    best_of: Any = UNSET
    echo: Any = UNSET
    suffix: Any = UNSET
    frequency_penalty: Any = UNSET
    logit_bias: Any = UNSET
    modalities: Any = UNSET
    tool_choice: Any = UNSET

    def __post_init__(self) -> None:
        """Refuse what is asked for and not built. msgspec makes an error of the request of it."""
        for name, neutral in NEUTRAL.items():
            value = getattr(self, name)
            same = any(type(value) is type(one) and value == one for one in neutral)  # true is no 1
            if value is not UNSET and value is not None and not same:
                known = " and ".join(
                    repr(one) for i, one in enumerate(neutral) if one not in neutral[:i]
                )
                raise ValueError(f"`{name}` is not supported beyond {known}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError("`seed`: expected a whole number from -2^63 to 2^63 - 1")
        if isinstance(self.stop, list) and not all(self.stop):
            raise ValueError("`stop`: expected texts that are not empty")

    @property
    def stops(self) -> list[str]:
        """Stop strings."""
        return [] if not self.stop else [self.stop] if isinstance(self.stop, str) else self.stop

    def sampling(self) -> Sampling:
        """How tokens are chosen; temperature 1 and a seed of its own where none is given."""
        given = {
            name: value
            for name in ("top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty")
            if (value := getattr(self, name)) is not None
        }
        temperature = 1.0 if self.temperature is None else self.temperature
        seed = secrets.randbits(63) if self.seed is None else self.seed % 2**64
        return Sampling(temperature=temperature, seed=seed, **given)


class ChatRequest(Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_ALTERNATIVES)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def num_top(self) -> int | None:
        """Alternatives beside each token's own log-probability; None: neither."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """Tokens of the answer at most."""
        return self.max_completion_tokens or self.max_tokens

    def __post_init__(self) -> None:
        """Refuse alternatives without log-probabilities, and template variables of ours."""
        super().__post_init__()
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs`: true")
        taken = TEMPLATE_NAMES & set(self.chat_template_kwargs or ())
        if taken:
            raise ValueError(f"`chat_template_kwargs` may not hold {', '.join(sorted(taken))}")
        form = self.response_format
        if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
            raise ValueError("`response_format`: json_schema goes with the type json_schema")


class CompletionRequest(Common, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[int | str]
    logprobs: Annotated[int, Meta(ge=0, le=MOST_ALTERNATIVES)] | None = None

    @property
    def num_top(self) -> int | None:
        """As of `ChatRequest`."""
        return self.logprobs

    @property
    def limit(self) -> int | None:
        """Tokens of the answer at most; 16 by default, as the API has it."""
        return self.max_tokens or 16

    def engine_prompt(self) -> str | list[int]:
        """One text or one list of ids. Raises UsageError for several."""
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if not prompt:
            raise UsageError("the prompt is empty", "give at least one token of text")
        if isinstance(prompt, str):
            return prompt
        ids = [token for token in prompt if isinstance(token, int)]
        if len(ids) < len(prompt):
            got = "several texts" if not ids else "both"
            raise UsageError(f"prompt: expected one text or a list of token ids, got {got}")
        return ids


_DECODERS = {kind: msgspec.json.Decoder(kind) for kind in (ChatRequest, CompletionRequest)}


def decode(kind: type[Any], body: bytes) -> Any:
    """Parse the body of a request. Raises UsageError in one line that names the field."""
    try:
        return _DECODERS[kind].decode(body)
    except msgspec.ValidationError as error:
        raise UsageError(f"the request is not valid: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the request is not JSON: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if "truncated" in str(error):  # msgspec says so of both
        return "it ends too early, or a text in it ends with half of a surrogate pair"
    return str(error)
