"""Chats in files: what is written comes back, what is none is refused, a kill leaves it whole."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.chat.saved import ModelName, SavedChat, Turn, load, save
from edge_runtime.errors import CheckpointError, UsageError

CHAT = SavedChat(
    model=ModelName("tiny", "a" * 64),
    system="be brief",
    thinking=False,
    settings={"temp": 0.5, "seed": None, "top-k": 4},
    messages=[Turn("user", "é 👩‍👧\n```\nx\n```"), Turn("assistant", "<|im_end|>")],
)

# writes chats of 4 MB over one file until it is killed
WRITER = """
import sys
from pathlib import Path
from edge_runtime.chat.saved import ModelName, SavedChat, Turn, save
path = Path(sys.argv[1])
n = 0
while True:
    n += 1
    turns = [Turn("user", f"{n} " * 1_000_000), Turn("assistant", str(n))]
    chat = SavedChat(model=ModelName("m", "0"), system=None, thinking=None, settings={},
                     messages=turns)
    save(path, chat)
    print(n, flush=True)
"""


def document(**changes: Any) -> dict[str, Any]:
    whole = {
        "format": "bitnest-edge chat",
        "version": 1,
        "model": {"name": "m", "sha256": "0"},
        "system": None,
        "thinking": None,
        "settings": {},
        "messages": [],
    }
    return {k: v for k, v in (whole | changes).items() if v is not ...}


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    save(path, CHAT)
    assert load(path) == CHAT
    save(path, CHAT)  # over its own kind
    assert [p.name for p in tmp_path.iterdir()] == ["chat.json"]
    assert json.loads(path.read_text())["messages"][0]["role"] == "user"


def test_it_is_private_and_touches_no_other_file(tmp_path: Path) -> None:
    path, other = tmp_path / "chat.json", tmp_path / "chat.json.tmp"
    other.write_text("mine")
    before = os.umask(0)
    try:
        save(path, CHAT)
        path.chmod(0o644)  # as an earlier version wrote it
        save(path, CHAT)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert other.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON"),
        (b"hello", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", 'no "format"'),
        (b'{"format": "bitnest"}', 'no "format"'),
        (document(version=2), "expected version 1 of a saved chat, got 2"),
        (document(version=...), "got None"),
        (document(model=...), "model"),
        (document(extra=1), "extra"),
        (document(settings={"temp": "hot"}), "settings"),
        (document(messages=[{"role": "system", "content": "x"}]), "role"),
        (document(messages=[{"role": "user", "content": 1}]), "content"),
        (document(messages=[{"role": "assistant", "content": "x"}]), "expected one of the user"),
        (document(messages=[{"role": "user", "content": "x"}]), "no answer"),
    ],
)
def test_what_is_no_saved_chat_is_refused(tmp_path: Path, data: Any, reason: str) -> None:
    path = tmp_path / "chat.json"
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    before = path.read_bytes()
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert reason in caught.value.message
    assert "\n" not in caught.value.message
    with pytest.raises(UsageError, match="is no saved chat"):  # nor is it written over
        save(path, CHAT)
    assert path.read_bytes() == before


def test_what_is_not_there_or_cannot_be(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path / "none", "no such file"),
        (tmp_path, "it is a folder"),
        (tmp_path / "pipe", "not a regular file"),
    ):
        with pytest.raises(CheckpointError, match=said) as caught:
            load(path)
        assert "/save" in caught.value.hint
    with pytest.raises(UsageError, match="cannot write there"):
        save(tmp_path / "none" / "chat.json", CHAT)


@pytest.mark.parametrize(("version", "newer"), [(0, False), (None, False), ("2", False), (2, True)])
def test_another_version_says_which_is_newer(tmp_path: Path, version: Any, newer: bool) -> None:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(document(version=version)))
    with pytest.raises(CheckpointError, match="expected version 1") as caught:
        load(path)
    assert ("a newer bitnest-edge" in caught.value.hint) == newer


def test_a_file_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "chat.json", CHAT)
    monkeypatch.setattr("edge_runtime.chat.saved.MAX_BYTES", 64)
    with pytest.raises(CheckpointError, match="at most 64 bytes"):
        load(tmp_path / "chat.json")


@pytest.mark.slow
def test_kill_9_while_saving_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    for delay_s in (0.0, 0.003, 0.007, 0.013, 0.021, 0.034):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        done = int(writer.stdout.readline())
        time.sleep(delay_s)
        os.kill(writer.pid, signal.SIGKILL)
        done = int((writer.stdout.read().split() or [done])[-1])
        writer.wait()
        writer.stdout.close()
        chat = load(path)
        number = int(chat.messages[1].content)
        assert number in (done, done + 1)
        assert chat.messages[0].content == f"{number} " * 1_000_000
