"""chat: at a terminal, from a pipe and with --once."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ENTER = "import sys\nfrom edge_runtime.cli import main\nmain(sys.argv[1:])"


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


class Terminal:
    """A chat in a child process that sees a terminal."""

    def __init__(self, *args: object) -> None:
        self._fd, child = pty.openpty()
        environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENTER, *map(str, args)],
            stdin=child,
            stdout=child,
            stderr=child,
            env=environment,
            start_new_session=True,
        )
        os.close(child)
        self.seen = ""
        self._new = ""

    def until(self, text: str, *, interrupt: bool = False) -> None:
        """Read on until `text` comes; `interrupt` presses Ctrl-C while it does not."""
        deadline = time.monotonic() + 60
        while text not in self._new:
            assert time.monotonic() < deadline, self.seen
            if interrupt:
                self.process.send_signal(signal.SIGINT)
            if select.select([self._fd], [], [], 1.0)[0]:
                data = os.read(self._fd, 4096).decode("utf-8", "replace")
                self.seen += data
                self._new += data
        self._new = self._new.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def end(self) -> int:
        code = self.process.wait(60)
        os.close(self._fd)
        assert "Traceback" not in self.seen
        return code


def test_a_conversation_at_a_terminal(tiny_checkpoint: Path) -> None:
    chat = Terminal("chat", tiny_checkpoint, "-n", 5)
    chat.until("/help")
    chat.until(">>> ")
    chat.until("/exit or Ctrl-D", interrupt=True)
    for typed, shown in (
        ("hello", "tok/s"),
        ('"""one\ntwo"""', "tok/s"),
        ("/stats", "draft    "),
        ("/nonsense", "Unknown command /nonsense"),
    ):
        chat.until(">>> ")
        chat.type(typed + "\n")
        chat.until(shown)
    chat.until(">>> ")
    chat.type("\x04")
    assert chat.end() == 0


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(tiny_checkpoint: Path) -> None:
    # the slow backend: the answer must still be running when Ctrl-C comes
    args = ("-n", 1900, "--view", "w8", "--backend", "reference")
    chat = Terminal("chat", tiny_checkpoint, *args)
    chat.until(">>> ")
    chat.type("hello world\n")
    chat.until("hello world\r\n")
    time.sleep(0.5)
    chat.process.send_signal(signal.SIGINT)
    chat.until("ctx ")
    chat.until(">>> ")
    chat.type("/exit\n")
    assert chat.end() == 0
