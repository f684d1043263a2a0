"""Threads of the native backend: how many, and that none is left."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from random_weights import random_spec, random_weights

from edge_runtime.decode.sampling import Sampling
from edge_runtime.errors import UsageError
from edge_runtime.kernels.cpu.backend import CpuBackend
from edge_runtime.kernels.cpu.threads import cgroup_quota, usable_cores
from edge_runtime.model.runner import Model
from edge_runtime.model.transformer import geometry


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "nonsense"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ({}, None),
    ],
)
def test_quota(tmp_path: Path, files: dict[str, str], cores: float | None) -> None:
    assert cgroup_quota(write(tmp_path, files)) == cores


def test_a_quota_below_one_core_is_one_thread(tmp_path: Path) -> None:
    assert usable_cores(write(tmp_path, {"cpu.max": "20000 100000"})) == 1


def test_affinity_is_honoured(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert 1 <= usable_cores(tmp_path) <= len(allowed)


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def test_none_is_left_after_close() -> None:
    spec = random_spec(num_layers=1)
    weights = random_weights(spec, 32, 64)
    before = tasks()
    backend = CpuBackend(weights, geometry(spec, 317), threads=4, isa="portable")
    assert tasks() == before + 3
    model = Model(spec, backend)
    first = model.forward("w8", [1, 2], 0, backend.new_cache(64)).numpy()
    assert np.isfinite(first).all()
    cache = backend.new_cache(64)
    logits = model.forward("w8", [1, 2], 0, cache)
    backend.close()
    assert tasks() == before
    backend.close()  # once more is no error
    for use in (
        lambda: backend.new_cache(64),
        lambda: model.forward("w8", [1], 0, cache),
        lambda: cache.planes(1),
        lambda: backend.workspace_bytes,
        lambda: logits.sample(0, 5, [], [], Sampling(temperature=1.0)),
    ):
        with pytest.raises(UsageError, match="closed"):
            use()


def test_a_backend_that_is_dropped_ends_its_threads() -> None:
    spec = random_spec(num_layers=1)
    before = tasks()
    backend = CpuBackend(
        random_weights(spec, 32, 64), geometry(spec, 317), threads=3, isa="portable"
    )
    assert tasks() == before + 2
    del backend
    gc.collect()
    assert tasks() == before
