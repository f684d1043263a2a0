"""A server over a tiny model, on a free port, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import tiny_checkpoints

from edge_runtime import Engine
from edge_runtime.serve.app import Settings
from edge_runtime.serve.listen import HttpServer, bind
from edge_runtime.serve.worker import Worker

from .chromium import Browser, Page, find

CONTEXT = 256
MODEL = "tiny"


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("serve")
    path = tiny_checkpoints.convert_tiny(folder, "llama", max_position_embeddings=CONTEXT)
    with Engine.open(path, backend="reference", ctx=CONTEXT, draft=4) as opened:
        yield opened


@dataclass
class Running:
    """A server that runs. url: without a path."""

    url: str
    worker: Worker
    server: HttpServer
    thread: threading.Thread

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(**({"base_url": self.url, "timeout": 60} | options))

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """Start servers; they are stopped at the end of the test."""
    started: list[Running] = []

    def start(engine: Any, drain_s: int = 20, **settings: Any) -> Running:
        chosen = Settings(**({"model": MODEL} | settings))
        worker = Worker(engine, chosen.max_queue)
        server = HttpServer(worker, chosen, drain_s)
        [listener] = bind("127.0.0.1", 0)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        port = listener.getsockname()[1]
        started.append(Running(f"http://127.0.0.1:{port}", worker, server, thread))
        return started[-1]

    yield start
    for running in started:
        running.stop()


@pytest.fixture
def running(engine: Engine, serve: Callable[..., Running]) -> Running:
    return serve(engine)


@pytest.fixture(scope="session")
def browser(
    tmp_path_factory: pytest.TempPathFactory, give_up: Callable[[str, str], None]
) -> Iterator[Browser]:
    path = find()
    if path is None:
        give_up("chromium", "no Chromium is installed (apt-get install chromium-headless-shell)")
        raise AssertionError
    started = Browser(path, tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a server's page and wait for its first gauges; at the end no script may have failed."""
    opened: list[Page] = []

    def open_page(running: Running, **size: int) -> Page:
        opened.append(browser.open(running.url + "/", **size))
        opened[-1].until("gauges.latest || $('lock').open")
        return opened[-1]

    yield open_page
    for page in opened:
        assert page.faults() == []
        page.close()
