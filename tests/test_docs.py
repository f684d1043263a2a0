"""README and the command line say the same."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from edge_runtime.cli.app import COMMANDS, PROGRAM, app


@pytest.fixture(scope="module")
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text(encoding="utf-8")


def get_command(name: str) -> click.Command:
    command = app.get_command(click.Context(app), name)
    assert command is not None, f"{name} is not a command"
    return command


def options_of(command: click.Command) -> set[str]:
    ctx = click.Context(command)
    return {option for param in command.get_params(ctx) for option in param.opts}


def shown_lines(readme: str) -> list[list[str]]:
    """Every command line README shows, in a block or inline, as words from the program's name on.

    Continuation lines are joined; a trailing comment, explanation or pipe is cut off.
    """
    text = re.sub(r"\\\n\s*", " ", readme)
    lines = re.findall(rf"^[ \t]*(?:\$ )?({PROGRAM} .*)$", text, re.MULTILINE)
    lines += re.findall(rf"`({PROGRAM} [^`\n]+)`", text)
    commands = []
    for line in lines:
        words = shlex.split(re.split(r"\s{3,}", line)[0], comments=True)
        end = next(
            (i for i, word in enumerate(words) if word in {"|", "&&", "||", ">", "2>"}), None
        )
        commands.append([word.strip("[]") for word in words[:end]])
    return commands


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_readme_and_has_help(name: str, readme: str) -> None:
    assert re.search(rf"{PROGRAM} {name}\b", readme)
    assert get_command(name).help


def test_every_option_shown_exists(readme: str) -> None:
    lines = shown_lines(readme)
    assert lines
    for _, first, *rest in lines:
        command = app if first.startswith("-") else get_command(first)
        if isinstance(command, click.Group) and rest and rest[0] in command.commands:
            command = command.commands[rest[0]]
        known = options_of(command)
        used = {word.partition("=")[0] for word in rest if word.startswith("--")}
        used |= {first} if first.startswith("-") else set()
        assert used <= known | {"-h", "--help"}, f"{PROGRAM} {first}: {used - known}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help(name: str) -> None:
    command = get_command(name)
    bare = [
        param.opts
        for param in command.get_params(click.Context(command))
        if isinstance(param, click.Option) and not param.help
    ]
    assert not bare


def test_a_new_environment_is_activated(readme: str) -> None:
    """Programs are called by their bare names, so every block that makes one goes into it."""
    assert set(re.findall(r"\.venv/bin/(\w+)", readme)) == {"activate"}
    for line in re.findall(r".*-m venv .*", readme):
        assert "-m venv .venv && . .venv/bin/activate &&" in line


@pytest.mark.parametrize("number", range(2))
def test_the_python_examples_run(
    readme: str, number: int, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    mine = [text for text in examples if "edge_runtime" in text]
    assert len(mine) == 2
    (tmp_path / "smollm2-nest").symlink_to(tiny_checkpoint)
    done = subprocess.run(
        [sys.executable, "-c", mine[number]], cwd=tmp_path, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") >= 2
