"""The file of finished items: what was written is read, what is torn or another's is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.errors import CheckpointError, UsageError
from edge_runtime.evaluate.resume import Finished

IDENTITY: dict[str, Any] = {"task": "ppl", "model": "abc", "views": ("nest",)}


def test_records_come_back(tmp_path: Path) -> None:
    path = tmp_path / "done"
    first = Finished(path, IDENTITY)
    assert first.add("a/0", {"n": 3, "nll": (1.25, 0.1)}) == {"n": 3, "nll": [1.25, 0.1]}
    first.add("a/1", {"text": "ünï\ncode"})
    first.close()
    again = Finished(path, dict(IDENTITY))
    assert again.records == first.records
    again.close()


def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "done"
    whole = Finished(path, IDENTITY)
    whole.add("0", {"n": 1})
    whole.add("1", {"n": 2})
    whole.close()
    lines = path.read_bytes()
    for end in range(len(lines)):
        path.write_bytes(lines[:end])
        found = Finished(path, IDENTITY)
        assert len(found.records) == max(0, lines[:end].count(b"\n") - 1)
        found.add("2", {"n": 3})
        found.close()
        last = Finished(path, IDENTITY)
        assert last.records == found.records
        last.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": "gsm8k"}, 'task was "ppl", now "gsm8k"'),
        ({"views": ["nest", "w4"]}, 'views was ["nest"], now ["nest", "w4"]'),
        ({"original": "x"}, 'original was none, now "x"'),
    ],
)
def test_another_run_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "done"
    Finished(path, IDENTITY).close()
    before = path.read_bytes()
    with pytest.raises(UsageError) as caught:
        Finished(path, IDENTITY | change)
    assert words in caught.value.message
    assert path.read_bytes() == before


def test_what_differs_is_seen(tmp_path: Path) -> None:
    path, alike = tmp_path / "done", "0123456789abcdef" * 6
    Finished(path, IDENTITY | {"model": f"{alike}x"}).close()
    with pytest.raises(UsageError) as caught:
        Finished(path, IDENTITY | {"model": f"{alike}y"})
    was, now = caught.value.message.split("model was ")[1].split(", now ")
    assert was.endswith('efx"')
    assert now.endswith('efy"')


@pytest.mark.parametrize("content", ["hello", "hello\n", "{}\n", '{"eval": 2}\n', "[1]\n"])
def test_something_else_is_refused_and_kept(content: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(CheckpointError, match="got something else"):
        Finished(path, IDENTITY)
    assert path.read_text() == content


def test_one_run_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "done"
    first = Finished(path, IDENTITY)
    with pytest.raises(UsageError, match="another run"):
        Finished(path, IDENTITY)
    first.close()
    Finished(path, IDENTITY).close()


def test_without_a_file(tmp_path: Path) -> None:
    found = Finished(None, IDENTITY)
    found.add("0", {"n": 1})
    assert found.records == {"0": {"n": 1}}
    assert json.dumps(found.records)
    with pytest.raises(CheckpointError, match="cannot write"):
        Finished(tmp_path / "no" / "folder", IDENTITY)
