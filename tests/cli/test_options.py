"""Option types: what they take, what they refuse, and that none is without a limit."""

from __future__ import annotations

import json

import click
import hypothesis.strategies as st
import pytest
from click.testing import CliRunner
from hypothesis import given

from edge_runtime.cli import options
from edge_runtime.cli.app import app


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1234", 1234),
        ("12B", 12),
        ("512M", 512 * 2**20),
        ("512m", 512 * 2**20),
        ("3GiB", 3 * 2**30),
        ("3 GiB", 3 * 2**30),
        ("7.5G", 15 * 2**29),
        (".5k", 512),
        ("1T", 2**40),
        ("8GB", 8 * 10**9),
        ("1.5kB", 1500),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert options.parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "G", "-1G", "7,5G", "1e9", "3 apples", "nan", "inf", "3Gi", "7.5"]
)
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|whole number"):
        options.parse_size(text)


@given(st.integers(0, 2**50))
def test_a_count_of_bytes_is_itself(size: int) -> None:
    assert options.parse_size(str(size)) == size
    assert options.parse_size(f"{size}KiB") == size * 1024


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("1", 1), ("32768", 32768)])
def test_ctx(text: str, value: object) -> None:
    assert options.parse_ctx(text) == value


@pytest.mark.parametrize("text", ["0", "-5", "4k", ""])
def test_what_is_not_a_ctx(text: str) -> None:
    with pytest.raises(ValueError, match="at least 1, nor auto"):
        options.parse_ctx(text)


@click.command()
@options.model_argument(required=False)
@options.engine_options
@options.json_option
def everything(**values: object) -> None:
    options.print_document(values)


def test_the_shared_options_and_their_defaults() -> None:
    done = CliRunner().invoke(everything, [])
    assert done.exit_code == 0, done.output
    assert click.get_current_context(silent=True) is None
    assert done.stdout.count("\n") == 1
    defaults = {
        "model": None,
        "backend": "auto",
        "view": "nest",
        "draft": "auto",
        "draft_source": "auto",
        "kv_policy": "auto",
        "ctx": "auto",
        "budget": None,
        "reserve": None,
        "threads": None,
        "as_json": False,
    }
    assert json.loads(done.stdout) == defaults


@pytest.mark.parametrize(
    "args",
    [
        ["--backend", "tpu"],
        ["--view", "w5"],
        ["--draft", "8"],
        ["--draft", "²"],
        ["--kv-policy", "kv16"],
        ["--kv-policy", "recent:0"],
        ["--ctx", "none"],
        ["--budget", "lots"],
        ["--reserve", "-1G"],
        ["--threads", "0"],
        ["--threads", "257"],
        ["--threads", "100000"],
        ["--threads", "9" * 5000],
        ["--ctx", "9" * 5000],
        ["--draft", "9" * 5000],
        ["--budget", "9" * 5000],
        ["--kv-policy", "recent:" + "9" * 5000],
    ],
)
def test_a_wrong_value_names_the_option(args: list[str]) -> None:
    done = CliRunner().invoke(everything, args)
    assert done.exit_code == 2
    assert args[0] in done.stderr
    assert len(done.stderr) < 400


FLOATS = ("float", "float range")
COUNTS = ("whole number", "integer", "integer range")


def all_options(
    command: click.Command, kinds: tuple[str, ...], path: tuple[str, ...] = ()
) -> list[tuple[str, ...]]:
    """The words that lead to every option of a command whose value is of a kind."""
    found = [
        (*path, option.opts[-1])
        for option in command.params
        if isinstance(option, click.Option) and option.type.name in kinds
    ]
    if isinstance(command, click.Group):
        for name in command.list_commands(None):
            sub = command.get_command(None, name)
            assert sub is not None
            found += all_options(sub, kinds, (*path, name))
    return found


@pytest.mark.parametrize("words", all_options(app, FLOATS), ids=" ".join)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_a_float_option_is_finite(words: tuple[str, ...], value: str, call) -> None:
    code, out, err = call(*words, value, "model")
    assert (code, out) == (2, "")
    assert words[-1] in err
    assert "finite" in err or "range" in err


@pytest.mark.parametrize("words", all_options(app, COUNTS), ids=" ".join)
@pytest.mark.parametrize("value", ["1" + "0" * 400, "9" * 5000, "1" + "0" * 20, "1.5"])
def test_a_count_is_bounded(words: tuple[str, ...], value: str, call) -> None:
    """What waits, slices or allocates takes no more."""
    code, out, err = call(*words, value, "model")
    assert (code, out) == (2, "")
    assert words[-1] in err
    assert len(err) < 500


@pytest.mark.parametrize("value", ["1e300", "1e10"])
def test_a_time_is_bounded(value: str, call) -> None:
    for words in (("generate", "--deadline"), ("serve", "--queue-seconds")):
        code, out, err = call(*words, value, "model")
        assert (code, out) == (2, "")
        assert "expected at most 1000000000" in err


@pytest.mark.parametrize(
    "words", [("chat", "--system"), ("chat", "--once"), ("generate", "-p"), ("generate", "--stop"),
              ("eval", "--stop"), ("eval", "--template")], ids=" ".join,
)  # fmt: skip
def test_text_for_a_model_is_utf8(words: tuple[str, ...], call) -> None:
    """Arguments may hold any bytes; refused before anything is loaded."""
    code, out, err = call(*words, "é\udcffb", "model")
    assert (code, out) == (2, "")
    assert "expected UTF-8 text, got byte 0xff at 2" in err
