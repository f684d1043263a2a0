"""What rejected drafts, abandoned answers, deadlines and reuse leave behind: nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from edge_runtime.decode.engine import Engine
from edge_runtime.decode.sampling import Sampling
from edge_runtime.errors import ContextError, NumericError, UsageError

Engines = Callable[..., Engine]
PROMPT = np.random.default_rng(4).integers(0, 277, 61).tolist()  # answers cross a block at 64
SAMPLED = Sampling(temperature=0.9, seed=12)


def run(engine: Engine, prompt: Any = PROMPT, **options: Any) -> Any:
    options = {"max_new_tokens": 20, "ignore_eos": True} | options
    return engine.generate(prompt, **options).complete()


def cache_bytes(engine: Engine, length: int) -> dict[str, bytes]:
    return {name: part.tobytes() for name, part in engine.cache.planes(length).items()}


class Adversary:
    """Random tokens, and now and then nothing or too many."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def propose(self, tokens: Sequence[int], start: int, gamma: int) -> list[int]:
        return self._rng.integers(0, 277, self._rng.integers(0, gamma + 4)).tolist()


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
@pytest.mark.parametrize("wrong_at", range(8))
def test_every_rejection_position(
    engines: Engines, scripted: Any, wrong_at: int, sampling: Sampling
) -> None:
    """A draft that is right up to position j leaves the cache of a run without drafting."""
    alone = engines("qwen2")
    want = run(alone, sampling=sampling).token_ids
    engine = engines("qwen2", gamma=7, policy="kv4")
    draft = scripted(want, len(PROMPT), lambda i: i == wrong_at)
    got = run(engine, sampling=sampling, draft_source=draft)
    assert got.token_ids == want
    length = len(PROMPT) + len(want) - 1
    assert cache_bytes(engine, length) == cache_bytes(alone, length)
    if wrong_at == 7:
        assert got.draft["acceptance"] == 1.0
        assert got.draft["cycles"] == 3  # 1 + 8 + 8 + 3 tokens
    else:
        assert got.draft["accepted"] <= got.draft["cycles"] * wrong_at


@pytest.mark.parametrize("policy", ["kv8", "kv4", "recent:64"])
@pytest.mark.parametrize("source", ["base", "both"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_own_drafts_leave_the_same_cache(
    engines: Engines, name: str, source: str, policy: str
) -> None:
    alone = engines(name)
    want = run(alone).token_ids
    engine = engines(name, gamma=4, source=source, policy=policy)
    assert run(engine).token_ids == want
    length = len(PROMPT) + len(want) - 1
    assert cache_bytes(engine, length) == cache_bytes(alone, length)


@pytest.mark.parametrize("seed", range(4))
def test_adversarial_draft(engines: Engines, seed: int) -> None:
    alone = engines("qwen3")
    want = run(alone).token_ids
    engine = engines("qwen3", gamma=7)
    got = run(engine, draft_source=Adversary(seed))
    assert got.token_ids == want
    assert got.draft["acceptance"] < 0.5
    length = len(PROMPT) + len(want) - 1
    assert cache_bytes(engine, length) == cache_bytes(alone, length)


# ---- reuse


def test_prefix_reuse_is_a_fresh_run(engines: Engines) -> None:
    engine = engines("llama", gamma=4, source="both", policy="kv4")
    first = run(engine)
    prompts = [
        PROMPT + first.token_ids + [5, 6],
        PROMPT,  # again: all but the last token is there
        PROMPT + first.token_ids[:3] + [(first.token_ids[3] + 1) % 270],
        PROMPT[:17],
        PROMPT[:17] + [1, 2, 3] * 30,
        [*PROMPT, 9],
        [(PROMPT[0] + 1) % 270, *PROMPT[1:]],
    ]
    cached = []
    for prompt in prompts:
        got = run(engine, prompt, sampling=SAMPLED)
        alone = engines("llama")
        want = run(alone, prompt, sampling=SAMPLED)
        assert got.token_ids == want.token_ids
        assert want.cached_tokens == 0
        cached.append(got.cached_tokens)
        length = len(prompt) + len(want.token_ids) - 1
        assert cache_bytes(engine, length) == cache_bytes(alone, length)
    assert cached[0] >= len(PROMPT) + 19
    assert cached[1] == len(PROMPT) - 1
    assert cached[3] == 16
    assert cached[4] == 17
    assert cached[6] == 0


def test_embedding_rows_in_a_prompt(engines: Engines, checkpoints: Callable[[str], Any]) -> None:
    from edge_runtime.convert.source import open_source

    table = open_source(checkpoints("qwen2").parent / "source").tensor("embed").numpy()
    spans = [PROMPT[:9], table[PROMPT[9:30]], PROMPT[30:]]
    want = run(engines("qwen2")).token_ids
    for source in ("base", "both", "ngram"):
        engine = engines("qwen2", gamma=7, source=source)
        assert run(engine, spans).token_ids == want
        again = run(engine, spans)
        assert (again.token_ids, again.cached_tokens) == (want, len(PROMPT) - 1)
        other = [PROMPT[:9], table[PROMPT[9:30]] * 1.5, PROMPT[30:]]
        assert run(engine, other).cached_tokens == 9
    penalised = Sampling(repetition_penalty=1.3, temperature=0.7, seed=5)
    alone = run(engines("qwen2"), spans, sampling=penalised).token_ids
    engine = engines("qwen2", gamma=4, source="both")
    assert run(engine, spans, sampling=penalised).token_ids == alone


# ---- interruptions


def test_abandoned_then_another(engines: Engines) -> None:
    engine = engines("llama", gamma=7, source="both", policy="kv4")
    want = run(engines("llama")).token_ids
    for taken in (0, 1, 2, 9):
        left = engine.generate(PROMPT, max_new_tokens=20, ignore_eos=True)
        got = [next(left).id for _ in range(taken)]
        assert got == want[:taken]
        other = run(engine, [*PROMPT[:30], 7, 7, 7])
        assert left.result.finish_reason == "cancelled"
        assert left.result.token_ids == want[:taken]
        assert list(left) == []
        assert other.token_ids == run(engines("llama"), [*PROMPT[:30], 7, 7, 7]).token_ids
        assert run(engine).token_ids == want


def test_cancel_returns_a_prefix(engines: Engines) -> None:
    engine = engines("llama", gamma=4, source="base")
    want = run(engines("llama"))
    for after in (1, 2, 3, 6):
        running = engine.generate(PROMPT, max_new_tokens=20, ignore_eos=True)
        got = []
        for token in running:
            got.append(token.id)
            if len(got) == after:
                running.cancel()
        result = running.result
        assert result.finish_reason == "cancelled"
        assert result.token_ids == got == want.token_ids[: len(got)]
        assert after <= len(got) < after + 5  # within one cycle
        assert want.text.startswith(result.text.rstrip("�"))
    assert run(engine).token_ids == want.token_ids


def test_cancel_before_the_start_and_during_prefill(engines: Engines) -> None:
    engine = engines("llama", gamma=4, chunk=7)
    running = engine.generate(PROMPT, max_new_tokens=5)
    running.cancel()
    assert running.complete().finish_reason == "cancelled"
    assert running.result.token_ids == []
    assert run(engine).token_ids == run(engines("llama")).token_ids


@pytest.mark.parametrize("deadline_s", [0.0, 0.02, 0.1])
def test_deadline_returns_a_prefix(engines: Engines, deadline_s: float) -> None:
    engine = engines("llama", gamma=4, source="both", chunk=16)
    want = run(engines("llama"), max_new_tokens=90)
    started = time.perf_counter()
    got = run(engine, max_new_tokens=90, deadline_s=deadline_s)
    assert time.perf_counter() - started < deadline_s + 2
    assert got.token_ids == want.token_ids[: len(got.token_ids)]
    if len(got.token_ids) < 90:
        assert (got.finish_reason, got.late) == ("deadline", True)
    later = run(engine, max_new_tokens=90)
    assert later.token_ids == want.token_ids
    assert not later.late


def test_the_deadline_bounds_a_cycle(engines: Engines) -> None:
    """Steps that are known to take longer than is left are not drafted; the others are."""
    engine = engines("llama", gamma=4)
    for seconds, drafted in ((40.0, 0), (1e-6, 4)):
        for _ in range(60):
            engine.governor.times.add("w8", 5, 1e-6)
            engine.governor.times.add("w4", 1, seconds)
        got = run(engine, max_new_tokens=9, deadline_s=30.0)
        assert got.finish_reason == "length"
        assert got.draft["drafted"] >= drafted
        assert bool(got.draft["drafted"]) is bool(drafted)


def test_an_error_in_a_pass_leaves_the_engine_usable(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("llama", gamma=4, source="base", chunk=16)
    want = run(engines("llama")).token_ids
    places = [(type(engine.model.backend), "run")]
    if (cycles := engine.device_cycles()) is not None:
        places.append((type(cycles), "read"))
    for failing in (0, 2, 4, 6, 9):
        calls = iter(range(1000))
        for owner, name in places:
            original = getattr(owner, name)

            def broken(
                self: Any, *args: Any, original: Any = original, at: int = failing, n: Any = calls
            ) -> Any:
                done = original(self, *args)
                if next(n) == at:
                    raise NumericError("logits hold NaN or infinity")
                return done

            monkeypatch.setattr(owner, name, broken)
        with pytest.raises(NumericError):
            run(engine)
        monkeypatch.undo()
        assert run(engine).token_ids == want
        engine.reuse([])


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_huge_rows(engines: Engines, name: str) -> None:
    """As large as is allowed nothing overflows (a warning would fail this); beyond, it is said."""
    engine = engines(name, gamma=4)
    want = run(engines(name)).token_ids
    for rows in (np.full((70, 64), 2.0**48, np.float32), np.eye(64) * -(2.0**48)):
        assert engine.generate([rows], max_new_tokens=3).complete().new_tokens > 0
        assert run(engine).token_ids == want
    for huge in (2.0**49, 3e38, 1e300):
        with pytest.raises(UsageError, match=r"span 0: .* beyond ±2\^48"):
            engine.generate([np.full((2, 64), huge)])


# ---- what is refused


def test_refusals(engines: Engines) -> None:
    engine = engines("llama", context=70)
    with pytest.raises(UsageError, match="empty"):
        engine.generate([])
    with pytest.raises(UsageError, match="0…276, got 277"):
        engine.generate([1, 277])
    with pytest.raises(UsageError, match="got -1"):
        engine.generate([-1])
    with pytest.raises(UsageError, match=r"rows \[n, 64\] of numbers, got \[2, 63\]"):
        engine.generate([[1], np.zeros((2, 63), np.float32)])
    with pytest.raises(UsageError, match="NaN"):
        engine.generate([np.full((1, 64), np.nan, np.float32)])
    with pytest.raises(UsageError, match="at least 1"):
        engine.generate([1], max_new_tokens=0)
    with pytest.raises(UsageError, match="allowed_ids"):
        engine.generate([1], allowed_ids=[])
    with pytest.raises(UsageError, match="allowed_ids: expected 0…276, got 277"):
        engine.generate([1], allowed_ids=[277])
    with pytest.raises(UsageError, match="of numbers, got"):
        engine.generate([np.full((1, 64), "a")])
    with pytest.raises(ContextError, match="70 tokens, the context holds 70"):
        engine.generate([1] * 70)
    assert run(engine).token_ids == run(engines("llama")).token_ids[:9]
