"""The tool that measures the nest against 16 bits: it runs, on a tiny model."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "tools"))
    module = importlib.import_module("engine_half")
    monkeypatch.setattr(module, "PATTERNS", ((1,),))
    monkeypatch.setattr(module, "GAMMA", 1)
    monkeypatch.setattr(module, "ACTION_ROWS", 5)
    monkeypatch.setattr(module, "ACTIONS", {"nest, all accepted": (1, (1,), 1)})
    return module


def test_every_part(tool: Any) -> None:
    from edge_runtime.cache.policy import KV8
    from edge_runtime.profiles.load import shape

    spec = msgspec.structs.replace(
        shape("smollm2-135m").spec, num_layers=1, hidden_size=64, intermediate_size=96,
        num_heads=2, num_kv_heads=1, head_dim=32, vocab_size=64,
    )  # fmt: skip
    ways = tool.open_ways(spec, 32, 12, KV8)
    nest, kv16, half = (ways[name][0].backend.weights_bytes for name in ("nest", "w8-kv16", "fp16"))
    assert half > nest == kv16
    steps = tool.steps(ways, 1)
    assert set(steps["x_fp16"]) == {"w4", "w8", "w8 5 rows", "fp16", "w8-kv16"}
    assert steps["x_fp16"]["fp16"] == 1
    cycles = tool.cycles(ways, 1, 1)
    assert set(cycles["tok_s"]) == {"nest 2.0 tokens a cycle", "w8", "fp16", "w8-kv16"}
    assert all(row["min"] > 0 for row in cycles["tok_s"].values())
    assert set(tool.prefill(ways, 20, 1)["seconds"]) == {f"{n}, prompt of 20" for n in ways}
    assert set(tool.action(ways, 1)["x_fp16"]) == {"nest, all accepted", "fp16", "w8-kv16"}
