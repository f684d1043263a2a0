"""Declared acceptance: exact patterns, obeyed on every backend, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edge_runtime.decode.declared import parse_declared
from edge_runtime.decode.engine import Engine
from edge_runtime.decode.sampling import Sampling
from edge_runtime.errors import UsageError

PROMPT = [5, 9, 13, 20, 5, 9]


@pytest.mark.parametrize(
    ("text", "gamma", "pattern"),
    [
        ("0.95", 4, (3, 4, 4, 4, 4)),  # 4.8 tokens a cycle
        ("0.875", 4, (3, 4)),  # 4.5
        ("0.0", 4, (0,)),
        ("1.0", 7, (7,)),
        ("1.", 7, None),
        ("0.25", 3, (0, 1, 1, 1)),
        ("4,4,3", 4, (4, 4, 3)),
        ("1", 1, (1,)),
        ("0", 4, (0,)),
    ],
)
def test_patterns(text: str, gamma: int, pattern: tuple[int, ...] | None) -> None:
    if pattern is None:
        with pytest.raises(UsageError, match="a rate from"):
            parse_declared(text)
        return
    assert parse_declared(text).pattern(gamma) == pattern


@pytest.mark.parametrize("rate", ["0.001", "0.333", "0.5", "0.999"])
@pytest.mark.parametrize("gamma", [1, 4, 7])
def test_a_rate_is_met_exactly_and_evenly(rate: str, gamma: int) -> None:
    pattern = parse_declared(rate).pattern(gamma)
    assert sum(pattern) * 1000 == int(rate[2:].ljust(3, "0")) * gamma * len(pattern)
    assert max(pattern) - min(pattern) <= 1
    for n in range(1, len(pattern)):  # of any beginning as well
        assert abs(sum(pattern[:n]) - float(rate) * gamma * n) < 1


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1.5", "0.1234", "8", "4,,3", "nan", "1e0", "٣", "4," * 70 + "1"]
)
def test_what_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="accept: expected"):
        parse_declared(text)


def test_more_than_is_drafted() -> None:
    with pytest.raises(UsageError, match="at most the 4 tokens"):
        parse_declared("5,4").pattern(4)


# ---- on engines


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_k=40, seed=3)])
def test_cycles_take_as_declared(engines: Callable[..., Engine], sampling: Sampling) -> None:
    engine = engines("llama", gamma=3)
    engine.forced = (3, 0, 2)
    result = engine.generate(
        PROMPT, max_new_tokens=24, sampling=sampling, ignore_eos=True
    ).complete()
    assert result.forced
    assert result.new_tokens == 24
    if engine.device_cycles() is not None:  # the last drafts get shorter one cycle earlier
        assert 0.4 < result.draft["acceptance"] < 0.7
        return
    # 4 + 1 + 3 tokens in three cycles, twice; then 4, and 1 + 2 with shorter drafts
    assert result.draft["cycles"] == 9
    assert result.draft["accepted"] == 2 * 5 + 3 + 0 + 1
    assert result.draft["drafted"] == 7 * 3 + 2 + 1


def test_full_acceptance_is_the_drafts_text(engines: Callable[..., Engine]) -> None:
    """With everything accepted but for the bonus, and nothing: whose tokens they are."""
    engine = engines("llama", gamma=4)
    engine.forced = (0,)
    none = engine.generate(PROMPT, max_new_tokens=20, ignore_eos=True).complete()
    engine.forced = ()
    real = engine.generate(PROMPT, max_new_tokens=20, ignore_eos=True).complete()
    assert none.token_ids == real.token_ids  # the target's token each time
    assert (none.forced, real.forced) == (True, False)


def test_nothing_is_left_of_it(engines: Callable[..., Engine]) -> None:
    fresh, engine = engines("llama", gamma=3), engines("llama", gamma=3)
    want = fresh.generate(PROMPT, max_new_tokens=9, ignore_eos=True).complete().token_ids
    engine.forced = (2,)
    forced = engine.generate(PROMPT, max_new_tokens=9, ignore_eos=True).complete()
    unfinished = engine.generate([*PROMPT, *forced.token_ids[:3]], ignore_eos=True)
    next(unfinished)
    unfinished.close()
    engine.forced = ()
    after = engine.generate(PROMPT, max_new_tokens=9, ignore_eos=True).complete()
    assert after.cached_tokens == 0  # not even what would have been the same
    assert after.token_ids == want
    assert not after.forced
