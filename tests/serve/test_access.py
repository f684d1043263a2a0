"""Who may ask: keys, and names of the host."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from edge_runtime import Engine

from .conftest import MODEL, Running


def test_the_key(engine: Engine, serve: Callable[..., Running]) -> None:
    running = serve(engine, key="the-key-of-this-test", hosts=None)
    message = {"role": "user", "content": "Hello, world"}
    body = {"model": MODEL, "messages": [message], "max_tokens": 1}
    for given, status in (
        (None, 401), ("Bearer x", 401), ("the-key-of-this-test", 401),
        ("Bearer the-key-of-this-test", 200), ("bearer the-key-of-this-test", 200),
        ("BEARER  the-key-of-this-test", 200), ("Basic the-key-of-this-test", 401),
        ("Bearer", 401), ("Bearer the-key-of-this-test2", 401),
    ):  # fmt: skip
        headers = {} if given is None else {"authorization": given}
        with running.client() as client:
            got = client.post("/v1/chat/completions", json=body, headers=headers)
        assert got.status_code == status, given
    with running.client() as client:
        assert client.get("/metrics").status_code == 401
        assert client.get("/v1/models").status_code == 401
        assert client.get("/health").status_code == client.get("/").status_code == 200


@pytest.mark.parametrize(("host", "status"), [
    ("localhost", 200), ("127.0.0.1:99", 200), ("[::1]:8080", 200), ("evil.example", 403),
    ("localhost.evil.example", 403), ("", 403),
    ("127.0.0.1:80@evil.example", 403), ("localhost:http", 403), ("[::1]evil.example", 403),
])  # fmt: skip
def test_names_of_the_host(running: Running, host: str, status: int) -> None:
    """A page of another site that had its name point here gets nothing."""
    with running.client() as client:
        assert client.get("/health", headers={"host": host}).status_code == status
        whole = {"target": f"http://{host}/health".encode()}  # as to a proxy
        assert client.get("/", extensions=whole).status_code == status


def test_a_request_of_http_1_0_names_no_host(running: Running) -> None:
    """As a probe of a balancer may ask; a browser always names one."""
    host, port = running.url.removeprefix("http://").split(":")
    for more, status in ((b"", b"200"), (b"Host: evil.example\r\n", b"403")):
        with socket.create_connection((host, int(port)), timeout=20) as one:
            one.sendall(b"GET /health HTTP/1.0\r\n%b\r\n" % more)
            assert one.recv(1000).split()[1] == status
