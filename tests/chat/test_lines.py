"""Reading messages: fences, terminals that can be edited on and others, what is imported when."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from edge_runtime.chat import lines
from edge_runtime.chat.commands import LEAVE, NAMES
from edge_runtime.chat.history import HistoryFile
from edge_runtime.chat.lines import PlainReader, is_open, open_reader, without_fences


@pytest.mark.parametrize(
    ("text", "still_open", "inner"),
    [
        ('"""', True, ""),
        ('"""one', True, "one"),
        ('"""one"""', False, "one"),
        ('  """\none\n\ntwo\n"""  ', False, "one\n\ntwo"),
        ('""""""', False, ""),
        ('"""a """ b', True, 'a """ b'),
    ],
)
def test_fences(text: str, still_open: bool, inner: str) -> None:
    assert is_open(text) is still_open
    assert without_fences(text) == inner


def test_a_line_without_a_fence_is_whole() -> None:
    assert not is_open('say """ twice')
    assert not is_open("")


def test_plain_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('hel\udce9lo\r\n"""one\ntwo"""\n"""three'))
    reader = PlainReader()
    assert reader.read() == "hel?lo"
    assert reader.read() == '"""one\ntwo"""'
    with pytest.raises(EOFError):
        reader.read()
    out, err = capsys.readouterr()
    assert out == ""  # the prompt is no answer
    assert err == ">>> >>> ... >>> ... "


@pytest.mark.parametrize(
    ("tty", "term", "there", "kind", "note"),
    [
        (True, "xterm", True, "EditingReader", ""),
        (True, "dumb", True, "PlainReader", ""),
        (True, None, True, "PlainReader", ""),
        (False, "xterm", True, "PlainReader", ""),
        (True, "xterm", False, "PlainReader", lines.NO_EDITING),
    ],
)
def test_which_reader(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tty: bool,
    term: str | None,
    there: bool,
    kind: str,
    note: str,
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return tty

    class Editing:
        def __init__(self, *_: object) -> None:
            pass

    Editing.__name__ = "EditingReader"
    monkeypatch.setattr("sys.stdin", Stream())
    monkeypatch.setattr("sys.stdout", Stream())
    monkeypatch.setattr(lines, "EditingReader", Editing)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if there else None)
    if term is None:
        monkeypatch.delenv("TERM", raising=False)
    else:
        monkeypatch.setenv("TERM", term)
    reader, said = open_reader(HistoryFile(tmp_path / "history"), NAMES + LEAVE)
    assert (type(reader).__name__, said) == (kind, note)


def test_without_a_terminal_nothing_of_it_is_imported(tiny_checkpoint: Path) -> None:
    code = (
        "import sys\nfrom edge_runtime.cli.app import run\n"
        f"run(['chat', {str(tiny_checkpoint)!r}, '-n', '2'])\n"
        "import edge_runtime.chat.lines, edge_runtime.chat.repl\n"
        "print([m for m in sys.modules if m.startswith('prompt_toolkit')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=b"hello", capture_output=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == b"[]"
