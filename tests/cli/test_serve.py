"""`bitnest-edge serve` as a process: where it listens, what it refuses, how it ends."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_checkpoints
from click.testing import CliRunner

from edge_runtime.cli.app import app
from edge_runtime.cli.serve import api_key, is_loopback
from edge_runtime.errors import CheckpointError, UsageError
from edge_runtime.power import PowerUnavailable
from edge_runtime.serve.metrics import Power


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.convert_tiny(tmp_path_factory.mktemp("served"), "llama")


@pytest.fixture
def started(
    model: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server's process and address; options may be given as the fixture's parameter."""
    command = [
        sys.executable, "-c", "from edge_runtime.cli import main; main()", "serve", str(model),
        "--port", "0", "--backend", "reference", "--power-source", "none", "--name", "tiny",
        *getattr(request, "param", ()),
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = ""
    for line in process.stderr:
        if found := re.search(r"tiny at (http://\S+:\d+)/", line):
            url = found[1]
            break
    yield process, url
    process.kill()
    process.wait()
    process.stderr.close()


BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


def test_a_process_that_is_told_to_end(started: tuple[subprocess.Popen[str], str]) -> None:
    """It listens on loopback; SIGTERM lets the answer end, and the exit code is 0."""
    process, url = started
    assert url.startswith("http://127.0.0.1:")
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = BODY | {"max_tokens": 60, "ignore_eos": True}
        answers.append(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60))

    asking = threading.Thread(target=ask)
    asking.start()
    while not httpx.get(f"{url}/metrics?format=json", timeout=60).json()["busy"]:
        assert asking.is_alive()
    process.send_signal(signal.SIGTERM)
    asking.join(60)
    assert answers[0].json()["usage"]["completion_tokens"] == 60
    assert process.wait(30) == 0


@pytest.mark.parametrize(
    "started", [("--host", "127.0.0.2"), ("--host", "LocalHost")], indirect=True
)
def test_other_names_of_this_machine(started: tuple[subprocess.Popen[str], str]) -> None:
    url = started[1]
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200
    other = httpx.get(f"{url}/health", headers={"host": "evil.example"}, timeout=60)
    assert other.status_code == 403


def run(*arguments: str, **variables: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["serve", *arguments], env=variables)
    return found.exit_code, str(found.exception)


def test_others_need_a_key(model: Path) -> None:
    for host in ("0.0.0.0", "192.168.1.5", "::", "board.local"):
        code, error = run(str(model), "--host", host)
        assert "expected a key" in error, code


def test_a_port_that_is_taken(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told before the model is loaded."""
    monkeypatch.setattr("edge_runtime.cli.serve.open_checkpoint", None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        _, error = run(str(model), "--port", port, "--backend", "reference")
    assert f"cannot listen on 127.0.0.1 port {port}" in error


@pytest.mark.parametrize(("options", "says"), [
    (("--power-source", "foo"), "unknown power source 'foo'"),
    (("--power-source", "replay:/nonexistent"), "/nonexistent"),
    (("--name", "a\udcff"), "expected printable characters, got 'a\\udcff'"),
    (("--name", "a\nb"), "expected printable characters"),
    (("--name", ""), "expected printable characters, got ''"),
])  # fmt: skip
def test_what_is_refused_before_a_model_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], says: str
) -> None:
    monkeypatch.setattr("edge_runtime.cli.serve.open_checkpoint", None)
    assert says in run(str(model), "--port", "0", *options)[1]


def test_a_folder_whose_name_cannot_be_told(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"a\xff")
    shutil.copytree(model, folder)
    assert "expected printable characters" in run(str(folder), "--port", "0")[1]


def test_no_power_source(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none is there it is told; one that was named has to be there."""
    monkeypatch.setattr("edge_runtime.power.meter.AUTO", ())
    with caplog.at_level(logging.INFO):
        assert Power("none").rail == ""
        assert caplog.text == ""
        assert Power("auto").rail == ""
    assert "no watts and joules in /metrics: no source of power readings" in caplog.text
    with pytest.raises(PowerUnavailable):
        Power("jtop")


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    monkeypatch.delenv("BITNEST_EDGE_API_KEY", raising=False)
    assert api_key(None) is None
    file.write_text("a-long-enough-key\n")
    assert api_key(str(file)) == "a-long-enough-key"
    for text in ("", "short", "two words here", "schlüssel-lang", "line\nline-again"):
        file.write_text(text)
        with pytest.raises(UsageError, match="expected a key of at least 8"):
            api_key(str(file))
    file.write_bytes(b"x" * 5000)
    with pytest.raises(CheckpointError, match="at most 4096 bytes"):
        api_key(str(file))
    with pytest.raises(CheckpointError, match="cannot read the key"):
        api_key(str(tmp_path / "none"))
    monkeypatch.setenv("BITNEST_EDGE_API_KEY", "from-the-environment")
    assert api_key(None) == "from-the-environment"


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "")))


def test_without_the_extra() -> None:
    """One line that says what to install, and the exit code of a missing backend."""
    code = (
        "import sys; sys.modules['starlette'] = None; sys.argv = ['x', 'serve', 'default'];"
        "from edge_runtime.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 4
    assert "pip install 'bitnest-edge[serve]'" in done.stderr
    assert "Traceback" not in done.stderr
