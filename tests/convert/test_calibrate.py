"""Calibration text: formats, windows, and errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from edge_runtime.convert.calibrate import HessianSum, calibration_documents, windows
from edge_runtime.errors import CheckpointError

CHAT = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}


def encode(text: str) -> list[int]:
    return list(text.encode())


def jsonl(tmp_path: Path, *lines: Any) -> Path:
    file = tmp_path / "c.jsonl"
    text = [x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in lines]
    file.write_text("\n".join(text), encoding="utf-8")
    return file


def test_formats(tmp_path: Path) -> None:
    plain = tmp_path / "c.txt"
    plain.write_text('{"text": 3}\nline\n')
    assert calibration_documents(plain) == [{"text": '{"text": 3}\nline\n'}]
    odd = {"text": "one\u2028two\x85three\u000b", "more": 1}
    assert calibration_documents(jsonl(tmp_path, odd, "", CHAT, "  ")) == [odd, CHAT]
    windows_line_ends = tmp_path / "w.jsonl"
    windows_line_ends.write_bytes(b'{"text": "a"}\r\n{"text": "b"}\r\n')
    assert [d["text"] for d in calibration_documents(windows_line_ends)] == ["a", "b"]


def test_the_bundled_set() -> None:
    documents = calibration_documents(None)
    assert len(documents) > 10
    assert all(isinstance(d.get("text", ""), str) for d in documents)
    assert len(windows(documents, encode, None, 8)) == 8


@pytest.mark.parametrize(
    "line",
    ["{", "nonsense", "[" * 100_000, "3", "null", "[]", "{}", {"text": 3}, {"text": None},
     {"messages": []}, {"messages": "hello"}, {"messages": ["hello"]},
     {"messages": [{"role": "user"}]}, {"messages": [{"role": "user", "content": None}]}],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path: Path, line: Any) -> None:
    with pytest.raises(CheckpointError, match=r"c\.jsonl:3: "):
        calibration_documents(jsonl(tmp_path, {"text": "a"}, "", line))


def test_files_that_are_not_text(tmp_path: Path) -> None:
    file = tmp_path / "c.txt"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="UTF-8"):
        calibration_documents(file)
    for path in (tmp_path, Path("/dev/null")):
        with pytest.raises(CheckpointError, match="file: it is a folder, a pipe or a device"):
            calibration_documents(path)


def test_windows_are_cut_from_the_shuffled_stream() -> None:
    documents = [{"text": chr(97 + i) * 40} for i in range(20)]
    found = windows(documents, encode, None, 5, length=64, seed=3)
    assert [len(w) for w in found] == [64] * 5
    assert windows(documents, encode, None, 5, length=64, seed=3) == found
    assert windows(documents, encode, None, 5, length=64, seed=4) != found
    assert windows(documents, encode, None, 3, length=64, seed=3) == found[:3]
    assert len(windows(documents, encode, None, 99, length=64)) == 20 * 42 // 64
    with pytest.raises(CheckpointError, match="expected at least 1000 tokens, got 840"):
        windows(documents, encode, None, 1, length=1000)
    with pytest.raises(CheckpointError, match="got 0"):
        windows([], encode, None, 1)


def test_chats_are_rendered_where_there_is_a_template() -> None:
    assert windows([CHAT], encode, lambda m: [len(m)] * 9, 1, length=9) == [[2] * 9]
    assert bytes(windows([CHAT], encode, None, 1, length=11)[0]) == b"hello\n\nhi\n\n"


def test_hessian_is_the_mean_of_outer_products() -> None:
    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    total = HessianSum()
    for part in x.split([1, 20, 29]):
        total.observe("w", part)
    total.observe("v", x[:3])
    assert torch.allclose(total.take("w"), x.T @ x / 50, atol=1e-5)
    assert total.take("v").shape == (7, 7)
    assert not total.by_name
