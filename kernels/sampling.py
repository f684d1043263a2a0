"""Choosing a token: greedy, or seeded sampling that drafting cannot change. The definition.

Invariant: the choice is a function of (logits, absolute position, tokens so far, parameters), so a
draft and a verification that see equal logits choose equal tokens, and a run with drafting emits
what a run without it does. Noise is Gumbel from Philox4x32-10 (Salmon et al. 2011) with key = seed
and counter = (position, token id): argmax(logit + noise) is a draw from the softmax. Order:
penalties, temperature, top-k, top-p, min-p, noise; candidates sorted by (-logit, id). exp and log
are fixed fp64 sequences, so that every backend repeats them to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]
LN2 = float.fromhex("0x1.62e42fefa39efp-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How a token is chosen. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 are off.

    repetition_penalty divides (multiplies, if negative) the logits of tokens in prompt and answer;
    presence_penalty is subtracted from those of tokens in the answer. seed: 0 … 2^64 - 1.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    seed: int = 0


def choose(
    logits: npt.NDArray[np.float32],
    position: int,
    prompt: Sequence[int],
    answer: Sequence[int],
    sampling: Parameters,
    allowed: npt.NDArray[np.int64] | None = None,
) -> int:
    """Choose the token at absolute `position`. logits: fp32 [V]; allowed: sorted ids or None."""
    scores = logits.astype(np.float64)
    _penalise(scores, prompt, answer, sampling)
    ids = np.arange(len(scores)) if allowed is None else allowed
    scores = scores[ids]
    if sampling.temperature == 0:
        return int(ids[scores.argmax()])
    with np.errstate(over="ignore"):  # a tiny temperature: everything but the maximum is -inf
        scores = (scores - scores.max()) / sampling.temperature
    ids, scores = _truncate(ids, scores, sampling)
    noisy = scores + gumbel(sampling.seed, position, ids)
    best = np.flatnonzero(noisy == noisy.max())
    return int(ids[best].min())


def _penalise(
    scores: F64, prompt: Sequence[int], answer: Sequence[int], sampling: Parameters
) -> None:
    if sampling.repetition_penalty != 1:
        seen = np.unique(np.array([*prompt, *answer], dtype=np.int64))
        seen = seen[(seen >= 0) & (seen < len(scores))]
        s = scores[seen]
        r = sampling.repetition_penalty
        scores[seen] = np.where(s > 0, s / r, s * r)
    if sampling.presence_penalty != 0:
        seen = np.unique(np.array(answer, dtype=np.int64))
        scores[seen] -= sampling.presence_penalty


def _truncate(
    ids: npt.NDArray[np.int64], scores: F64, sampling: Parameters
) -> tuple[npt.NDArray[np.int64], F64]:
    """Apply top-k, top-p and min-p."""
    if sampling.top_k or sampling.top_p < 1:
        order = np.lexsort((ids, -scores))
        if sampling.top_k:
            order = order[: sampling.top_k]
        ids, scores = ids[order], scores[order]
    if sampling.top_p < 1:
        mass = np.cumsum(exp(scores - scores[0]))  # cumsum adds in order
        keep = int(np.searchsorted(mass, sampling.top_p * mass[-1])) + 1
        ids, scores = ids[:keep], scores[:keep]
    if sampling.min_p > 0:
        likely = exp(scores - scores.max()) >= sampling.min_p
        ids, scores = ids[likely], scores[likely]
    return ids, scores


def gumbel(seed: int, position: int, ids: npt.NDArray[np.int64]) -> F64:
    """Return Gumbel noise for tokens at a position: -log(-log(u)), u = (word + 1/2) / 2^32."""
    u = (philox(seed, position, ids.astype(np.uint64)).astype(np.float64) + 0.5) * 2.0**-32
    noise: F64 = -log(-log(u))
    return noise


def philox(seed: int, position: int, ids: U64) -> U64:
    """First output word of Philox4x32-10, key = seed, counter = (position low, high, id, 0)."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    m0, m1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    c0 = np.full_like(ids, position & 0xFFFFFFFF)
    c1 = np.full_like(ids, position >> 32)
    c2, c3 = ids & mask, np.zeros_like(ids)
    for _ in range(10):
        p0, p1 = m0 * c0, m1 * c2
        c0, c1, c2, c3 = (
            (p1 >> shift) ^ c1 ^ np.uint64(k0),
            p1 & mask,
            (p0 >> shift) ^ c3 ^ np.uint64(k1),
            p0 & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0


def exp(x: F64) -> F64:
    """exp of x <= 0 in fp64 by a fixed sequence: 2^n · Taylor(r), |r| <= ln2 / 2; 0 below -700."""
    clipped = np.maximum(x, -700.0)
    n = np.rint(clipped / LN2)
    r = clipped - n * LN2
    total = np.ones_like(r)
    for k in range(14, 0, -1):
        total = total * r / k + 1.0
    return np.where(x < -700.0, 0.0, np.ldexp(total, n.astype(np.int32)))


def log(x: F64) -> F64:
    """log of x > 0 in fp64 by a fixed sequence: e·ln2 + 2·atanh((m - 1) / (m + 1))."""
    m, e = np.frexp(x)
    small = m < 0.7071067811865476
    m = np.where(small, m * 2.0, m)
    e = np.where(small, e - 1, e)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    total = np.full_like(z, 1.0 / 25.0)
    for k in range(23, 0, -2):
        total = total * z + 1.0 / k
    result: F64 = e * LN2 + 2.0 * s * total
    return result
