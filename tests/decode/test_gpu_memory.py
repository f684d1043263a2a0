"""Whose memory a GPU's engine is held to: the GPU's own, or the one pool of a board."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from random_weights import random_spec

from edge_runtime import machine
from edge_runtime.decode import memory
from edge_runtime.decode.engine import Engine
from edge_runtime.errors import BudgetError
from edge_runtime.plan import footprint

GIB = 1 << 30


def board(monkeypatch: pytest.MonkeyPatch, *, discrete: bool, free: int = 2 * GIB) -> None:
    pool = pytest.importorskip("edge_runtime.kernels.cuda.memory").Pool
    found = pool(arch=90 if discrete else 87, discrete=discrete, free_bytes=free, total_bytes=free)
    monkeypatch.setattr(memory, "_gpu_pool", lambda: found)
    monkeypatch.setattr(machine, "available_bytes", lambda: 3 * GIB)
    monkeypatch.setattr(machine, "total_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(memory, "anonymous_bytes", lambda: 0)


@pytest.mark.parametrize("discrete", [False, True])
def test_the_longest_context_is_within_the_right_pool(
    discrete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = random_spec(max_position=1 << 24)
    board(monkeypatch, discrete=discrete)
    account = footprint.footprint(
        spec, backend="cuda", group_size=32, arch=90 if discrete else 87, discrete=discrete
    )
    reserve = footprint.reserve_bytes(0, 2 * GIB if discrete else 8 * GIB)
    limit = 2 * GIB + memory.CONTEXT_BYTES if discrete else 3 * GIB
    found = memory.fit_context(spec, "auto", "cuda", None, 0, group_size=32)
    assert found == account.max_context(limit - reserve)
    with pytest.raises(BudgetError, match="MiB are available"):
        memory.fit_context(spec, found + 1, "cuda", None, 0, group_size=32)
    budget = account.total_bytes(1280)
    assert memory.fit_context(spec, "auto", "cuda", budget, 0, group_size=32) == 1280


@pytest.mark.parametrize("discrete", [False, True])
def test_an_engine_says_what_lies_on_the_gpu(
    discrete: bool, checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.open(checkpoints("llama-r3"), backend="reference", ctx=64) as engine:
        alone = engine.memory()
        backend: Any = engine.model.backend
        gpu = {"device_bytes": 9 * GIB, "device_peak_bytes": 10 * GIB, "context_bytes": GIB}
        monkeypatch.setattr(backend, "device_memory", lambda: gpu, raising=False)
        monkeypatch.setattr(backend, "discrete", discrete, raising=False)
        found = engine.memory()
    assert {name: found[name] for name in gpu} == gpu
    assert found["rss_bytes"] > 0
    peak = found["peak_bytes"] - 11 * GIB
    assert peak == (0 if discrete else found["rss_peak_bytes"])
    rest = found["workspace_bytes"] + found["weights_bytes"] + found["kv_bytes"] - 9 * GIB
    assert rest == (0 if discrete else found["rss_bytes"])
    assert set(alone) == {"weights_bytes", "kv_bytes", "workspace_bytes", "peak_bytes"}
