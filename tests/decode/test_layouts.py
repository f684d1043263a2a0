"""The unquantised model and other layouts behind an engine on the CUDA kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_weights import random_spec

from edge_runtime import bench, kernels
from edge_runtime.cli.model import EngineOptions, open_checkpoint, options_of_mode
from edge_runtime.convert.synthetic import Synthesis, SyntheticOptions
from edge_runtime.decode.engine import Engine
from edge_runtime.decode.sampling import Sampling
from edge_runtime.errors import BudgetError, UsageError
from edge_runtime.format.reader import Checkpoint
from edge_runtime.measure import worker
from edge_runtime.measure.worker import Job, Way

GPU = torch.cuda.is_available()
pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy
PROMPT = np.random.default_rng(4).integers(0, 277, 20).tolist()


@pytest.fixture(autouse=True)
def _on_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda is on offer; the interpreter multiplies the bits of bf16 as integers, so fp16 there."""
    if not GPU:
        from edge_runtime.kernels.cuda import half

        monkeypatch.setattr(kernels, "cuda_status", lambda: (True, "in the interpreter"))
        monkeypatch.setattr(half, "WIDE_RANGE", ())


def open_(path: Path, backend: str, view: str = "fp", **options: Any) -> Engine:
    given = {"backend": backend, "view": view, "ctx": 64} | options
    return open_checkpoint(Checkpoint(path), EngineOptions(**given))


def logits(engine: Engine) -> np.ndarray[Any, Any]:
    got = engine.model.forward(engine.target_view, PROMPT, 0, engine.cache, num_logits=8)
    return got.numpy()


def far(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt(((got - want) ** 2).mean() / (want**2).mean()))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_an_original_in_16_bits(checkpoints: Callable[[str], Path], name: str) -> None:
    """fp16 keeps 11 bits: 5e-4 a rounding, some twenty of them on the way to the logits. bf16 on a
    GPU keeps 8. That the reference's fp view is transformers' model, tests/model says."""
    with open_(checkpoints(name), "reference") as engine:
        want = logits(engine)
    with open_(checkpoints(name), "cuda") as engine:
        assert engine.backend_why == "the unquantised model runs in 16 bits"
        assert far(logits(engine), want) < (4e-2 if GPU and name != "llama" else 5e-3)
        engine.reuse([0])
        result = engine.generate(PROMPT, max_new_tokens=4, ignore_eos=True).complete()
        assert engine.device_cycles() is not None
        # by single passes: penalties that change nothing keep the host's way
        engine.reuse([0])
        single = Sampling(repetition_penalty=1 + 1e-9)
        again = engine.generate(PROMPT, max_new_tokens=4, ignore_eos=True, sampling=single)
        assert again.complete().token_ids == result.token_ids
        assert result.view == "fp"
        assert result.draft["drafted"] == 0


def test_a_synthetic_checkpoint_stands_for_its_original(tmp_path: Path) -> None:
    """Activations are int8 in the one, 16 bits in the other: some per cent."""
    Synthesis(random_spec(), "tiny", tmp_path / "a", SyntheticOptions(), lambda *_: None).run()
    with open_(tmp_path / "a", "reference", "w8") as engine:
        want = logits(engine)
    with open_(tmp_path / "a", "cuda") as engine:
        assert far(logits(engine), want) < 6e-2
    with pytest.raises(UsageError, match="needs the unquantised model"):
        open_(tmp_path / "a", "reference")


def test_two_copies_answer_as_the_nest(checkpoints: Callable[[str], Path]) -> None:
    path, found = checkpoints("llama-r3"), []
    for layout in ("nest", "two_copies"):
        with open_(path, "cuda", "nest", draft="2", draft_source="base", layout=layout) as engine:
            result = engine.generate(PROMPT, max_new_tokens=5, ignore_eos=True).complete()
            found.append((result.token_ids, result.draft["accepted"]))
    assert found[0] == found[1]


def test_what_is_refused(checkpoints: Callable[[str], Path]) -> None:
    path = checkpoints("llama-r3")
    with pytest.raises(UsageError, match="layout two_copies is there on the cuda backend only"):
        Engine.open(path, backend="reference", layout="two_copies")
    with pytest.raises(UsageError, match="layout: expected nest, w8, two_copies, got 'fp16'"):
        Engine.open(path, backend="cuda", layout="fp16")
    with pytest.raises(UsageError, match="backends reference and cuda, got cpu"):
        open_(path, "cpu")
    for options in ({"view": "fp"}, {"view": "nest", "layout": "w8"}):
        with pytest.raises(BudgetError, match="within the budget of 1 MiB"):
            open_(path, "cuda", budget=1 << 20, **options)


@pytest.mark.parametrize(
    ("way", "options", "policy"),
    [
        (Way(mode="fp16"), {"view": "fp"}, "kv16"),
        (Way(mode="w8-kv16"), {"view": "nest", "layout": "w8"}, "kv16"),
        (Way(mode="two-copy", gamma=2), {"view": "nest", "layout": "two_copies"}, "kv8"),
    ],
)
def test_ways_of_a_profile(
    checkpoints: Callable[[str], Path], way: Way, options: dict[str, str], policy: str
) -> None:
    path = checkpoints("llama-r3")
    job = Job(
        model=str(path), ways=(way,), prompt_tokens=12, new_tokens=4, repeats=1, warm_up=False,
        text="the cat sat on the mat " * 9,
    )  # fmt: skip
    events: list[dict[str, Any]] = []
    with open_(path, "cuda", **options) as engine:
        worker.run(engine, job, events.append)
    opened, _, ran = events
    assert opened["policy"] == policy
    assert opened["backend"] == "cuda"
    assert ran["way"] == way.name
    assert ran["new_tokens"] == 4
    assert (ran["drafted"] > 0) == (way.mode == "two-copy")
    assert opened["planned_bytes"] > ran["memory"]["weights_bytes"] + ran["memory"]["kv_bytes"]


def test_in_turns_with_the_nest(checkpoints: Callable[[str], Path]) -> None:
    path = checkpoints("llama-r3")
    modes = ("nest", "fp16", "w8-kv16", "two-copy")
    options = EngineOptions(backend="cuda", ctx=64, draft="2", draft_source="base")
    with contextlib.ExitStack() as opened:
        engine, *rest = (
            opened.enter_context(open_checkpoint(Checkpoint(path), options_of_mode(mode, options)))
            for mode in modes
        )
        others = dict(zip(modes[1:], rest, strict=True))
        rows = bench.decode(engine, [PROMPT[:4]], new_tokens=3, others=others)["rows"]
    assert [row["mode"] for row in rows] == ["w8", "w4", *modes]
    weights = {row["mode"]: row["memory"]["weights_bytes"] for row in rows}
    assert weights["w8"] == weights["w8-kv16"] < weights["two-copy"]
    drafting = {row["mode"] for row in rows if row["acceptance"] is not None}
    assert drafting == {"nest", "two-copy"}
