"""An answer goes back as the next turn's history, as OpenAI's client writes it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from edge_runtime.errors import UsageError
from edge_runtime.serve import wire
from edge_runtime.text.template import ChatTemplate

from .conftest import MODEL, Running

USER: Any = {"role": "user", "content": "Hello, world"}
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8}
FIVE: Any = {"type": "json_schema", "json_schema": {"name": "five", "schema": {"const": 5}}}
NOTHING = {"audio": {}, "annotations": [], "tool_calls": [], "refusal": "", "function_call": None}


def test_the_next_turn(running: Running) -> None:
    """It says to the model what its content says."""
    chat = openai.OpenAI(base_url=running.url + "/v1", api_key="none").chat.completions
    first = {**GREEDY, "messages": [USER]}
    whole = chat.create(**first).choices[0].message
    parsed = chat.parse(**first, response_format=FIVE).choices[0].message
    with chat.stream(**first, response_format=FIVE) as stream:
        streamed = stream.get_final_completion().choices[0].message

    def again(turn: Any) -> Any:
        got = chat.create(**{**GREEDY, "messages": [USER, turn, USER]})
        return got.choices[0].message.content, got.usage and got.usage.prompt_tokens

    for message in (whole, parsed, streamed):
        turn = message.model_dump()
        plain = again({"role": "assistant", "content": message.content})
        for echoed in (message, turn, turn | NOTHING, turn | {"parsed": {"n": [5]}}):
            assert again(echoed) == plain


def test_what_is_empty_is_not_in_the_template() -> None:
    message = wire.Message(role="assistant", content="x", tool_calls=[])
    assert message.for_template() == {"role": "assistant", "content": "x"}


def test_arguments_of_tools_are_data() -> None:
    """As templates write them, which turn them into JSON themselves; the API has their text."""
    template = (
        "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    )
    for text, written in (
        ('{"city": "Köln", "n": [1, 2.5]}', '{"city": "Köln", "n": [1, 2.5]}'), ("", "{}"),
        ({"a": 1}, '{"a": 1}'),
    ):  # fmt: skip
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
        body = {"model": "m", "messages": [{"role": "assistant", "tool_calls": [call]}]}
        asked = wire.decode(wire.ChatRequest, json.dumps(body).encode())
        found = asked.messages[0].for_template()
        assert ChatTemplate(template).render([found]) == written
        assert found["tool_calls"][0] | {"function": None} == call | {"function": None}


@pytest.mark.parametrize("text", ["[1]", "7", "{", '{"a": 1e999}', '{"a":' * 3000, "null", "x"])
def test_arguments_that_are_no_object(text: str) -> None:
    call = {"function": {"name": "f", "arguments": text}}
    with pytest.raises(UsageError, match="tool_calls: expected a JSON object"):
        wire.Message(role="assistant", tool_calls=[call]).for_template()


def test_a_developer_is_the_system(running: Running) -> None:
    def told(role: str) -> Any:
        turns = [{"role": role, "content": "be brief"}, USER]
        with running.client() as client:
            got = client.post("/v1/chat/completions", json=GREEDY | {"messages": turns}).json()
        return got["usage"]["prompt_tokens"], got["choices"]

    assert told("developer") == told("system")


@pytest.mark.parametrize(("name", "value"), [
    ("refusal", "no"), ("audio", {"id": "a"}), ("annotations", [{}]),
    ("function_call", {"name": "f"}),
])  # fmt: skip
def test_what_no_template_is_given(running: Running, name: str, value: Any) -> None:
    turn = {"role": "assistant", "content": "x", name: value}
    with running.client() as client:
        got = client.post("/v1/chat/completions", json=GREEDY | {"messages": [USER, turn]})
    assert got.status_code == 400
    assert f"`{name}` of a message is not supported" in got.json()["error"]["message"]
