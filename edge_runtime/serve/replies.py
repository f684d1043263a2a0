"""Bodies of answers as the OpenAI API has them: whole, in chunks, and errors."""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from edge_runtime.decode.logprobs import LogProbs
from edge_runtime.decode.request import Result, Token
from edge_runtime.errors import BitnestError, BudgetError, ContextError
from edge_runtime.text.stream import TextStream
from edge_runtime.text.tokenizer import Tokenizer

FINISH = {"eos": "stop", "stop": "stop", "length": "length", "deadline": "length"}
KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 405: "invalid_request_error", 408: "invalid_request_error",
    413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error",
}  # fmt: skip
HINTS: dict[type, str] = {
    ContextError: "shorten the messages or the prompt",
    BudgetError: "try again later",
}


def error_body(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """The shape of every error."""
    kind = KINDS.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def of_error(error: BitnestError) -> tuple[int, dict[str, Any]]:
    """Status and body of an error; the hint goes with the message. One that names flags of the
    command line, which clients cannot give, is replaced."""
    hint = error.hint
    if "--" in hint:
        hint = next((text for kind, text in HINTS.items() if isinstance(error, kind)), "")
    message = error.message + (f" ({hint})" if hint else "")
    code = "context_length_exceeded" if isinstance(error, ContextError) else None
    return error.http_status, error_body(error.http_status, message, code)


def usage(result: Result) -> dict[str, Any]:
    """Numbers of tokens."""
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.new_tokens,
        "total_tokens": result.prompt_tokens + result.new_tokens,
        "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": result.draft.get("accepted", 0),
            "rejected_prediction_tokens": result.draft.get("drafted", 0)
            - result.draft.get("accepted", 0),
        },
    }


class Told(NamedTuple):
    """A token's log-probabilities. start: of its text in the answer, in characters."""

    id: int
    values: LogProbs
    start: int


@dataclass
class Reply:
    """One answer, of a chat or a completion. with_usage: a last chunk of a stream tells it."""

    model: str
    chat: bool
    tokenizer: Tokenizer
    eos_ids: Collection[int] = ()
    with_usage: bool = False
    id: str = field(init=False)
    created: int = field(init=False)
    _spelled: TextStream | None = None  # without stop strings: where each token begins
    _waiting: deque[Told] = field(default_factory=deque)
    _length: int = 0  # characters of all tokens so far
    _shown: int = 0  # of these, what is known to be of the answer

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.chat else "cmpl"
        self.id, self.created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())

    # whole

    def add(self, token: Token) -> None:
        """Take a token of the whole answer, or of a stream."""
        self._shown += len(token.text)
        if token.logprobs is not None:
            if self._spelled is None:
                self._spelled = TextStream(self.tokenizer, continues=not self.chat)
            self._waiting.append(Told(token.id, token.logprobs, self._length))
            self._length += len(self._spelled.push(token.id).text)

    def whole(self, result: Result) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": result.text, "refusal": None}
        else:
            choice["text"] = result.text
        logprobs = self._logprobs(self._rest(result))
        choice |= {"logprobs": logprobs, "finish_reason": FINISH[result.finish_reason]}
        kind = "chat.completion" if self.chat else "text_completion"
        return self._body(kind, [choice]) | {"usage": usage(result)}

    # in chunks

    def first(self) -> Iterator[bytes]:
        """What a stream begins with."""
        if self.chat:
            yield self._event(self._chunk({"role": "assistant", "content": "", "refusal": None}))

    def piece(self, token: Token) -> Iterator[bytes]:
        """A token; nothing while its text is held back. Log-probabilities come with the text: of
        what a stop string cuts none are told."""
        self.add(token)
        told = []
        while self._waiting and self._waiting[0].start < self._shown:
            if len(self._waiting) == 1 and token.id in self.eos_ids:
                break  # it may be the end, which is no part of the answer
            told.append(self._waiting.popleft())
        if token.text or told:
            yield self._event(self._chunk(self._delta(token.text), self._logprobs(told)))

    def last(self, result: Result, rest: str = "") -> Iterator[bytes]:
        """The end of a stream; rest: text that no token brought."""
        told = self._rest(result)
        if rest or told:
            yield self._event(self._chunk(self._delta(rest), self._logprobs(told)))
        delta: dict[str, Any] = {} if self.chat else {"text": ""}
        yield self._event(self._chunk(delta, finish=FINISH[result.finish_reason]))
        if self.with_usage:
            kind = "chat.completion.chunk" if self.chat else "text_completion"
            yield self._event(self._body(kind, []) | {"usage": usage(result)})
        yield b"data: [DONE]\n\n"

    def broken(self, error: BitnestError) -> Iterator[bytes]:
        """An error after the stream began."""
        yield self._event(of_error(error)[1])

    def _delta(self, text: str) -> dict[str, Any]:
        return {"content" if self.chat else "text": text}

    def _chunk(
        self, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "logprobs": logprobs, "finish_reason": finish}
        choice |= {"delta": delta} if self.chat else delta
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        body = self._body(kind, [choice])
        return body | {"usage": None} if self.with_usage else body

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "choices": choices,
        }  # fmt: skip

    def _event(self, body: dict[str, Any]) -> bytes:
        return b"data: " + dumped(body) + b"\n\n"

    # log-probabilities

    def _rest(self, result: Result) -> list[Told]:
        """What of the waiting ones is told at the end: without the token that ends an answer, and
        without those beyond a stop string."""
        told = list(self._waiting)
        if result.finish_reason == "eos":
            return told[:-1]
        if result.finish_reason == "stop":
            return [t for t in told if t.start < len(result.text)]
        return told

    def _logprobs(self, told: Sequence[Told]) -> dict[str, Any] | None:
        if not told:
            return None
        if self.chat:
            content = [
                self._entry(t.id, t.values.chosen)
                | {"top_logprobs": [self._entry(*other) for other in t.values.top]}
                for t in told
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._name(t.id) for t in told],
            "token_logprobs": [t.values.chosen for t in told],
            "top_logprobs": [{self._name(i): value for i, value in t.values.top} for t in told],
            "text_offset": [t.start for t in told],
        }

    def _entry(self, token_id: int, value: float) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token_id, skip_special=False)
        return {"token": self._name(token_id), "logprob": value, "bytes": list(data)}

    def _name(self, token_id: int) -> str:
        return self.tokenizer.token_bytes(token_id, skip_special=False).decode("utf-8", "replace")


def dumped(body: Any) -> bytes:
    """JSON without line breaks, so that it is one line of a stream."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
