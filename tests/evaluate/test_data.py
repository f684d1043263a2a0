"""Kinds of data by their fields, and what is asked of a model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.errors import CheckpointError, UsageError
from edge_runtime.evaluate import data, report
from edge_runtime.evaluate.stats import share

ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "How many?", "answer": "Two.\n#### 2"},
    "humaneval": {
        "task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass",
        "entry_point": "f", "test": "",
    },
    "mbpp": {"task_id": 2, "prompt": "Write f.", "code": "def f(): pass", "test_list": ["f()"]},
    "mt_bench": {"question_id": 81, "turns": ["First?", "Second?"]},
    "conversations": {"conversations": [{"from": "human", "value": "Hi"},
                                        {"from": "gpt", "value": "Hello"}]},
    "answers": {"context": "A river.", "input": "What?", "answers": ["a river"], "length": 3},
    "prompts": {"prompt": "Say it."},
    "text": {"text": "Once upon a time"},
}  # fmt: skip


def write(folder: Path, *rows: dict[str, Any], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", ROWS)
def test_kinds(kind: str, tmp_path: Path) -> None:
    assert data.kind_of(ROWS[kind]) == kind
    file = data.read(write(tmp_path, ROWS[kind], ROWS[kind]))
    assert (file.kind, file.name) == (kind, "rows")
    if kind == "text":
        assert file.text == "Once upon a time\n\nOnce upon a time"
    else:
        assert len(file.rows) == 2
        assert data.messages(kind, ROWS[kind])[-1]["role"] == "user"


def test_what_is_asked() -> None:
    def asked(kind: str) -> list[str]:
        return [m["content"] for m in data.messages(kind, ROWS[kind])]

    assert asked("humaneval") == ["Complete this Python function:\ndef f():\n"]
    assert asked("mt_bench") == ["First?"]
    assert asked("conversations") == ["Hi"]
    assert asked("answers") == ["A river.\n\nWhat?"]
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": "4"},
    ]
    assert data.conversation({"messages": turns}) == turns[:-1]
    assert data.conversation({"messages": [{"role": "tool", "content": "x"}]}) == []


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"answer": 4}, ["4"]),
        ({"answers": ["a", "b"]}, ["a", "b"]),
        ({"outputs": ["x"]}, ["x"]),
        ({"answers": [], "target": "t"}, ["t"]),
        ({"answer": None}, []),
    ],
)
def test_references(row: dict[str, Any], answers: list[str]) -> None:
    assert data.references(row) == answers


def test_texts(tmp_path: Path) -> None:
    path = tmp_path / "wiki.test.raw"
    path.write_bytes("\ufeff = Title = \r\n{not json}\n".encode())
    file = data.read(path)
    assert (file.kind, file.name, file.text) == ("text", "wiki.test", " = Title = \n{not json}\n")
    path.write_text("{ a text that begins with a brace")
    assert data.read(path).kind == "text"
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([ROWS["gsm8k"]]))
    assert data.read(path).kind == "gsm8k"


def test_rows_as_a_text(tmp_path: Path) -> None:
    file = data.read(write(tmp_path, ROWS["humaneval"], ROWS["humaneval"]))
    assert data.whole_text(file) == "def f():\n    pass\n\ndef f():\n    pass"
    file = data.read(write(tmp_path, ROWS["conversations"]))
    assert data.whole_text(file) == "Hi\n\nHello"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "nothing in it"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"a": 1}\n', "got a"),
        (b'{"prompt": "x"}\nno json\n', ":2: not JSON"),
        (b'{"question": "cut"\n', ":1: not JSON"),
        (b'[{"prompt": "x"},', "f.jsonl: not JSON"),
        (b'{"text": ""}\n', "something in them, got text"),
        (b'{"prompt": "x"}\n[1]\n', ":2: expected a JSON object"),
        (b'{"prompt": "x"}\n{"text": "y"}\n', "one kind, got prompts, text"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
    ],
)
def test_refusals(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        data.read(path)
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        data.read(tmp_path / "none.jsonl")


def test_only_files_are_read(tmp_path: Path) -> None:
    """A pipe that nobody writes to never ends, a device has no end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="expected a file, got"):
            data.read(path)


def test_nothing_measured_is_no_zero() -> None:
    nothing = report.row("acceptance", "all", "4 base kv8", "acceptance", share([0], [0]))
    assert (nothing["value"], nothing["ci95"], nothing["n"]) == (None, None, 0)
    assert "acceptance      -" in "\n".join(report.lines({"rows": [nothing], "pairs": []}))


def test_templates() -> None:
    row = {"context": "C", "input": "I{x}"}
    assert data.fill("{context}: {input} {", row, "f") == "C: I{x} {"
    with pytest.raises(UsageError, match="no field 'question'"):
        data.fill("{question}", row, "f")


def test_the_larger_data(shared_data: Path) -> None:
    kinds = {p.name: data.read(p).kind for p in sorted(shared_data.glob("*bench_question.jsonl"))}
    kinds |= {
        p.name: data.read(p).kind
        for name in ("gsm8k_test", "humaneval", "mbpp_sanitized", "conversations")
        for p in shared_data.glob(f"{name}.jsonl")
    }
    assert set(kinds.values()) == {"mt_bench", "gsm8k", "humaneval", "mbpp", "conversations"}
    for book in (shared_data / "books").glob("*.txt"):
        assert data.read(book).kind == "text"
