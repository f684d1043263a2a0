"""The file of what was typed: private, bounded, whole lines, done without where it cannot be."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.chat import history
from edge_runtime.chat.history import HistoryFile


def test_what_was_typed_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history.jsonl"
    first = HistoryFile(path)
    assert first.load() == []
    typed = ["hello", "two\nlines", "é 👩‍👧 \u2028 \\", "/exit"]
    for text in ["", "  ", *typed, "/exit"]:
        first.append(text)
    assert HistoryFile(path).load() == typed
    assert first.why == ""


def test_it_is_private(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history.jsonl"
    before = os.umask(0)
    try:
        HistoryFile(path).append("hello")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        path.chmod(0o644)
        HistoryFile(path).append("the world")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "history.jsonl"
    file = HistoryFile(path)
    count = history.MAX_ENTRIES + history.SLACK + 1
    for i in range(count):
        file.append(f"{i}")
    file.append("x" * (history.MAX_ENTRY_CHARS + 1))
    kept = [f"{i}" for i in range(count - history.MAX_ENTRIES, count)]
    assert HistoryFile(path).load() == kept
    assert len(path.read_bytes().splitlines()) == history.MAX_ENTRIES  # written anew
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setattr(history, "MAX_BYTES", 100)
    found = HistoryFile(path).load()
    assert found == kept[-len(found) :]
    assert 0 < path.stat().st_size <= 100
    assert [p.name for p in tmp_path.iterdir()] == ["history.jsonl"]


def test_what_is_not_ours_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    deep = b"[" * 100_000
    path.write_bytes(b'"one"\n\xff\xfe\n{"a": 1}\n7\n' + deep + b'\n"two"\n"thr')
    assert HistoryFile(path).load() == ["one", "two"]


def test_two_chats_at_once(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    files = [HistoryFile(path), HistoryFile(path)]
    for i in range(20):
        files[i % 2].append(f"{i}")
    assert list(map(json.loads, path.read_text().splitlines())) == [f"{i}" for i in range(20)]


def test_a_line_that_was_cut_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b'"one"\n"tw')  # a kill, or a disk that was full
    HistoryFile(path).append("three")
    assert HistoryFile(path).load() == ["one", "three"]


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    file = HistoryFile(tmp_path / "history.jsonl")
    file.append("x" * 90)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        file.append("y" * 90)  # of which 7 bytes have room
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert "history.jsonl: No space" in file.why
    HistoryFile(tmp_path / "history.jsonl").append("z")
    assert HistoryFile(tmp_path / "history.jsonl").load() == ["x" * 90, "z"]


def test_what_another_chat_adds_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "history.jsonl"
    count = history.MAX_ENTRIES + history.SLACK + 1
    path.write_text("".join(f'"{i}"\n' for i in range(count)))
    adds = threading.Thread(target=HistoryFile(path).append, args=("other",))
    write = history.write_atomic

    def slow(*args: Any) -> None:
        adds.start()
        adds.join(0.2)
        write(*args)

    monkeypatch.setattr(history, "write_atomic", slow)
    HistoryFile(path).load()  # writes it anew
    adds.join()
    assert HistoryFile(path).load()[-2:] == [f"{count - 1}", "other"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is opened, or given a mode."""
    names: list[str] = []
    open_ = os.open
    monkeypatch.setattr(os, "open", lambda p, *a, **k: names.append(str(p)) or open_(p, *a, **k))
    monkeypatch.setattr(os, "fchmod", lambda *_: names.append("a mode"))  # it could be /dev/null's
    return names


@pytest.mark.parametrize("link", [False, True])
def test_what_is_no_file_is_never_opened(tmp_path: Path, link: bool, opened: list[str]) -> None:
    """A pipe has nobody at its other end, and of a device root would change the mode."""
    pipe = tmp_path / ("pipe" if link else "history.jsonl")
    os.mkfifo(pipe, 0o644)
    if link:
        (tmp_path / "history.jsonl").symlink_to(pipe)
    file = HistoryFile(tmp_path / "history.jsonl")
    assert file.load() == []
    file.append("hello")
    assert file.why == f"{tmp_path / 'history.jsonl'}: not a regular file"
    assert stat.S_IMODE(pipe.stat().st_mode) == 0o644
    assert opened == []


def test_a_link_to_nothing_switches_it_off(tmp_path: Path, opened: list[str]) -> None:
    (tmp_path / "history.jsonl").symlink_to(os.devnull)
    file = HistoryFile(tmp_path / "history.jsonl")
    assert file.load() == []
    file.append("hello")
    assert file.why == ""
    assert opened == []
    assert (tmp_path / "history.jsonl").is_symlink()


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").symlink_to(tmp_path / "elsewhere")
    HistoryFile(tmp_path / "history.jsonl").append("hello")
    assert HistoryFile(tmp_path / "elsewhere").load() == ["hello"]
    assert stat.S_IMODE((tmp_path / "elsewhere").stat().st_mode) == 0o600


def test_a_place_that_refuses_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    blocked = HistoryFile(tmp_path / "file" / "history.jsonl")
    assert blocked.load() == []
    blocked.append("hello")
    assert "file" in blocked.why
    folder = HistoryFile(tmp_path)
    assert folder.load() == []
    folder.append("hello")
    assert folder.why
