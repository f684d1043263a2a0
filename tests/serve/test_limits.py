"""What bounds the server: connections, bodies, the wait for a request, the end of a drain."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from edge_runtime.decode.request import Result
from edge_runtime.serve import listen
from edge_runtime.serve.worker import USUAL_S, Job, Worker

from .conftest import Running
from .test_queue import BODY, Slow, ask, until


@pytest.fixture
def slow() -> Any:
    return Slow()


def connect(running: Running) -> socket.socket:
    host, port = running.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_connections_are_bounded(slow: Any, serve: Callable[..., Running]) -> None:
    running = serve(slow, max_connections=4)
    slow.go.set()
    idle = [connect(running) for _ in range(4)]
    until(lambda: len(running.server.server_state.connections) == 4)
    refused = ask(running)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "server_error"
    assert refused.headers["connection"] == "close"
    assert httpx.get(f"{running.url}/health").status_code == 200  # whoever watches is answered
    idle += [connect(running) for _ in range(20)]
    until(lambda: len(running.server.server_state.connections) <= 8)
    for one in idle:
        one.close()
    until(lambda: not running.server.server_state.connections)
    assert ask(running).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: local", b"GET /health "])
def test_a_connection_that_never_asks(
    slow: Any, serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Also after a request that was answered."""
    monkeypatch.setattr(listen, "HEAD_S", 0.3)
    running = serve(slow)
    for before in (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        with connect(running) as one:
            if before:
                one.sendall(before)
                answer = b""
                while b"}" not in answer:
                    answer += one.recv(10000)
            if before and not sent:
                continue  # kept alive
            one.sendall(sent)
            started = time.monotonic()
            assert one.recv(10000) == b""
            assert 0.2 < time.monotonic() - started < 5
    slow.go.set()
    assert ask(running).status_code == 200


def test_bodies_together_are_bounded(slow: Any, serve: Callable[..., Running]) -> None:
    """Those that wait for their turn count, and those that were answered do not."""
    running = serve(slow, max_body_bytes=4096)
    text = [{"role": "user", "content": "x" * 3800}]
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(ask, running, messages=text) for _ in range(4)]
        until(lambda: running.worker.waiting == 3)
        refused = ask(running, messages=text)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "all there is room for" in refused.json()["error"]["message"]
        slow.go.set()
        assert [f.result().status_code for f in waiting] == [200] * 4
    assert ask(running, messages=text).status_code == 200


def test_a_body_that_is_told_and_does_not_come(slow: Any, serve: Callable[..., Running]) -> None:
    """It takes no room."""
    running = serve(slow, max_body_bytes=65536)
    slow.go.set()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"content-type: application/json\r\ncontent-length: 65536\r\n\r\n{"
    with contextlib.ExitStack() as held:
        for _ in range(6):
            held.enter_context(connect(running)).sendall(head)
        until(lambda: len(running.server.server_state.connections) == 6)
        assert ask(running).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_that_come_at_once(slow: Any, serve: Callable[..., Running], chunked: bool) -> None:
    """Piece by piece in turns: as many are answered as there is room for."""
    running = serve(slow, max_body_bytes=65536)
    slow.go.set()
    body = json.dumps(BODY | {"messages": [{"role": "user", "content": "x" * 60000}]}).encode()
    size = -(-len(body) // 3)
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nconnection: close\r\n"
    head += b"content-type: application/json\r\n"
    told = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(body)
    with contextlib.ExitStack() as held:
        all_ = [held.enter_context(connect(running)) for _ in range(8)]
        ends = [b"0\r\n\r\n"] if chunked else []
        pieces = [b"%x\r\n%b\r\n" % (len(p), p) if chunked else p for p in parts]
        for piece in (head + told + b"\r\n\r\n", *pieces, *ends):
            for one in all_:
                with contextlib.suppress(OSError):  # one that is refused is closed
                    one.sendall(piece)
            time.sleep(0.2)
        statuses = []
        for one in all_:
            with contextlib.suppress(ConnectionError):
                statuses.append(one.recv(100).split()[1])
    assert statuses.count(b"200") == 4
    assert set(statuses) <= {b"200", b"503"}
    until(lambda: ask(running).status_code == 200)


def test_a_client_that_takes_nothing(
    slow: Any, serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection ends, and its request."""
    monkeypatch.setattr(listen, "WRITE_S", 0.5)
    running = serve(slow)
    slow.go.set()
    body = json.dumps(BODY | {"stream": True, "max_tokens": 10**6}).encode()
    with connect(running) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        assert slow.cancelled.wait(30)
        until(lambda: not running.server.server_state.connections)
    assert ask(running).status_code == 200


def said(running: Running, request: bytes) -> bytes:
    """What is answered until the connection ends."""
    answer = b""
    with connect(running) as one:
        one.sendall(request)
        while part := one.recv(10000):
            answer += part
    return answer


def test_what_is_no_http(
    slow: Any, serve: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    """It is answered, and told of in the log where debugging is asked for."""
    running = serve(slow)
    head, _, body = said(running, b"\x16\x03\x01 hello\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    with caplog.at_level(logging.DEBUG, "edge_runtime"):
        said(running, b"\x16\r\n\r\n")
    assert "no HTTP request from ('127.0.0.1', " in caplog.text


def test_an_upgrade_is_not_done(
    slow: Any, serve: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    for what in (b"websocket", b"h2c"):
        request = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\n"
        answer = said(serve(slow), request + b"Upgrade: " + what + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_a_drain(slow: Any, serve: Callable[..., Running], stream: bool) -> None:
    """What runs and what waits is told so, in the API's shape."""
    running = serve(slow, drain_s=1)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ask, running, stream=stream) for _ in range(2)]
        until(lambda: running.worker.busy and running.worker.waiting == 1)
        running.server.should_exit = True
        for found in (f.result() for f in answers):
            assert found.status_code == 503
            assert int(found.headers["retry-after"]) >= 1
            assert "shut down" in found.json()["error"]["message"]
    running.thread.join(20)
    assert not running.thread.is_alive()


def test_the_end_of_a_drain_in_a_stream(slow: Any, serve: Callable[..., Running]) -> None:
    running = serve(slow, drain_s=1)
    slow.go.set()
    with (
        running.client() as client,
        client.stream(
            "POST", "/v1/chat/completions", json=BODY | {"stream": True, "max_tokens": 10**6}
        ) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        slow.go.clear()
        running.server.should_exit = True
        rest = [line for line in lines if line]
    assert "shut down" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]


def test_a_turn_that_never_comes_says_when(slow: Any, serve: Callable[..., Running]) -> None:
    running = serve(slow, queue_s=0.2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, running)
        until(lambda: running.worker.busy)
        assert int(ask(running).headers["retry-after"]) >= 1
        slow.go.set()
        assert first.result().status_code == 200


def test_cancelled_jobs_are_not_in_the_mean(slow: Any) -> None:
    worker, events = Worker(slow, 5), list[Any]()
    worker.start()
    for _ in range(3):
        job = Job(lambda engine: engine.generate("x", max_new_tokens=3), events.append)
        worker.submit(job)
        until(lambda: worker.busy)
        job.cancel()
        until(lambda: not worker.busy)
    assert [e.finish_reason for e in events if isinstance(e, Result)] == ["cancelled"] * 3
    assert worker._mean_s == USUAL_S
    assert worker.stop(timeout_s=20)
