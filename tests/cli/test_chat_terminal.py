"""chat as a person has it: at a pseudo-terminal, with editing and without."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import boards
import pytest
from chat_tools import ALT_ENTER, CTRL_C, CTRL_D, END_OF_PASTE, PASTE, UP, Terminal

# run in the child before the program: a phase that lasts until it is stopped, and says so
LOADING = """
import time
import edge_runtime.decode.engine as engine
def load_model(*_):
    print("loading", flush=True)
    time.sleep(60)
engine.load_model = load_model
"""
PREFILL = """
import time
from edge_runtime.model.runner import Model
whole = Model.prefill
def prefill(self, *args, proceed, **options):
    print("reading", flush=True)
    for _ in range(600):
        if not proceed(0):
            return 0, None
        time.sleep(0.1)
    return whole(self, *args, proceed=proceed, **options)
Model.prefill = prefill
"""
DECODE = """
import time
from edge_runtime.decode.generation import Generation
whole = Generation._cycle
def cycle(self):
    time.sleep(0.05)
    return whole(self)
Generation._cycle = cycle
"""
TALKATIVE = ("-n", 1900, "--draft", "off")


@pytest.fixture
def start(tiny_checkpoint: Path, tmp_path: Path) -> Any:
    def start(*args: object, **options: Any) -> Terminal:
        return Terminal(
            "chat", tiny_checkpoint, *(args or ("-n", 5)), state=tmp_path / "state", **options
        )

    return start


def asked(chat: Terminal, file: Path) -> list[str]:
    """What the chat has as its user's messages, by saving it."""
    chat.type(f"/save {file}\r")
    chat.until("Saved")
    chat.prompt()
    return [m["content"] for m in json.loads(file.read_text())["messages"][::2]]


def leave(chat: Terminal) -> None:
    chat.type("/exit\r")
    assert chat.end() == 0


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_conversation(start: Any, term: str) -> None:
    chat = start(term=term)
    chat.until("/help")
    chat.prompt()
    chat.type(CTRL_C)
    chat.until("/exit or Ctrl-D")
    for typed, shown in (
        ("hello", "tok/s"),
        ('"""one\rtwo"""', "tok/s"),
        ("/stats", "draft    "),
        ("/nonsense", "Unknown command /nonsense"),
        ("/context", "turn 2"),
        ("/regen", "tok/s"),
        ("/undo", "Taken back: one"),
    ):
        chat.prompt()
        chat.type(typed + "\r")
        chat.until(shown)
    chat.prompt()
    chat.type(CTRL_D)
    assert chat.end() == 0


def test_answers_that_go_elsewhere(start: Any, tmp_path: Path) -> None:
    """`chat | tee`: a person types, so it is a conversation; answers alone go there, uncoloured."""
    coloured = "import os; os.environ.pop('NO_COLOR')"
    with (tmp_path / "talk").open("wb") as talk:
        chat = start("-n", 5, before=coloured, stdout=talk.fileno())
        chat.prompt()
        for text in ("hello", "world"):
            chat.type(f"{text}\r")
            chat.until("tok/s")
            chat.prompt()
        assert asked(chat, tmp_path / "chat.json") == ["hello", "world"]
        leave(chat)
    said = json.loads((tmp_path / "chat.json").read_text())["messages"]
    answers = "".join(m["content"] + "\n" for m in said if m["role"] == "assistant")
    assert (tmp_path / "talk").read_text() == answers
    assert not (tmp_path / "state").exists()


def test_history_across_two_runs(start: Any, tmp_path: Path) -> None:
    first = start()
    first.prompt()
    first.type("hello world\r")
    first.until("ctx ")
    first.prompt()
    leave(first)
    [file] = (tmp_path / "state").rglob("*.jsonl")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    second = start()
    second.prompt()
    second.type(UP + UP)
    second.until("hello world")
    second.type("!\r")
    second.until("ctx ")
    second.prompt()
    assert asked(second, tmp_path / "chat.json") == ["hello world!"]
    leave(second)
    assert len(file.read_text().splitlines()) == 5


def test_several_lines(start: Any, tmp_path: Path) -> None:
    chat = start()
    chat.prompt()
    for typed in (
        f"one{ALT_ENTER}  two{ALT_ENTER}three\r",
        f"{PASTE}a\n\tb\r\n/exit{END_OF_PASTE}\r",
        f"{PASTE}/exit\nis no command{END_OF_PASTE}\r",
        '"""x\r\ry"""\r',
    ):
        chat.type(typed)
        chat.until("ctx ")
        chat.prompt()
    assert asked(chat, tmp_path / "chat.json") == [
        "one\n  two\nthree", "a\n\tb\n/exit", "/exit\nis no command", "x\n\ny",
    ]  # fmt: skip
    leave(chat)


def test_tab_completes_a_command(start: Any) -> None:
    chat = start()
    chat.prompt()
    chat.type("/cont\t\r")
    chat.until("are free")
    leave(chat)


def test_ctrl_c_while_it_loads(start: Any) -> None:
    chat = start(before=LOADING)
    chat.until("loading")
    chat.type(CTRL_C)
    assert chat.end() == 130


def test_ctrl_c_while_a_prompt_is_read(start: Any, tmp_path: Path) -> None:
    chat = start(before=PREFILL)
    chat.prompt()
    chat.type("hello\r")
    chat.until("reading")
    chat.type(CTRL_C)
    chat.until("Stopped before the first word; the message is forgotten.")
    chat.prompt()
    assert asked(chat, tmp_path / "chat.json") == []
    leave(chat)


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(start: Any, tmp_path: Path, term: str) -> None:
    chat = start(*TALKATIVE, before=DECODE, term=term)
    chat.prompt()
    chat.type("hello world\r")
    chat.until("hello world\n")
    time.sleep(0.5)
    chat.type(CTRL_C)
    assert "stopped" in chat.until(">>>")
    if term == "xterm":
        assert asked(chat, tmp_path / "chat.json") == ["hello world"]
    leave(chat)


def test_ctrl_c_at_the_prompt_clears_what_was_typed(start: Any, tmp_path: Path) -> None:
    chat = start()
    chat.prompt()
    chat.type("never sent")
    chat.until("never sent")
    chat.type(CTRL_C)
    chat.until("/exit or Ctrl-D")
    chat.prompt()
    chat.type("sent\r")
    chat.until("ctx ")
    chat.prompt()
    assert asked(chat, tmp_path / "chat.json") == ["sent"]
    leave(chat)


def test_ctrl_d_in_a_line_does_not_leave(start: Any) -> None:
    chat = start()
    chat.prompt()
    chat.type("x" + CTRL_D + "\r")
    chat.until("ctx ")
    chat.prompt()
    chat.type(CTRL_D)
    assert chat.end() == 0


def test_a_terminal_that_goes_away_ends_it(start: Any) -> None:
    chat = start()
    chat.prompt()
    chat.hang_up()
    chat.process.wait(60)


def test_a_narrow_terminal(start: Any, tmp_path: Path) -> None:
    chat = start("-n", 5, size=(10, 20))
    chat.prompt()
    words = " ".join(f"word{i}" for i in range(12))
    chat.type(f"{words}\r")
    chat.until(" tok ")
    figures = "tok " + chat.until(">>>")
    assert all(len(line) <= 20 for line in figures.splitlines()), figures.splitlines()
    assert asked(chat, tmp_path / "chat.json") == [words]
    leave(chat)


def test_a_resize(start: Any, tmp_path: Path) -> None:
    chat = start("-n", 60, before=DECODE)
    chat.prompt()
    words = " ".join(f"word{i}" for i in range(12))
    chat.type(words)
    chat.until("word11")
    for size in ((10, 20), (40, 100), (5, 12)):  # while a message is written
        chat.resize(*size)
        time.sleep(0.2)
    chat.type(" end\r")
    time.sleep(0.5)
    chat.resize(12, 30)  # and while it is answered
    chat.until("ctx ")
    chat.prompt()
    assert asked(chat, tmp_path / "chat.json") == [f"{words} end"]
    leave(chat)


def test_without_prompt_toolkit_it_says_so(start: Any) -> None:
    missing = """
import importlib.util
whole = importlib.util.find_spec
importlib.util.find_spec = lambda n, *a: None if n == "prompt_toolkit" else whole(n, *a)
"""
    chat = start(before=missing)
    chat.until("prompt_toolkit is not installed")
    chat.prompt()
    chat.type("hello\r")
    chat.until("ctx ")
    leave(chat)


def test_power_beside_the_answers(start: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("RAM 1/2MB CPU [1%@1] VDD_IN 4000mW/4000mW VDD_CPU_GPU_CV 40mW/40mW\n" * 99)
    chat = start("-n", 60, "--draft", "off", "--power-source", f"replay:{log}", before=DECODE)
    chat.prompt()
    for typed, shown in (
        ("hello\r", "J/tok (VDD_IN of a replayed log"),
        ("/power\r", "power from replay: VDD_IN"),
        ("/stats\r", "J decoding"),
    ):
        chat.type(typed)
        chat.until(shown)
        chat.prompt()
    leave(chat)


def test_throttling_is_told_at_once(start: Any, tmp_path: Path) -> None:
    board = boards.make(tmp_path / "board", **boards.NX16)
    root = f"from edge_runtime import machine\nmachine.ROOT = machine.Path({str(board)!r})\n"
    chat = start(*TALKATIVE, "--power-source", "none", before=root + DECODE)
    chat.prompt()
    chat.type("hello world\r")
    chat.until("hello world\n")
    boards.write(board, "sys/class/thermal/cooling_device1/cur_state", "1\n")
    chat.until("throttling: gpu-throttle-alert")
    boards.write(board, "sys/class/thermal/cooling_device1/cur_state", "0\n")
    chat.until("throttling is over")
    chat.type(CTRL_C)
    assert "stopped" in chat.until(">>>")
    leave(chat)


# ---- what a terminal emulator makes of it


def test_the_screen_of_a_real_terminal(tiny_checkpoint: Path, tmp_path: Path, give_up: Any) -> None:
    """tmux draws what chat writes: a long line survives a resize, a pasted block its lines."""
    if shutil.which("tmux") is None:
        give_up("tmux", "tmux is not installed")
    socket = str(tmp_path / "tmux")

    def tmux(*args: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", socket, "-f", "/dev/null", *args], capture_output=True, text=True,
            timeout=30, check=True,
        )  # fmt: skip
        return done.stdout

    def screen(text: str) -> str:
        deadline = time.monotonic() + 60
        while text not in (shown := tmux("capture-pane", "-p", "-J", "-t", "chat")):
            assert time.monotonic() < deadline, shown
            time.sleep(0.1)
        return shown

    program = f"{sys.executable} -c 'from edge_runtime.cli import main; main()'"
    line = f"XDG_STATE_HOME={tmp_path} {program} chat {tiny_checkpoint} -n 5; echo left $?"
    tmux("new-session", "-d", "-s", "chat", "-x", "60", "-y", "30", "sh", "-c", f"{line}; sleep 60")
    try:
        screen(">>>")
        words = " ".join(f"word{i}" for i in range(20))
        tmux("send-keys", "-t", "chat", "-l", words)
        screen("word19")
        tmux("resize-window", "-t", "chat", "-x", "30", "-y", "30")
        tmux("send-keys", "-t", "chat", "-l", " end")
        assert words.split()[-1] in screen("end")
        tmux("send-keys", "-t", "chat", "Enter")
        screen("ctx ")
        (tmp_path / "block").write_text("```python\nif x:\n\ty = 1\n```")
        tmux("load-buffer", "-b", "block", str(tmp_path / "block"))
        tmux("paste-buffer", "-p", "-b", "block", "-t", "chat")
        screen("... ```")
        tmux("send-keys", "-t", "chat", "Enter")
        tmux("send-keys", "-t", "chat", "-l", f"/save {tmp_path / 'chat.json'}")
        tmux("send-keys", "-t", "chat", "Enter")
        screen("Saved 2 turns")
        tmux("send-keys", "-t", "chat", "C-d")
        screen("left 0")
    finally:
        tmux("kill-server")
    saved = json.loads((tmp_path / "chat.json").read_text())
    block = "```python\nif x:\n\ty = 1\n```"
    assert [m["content"] for m in saved["messages"][::2]] == [f"{words} end", block]
