"""The tool that measures the engine at the size of a known model: it runs, on a tiny one."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy


@pytest.fixture(scope="module")
def bars() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
    return importlib.import_module("engine_bars")


@pytest.fixture(scope="module")
def model(bars: Any) -> Any:
    from edge_runtime.cache.policy import KV4
    from edge_runtime.profiles.load import shape

    spec = msgspec.structs.replace(
        shape("smollm2-135m").spec, num_layers=2, hidden_size=64, intermediate_size=96,
        num_heads=2, num_kv_heads=1, head_dim=32, vocab_size=64,
    )  # fmt: skip
    return bars.open_model(spec, 32, 12, KV4)


def test_cycles_follow_the_pattern(bars: Any, model: Any) -> None:
    run = bars.run_cycles(model.cycles(), model, 2, (2, 0), 3)
    assert run.tokens == 3 + 1 + 3
    assert len(run.each) == 3
    assert run.seconds >= run.device > 0


def test_random_weights_stay_finite(bars: Any, model: Any) -> None:
    found = bars.prompt(model, 5, 1, embedded=True)
    assert 0 < found["min"] <= found["median"] <= found["max"]
    assert not math.isnan(found["median"])


def test_the_unquantised_model(bars: Any, model: Any) -> None:
    plain = bars.open_half(model.spec, 12)
    run = bars.run_cycles(plain.cycles(), plain, 0, (), 2)
    assert run.tokens == len(run.each) == 2
