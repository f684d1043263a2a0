"""The API as its own client library sees it, and what it refuses."""

from __future__ import annotations

import json
import math
import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge_runtime import Engine, Sampling
from edge_runtime.errors import ContextError, UsageError
from edge_runtime.serve import replies, wire

from .conftest import MODEL, Running

MESSAGES: list[Any] = [{"role": "user", "content": "Hello, world"}]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0}


@pytest.fixture
def api(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0)


def test_an_answer_is_the_engines(api: openai.OpenAI, engine: Engine) -> None:
    got = api.chat.completions.create(**GREEDY, max_tokens=20)
    want = engine.generate(MESSAGES, max_new_tokens=20).complete()
    assert got.choices[0].message.content == want.text
    assert got.choices[0].finish_reason == "length"
    assert got.usage is not None
    assert got.usage.prompt_tokens == want.prompt_tokens
    assert got.usage.completion_tokens == want.new_tokens == 20
    assert [m.id for m in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).id == MODEL


def test_the_target_alone_says_the_same(api: openai.OpenAI, engine: Engine) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "max_tokens": 24}
    got = api.chat.completions.create(model=MODEL, messages=MESSAGES, **options)
    plain = engine.generate(
        MESSAGES, max_new_tokens=24, sampling=Sampling(temperature=0.9, top_p=0.95, seed=5),
        draft_source=None, logprobs=0,
    )  # fmt: skip
    assert got.choices[0].message.content == plain.complete().text


@pytest.mark.parametrize("stop", [None, "e", ["zz", "th"], "\n"])
def test_a_stream_is_the_whole_answer(api: openai.OpenAI, stop: Any) -> None:
    """Random tokens of all bytes: half characters, stop strings across tokens."""
    for seed in range(12):
        options: dict[str, Any] = {"seed": seed, "stop": stop, "max_tokens": 40}
        options |= {"model": MODEL, "messages": MESSAGES, "temperature": 1.5}
        whole = api.chat.completions.create(**options)
        pieces, ends, usage = [], [], None
        for chunk in api.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                pieces.append(choice.delta.content or "")
                ends += [choice.finish_reason] if choice.finish_reason else []
        assert "".join(pieces) == whole.choices[0].message.content
        assert ends == [whole.choices[0].finish_reason]
        assert usage is not None
        assert whole.usage is not None
        assert usage.completion_tokens == whole.usage.completion_tokens
        for text in [stop] if isinstance(stop, str) else stop or []:
            assert text not in "".join(pieces)


def test_completions(api: openai.OpenAI, engine: Engine) -> None:
    want = engine.generate("The first", max_new_tokens=9).complete()
    for prompt in ("The first", ["The first"], engine.encode_text("The first")):
        got = api.completions.create(
            model=MODEL, prompt=prompt, temperature=0, max_tokens=9, logprobs=2
        )
        assert got.choices[0].text == want.text
        told = got.choices[0].logprobs
        assert told is not None
        assert told.tokens is not None
        assert told.top_logprobs is not None
        assert told.token_logprobs is not None
        assert len(told.tokens) == len(told.top_logprobs) == 9
        assert told.token_logprobs[0] == max(told.top_logprobs[0].values())
    pieces = api.completions.create(
        model=MODEL, prompt="The first", temperature=0, max_tokens=9, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in pieces) == want.text


def test_log_probabilities(api: openai.OpenAI) -> None:
    options: dict[str, Any] = {**GREEDY, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    got = api.chat.completions.create(**options)
    told = got.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert len(told.content) == 6
    for entry in told.content:
        assert entry.logprob == max(other.logprob for other in entry.top_logprobs)
        assert sum(math.exp(other.logprob) for other in entry.top_logprobs) <= 1
        assert bytes(entry.bytes or []).decode("utf-8", "replace") == entry.token
    streamed = [
        entry
        for chunk in api.chat.completions.create(**options, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == told.content


@pytest.mark.parametrize("chat", [True, False])
def test_log_probabilities_end_with_the_text(running: Running, engine: Engine, chat: bool) -> None:
    """Of tokens that begin beyond it, in a stop string, none are told; streamed or not."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body: dict[str, Any] = {"model": MODEL, "temperature": 1.5, "max_tokens": 40, "logprobs": 1}
    body |= {"messages": MESSAGES, "logprobs": True} if chat else {"prompt": "Hello"}
    beyond = 0
    for seed in range(8):
        options: Any = {"max_new_tokens": 40, "sampling": Sampling(temperature=1.5, seed=seed)}
        text = engine.generate(MESSAGES if chat else "Hello", **options).complete().text
        stop = text[len(text) // 2 :][:3]
        body |= {"seed": seed, "stop": stop}
        found = raw(running, path, body).json()["choices"][0]
        kept = found["message"]["content"] if chat else found["text"]
        assert kept == text[: text.index(stop)]
        stream, starts, length = engine.new_stream((), continues=not chat), list[int](), 0
        for token in engine.generate(MESSAGES if chat else "Hello", stop=stop, **options):
            starts.append(length)
            length += len(stream.push(token.id).text)
        told = found["logprobs"]["content" if chat else "tokens"] if found["logprobs"] else []
        assert len(told) == sum(start < len(kept) for start in starts)
        beyond += len(starts) - len(told)
        streamed: list[Any] = []
        with running.client() as client:
            for line in client.post(path, json=body | {"stream": True}).text.splitlines():
                if line.startswith("data: {"):
                    [choice] = json.loads(line[6:])["choices"]
                    if part := choice["logprobs"]:
                        streamed += part["content" if chat else "tokens"]
        assert streamed == told
    assert beyond


def test_hints_are_for_clients(running: Running) -> None:
    long = [{"role": "user", "content": "word " * 400}]
    error = raw(running, "/v1/chat/completions", GREEDY | {"messages": long}).json()["error"]
    assert error["message"].endswith("(shorten the prompt)")  # no context is larger than this one
    flags = ContextError("too long", "shorten the prompt, or allocate more: --ctx up to 512")
    _, body = replies.of_error(flags)
    assert body["error"]["message"] == "too long (shorten the messages or the prompt)"


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "kind": {"enum": ["a", "bc"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}


def test_json_schema(api: openai.OpenAI) -> None:
    """A random model obeys it, however much is drafted."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    finished = 0
    for seed in range(6):
        got = api.chat.completions.create(
            model=MODEL, messages=MESSAGES, seed=seed, max_tokens=120, response_format=form
        )
        if got.choices[0].finish_reason == "stop":
            found = json.loads(got.choices[0].message.content or "")
            assert isinstance(found["n"], int)
            assert found["kind"] in ("a", "bc")
            finished += 1
    assert finished


def raw(running: Running, path: str, body: Any, **options: Any) -> httpx.Response:
    with running.client() as client:
        if isinstance(body, bytes):
            headers = {"content-type": "application/json"}
            return client.post(path, content=body, headers=headers, **options)
        return client.post(path, json=body, **options)


DEEP: list[Any] = []
for _ in range(900):
    DEEP = [DEEP]


@pytest.mark.parametrize(("change", "status", "says"), [
    ({"model": "other"}, 404, "the model 'other' is not here"),
    ({"messages": []}, 400, "length >= 1"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "robot"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, 400, "mood"),
    ({"temprature": 1}, 400, "temprature"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"n": 2}, 400, "`n` is not supported beyond 1"),
    ({"n": True}, 400, "`n` is not supported beyond 1"),
    ({"tool_choice": "required"}, 400, "beyond 'auto' and 'none'"),
    ({"echo": 0}, 400, "`echo` is not supported beyond False"),
    ({"frequency_penalty": False}, 400, "`frequency_penalty` is not supported beyond 0"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[1"}}]}]},
     400, "tool_calls: expected a JSON object as the text of `arguments`, got '[1'"),
    ({"logit_bias": {"5": 1}}, 400, "`logit_bias` is not supported"),
    ({"top_logprobs": 2}, 400, "needs `logprobs`"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"stop": [""]}, 400, "not empty"),
    ({"stop": ["x"] * 17}, 400, "stop"),
    ({"seed": 2**63}, 400, "`seed`: expected a whole number from -2^63 to 2^63 - 1"),
    ({"seed": -(2**63) - 1}, 400, "from -2^63 to 2^63 - 1"),
    ({"seed": 10**30}, 400, "from -2^63 to 2^63 - 1"),
    ({"seed": 1.5}, 400, "seed"),
    ({"messages": [{"role": "user", "content": "word " * 400}]}, 400, "the context holds 256"),
    ({"response_format": {"type": "json_schema"}}, 400, "json_schema goes with"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "what"}}}},
     400, "response_format"),
    ({"chat_template_kwargs": {"tools": []}}, 400, "may not hold tools"),
    ({"chat_template_kwargs": {"tokenizer": 1, "self": 2}}, 400, "may not hold self, tokenizer"),
    ({"chat_template_kwargs": {"max_tokens": 2}}, 400, "may not hold max_tokens"),
    ({"chat_template_kwargs": {"x": DEEP}}, 400, "nested too deeply"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
     400, "response_format"),
])  # fmt: skip
def test_what_is_refused(running: Running, change: Any, status: int, says: str) -> None:
    for stream in (False, True):
        got = raw(running, "/v1/chat/completions", GREEDY | {"stream": stream} | change)
        assert got.status_code == status
        error = got.json()["error"]
        assert says in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "\n" not in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'"x"', b"{}", b"[" * 9000])
def test_bodies_that_are_none(running: Running, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        got = raw(running, path, body)
        assert got.status_code == 400
        assert got.json()["error"]["type"] == "invalid_request_error"
    with pytest.raises(UsageError, match="half of a surrogate pair"):
        wire.decode(wire.ChatRequest, json.dumps(GREEDY | {"user": "\ud800"}).encode())


def test_fields_that_ask_for_nothing(running: Running) -> None:
    more = {
        "n": 1, "user": "me", "metadata": {"a": "b"}, "store": False, "logit_bias": {},
        "frequency_penalty": 0.0, "tool_choice": "auto", "stop": None, "stream": None,
        "response_format": {"type": "text"}, "parallel_tool_calls": True, "seed": None,
    }  # fmt: skip
    got = raw(running, "/v1/chat/completions", GREEDY | {"max_tokens": 2} | more)
    assert got.status_code == 200, got.text


def test_fields_that_change_nothing_are_never_decoded(running: Running) -> None:
    """However many objects they would be."""
    many: list[list[int]] = [[] for _ in range(300_000)]
    body = json.dumps(GREEDY | {"max_tokens": 1, "metadata": many, "user": many}).encode()
    decoded = wire.decode(wire.ChatRequest, body)
    tracemalloc.start()
    try:
        decoded = wire.decode(wire.ChatRequest, body)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert isinstance(decoded.metadata, msgspec.Raw)
    assert raw(running, "/v1/chat/completions", body).status_code == 200


def test_every_seed_of_64_bits(running: Running) -> None:
    """Each its own, the same whenever it is given."""
    said = set()
    for seed in (-(2**63), -1, 0, 1, 2**63 - 1):
        body = GREEDY | {"temperature": 2, "max_tokens": 12, "seed": seed}
        one, two = (raw(running, "/v1/chat/completions", body).json() for _ in range(2))
        assert one["choices"] == two["choices"]
        said.add(one["choices"][0]["message"]["content"])
    assert len(said) == 5


def test_other_paths_and_methods(running: Running) -> None:
    with running.client() as client:
        for got, status in (
            (client.get("/v1/nothing"), 404),
            (client.get("/v1/chat/completions"), 405),
            (client.get("/v1/models/other"), 404),
            (client.post("/v1/completions", content=b"{}"), 415),
        ):
            assert got.status_code == status
            assert got.json()["error"]["message"]
        assert client.get("/health").json() == {"status": "ok", "model": MODEL}
        page = client.get("/")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert client.get("/openapi.json").json()["openapi"].startswith("3.")


def test_metrics(running: Running) -> None:
    raw(running, "/v1/chat/completions", GREEDY | {"max_tokens": 9})
    with running.client() as client:
        text = client.get("/metrics").text
        assert 'bitnest_edge_requests_total{end="length"} 1.0' in text
        assert "bitnest_edge_new_tokens_total 9.0" in text
        assert "watts" not in text  # there is no source
        gauges = client.get("/metrics", params={"format": "json"}).json()
    assert gauges["new_tokens"] == 9
    assert gauges["context"] == 256
    assert gauges["tok_s"] > 0


def test_names_of_metrics(running: Running) -> None:
    """As Prometheus has them: base units, counters with _total, one prefix."""
    raw(running, "/v1/chat/completions", GREEDY | {"max_tokens": 9})
    with running.client() as client:
        families = {m.name: m for m in text_string_to_metric_families(client.get("/metrics").text)}
    units = {"s", "ms", "mb", "mib", "mw", "c", "tok", "tok_s"}
    for name, family in families.items():
        assert re.fullmatch(r"bitnest_edge(_[a-z]+)+", name)
        assert not units & set(name.split("_")), name
        assert family.documentation
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")
    assert {"bitnest_edge_decode_seconds", "bitnest_edge_memory_bytes"} <= families.keys()
    assert families["bitnest_edge_running_requests"].samples[0].value == 0


def test_a_prompt_before_it_is_not_read_again(running: Running) -> None:
    first = raw(running, "/v1/chat/completions", GREEDY | {"max_tokens": 4}).json()
    said = first["choices"][0]["message"]["content"]
    turns = [*MESSAGES, {"role": "assistant", "content": said}, {"role": "user", "content": "and"}]
    second = raw(running, "/v1/chat/completions", GREEDY | {"messages": turns, "max_tokens": 4})
    cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"]


def test_large_requests(engine: Engine, serve: Callable[..., Running]) -> None:
    running = serve(engine, max_body_bytes=4096)
    got = raw(running, "/v1/chat/completions", GREEDY | {"user": "x" * 5000})
    assert got.status_code == 413
    assert "at most 4096 bytes" in got.json()["error"]["message"]


def test_a_long_text_is_refused_before_it_is_encoded(
    running: Running, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no context of this size can hold; what it may hold is counted in tokens."""
    encoded: list[int] = []
    encode = engine.tokenizer._encode

    def noted(text: str, allow_special: bool) -> list[int]:
        encoded.append(len(text))
        return encode(text, allow_special)

    monkeypatch.setattr(engine.tokenizer, "_encode", noted)
    most = 256 * engine.tokenizer.longest_bytes
    for size, says in ((most + 1, "bytes at most"), (most // 2, "the prompt has")):
        text = "x " * (size // 2 + 1)
        for path, change in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ("/v1/completions", {"prompt": text, "messages": None}),
        ):
            body = {k: v for k, v in (GREEDY | change).items() if v is not None}
            error = raw(running, path, body)
            assert error.status_code == 400
            assert says in error.json()["error"]["message"]
            assert error.json()["error"]["code"] == "context_length_exceeded"
        assert max(encoded, default=0) <= most
    assert encoded
