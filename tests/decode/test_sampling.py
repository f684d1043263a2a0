"""Seeded sampling: the generator, its transcendental functions, and what is cut away."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest
import scalar_ops
from hypothesis import strategies as st

from edge_runtime.decode.sampling import Sampling
from edge_runtime.errors import UsageError
from edge_runtime.kernels.sampling import choose, exp, gumbel, log, philox

F = np.float32
ONES = 0xFFFFFFFF
# Random123's kat_vectors, philox4x32 10: counter, key, result
KNOWN = (
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((ONES,) * 4, (ONES, ONES), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
)


def pick(logits: Any, *, position: int = 0, allowed: Any = None, **fields: Any) -> int:
    return choose(np.asarray(logits, F), position, [], [], Sampling(**fields), allowed)


# ---- noise


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_plain_philox_has_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: str
) -> None:
    found = scalar_ops.philox4x32(counter, key)
    assert " ".join(f"{w:08x}" for w in found) == words


@hypothesis.given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, ONES))
def test_first_word_of_philox(seed: int, position: int, token: int) -> None:
    ids = np.array([token, token ^ 1, 0], dtype=np.uint64)
    want = [
        scalar_ops.philox4x32(
            (position & ONES, position >> 32, int(t), 0), (seed & ONES, seed >> 32)
        )
        for t in ids
    ]
    assert philox(seed, position, ids).tolist() == [w[0] for w in want]


def test_philox_at_zero() -> None:
    assert philox(0, 0, np.zeros(1, np.uint64)).tolist() == [0x6627E8D5]


def test_log_and_exp_are_accurate() -> None:
    words = np.concatenate([np.arange(1000.0), 2.0**32 - 1 - np.arange(1000.0)])
    x = np.concatenate([np.geomspace(1e-12, 1e3, 20_001), (words + 0.5) * 2.0**-32])
    exact = np.array([math.log(v) for v in x])
    # 1e-15 of the value, and near 1 of the distance from it: the noise loses no tail
    assert (np.abs(log(x) - exact) <= 4e-15 * np.abs(exact) + 1e-300).all()
    y = -np.concatenate([np.linspace(0, 700, 20_001), np.geomspace(1e-20, 1, 1000)])
    exact = np.array([math.exp(v) for v in y])
    # n · ln2 rounds: 700 · 2^-53 of relative error at the far end
    assert (np.abs(exp(y) - exact) <= 2e-13 * exact).all()
    assert exp(np.array([-700.1, -np.inf, 0.0])).tolist() == [0.0, 0.0, 1.0]


def test_noise_is_finite_and_gumbel() -> None:
    noise = np.concatenate([gumbel(7, p, np.arange(50_000)) for p in range(4)])
    assert np.isfinite(noise).all()
    # mean 0.5772, variance π²/6 of the Gumbel law; standard errors 0.003 and 0.008
    assert noise.mean() == pytest.approx(0.5772, abs=0.012)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.035)
    assert np.unique(noise).size > 0.9999 * noise.size


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = np.array([2.0, 1.0, 1.0, 0.0, -1.0, 3.0, -8.0])
    weights = np.exp(logits / temperature)
    expected = weights / weights.sum()
    for seed in (1, 2**40):
        draws = [pick(logits, position=p, temperature=temperature, seed=seed) for p in range(4000)]
        counts = np.bincount(draws, minlength=7)
        wide = expected * 4000 > 5
        chi2 = ((counts - expected * 4000) ** 2 / (expected * 4000))[wide].sum()
        assert chi2 < 24.3  # six degrees of freedom, one in two thousand; seeds are fixed


# ---- truncation


def kept(logits: Any, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Straightforward: sort, take k, take mass p, take what is likely enough."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k:
        order = order[:top_k]
    weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
    mass, total, nucleus = 0.0, sum(weights), []
    for i, w in zip(order, weights, strict=True):
        nucleus.append(i)
        mass += w
        if top_p < 1 and mass >= top_p * total:
            break
    return {i for i in nucleus if math.exp(logits[i] - logits[order[0]]) >= min_p}


@hypothesis.given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=12),
    st.integers(0, 14),
    st.sampled_from([0.05, 0.3, 0.61, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.03, 0.21, 0.97]),
    st.sampled_from([0.5, 1.0, 1.7]),
)
def test_only_what_is_kept_is_drawn(
    raw: list[int], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    logits = [x / 7 for x in raw]
    cut = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    want = kept([float(F(x)) / temperature for x in logits], top_k, top_p, min_p)
    noise = {}
    for seed in range(6):
        found = pick(logits, position=3, temperature=temperature, seed=seed, **cut)
        scores = np.array(logits, F).astype(np.float64) / temperature
        noise = scores + gumbel(seed, 3, np.arange(len(logits)))
        assert found == max(want, key=lambda i: (noise[i], -i))


def test_ties_go_to_the_lower_id() -> None:
    flat = [1.0] * 9
    assert pick(flat) == 0
    assert {pick(flat, temperature=1.0, top_k=3, seed=s) for s in range(60)} == {0, 1, 2}
    assert {pick(flat, temperature=1.0, top_p=0.34, seed=s) for s in range(99)} == {0, 1, 2, 3}
    assert pick([0.0, 5.0, 5.0], temperature=1.0, top_k=1) == 1
    assert pick(flat, temperature=1.0, top_p=1e-12) == 0
    assert pick([0.0, 3.0, 3.0], temperature=1.0, min_p=1.0) in (1, 2)


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-300, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = [30000.0, -2e4, 30000.5, 0.0]
    for cut in ({}, {"top_p": 0.9}, {"top_k": 2, "min_p": 0.1}):
        assert pick(logits, temperature=temperature, seed=5, **cut) == 2


def test_the_allowed_ids_are_the_whole_vocabulary() -> None:
    logits = np.arange(20.0)
    allowed = np.array([2, 7, 11])
    assert pick(logits, allowed=allowed) == 11
    drawn = {pick(logits / 9, allowed=allowed, temperature=1.0, seed=s) for s in range(60)}
    assert drawn == {2, 7, 11}
    drawn = {pick(logits, allowed=allowed, temperature=9.0, top_k=2, seed=s) for s in range(60)}
    assert drawn == {7, 11}


# ---- penalties


def test_penalties() -> None:
    logits = np.array([2.0, 1.9, -0.1, -0.3, 1.0], F)
    before = logits.copy()

    def best(prompt: list[int], answer: list[int], **fields: Any) -> int:
        return choose(logits, 0, prompt, answer, Sampling(**fields))

    assert best([0], [], repetition_penalty=1.1) == 1  # 2 / 1.1 < 1.9
    assert best([], [0, 0, 0], repetition_penalty=1.04) == 0  # counted once
    assert best([0, 1, 4], [], repetition_penalty=100.0) == 0
    assert best([0, 1, 4, 2], [], repetition_penalty=100.0) == 0
    assert best([0], [], presence_penalty=5.0) == 0  # only the answer counts
    assert best([], [0, 0], presence_penalty=0.2) == 1
    assert best([3], [], presence_penalty=-9.0) == 0
    assert best([], [3], presence_penalty=-9.0) == 3
    assert best([-1, 0], [], repetition_penalty=1.1) == 1  # embedding rows have no id
    worse = Sampling(repetition_penalty=4.0)  # a negative logit gets more negative
    assert choose(np.array([-0.2, -0.7], F), 0, [0], [], worse) == 1
    assert np.array_equal(logits, before)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.nan},
        {"presence_penalty": math.inf},
        {"presence_penalty": math.nan},
        {"seed": -1},
        {"seed": 2**64},
        {"temperature": "hot"},
        {"temperature": None},
        {"top_p": True},
        {"top_k": 1.5},
        {"seed": 0.0},
    ],
)
def test_impossible_values(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(wrong))}: expected"):
        Sampling(**wrong)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (-0.1, 10**400, float("nan"))),
        ("top_k", (-1, -(10**400))),
        ("seed", (2**64, 10**400, 10**6000, np.int64(-1))),
        ("repetition_penalty", (1e-320, 1e-308, 0.0099, 100.1, 1e308, 10**400)),
        ("presence_penalty", (-1e308, 1001, 10**6000, np.float64("inf"))),
    ],
)
def test_values_out_of_all_bounds(name: str, values: Sequence[Any]) -> None:
    for value in values:
        with pytest.raises(UsageError, match=f"{name}: expected") as caught:
            Sampling(**{name: value})
        assert len(caught.value.message) < 100


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-300, 1.0, 1e308])
def test_extremes_warn_of_nothing(temperature: float) -> None:
    logits = np.array([3e38, -3e38, 0.0, 1e-38, -1.0], F)
    for r in (0.01, 100.0):
        for p in (-1000.0, 1000.0):
            for more in ({}, {"top_k": 2, "top_p": 1e-300, "min_p": 1.0}):
                s = Sampling(
                    temperature=temperature, repetition_penalty=r, presence_penalty=p, **more
                )
                assert 0 <= choose(logits, 3, [0, 1, 2], [3], s) < 5


def test_numbers_of_numpy_become_pythons_own() -> None:
    s = Sampling(
        temperature=np.float32(0.5), top_k=np.int64(5), top_p=np.float16(0.5), seed=np.int32(5)
    )
    assert s == Sampling(temperature=0.5, top_k=5, top_p=0.5, seed=5)
    assert {type(value) for value in (s.temperature, s.top_p, s.presence_penalty)} == {float}
    assert (type(s.top_k), type(s.seed)) == (int, int)


def test_greedy_is_known() -> None:
    assert Sampling().plain_greedy
    assert Sampling(top_k=4, top_p=0.5, seed=9).plain_greedy
    assert not Sampling(temperature=0.1).plain_greedy
    assert not Sampling(repetition_penalty=1.1).plain_greedy
    assert not Sampling(presence_penalty=0.1).plain_greedy
