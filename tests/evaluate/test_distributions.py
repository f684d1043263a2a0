"""KL, JS and likelihood against sums written out, one number at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edge_runtime.evaluate import distributions
from edge_runtime.evaluate.distributions import compare, negative_log_likelihood, softmax


def probabilities(row: np.ndarray) -> list[float]:
    top = max(float(x) for x in row)
    weights = [math.exp(float(x) - top) for x in row]
    total = math.fsum(weights)
    return [w / total for w in weights]


def direct(p: list[float], q: list[float]) -> tuple[float, float]:
    """(KL, JS) of two distributions in nats."""

    def kl(a: list[float], b: list[float]) -> float:
        return math.fsum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    m = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
    return kl(p, q), (kl(p, m) + kl(q, m)) / 2


@pytest.mark.parametrize("work_bytes", [8, 1 << 20])
def test_divergences(work_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributions, "WORK_BYTES", work_bytes)  # one row a block, or all
    random = np.random.default_rng(0)
    logits = random.normal(0, 4, (5, 37)).astype(np.float32)
    others = {
        "near": logits + random.normal(0, 0.1, logits.shape).astype(np.float32),
        "far": random.normal(0, 4, logits.shape).astype(np.float32),
        "itself": logits,
    }
    pairs = [("p", name) for name in others] + [("far", "near")]
    by_pair = compare({"p": logits, **others}, pairs)
    assert list(by_pair) == pairs
    found = {name: by_pair["p", name] for name in others}
    assert by_pair["far", "near"].js == pytest.approx(
        compare({"near": others["near"], "far": others["far"]}, [("near", "far")])["near", "far"].js
    )
    for name, other in others.items():
        rows = [
            direct(probabilities(a), probabilities(b)) for a, b in zip(logits, other, strict=True)
        ]
        assert found[name].kl == pytest.approx(math.fsum(k for k, _ in rows), rel=1e-9, abs=1e-12)
        assert found[name].js == pytest.approx(math.fsum(j for _, j in rows), rel=1e-9, abs=1e-12)
        same = sum(int(a.argmax() == b.argmax()) for a, b in zip(logits, other, strict=True))
        assert found[name].same == same
    assert found["itself"].kl == 0.0
    assert found["far"].js <= 5 * math.log(2)


def test_equal_maxima_and_distant_logits() -> None:
    logits = np.array([[1.0, 1.0, -2000.0]], np.float32)
    other = np.array([[1.0, 3.0, 3.0]], np.float32)
    found = compare({"p": logits, "q": other}, [("p", "q")])["p", "q"]
    assert found.same == 0  # the lowest index wins: 0 and 1
    assert math.isfinite(found.kl)
    assert softmax(logits)[1][0, 2] == pytest.approx(-2001 - math.log(2))


def test_likelihood() -> None:
    random = np.random.default_rng(1)
    logits = random.normal(0, 3, (7, 11)).astype(np.float32)
    targets = random.integers(0, 11, 7)
    want = -math.fsum(
        math.log(probabilities(row)[t]) for row, t in zip(logits, targets, strict=True)
    )
    assert negative_log_likelihood(logits, targets) == pytest.approx(want, rel=1e-12)
