"""Native sampling chooses the token of `kernels/sampling.py`, whatever the parameters."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from random_weights import random_spec, random_weights

from edge_runtime.decode.sampling import Sampling
from edge_runtime.kernels.cpu import library
from edge_runtime.kernels.cpu.backend import CpuBackend
from edge_runtime.kernels.cpu.logits import CpuLogits, LogitsBuffer
from edge_runtime.kernels.sampling import choose
from edge_runtime.model.transformer import geometry

VOCABULARY = 317


@pytest.fixture(scope="module", params=library.available_isas())
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    spec = random_spec(num_layers=1)
    return CpuBackend(
        random_weights(spec, 32, 64), geometry(spec, VOCABULARY), threads=1, isa=request.param
    )


def native(backend: CpuBackend, logits: np.ndarray[Any, Any], *args: Any) -> int:
    buffer = LogitsBuffer(2, VOCABULARY + 3)
    buffer.values[:] = np.nan
    buffer.values[1, :VOCABULARY] = logits
    return CpuLogits(backend, buffer, 2).sample(1, *args)


@hypothesis.settings(max_examples=300)
@hypothesis.given(
    seed=st.integers(0, 2**64 - 1),
    spread=st.sampled_from([0.0, 0.3, 3.0, 40.0]),
    rounded=st.booleans(),  # equal logits: the order of ids decides
    temperature=st.sampled_from([0.0, 1e-3, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 7, VOCABULARY + 5, 2**32 + 1]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-9]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    repetition=st.sampled_from([1.0, 1.3, 0.6]),
    presence=st.sampled_from([0.0, 0.7, -1.5]),
    position=st.sampled_from([0, 5, 2**33 + 1]),
    few=st.booleans(),
)
def test_the_same_token(
    backend: CpuBackend, seed: int, spread: float, rounded: bool, temperature: float, top_k: int,
    top_p: float, min_p: float, repetition: float, presence: float, position: int, few: bool,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed % 1000)
    logits = (rng.standard_normal(VOCABULARY) * spread).astype(np.float32)
    if rounded:
        logits = np.round(logits)
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        repetition_penalty=repetition, presence_penalty=presence,
    )  # fmt: skip
    prompt, answer = [-1, *rng.integers(0, VOCABULARY, 30).tolist()], [3, 3, 9]
    allowed = np.unique(rng.integers(0, VOCABULARY, 40)) if few else None
    args = (position, prompt, answer, sampling, allowed)
    assert native(backend, logits, *args) == choose(logits, *args)
