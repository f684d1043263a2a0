"""--prompt-cache: made by the first run, used by the next, refused where it does not belong."""

from __future__ import annotations

import json
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
