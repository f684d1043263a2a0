"""Cycles on the CUDA kernels: the answers of the reference decoding one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from edge_runtime import kernels
from edge_runtime.decode.engine import Engine
from edge_runtime.decode.sampling import Sampling

GPU = torch.cuda.is_available()
pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy
NEW = 40 if GPU else 6
TEXT = np.random.default_rng(4).integers(0, 277, 9).tolist()
REPEATING = [5, 6, 7, 8, 9] * 3  # a look-up finds something


@pytest.fixture
def opened(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Engine]]:
    if not GPU:
        monkeypatch.setattr(kernels, "cuda_status", lambda: (True, "in the interpreter"))
        monkeypatch.setattr(kernels, "cuda_missing", lambda: None, raising=False)
    engines: list[Engine] = []

    def get(backend: str, name: str = "llama-r3", ctx: int = 96, **options: str) -> Engine:
        engines.append(Engine.open(checkpoints(name), backend=backend, ctx=ctx, **options))
        return engines[-1]

    yield get
    for engine in engines:
        engine.close()


def answers(engine: Engine, prompt: Sequence[int], sampling: Sampling, n: int = NEW) -> list[int]:
    result = engine.generate(prompt, max_new_tokens=n, sampling=sampling, ignore_eos=True)
    return result.complete().token_ids


@pytest.mark.parametrize(
    ("prompt", "sampling", "options"),
    [
        (TEXT, Sampling(), {"draft": "3", "draft_source": "base"}),
        (REPEATING, Sampling(), {"draft": "5", "draft_source": "ngram"}),
        (REPEATING, Sampling(temperature=0.7, seed=3), {"draft": "4", "draft_source": "both"}),
        (TEXT, Sampling(temperature=0.9, top_k=30, seed=11), {"draft": "2", "kv_policy": "kv4"}),
        (TEXT, Sampling(), {"draft": "auto", "kv_policy": "recent:8"}),
        (TEXT, Sampling(temperature=0.8, seed=5), {"view": "w8"}),
    ],
)
def test_the_answer_of_the_reference(
    opened: Callable[..., Engine], prompt: list[int], sampling: Sampling, options: dict[str, str]
) -> None:
    view = options.get("view", "nest")
    want = answers(opened("reference", draft="off", view=view), prompt, sampling)
    engine = opened("cuda", **options)
    assert answers(engine, prompt, sampling) == want
    assert engine.device_cycles() is not None
    # the prefix that is in the cache is that of the answer: the next text goes on from it
    assert answers(engine, [*prompt, *want[:3]], sampling, 2) == want[3:5]


def test_to_the_end_of_the_context(opened: Callable[..., Engine]) -> None:
    want = opened("reference", draft="off", ctx=20).generate(TEXT, ignore_eos=True).complete()
    engine = opened("cuda", draft="7", draft_source="base", ctx=20)
    got = engine.generate(TEXT, ignore_eos=True).complete()
    assert got.token_ids == want.token_ids
    assert len(got.token_ids) == 11
    assert got.finish_reason == want.finish_reason == "length"


def test_an_end_in_the_middle_and_what_follows(opened: Callable[..., Engine]) -> None:
    """A stop inside a cycle while the next one is on its way; then another text."""
    reference, engine = opened("reference", draft="off"), opened("cuda", draft="3")
    want = answers(reference, TEXT, Sampling())
    eos = frozenset({want[4]})
    reference.eos_ids = engine.eos_ids = eos
    results = [e.generate(TEXT, max_new_tokens=NEW).complete() for e in (reference, engine)]
    assert results[0].token_ids == results[1].token_ids == want[: want.index(want[4])]
    assert results[1].finish_reason == "eos"
    other = TEXT[::-1]
    assert answers(engine, other, Sampling()) == answers(reference, other, Sampling())


def test_cancel_within_a_cycle(opened: Callable[..., Engine]) -> None:
    engine = opened("cuda", draft="2", draft_source="base")
    generation = engine.generate(TEXT, max_new_tokens=NEW, ignore_eos=True)
    first = next(generation)
    generation.cancel()
    result = generation.complete()
    assert result.finish_reason == "cancelled"
    assert result.token_ids[0] == first.id
    assert answers(engine, TEXT, Sampling()) == answers(
        opened("reference", draft="off"), TEXT, Sampling()
    )


def test_penalties_and_allowed_ids_take_the_hosts_way(opened: Callable[..., Engine]) -> None:
    sampling = Sampling(temperature=0.7, seed=3, repetition_penalty=1.2)
    engine = opened("cuda", draft="2", draft_source="base")
    assert answers(engine, TEXT, sampling, 5) == answers(
        opened("reference", draft="off"), TEXT, sampling, 5
    )
    assert not engine._cycles


def test_a_declared_pattern_and_the_text_after_it(opened: Callable[..., Engine]) -> None:
    """What is accepted as declared are the reference's tokens, and they are forgotten."""
    results, count = [], NEW + 8  # at the end drafts get shorter, one cycle earlier on a device
    engines = [opened(backend, draft="3", draft_source="base") for backend in ("reference", "cuda")]
    for engine in engines:
        engine.forced = (3, 0, 2)
        results.append(engine.generate(TEXT, max_new_tokens=count, ignore_eos=True).complete())
        engine.forced = ()
        assert results[-1].forced
    assert results[0].token_ids[:NEW] == results[1].token_ids[:NEW]
    again = [e.generate(TEXT, max_new_tokens=2, ignore_eos=True).complete() for e in engines]
    assert again[0].token_ids == again[1].token_ids
    assert [r.cached_tokens for r in again] == [0, 0]


def test_forced_acceptance(opened: Callable[..., Engine]) -> None:
    """A declared pattern, for timing models of random weights."""
    engine = opened("cuda", draft="3", draft_source="base")
    engine.generate(TEXT, max_new_tokens=1, ignore_eos=True).complete()
    cycles = engine.device_cycles()
    assert cycles is not None
    for pattern, want in (([3, 0, 2], [4, 1, 3, 4]), ([1, 1, 0], [2, 2, 1])):
        cycles.begin([*TEXT, 5], Sampling(), forced=pattern)
        known, found = len(TEXT) + 1, []
        for _ in want:
            cycles.launch(3, 0, known)
            cycle = cycles.read()
            found.append(len(cycle.tokens))
            known += len(cycle.tokens)
            assert cycle.drafted == 3
            assert cycle.seconds > 0
        assert found == want
