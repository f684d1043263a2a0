"""chat: at a terminal, from a pipe and with --once."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest


def test_the_end_of_input_is_no_error(call, tiny_checkpoint: Path) -> None:
    assert call("chat", tiny_checkpoint) == (0, "", "")


def test_a_pipe_is_one_message(call, tiny_checkpoint: Path) -> None:
    answers = {
        call("chat", tiny_checkpoint, "-n", 8, *more, stdin=stdin)[:2]
        for more, stdin in (
            (("--once", "hello\nworld"), b""),
            (("--once", "-"), b"hello\nworld"),
            ((), b"hello\nworld"),
            ((), b"hello\r\nworld\r\n"),
        )
    }
    assert len(answers) == 1
    assert answers.pop()[0] == 0


def test_json_and_system(call, tiny_checkpoint: Path) -> None:
    plain = json.loads(call("chat", tiny_checkpoint, "--once", "hi", "-n", 4, "--json")[1])
    code, out, _ = call(
        "chat", tiny_checkpoint, "-n", 4, "--json", "--system", "in the world", stdin=b"hi"
    )
    assert code == 0
    assert json.loads(out)["prompt_tokens"] > plain["prompt_tokens"]


@pytest.mark.parametrize("args", [("--once", ""), ("--once", "-"), ("--once", "x", "--temp", "-1")])
def test_usage(call, tiny_checkpoint: Path, args: tuple[str, ...]) -> None:
    code, out, err = call("chat", tiny_checkpoint, *args)
    assert (code, out) == (2, "")
    assert "error:" in err


def test_thinking_of_a_model_without_it_is_refused(call, tiny_checkpoint: Path) -> None:
    code, out, err = call("chat", tiny_checkpoint, "--once", "hi", "--think", "off")
    assert (code, out) == (2, "")
    assert "error: thinking: this model's chat template has no enable_thinking" in err


def test_settings_are_the_command_lines(tmp_path: Path) -> None:
    """Every sampling option is a setting, read and checked as that option."""
    from edge_runtime.cli.chat import make_settings
    from edge_runtime.cli.sampling import _OPTIONS
    from edge_runtime.errors import UsageError

    @click.command()
    def bare() -> None:
        pass

    for option in reversed(_OPTIONS):
        bare = option(bare)
    defaults = bare.make_context("bare", []).params
    settings = make_settings(defaults)
    assert {name.replace("-", "_") for name in settings.values} == set(defaults)
    for name, text, value in (
        ("temp", "0.7", 0.7), ("top-p", ".9", 0.9), ("top-k", "5", 5), ("min-p", "0.1", 0.1),
        ("repetition-penalty", "1.1", 1.1), ("presence-penalty", "-1", -1.0), ("seed", "9", 9),
        ("new-tokens", "3", 3),
    ):  # fmt: skip
        settings.set(name, text)
        assert settings.values[name] == value
    options = settings.options()
    assert options["max_new_tokens"] == 3
    assert (options["sampling"].temperature, options["sampling"].seed) == (0.7, 9)
    before = dict(settings.values)
    for name, text in (
        ("temp", "hot"), ("temp", "-1"), ("temp", "nan"), ("top-p", "0"), ("top-p", "1.5"),
        ("top-k", "1.5"), ("seed", "-1"), ("seed", str(2**64)), ("new-tokens", "0"),
        ("new-tokens", "1" + "0" * 24),
        ("min-p", "2"), ("repetition-penalty", "0"), ("presence-penalty", "inf"),
    ):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            settings.set(name, text)
        assert "\n" not in caught.value.message
    assert settings.values == before
    for name in settings.values:
        settings.set(name, "default")
    assert {n.replace("-", "_"): v for n, v in settings.values.items()} == defaults
