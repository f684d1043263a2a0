"""Schemas that would take minutes or gigabytes are refused, and the others pay once."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from edge_runtime import Engine
from edge_runtime.errors import UsageError
from edge_runtime.serve import grammar, trial
from edge_runtime.serve.schema import Vocabulary
from edge_runtime.serve.trial import Limits, TrialFailed, Trials

from .conftest import MODEL, Running

USUAL = '{"type": "object", "properties": {"n": {"type": "integer"}}}'
PATTERNS = {
    "allOf": [{"type": "string", "pattern": f"^.*[ab].{{{i}}}$"} for i in range(10, 40)]
}  # fmt: skip
FACTORS = {"allOf": [{"type": "integer", "multipleOf": n} for n in (3, 7, 11, 13, 17, 19, 23)]}
WORDS = {"allOf": [{"type": "string", "pattern": f"{i * 7919 % 100003:05d}"} for i in range(300)]}
DEEP: dict[str, Any] = {}
for _ in range(300):
    DEEP = {"type": "object", "properties": {"x": DEEP}}
HUGE = {"enum": [f"{i:08d}" for i in range(20000)]}


@pytest.fixture(scope="module")
def trials(engine: Engine) -> Iterator[Trials]:
    started = Trials(Vocabulary.of(engine))
    started.start()
    yield started
    started.stop()


def ask(running: Running, schema: Any, **more: Any) -> Any:
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 3,
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }  # fmt: skip
    with running.client() as client:
        return client.post("/v1/chat/completions", json=body | more)


@pytest.mark.parametrize(("schema", "says"), [
    (PATTERNS, "takes more than"), (FACTORS, "takes more than"), (WORDS, "takes more than"),
    ({"type": "integer", "multipleOf": 300_007}, "takes more than"), (DEEP, "recursion limit"),
    (HUGE, "at most 100000 characters"), ({"$ref": "#"}, "no text that it allows has an end"),
])  # fmt: skip
def test_hostile_schemas(running: Running, schema: Any, says: str) -> None:
    """Refused in a few seconds, in one line; the server answers meanwhile and has not grown."""
    ask(running, {"type": "integer"})
    before = psutil.Process().memory_info().rss
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(ask(running, schema)))
    asking.start()
    worst = 0.0
    with running.client() as client:
        while asking.is_alive():
            started = time.monotonic()
            assert client.get("/health").status_code == 200
            worst = max(worst, time.monotonic() - started)
            time.sleep(0.02)
    assert worst < 1
    assert answers[0].status_code == 400
    message = answers[0].json()["error"]["message"]
    assert says in message
    assert "\n" not in message
    assert "<state>" not in message
    assert psutil.Process().memory_info().rss - before < 64 << 20
    started = time.monotonic()
    assert ask(running, schema).status_code == 400  # remembered
    assert time.monotonic() - started < 1


def test_the_usual_schema(trials: Trials) -> None:
    """It passes, also where text is forced and where it holds all that may."""
    names = [f"{i * 7919:09d}" for i in range(6000)]
    for text in (USUAL, '{"const": "a long text, 轨道 🚆"}', json.dumps({"enum": names})):
        trials.run(text).check()


def test_many_that_are_new(
    engine: Engine, serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hostile ones do not keep others waiting for minutes: some are told to come again."""
    monkeypatch.setattr(grammar, "Trials", lambda known: Trials(known, Limits(cpu_s=1)))
    running = serve(engine)
    schemas = [{**FACTORS, "title": str(i)} for i in range(grammar.MOST_WAITING + 4)]
    with ThreadPoolExecutor(len(schemas)) as pool:
        waiting = [pool.submit(ask, running, schema) for schema in schemas]
        answers = [f.result() for f in waiting]
    assert {a.status_code for a in answers} == {400, 429}
    assert sum(a.status_code == 429 for a in answers) <= 4
    assert all(int(a.headers["retry-after"]) for a in answers if a.status_code == 429)


def test_limits(engine: Engine) -> None:
    names = json.dumps({"enum": [f"{i * 7919:09d}" for i in range(6000)]})
    room = 4 << 30  # not what ends it: how fast the memory grows depends on the machine
    for limits, text, says in (
        (Limits(memory_bytes=1 << 20), names, "1 MiB of memory"),
        (Limits(cpu_s=0.25, memory_bytes=room), json.dumps(FACTORS), "0.25 s of CPU time"),
    ):
        small = Trials(Vocabulary.of(engine), limits)
        try:
            with pytest.raises(UsageError, match=says):
                small.run(text).check()
            assert small.known(text)
        finally:
            small.stop()


def test_what_the_machine_had_no_time_for_is_tried_again(engine: Engine) -> None:
    """Nothing is said of the schema, and nothing remembered."""
    text = json.dumps(FACTORS)
    busy = Trials(Vocabulary.of(engine), Limits(cpu_s=60, wall_s=1, memory_bytes=4 << 30))
    try:
        for _ in range(2):
            with pytest.raises(TrialFailed, match="cannot be tried now"):
                busy.run(text)
            assert busy.known(text) is None
        busy.run(USUAL).check()
    finally:
        busy.stop()


def test_a_deadline_holds_for_the_grammar_too(
    engine: Engine, serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = grammar.Grammars.of_schema

    def slowly(self: grammar.Grammars, text: str) -> grammar.Grammar:
        time.sleep(0.3)
        return made(self, text)

    monkeypatch.setattr(grammar.Grammars, "of_schema", slowly)
    got = ask(serve(engine), {"type": "string"}, deadline_s=0.2, max_tokens=100)
    assert got.status_code == 200
    assert got.json()["usage"]["completion_tokens"] <= 1


def test_a_schema_is_tried_once(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    verdict = trials._verdict

    def noted(text: str) -> trial.Verdict:
        tried.append(text)
        return verdict(text)

    monkeypatch.setattr(trials, "_verdict", noted)
    for _ in range(3):
        trials.run('{"type": "number"}')
        trials.run('{"type": "what"}')
    assert len(tried) == 2
    with pytest.raises(UsageError, match="cannot be followed"):
        trials.run('{"type": "what"}').check()
    for n in range(trial.MOST_KNOWN):
        trials.run(f'{{"const": {n}}}')
    assert trials.known('{"type": "number"}') is None
    assert len(trials._known) == trial.MOST_KNOWN


def test_a_helper_that_is_killed_comes_back(trials: Trials) -> None:
    trials.run('{"const": "a"}')
    assert trials._helper is not None
    os.kill(trials._helper.pid, signal.SIGKILL)
    trials.run('{"const": "b"}').check()


def test_a_signal_of_the_terminal_leaves_the_helper(trials: Trials) -> None:
    trials.run('{"const": "c"}')
    assert trials._helper is not None
    helper = trials._helper
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(helper.pid, number)
    trials.run('{"const": "d"}')
    assert trials._helper is helper


def test_it_ends_with_the_server(engine: Engine, serve: Callable[..., Running]) -> None:
    before = set(psutil.Process().children())
    running = serve(engine)
    assert ask(running, {"type": "boolean"}).status_code == 200
    [helper] = set(psutil.Process().children()) - before
    running.stop()
    assert not helper.is_running()
