"""Rules about an answer and log-probabilities: drafts change neither."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from edge_runtime import Engine
from edge_runtime.decode.constraint import Ids
from edge_runtime.decode.logprobs import log_probs
from edge_runtime.decode.sampling import Sampling
from edge_runtime.errors import UsageError

PROMPT = [5, 17, 3, 9, 17, 3, 9]
SAMPLED = Sampling(temperature=0.9, top_k=50, seed=4)


class Alternating:
    """Even ids after an even number of tokens, else odd ones; seen: every question."""

    def __init__(self, num_tokens: int) -> None:
        self._ids = np.arange(num_tokens)
        self.seen: list[list[int]] = []

    def allowed(self, answer: Sequence[int]) -> Ids:
        self.seen.append(list(answer))
        return self._ids[self._ids % 2 == len(answer) % 2]


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
@pytest.mark.parametrize("source", ["base", "ngram", "both"])
def test_a_rule_that_follows_the_answer(
    engines: Callable[..., Engine], sampling: Sampling, source: str
) -> None:
    found = []
    for gamma in (0, 3, 7):
        engine = engines("llama", gamma=gamma, source=source if gamma else "base")
        rule = Alternating(engine.num_tokens)
        result = engine.generate(
            PROMPT, max_new_tokens=20, sampling=sampling, constraint=rule, ignore_eos=True
        ).complete()
        assert [t % 2 for t in result.token_ids] == [i % 2 for i in range(20)]
        found.append(result.token_ids)
        assert all(a == result.token_ids[: len(a)] or gamma for a in rule.seen)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("end", ["whole", "closed", "never run"])
def test_what_an_answer_held_is_freed_at_its_end(engines: Callable[..., Engine], end: str) -> None:
    """A grammar's library may hold 70 MB for one answer, which Python's collector does not see."""
    engine = engines("llama", gamma=3)
    rule = Alternating(engine.num_tokens)
    generation = engine.generate(PROMPT, max_new_tokens=5, constraint=rule)
    kept = [weakref.ref(generation), weakref.ref(rule)]
    if end == "whole":
        generation.complete()
    else:
        if end == "closed":
            next(generation)
        generation.close()
        generation.close()
        assert next(generation, None) is None
    gc.collect()
    gc.disable()
    try:
        del generation, rule
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
def test_log_probabilities_are_the_targets(
    engines: Callable[..., Engine], sampling: Sampling
) -> None:
    """Of a pass over all tokens; the same whatever is drafted."""
    found = []
    for gamma in (0, 4):
        engine = engines("llama", gamma=gamma)
        tokens = list(
            engine.generate(
                PROMPT, max_new_tokens=12, sampling=sampling, logprobs=3, ignore_eos=True
            )
        )
        found.append([token.logprobs for token in tokens])
    assert found[0] == found[1]
    ids = [token.id for token in tokens]
    engine.reuse([])
    whole = [*PROMPT, *ids[:-1]]
    logits = engine.model.forward("w8", whole, 0, engine.cache, num_logits=len(whole)).numpy()
    for i, (token, given) in enumerate(zip(ids, found[0], strict=True)):
        row = logits[len(PROMPT) - 1 + i].astype(np.float64)
        want = row - np.log(np.exp(row).sum())
        assert given is not None
        assert given.chosen == pytest.approx(want[token], abs=1e-9)
        assert [t for t, _ in given.top] == np.argsort(-want, kind="stable")[:3].tolist()
    engine.reuse([])


def test_equal_ones_are_in_order() -> None:
    row = np.array([1, 3, 3, 0, 3], np.float32)
    assert [i for i, _ in log_probs(row, 0, 2).top] == [1, 2]
    assert log_probs(row, 0, 0).top == ()
    assert [i for i, _ in log_probs(row, 0, 5).top] == [1, 2, 4, 0, 3]


def test_what_is_refused(engines: Callable[..., Engine]) -> None:
    engine = engines("llama")
    with pytest.raises(UsageError, match="expected one of them, got both"):
        engine.generate(PROMPT, allowed_ids=[1], constraint=Alternating(9))
    wrong: tuple[Any, ...] = (-1, 21, 1.5, True)
    for count in wrong:
        with pytest.raises(UsageError, match="logprobs: expected a whole number from 0 to 20"):
            engine.generate(PROMPT, logprobs=count)
