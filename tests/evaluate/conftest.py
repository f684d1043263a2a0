"""Views over the tiny checkpoint, its original and plain W8A8 of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch

from edge_runtime.convert.original import float_model
from edge_runtime.convert.source import open_source
from edge_runtime.decode.draft import DraftChoice
from edge_runtime.decode.engine import Engine
from edge_runtime.evaluate.original import w4a16_engine, w8a8_engine
from edge_runtime.evaluate.views import Views
from edge_runtime.format.reader import Checkpoint

CONTEXT = 320
TEXT = tiny_checkpoints.CALIBRATION
QUESTIONS = [
    {"question": f"What is {a} and {b}?", "answer": f"It is {a + b}.\n#### {a + b}"}
    for a, b in ((2, 2), (3, 4), (5, 1), (7, 7), (9, 20))
]


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def questions(jsonl: Callable[..., Path]) -> Path:
    return jsonl(QUESTIONS, "questions.jsonl")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def open_tiny(tiny_checkpoint: Path, tiny_source: Path) -> Callable[[str, str], Engine]:
    """Open an engine by its name in `Views`, and a backend."""

    def open_engine(name: str, backend: str = "auto") -> Engine:
        checkpoint = Checkpoint(tiny_checkpoint)
        if name == "nest":
            return Engine.open(checkpoint, backend=backend, ctx=CONTEXT)
        if name == "w4a16":
            return w4a16_engine(checkpoint, CONTEXT)
        source = open_source(tiny_source)
        if name == "w8a8":
            return w8a8_engine(checkpoint, source, CONTEXT)
        text = checkpoint.manifest.text
        model, draft = float_model(source, CONTEXT), DraftChoice(0, "base", "unquantised")
        plain = Engine.open(checkpoint, backend="reference", ctx=CONTEXT)
        return Engine(model, plain.tokenizer, text, view="fp", context=CONTEXT, draft=draft)

    return open_engine


@pytest.fixture(scope="session", params=["reference", "cpu", "cuda"])
def views(
    request: pytest.FixtureRequest, open_tiny: Callable[[str, str], Engine]
) -> Iterator[Views]:
    if request.param == "cuda" and not torch.cuda.is_available():
        # every view is a model of its own, and reads whole texts
        pytest.skip("no GPU: the interpreter takes minutes for each view")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for sizes like these a second one only waits
    with Views(lambda name: open_tiny(name, request.param)) as opened:
        yield opened
    torch.set_num_threads(threads)
