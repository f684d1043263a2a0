"""Bodies of answers as the OpenAI API has them: whole, in chunks, and errors."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_runtime.decode.logprobs import LogProbs
from edge_runtime.decode.request import Result, Token
from edge_runtime.errors import BitnestError, ContextError
from edge_runtime.text.tokenizer import Tokenizer

FINISH = {"eos": "stop", "stop": "stop", "length": "length", "deadline": "length"}
KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 405: "invalid_request_error", 413: "invalid_request_error",
    415: "invalid_request_error", 429: "rate_limit_error",
}  # fmt: skip


def error_body(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """The shape of every error."""
    kind = KINDS.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def of_error(error: BitnestError) -> tuple[int, dict[str, Any]]:
    """Status and body of an error; the hint goes with the message."""
    message = error.message + (f" ({error.hint})" if error.hint else "")
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


@dataclass
class Reply:
    """One answer, of a chat or a completion. with_usage: a last chunk of a stream tells it."""

    model: str
    chat: bool
    tokenizer: Tokenizer
    with_usage: bool = False
    id: str = field(init=False)
    created: int = field(init=False)
    _tokens: list[Token] = field(default_factory=list)
    _offset: int = 0  # characters of the answer before the next token

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.chat else "cmpl"
        self.id, self.created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())

    # whole

    def add(self, token: Token) -> None:
        """Keep a token for the whole answer."""
        self._tokens.append(token)

    def whole(self, result: Result) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        logprobs = self._logprobs(self._kept(result))
        choice: dict[str, Any] = {"index": 0}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": result.text, "refusal": None}
        else:
            choice["text"] = result.text
        choice |= {"logprobs": logprobs, "finish_reason": FINISH[result.finish_reason]}
        kind = "chat.completion" if self.chat else "text_completion"
        return self._body(kind, [choice]) | {"usage": usage(result)}

    def _kept(self, result: Result) -> list[Token]:
        """Without the token that ends the answer, which is no part of it."""
        return self._tokens[: result.new_tokens]

    # in chunks

    def first(self) -> Iterator[bytes]:
        """What a stream begins with."""
        if self.chat:
            yield self._event(self._chunk({"role": "assistant", "content": "", "refusal": None}))

    def piece(self, token: Token, eos: bool) -> Iterator[bytes]:
        """A token; nothing while its text is held back and nothing else is told."""
        shown = [] if eos or token.logprobs is None else [token]
        if token.text or shown:
            delta = {"content": token.text} if self.chat else {"text": token.text}
            yield self._event(self._chunk(delta, self._logprobs(shown)))

    def last(self, result: Result, rest: str = "") -> Iterator[bytes]:
        """The end of a stream; rest: text that no token brought."""
        if rest:
            yield self._event(self._chunk({"content" if self.chat else "text": rest}))
        delta: dict[str, Any] = {} if self.chat else {"text": ""}
        yield self._event(self._chunk(delta, finish=FINISH[result.finish_reason]))
        if self.with_usage:
            kind = "chat.completion.chunk" if self.chat else "text_completion"
            yield self._event(self._body(kind, []) | {"usage": usage(result)})
        yield b"data: [DONE]\n\n"

    def broken(self, error: BitnestError) -> Iterator[bytes]:
        """An error after the stream began."""
        yield self._event(of_error(error)[1])

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

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        told = [(t.id, t.logprobs) for t in tokens if t.logprobs is not None]
        if not told:
            return None
        if self.chat:
            content = [
                self._entry(i, p.chosen) | {"top_logprobs": [self._entry(*o) for o in p.top]}
                for i, p in told
            ]
            return {"content": content, "refusal": None}
        return self._of_completion(told)

    def _of_completion(self, told: list[tuple[int, LogProbs]]) -> dict[str, Any]:
        names = [self._name(i) for i, _ in told]
        offsets = []
        for name in names:
            offsets.append(self._offset)
            self._offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [p.chosen for _, p in told],
            "top_logprobs": [{self._name(i): value for i, value in p.top} for _, p in told],
            "text_offset": offsets,
        }

    def _entry(self, token_id: int, value: float) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token_id, skip_special=False)
        return {"token": self._name(token_id), "logprob": value, "bytes": list(data)}

    def _name(self, token_id: int) -> str:
        return self.tokenizer.token_bytes(token_id, skip_special=False).decode("utf-8", "replace")


def dumped(body: Any) -> bytes:
    """JSON without line breaks, so that it is one line of a stream."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
