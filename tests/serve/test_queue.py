"""Order, limits and ends: a model that is told when to go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from edge_runtime.decode.request import Result, Token
from edge_runtime.errors import NumericError
from edge_runtime.serve.worker import Job, QueueFull, Stopping, Worker

from .conftest import MODEL, Running

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}


class Answering:
    """A generation that says its number, a word each time it may."""

    def __init__(self, engine: Slow, words: int) -> None:
        self._engine, self._words = engine, words
        self.result = Result(finish_reason="cancelled")
        self._stopped = False

    def __iter__(self) -> Iterator[Token]:
        number = len(self._engine.order)
        self._engine.order.append(number)
        for i in range(self._words):
            while not self._engine.go.wait(0.01):
                if self._stopped:
                    return
            if self._stopped:
                return
            text = f"{number} "
            self.result.text += text
            self.result.new_tokens += 1
            yield Token(i, text)
        self.result.finish_reason = "length"

    def cancel(self) -> None:
        self._stopped = True
        self._engine.cancelled.set()


class Slow:
    """What a worker needs of an engine. go: clear it and every answer waits."""

    context, backend_name, view, num_tokens = 64, "none", "nest", 5
    eos_ids: frozenset[int] = frozenset([0])
    tokenizer = SimpleNamespace(
        token_bytes=lambda i, skip_special=True: b"x", is_special=lambda i: i == 0
    )

    def __init__(self) -> None:
        self.go, self.cancelled = threading.Event(), threading.Event()
        self.order: list[int] = []
        self.fail: BaseException | None = None

    def generate(self, prompt: Any, **options: Any) -> Answering:
        if self.fail is not None:
            raise self.fail
        return Answering(self, options["max_new_tokens"])

    def memory(self) -> dict[str, int]:
        return {"weights_bytes": 1, "kv_bytes": 1}


@pytest.fixture
def slow() -> Any:  # no Engine, but all that a worker needs of one
    return Slow()


def until(what: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


def ask(running: Running, **more: Any) -> httpx.Response:
    with running.client() as client:
        return client.post("/v1/chat/completions", json=BODY | more)


def test_a_full_queue(slow: Any, serve: Callable[..., Running]) -> None:
    running = serve(slow, max_queue=2)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(ask, running)
        until(lambda: running.worker.busy)
        waiting = [pool.submit(ask, running) for _ in range(2)]
        until(lambda: running.worker.waiting == 2)
        refused = ask(running)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        with running.client() as client:
            started = time.monotonic()
            assert client.get("/health").status_code == 200
            assert time.monotonic() - started < 1  # while one runs and two wait
        slow.go.set()
        answers = [f.result().json() for f in (first, *waiting)]
    texts = [a["choices"][0]["message"]["content"] for a in answers]
    assert texts[0] == "0 " * 5
    assert sorted(texts) == ["0 " * 5, "1 " * 5, "2 " * 5]


def test_a_turn_that_never_comes(slow: Any, serve: Callable[..., Running]) -> None:
    running = serve(slow, queue_s=0.2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, running)
        until(lambda: running.worker.busy)
        assert ask(running).status_code == 503
        time.sleep(0.3)  # the first one has had its turn: its answer may take longer
        slow.go.set()
        assert first.result().status_code == 200
    assert ask(running).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(slow: Any, serve: Callable[..., Running], stream: bool) -> None:
    running = serve(slow)
    if stream:
        slow.go.set()
    body = BODY | {"stream": stream, "max_tokens": 10**6}
    with running.client(timeout=5 if stream else 0.3) as client:
        if stream:
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                assert next(answer.iter_raw())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=body)
    assert slow.cancelled.wait(5)
    until(lambda: not running.worker.busy)
    slow.go.set()
    assert ask(running).status_code == 200


def test_one_that_leaves_the_queue_is_never_run(slow: Any, serve: Callable[..., Running]) -> None:
    running = serve(slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, running)
        until(lambda: running.worker.busy)
        with running.client(timeout=0.2) as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=BODY)
        until(lambda: running.worker.waiting == 0)
        slow.go.set()
        assert first.result().status_code == 200
    assert ask(running).json()["choices"][0]["message"]["content"] == "1 " * 5


def test_errors_leave_the_server_usable(slow: Any, serve: Callable[..., Running]) -> None:
    running = serve(slow)
    slow.go.set()
    for error, status in ((NumericError("logits hold NaN"), 500), (KeyError("a bug"), 500)):
        slow.fail = error
        for stream in (False, True):
            got = ask(running, stream=stream)
            assert got.status_code == status
            assert got.json()["error"]["type"] == "server_error"
            assert "a bug" not in got.text  # what is inside stays inside
    slow.fail = None
    assert ask(running).status_code == 200


def test_a_stop_lets_admitted_requests_end(slow: Any, serve: Callable[..., Running]) -> None:
    running = serve(slow)
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(ask, running) for _ in range(3)]
        until(lambda: running.worker.busy and running.worker.waiting == 2)
        running.server.should_exit = True
        time.sleep(0.2)
        slow.go.set()
        assert [f.result().status_code for f in answers] == [200, 200, 200]
    running.thread.join(20)
    assert not running.thread.is_alive()
    with pytest.raises(Stopping):
        running.worker.submit(Job(lambda engine: engine.generate("x"), lambda event: None))


def test_jobs_run_in_order_and_one_at_a_time(slow: Any) -> None:
    worker = Worker(slow, 50)
    said: list[tuple[int, Any]] = []
    slow.go.set()
    for number in range(20):
        worker.submit(Job(
            lambda engine: engine.generate("x", max_new_tokens=3),
            lambda event, number=number: said.append((number, event)),
        ))  # fmt: skip
    worker.start()
    assert worker.stop(timeout_s=20)
    assert [number for number, _ in said] == [n for n in range(20) for _ in range(5)]
    assert worker.totals.requests == {"length": 20}
    assert worker.totals.new_tokens == 60


def test_an_engine_that_is_stopped_at_once(slow: Any) -> None:
    worker = Worker(slow, 1)
    events: list[Any] = []
    worker.submit(Job(lambda engine: engine.generate("x", max_new_tokens=3), events.append))
    with pytest.raises(QueueFull):
        worker.submit(Job(lambda engine: engine.generate("x", max_new_tokens=3), events.append))
    worker.start()
    until(lambda: worker.busy)
    assert worker.stop(drain=False, timeout_s=20)
    assert [e.finish_reason for e in events if isinstance(e, Result)] == ["cancelled"]


def test_a_panic_ends_no_worker(slow: Any, serve: Callable[..., Running]) -> None:
    class Panic(BaseException):
        """As Rust's, through pyo3."""

    running = serve(slow)
    slow.go.set()
    slow.fail = Panic("boom")
    assert ask(running).status_code == 500
    slow.fail = None
    assert ask(running).status_code == 200


def test_nothing_waits_where_nothing_may(slow: Any, serve: Callable[..., Running]) -> None:
    running = serve(slow, max_queue=0)
    slow.go.set()
    assert ask(running).status_code == 200
