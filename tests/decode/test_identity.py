"""The contract: with drafting the answer is the one without it, token for token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from edge_runtime.decode.engine import Engine
from edge_runtime.decode.request import Result
from edge_runtime.decode.sampling import Sampling
from edge_runtime.kernels.layout import full_from
from edge_runtime.kernels.ops import Linear
from edge_runtime.kernels.sampling import choose

Engines = Callable[..., Engine]
MODELS = ("llama", "qwen2", "qwen3", "llama-r3")
POLICIES = ("kv8", "kv4", "recent:64")
SOURCES = ("base", "ngram", "both")
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, seed=2**40 + 11)
PENALISED = Sampling(temperature=1.3, repetition_penalty=1.2, presence_penalty=0.4, seed=3)
GREEDY_PENALISED = Sampling(repetition_penalty=1.15, presence_penalty=-0.3)


def random_prompt(seed: int, length: int = 70) -> list[int]:
    """Random ids with a repetition in them, for the look-up to find."""
    ids = np.random.default_rng(seed).integers(0, 277, length).tolist()
    return ids + ids[10:40] if length > 40 else ids


def run(engine: Engine, prompt: Any, **options: Any) -> Result:
    options = {"max_new_tokens": 24, "ignore_eos": True} | options
    return engine.generate(prompt, **options).complete()


def answers(result: Result) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.finish_reason, result.new_tokens


PLAIN: dict[Any, Result] = {}


def plain(engines: Engines, name: str, prompt: Sequence[int], **options: Any) -> Result:
    """The answer without drafting, remembered."""
    key = (name, tuple(prompt), repr(sorted(options.items())))
    if key not in PLAIN:
        PLAIN[key] = run(engines(name), prompt, **options)
        assert PLAIN[key].draft["drafted"] == 0
    return PLAIN[key]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_greedy(engines: Engines, name: str, policy: str) -> None:
    prompt = random_prompt(1)
    want = plain(engines, name, prompt)
    for gamma in (1, 2, 4, 7):
        for source in SOURCES if policy == "kv8" else ("base",):
            got = run(engines(name, gamma=gamma, source=source, policy=policy), prompt)
            assert answers(got) == answers(want), (gamma, source)


@pytest.mark.parametrize("sampling", [SAMPLED, PENALISED, GREEDY_PENALISED])
@pytest.mark.parametrize("name", MODELS)
def test_sampled_and_penalised(engines: Engines, name: str, sampling: Sampling) -> None:
    prompt = random_prompt(2)
    want = plain(engines, name, prompt, sampling=sampling)
    for gamma, source, policy in [(1, "base", "kv8"), (2, "both", "kv4"), (4, "base", "recent:64"),
                                  (7, "both", "recent:64"), (7, "ngram", "kv8")]:  # fmt: skip
        got = run(engines(name, gamma=gamma, source=source, policy=policy), prompt,
                  sampling=sampling)  # fmt: skip
        assert answers(got) == answers(want), (gamma, source)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED, GREEDY_PENALISED])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_against_a_loop_that_recomputes_everything(
    engines: Engines, name: str, sampling: Sampling
) -> None:
    """No cache reuse, no engine: every token from a whole pass over all tokens before it."""
    prompt = random_prompt(2)
    model = engines(name).model
    answer: list[int] = []
    while len(answer) < 10:
        ids = prompt + answer
        cache = model.backend.new_cache(len(ids))
        logits = model.forward("w8", ids, 0, cache).numpy()[0]
        answer.append(choose(logits, len(ids), prompt, answer, sampling))
    want = plain(engines, name, prompt, sampling=sampling)
    assert want.token_ids[:10] == answer


@pytest.mark.parametrize(("policy", "recent"), [("kv8", None), ("kv4", 0), ("recent:64", 64)])
def test_only_drafts_read_by_the_policy(
    engines: Engines, policy: str, recent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("llama", gamma=4, policy=policy)
    seen: list[tuple[str, Any]] = []
    backend = type(engine.model.backend)
    original = backend.run

    def spy(self: Any, program: Any, batch: Any, cache: Any) -> Any:
        view = next(op.view for op in program if isinstance(op, Linear))
        seen.append((view, batch))
        return original(self, program, batch, cache)

    monkeypatch.setattr(backend, "run", spy)
    # a cycle of the device runs no pass that could be watched: test_device_cycles.py compares them
    monkeypatch.setattr(type(engine), "device_cycles", lambda self: None)
    run(engine, random_prompt(1, 95))  # 125 tokens: across the block at 128
    assert {view for view, _ in seen} == {"w4", "w8"}
    for view, batch in seen:
        wanted = recent if view == "w4" else None
        assert batch.full_from.tolist() == [full_from(p, wanted) for p in batch.positions.tolist()]


@pytest.mark.parametrize("name", MODELS)
def test_acceptance_is_neither_none_nor_all(engines: Engines, name: str) -> None:
    """Otherwise the tests above would not test much."""
    for policy in ("kv8", "kv4"):
        totals = [
            run(engines(name, gamma=4, policy=policy), random_prompt(s)).draft for s in (1, 2)
        ]
        share = sum(t["accepted"] for t in totals) / sum(t["drafted"] for t in totals)
        assert 0.1 < share < 0.95, (name, policy)


def test_another_seed_or_temperature_gives_another_answer(engines: Engines) -> None:
    prompt = random_prompt(2)
    found = {
        tuple(plain(engines, "llama", prompt, sampling=s).token_ids)
        for s in (GREEDY, SAMPLED, PENALISED, Sampling(temperature=0.8, seed=1))
    }
    assert len(found) == 4


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    name=st.sampled_from(MODELS),
    length=st.integers(1, 140),
    seed=st.integers(0, 2**32),
    gamma=st.integers(1, 7),
    source=st.sampled_from(SOURCES),
    policy=st.sampled_from(["kv8", "kv4", "recent:1", "recent:64", "recent:100"]),
    sampling=st.sampled_from([GREEDY, SAMPLED, PENALISED]),
    chunk=st.sampled_from([1, 7, 64, 256]),
    new=st.integers(1, 24),
)
def test_any_combination(
    engines: Engines, name: str, length: int, seed: int, gamma: int, source: str, policy: str,
    sampling: Sampling, chunk: int, new: int,
) -> None:  # fmt: skip
    prompt = random_prompt(seed, length)
    want = run(engines(name), prompt, sampling=sampling, max_new_tokens=new)
    engine = engines(name, gamma=gamma, source=source, policy=policy, chunk=chunk)
    assert answers(run(engine, prompt, sampling=sampling, max_new_tokens=new)) == answers(want)


# ---- ends


@pytest.mark.parametrize("new", [1, 2, 3, 5, 8, 9])
def test_cut_by_max_new_tokens(engines: Engines, scripted: Any, new: int) -> None:
    prompt = random_prompt(1)
    want = plain(engines, "llama", prompt).token_ids
    for gamma in (1, 4, 7):
        oracle = scripted(want, len(prompt), lambda _: False)
        engine = engines(gamma=gamma)
        got = run(engine, prompt, max_new_tokens=new, draft_source=oracle)
        assert got.token_ids == want[:new]
        assert (got.finish_reason, got.new_tokens) == ("length", new)
        assert got.draft["acceptance"] == (1.0 if got.draft["drafted"] else 0.0)


@pytest.mark.parametrize("at", [0, 1, 4, 9, 20])
def test_eos_inside_an_accepted_run(engines: Engines, scripted: Any, at: int) -> None:
    prompt = random_prompt(5, 30)
    truth = plain(engines, "llama", prompt).token_ids
    eos = truth[at]
    at = truth.index(eos)
    want = run(engines(eos=[eos]), prompt, ignore_eos=False)
    assert want.token_ids == truth[:at]
    assert (want.finish_reason, want.new_tokens) == ("eos", at)
    for gamma in (1, 4, 7):
        oracle = scripted(truth, len(prompt), lambda _: False)
        for options in ({"draft_source": oracle}, {}):
            engine = engines(gamma=gamma, eos=[eos])
            got = run(engine, prompt, ignore_eos=False, **options)
            assert answers(got) == answers(want)
            again = run(engine, prompt, ignore_eos=False)  # over what lies past the end now
            assert answers(again) == answers(want)


def test_stop_strings(engines: Engines, scripted: Any) -> None:
    checked = 0
    for seed in range(6, 12):  # of a random model: not every answer is text
        checked += stops_checked(engines, scripted, random_prompt(seed, 30))
        if checked >= 2:
            return
    raise AssertionError("no answer was text")


def stops_checked(engines: Engines, scripted: Any, prompt: list[int]) -> int:
    whole = plain(engines, "llama", prompt)
    checked = 0
    for start in range(0, max(0, len(whole.text) - 3), 3):
        stop = whole.text[start : start + 3]
        if "�" in stop:
            continue
        want = run(engines(), prompt, stop=[stop, "never there"])
        assert want.finish_reason == "stop"
        assert want.text == whole.text[: whole.text.index(stop)]
        for gamma, source in ((4, "base"), (7, "both")):
            got = run(engines(gamma=gamma, source=source), prompt, stop=[stop, "never there"])
            assert answers(got) == answers(want)
        oracle = scripted(whole.token_ids, len(prompt), lambda _: False)
        got = run(engines(gamma=7), prompt, stop=[stop], draft_source=oracle)
        assert answers(got) == answers(want)
        checked += 1
    return checked


def test_the_end_of_the_context(engines: Engines, scripted: Any) -> None:
    prompt = random_prompt(7, 40)  # 40 tokens
    truth = run(engines(), prompt, max_new_tokens=30).token_ids
    for context in (41, 42, 47, 64, 65):
        want = truth[: context - 40]
        for gamma in (0, 1, 7):
            for options in ({}, {"draft_source": scripted(truth, 40, lambda _: False)}):
                engine = engines(gamma=gamma, context=context)
                got = run(engine, prompt, max_new_tokens=None, **options)
                assert got.token_ids == want
                assert got.finish_reason == "length"


def test_allowed_ids(engines: Engines) -> None:
    prompt = random_prompt(8)
    allowed = [40, 3, 77, 140, 3, 99, 200, 201]
    for sampling in (GREEDY, SAMPLED):
        want = plain(engines, "qwen3", prompt, sampling=sampling, allowed_ids=allowed)
        assert set(want.token_ids) <= set(allowed)
        for gamma, source in ((1, "base"), (4, "both"), (7, "ngram")):
            engine = engines("qwen3", gamma=gamma, source=source)
            got = run(engine, prompt, sampling=sampling, allowed_ids=allowed)
            assert answers(got) == answers(want)
