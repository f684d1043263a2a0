"""The context that is allocated: what is counted is what is taken; what does not fit is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models

from edge_runtime import machine
from edge_runtime.convert.original import float_model
from edge_runtime.convert.source import open_source
from edge_runtime.decode import memory
from edge_runtime.decode.engine import Engine
from edge_runtime.decode.memory import fit_context
from edge_runtime.errors import BudgetError, ContextError
from edge_runtime.format.reader import Checkpoint
from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels.layout import kv_plain_per_token_bytes, kv_stored_per_token_bytes
from edge_runtime.kernels.reference.cache import NestedCache, PlainCache
from edge_runtime.model.transformer import geometry
from edge_runtime.plan.footprint import footprint, reserve_bytes


def shape(spec: ModelSpec) -> tuple[int, int, int]:
    return spec.num_layers, spec.num_kv_heads, spec.head_dim


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_the_caches_take_what_is_planned(checkpoints: Callable[[str], Path], name: str) -> None:
    spec = Checkpoint(checkpoints(name)).manifest.spec
    sizes = geometry(spec, spec.vocab_size)
    assert PlainCache(sizes, 128).num_bytes == 128 * kv_plain_per_token_bytes(*shape(spec))
    assert NestedCache(sizes, 128).num_bytes == 128 * kv_stored_per_token_bytes(*shape(spec))


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # qwen2: a tied head is held twice
def test_the_float_model_takes_what_is_planned(
    checkpoints: Callable[[str], Path], name: str
) -> None:
    source = open_source(checkpoints(name).parent / "source")
    spec = source.spec
    table = spec.vocab_size * spec.hidden_size
    account = footprint(spec, layout="fp", backend="reference")
    planned = account.fixed_bytes - account.fixed["runtime"]
    assert planned - float_model(source, 64).backend.weights_bytes == 2 * table * 4  # loading


def test_fp_is_refused_by_its_own_numbers(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Checkpoint(checkpoints("llama")).manifest.spec
    account = footprint(spec, layout="fp", backend="reference")
    free = account.total_bytes(100) + reserve_bytes(0, machine.total_bytes())
    monkeypatch.setattr(machine, "available_bytes", lambda: free)
    monkeypatch.setattr(memory, "anonymous_bytes", lambda: 0)
    assert fit_context(spec, "auto", "reference", None, 0, view="fp") == 100
    assert fit_context(spec, 100, "reference", None, 0, view="fp") == 100
    with pytest.raises(BudgetError) as caught:
        fit_context(spec, 101, "reference", None, 0, view="fp")
    assert caught.value.hint == "the largest context that fits is 100"


def test_what_the_process_has_already_is_not_asked_for_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 1000 << 20)
    monkeypatch.setattr(machine, "total_bytes", lambda: 4000 << 20)
    monkeypatch.setattr(memory, "anonymous_bytes", lambda: 40 << 20)
    assert memory.room_bytes(50 << 20, 100 << 20) == (1000 + 40 - 100) << 20
    assert memory.room_bytes(30 << 20, 100 << 20) == (1000 + 30 - 100) << 20  # a host's own stays
    assert memory.room_bytes(0, 0) == (1000 - 64) << 20


def resident_file_bytes() -> int:
    """Pages of mapped files that count as this process's memory."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssFile:\s+(\d+)", status)
    assert found is not None, status
    return int(found[1]) * 1024


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_a_source_that_was_read_is_not_resident(tmp_path: Path, kind: str) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 4096, "num_hidden_layers": 8}
    path = tmp_path / "m.gguf"
    write = tiny_models.write_gguf if kind == "gguf" else tiny_models.write_hf
    path = write(path if kind == "gguf" else tmp_path, **shape)
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    assert sum(f.stat().st_size for f in files) > 80 << 20
    first = open_source(path)
    float_model(first, 8)  # code that is used for the first time is mapped too
    first.close()
    source = open_source(path)
    before = resident_file_bytes()
    kept = float_model(source, 8)
    assert resident_file_bytes() - before < 8 << 20
    source.close()
    kept.backend.close()


@pytest.mark.parametrize("full", [False, True])
def test_a_prompt_that_is_too_long_says_what_helps(
    checkpoints: Callable[[str], Path], full: bool
) -> None:
    most = Checkpoint(checkpoints("llama")).manifest.spec.max_position
    context = most if full else 64
    with (
        Engine.open(checkpoints("llama"), ctx=context) as engine,
        pytest.raises(ContextError, match=f"the context holds {context}") as caught,
    ):
        engine.generate([1] * context)
    assert ("--ctx" in caught.value.hint) != full  # not where the context is the model's longest
    assert caught.value.hint.startswith("shorten the prompt")
