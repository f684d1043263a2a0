"""The file of what was typed: private, bounded, whole lines, done without where it cannot be."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

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
