"""GGUF metadata of a type that its key does not have: refused with one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from hf_folders import refused

from edge_runtime.convert.gguf_file import GgufFile
from edge_runtime.convert.source import open_source

pytest.importorskip("gguf")

YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
NO_NUMBER = ("words", "", True, -1, float("nan"), 1e300, [["a"]], [1.5] * 100)
NO_ID = ("words", 2.5, True, [1])
NO_TEXT = (3, 2.5, True, [["a"]])
NO_SWITCH = ("false", 0, 1.0, [1])
NO_LIST = ("words", 3, 2.5, True)
WRONG: dict[str, tuple[Any, ...]] = {
    **{f"llama.{key}": NO_NUMBER for key in YARN},
    "llama.rope.scaling.original_context_length": (*NO_NUMBER, 2.5),
    **{f"tokenizer.ggml.{name}_token_id": NO_ID for name in ("bos", "eos", "eot", "padding")},
    "general.name": NO_TEXT,
    "tokenizer.ggml.pre": NO_TEXT,
    "tokenizer.chat_template": NO_TEXT,
    "tokenizer.ggml.add_bos_token": NO_SWITCH,
    "tokenizer.ggml.add_space_prefix": NO_SWITCH,
    "tokenizer.ggml.tokens": (*NO_LIST, [1, 2]),
    "tokenizer.ggml.merges": (*NO_LIST, [1, 2]),
    "tokenizer.ggml.scores": (*NO_LIST, ["a"] * 400),
    "tokenizer.ggml.token_type": (*NO_LIST, ["a"] * 400, [1.5] * 400),
}


@pytest.mark.parametrize("key", WRONG)
def test_metadata_of_the_wrong_type(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = "llama" if key.endswith(("scores", "prefix")) else "gpt2"
    path = tiny_models.write_gguf(tmp_path / "m.gguf", metadata=YARN, tokenizer=tokenizer)
    open_source(path).close()
    for value in WRONG[key]:

        def changed(file: Path, value: Any = value) -> GgufFile:
            found = GgufFile(file)
            found.metadata[key] = value
            return found

        monkeypatch.setattr("edge_runtime.convert.source_gguf.GgufFile", changed)
        refused(path, "GGUF metadata" if "rope.scaling.type" not in key else "RoPE scaling")


def test_a_llama3_context_of_the_wrong_type(tmp_path: Path) -> None:
    metadata = {"rope.scaling.original_context_length": "long"}
    table = {"rope_freqs.weight": torch.tensor([1.0] * 4 + [32.0] * 4)}
    path = tiny_models.write_gguf(tmp_path / "m.gguf", metadata=metadata, extra=table)
    refused(path, "rope.scaling.original_context_length must be a positive integer, got 'long'")


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", LONG),
        ("tokenizer.ggml.model", LONG),
        ("tokenizer.ggml.pre", LONG),
        ("tokenizer.ggml.merges", [LONG]),
        ("llama.rope.scaling.type", LONG),
        ("llama.block_count", LONG),
        ("llama." + LONG, 1),
    ],
    ids=lambda v: str(v)[:30],
)
def test_what_is_long_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any
) -> None:
    def changed(file: Path) -> GgufFile:
        found = GgufFile(file)
        found.metadata[key] = value
        return found

    monkeypatch.setattr("edge_runtime.convert.source_gguf.GgufFile", changed)
    error = refused(tiny_models.write_gguf(tmp_path / "m.gguf"), "xxx...")
    assert len(error.message) < 250


def test_long_names_in_the_file(tmp_path: Path) -> None:
    path = tiny_models.write_gguf(tmp_path / "a.gguf", metadata={LONG: 7})
    assert len(refused(path, "xxx...").message) < 250
    path = tiny_models.write_gguf(tmp_path / "b.gguf", extra={LONG: torch.zeros(4)})
    refused(path, "tensor names of at most 256 characters, got 5000")
