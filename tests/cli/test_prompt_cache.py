"""--prompt-cache: made by the first run, used by the next, refused where it does not belong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOME = ("-n", 12, "--ignore-eos", "--backend", "cpu", "--json")
TEXT = "hello the world, " * 8


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompt.kv"


def generated(call: Any, *args: object) -> dict[str, Any]:
    code, out, err = call("generate", *args)
    assert code == 0, err
    return dict(json.loads(out))


@pytest.mark.parametrize("raw", [(), ("--raw",)])
def test_generate(call: Any, tiny_checkpoint: Path, file: Path, raw: tuple[str, ...]) -> None:
    common = (tiny_checkpoint, "-p", TEXT, *SOME, *raw)
    want = generated(call, *common, "--view", "w8")
    first = generated(call, *common, "--prompt-cache", file)
    assert first["cached_tokens"] == 0
    made = file.read_bytes()
    for more in (
        (),
        ("--view", "w8"),
        ("--draft", "4", "--draft-source", "base", "--kv-policy", "kv4"),
        ("--backend", "reference"),
        ("--ctx", "300"),
    ):
        again = generated(call, *common, "--prompt-cache", file, *more)
        assert again["token_ids"] == want["token_ids"] == first["token_ids"], more
        assert again["text"] == want["text"]
        assert again["cached_tokens"] == again["prompt_tokens"] - 1
    assert file.read_bytes() == made
    if raw:  # what goes on from it begins with it
        longer = (tiny_checkpoint, "-p", TEXT + "hell", *SOME, *raw)
        got = generated(call, *longer, "--prompt-cache", file)
        assert got["token_ids"] == generated(call, *longer)["token_ids"]
        assert got["cached_tokens"] > len(TEXT) // 4


def test_what_is_refused(call: Any, tiny_checkpoint: Path, file: Path, tmp_path: Path) -> None:
    common = ("generate", tiny_checkpoint, *SOME, "--prompt-cache")
    assert call(*common, file, "-p", TEXT)[0] == 0
    (tmp_path / "text").write_text("x")
    for code, said, args in (
        (5, "made for another prompt", (file, "-p", "something else")),
        (5, "made for another view", (file, "-p", TEXT, "--view", "w4")),
        (5, "no prompt's cache", (tmp_path / "text", "-p", TEXT)),
        (5, "got none", (tmp_path, "-p", TEXT)),
        (2, "cannot keep", (tmp_path / "none" / "x", "-p", TEXT)),
        (2, "nested KV cache", (tmp_path / "new", "-p", TEXT, "--view", "fp", "--backend", "auto")),
    ):
        found, out, err = call(*common, *args)
        assert (found, out) == (code, ""), err
        assert err.count("error: ") == 1
        assert said in err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_what_is_refused_before_a_model_is_loaded(
    call: Any, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may be converted and loaded for minutes."""
    if command == "serve":
        pytest.importorskip("uvicorn")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("x")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "there").symlink_to(tmp_path / "text")
    (tmp_path / "links" / "dangling").symlink_to("nowhere/x")
    asks = {"generate": ("-p", TEXT), "chat": ("--once", TEXT), "serve": ()}[command]
    made = command != "serve"
    for name, code, said in (
        ("text", 5, "no prompt's cache"),
        ("links/there", 5, "no prompt's cache"),
        ("links", 5, "not a regular file"),
        ("/dev/null", 5, "not a regular file"),
        ("none/x", 2 if made else 5, "cannot keep" if made else "got none"),
        ("links/dangling", 2 if made else 5, "links/nowhere" if made else "got none"),
    ):
        found, out, err = call(command, "no-such-model", *asks, "--prompt-cache", name)
        assert (found, out) == (code, ""), err
        assert said in err
        assert name in err


def test_a_deadline_that_ends_the_prompt_keeps_nothing(
    call: Any, tiny_checkpoint: Path, file: Path
) -> None:
    common = ("generate", tiny_checkpoint, *SOME, "--prompt-cache", file, "-p", TEXT)
    code, out, err = call(*common, "--deadline", "0.0000001")
    assert code == 0
    assert json.loads(out)["finish_reason"] == "deadline"
    assert not file.exists()
    assert "not kept" in err


def test_chat_keeps_its_system_prompt(call: Any, tiny_checkpoint: Path, file: Path) -> None:
    common = ("chat", tiny_checkpoint, "--system", TEXT, "-n", 12, "--backend", "cpu", "--json")
    want = json.loads(call(*common, "--once", "hell")[1])
    code, out, err = call(*common, "--once", "hell", "--prompt-cache", file)
    assert code == 0, err
    assert "kept" in err
    made = file.read_bytes()
    for text in ("hell", "world"):
        code, out, err = call(*common, "--once", text, "--prompt-cache", file)
        assert code == 0, err
        found = json.loads(out)
        assert found["cached_tokens"] > len(TEXT) // 4
        assert found["cached_tokens"] < found["prompt_tokens"] - 1
        if text == "hell":
            assert found["token_ids"] == want["token_ids"]
    assert file.read_bytes() == made
    other = ("chat", tiny_checkpoint, "--system", "x", "--once", "hell", "--prompt-cache", file)
    assert call(*other)[0] == 5


def test_serve_begins_with_it(call: Any, tiny_checkpoint: Path, file: Path) -> None:
    """Also after other prompts; without the file it does not start."""
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("uvicorn")
    options = ("--backend", "cpu", "--prompt-cache", str(file))
    code, _, err = call("serve", tiny_checkpoint, *options)
    assert code == 5
    assert "chat --system TEXT" in err
    chat = ("chat", tiny_checkpoint, "--system", TEXT, "--once", "hell", *options)
    code, _, err = call(*chat, "-n", 1)
    assert code == 0, err
    command = [
        sys.executable, "-c", "from edge_runtime.cli import main; main()", "serve",
        str(tiny_checkpoint), *options, "--port", "0", "--power-source", "none",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = (re.search(r" at (http://\S+:\d+)/", line) for line in process.stderr)
            url = next(found[1] for found in lines if found)

            def cached(*messages: tuple[str, str]) -> int:
                body = {
                    "model": tiny_checkpoint.name,
                    "messages": [{"role": role, "content": text} for role, text in messages],
                    "max_tokens": 4,
                }
                answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
                return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

            for _ in range(2):
                assert cached(("system", TEXT), ("user", "world")) > len(TEXT) // 4
                assert cached(("user", "other")) < 5
        finally:
            process.terminate()
            process.communicate(timeout=60)
