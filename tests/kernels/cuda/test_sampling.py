"""Sampling in Triton: the tokens of `kernels/sampling.py`, its noise and functions to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton_devices import DEVICES, device_of

from edge_runtime.kernels import sampling
from edge_runtime.kernels.sampling import Parameters, choose

F64_CASES = {"exp": -np.geomspace(1e-300, 800, 3000), "log": np.geomspace(1e-300, 1e300, 3000)}


def packed(ids: np.ndarray[Any, Any], V: int) -> torch.Tensor:
    """Bits of the allowed tokens, int32 words."""
    bits = np.zeros(-(-V // 32) * 32, bool)
    bits[ids] = True
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32).copy())


def random_case(rng: np.random.Generator, V: int) -> tuple[Any, ...]:
    """Logits, position, prompt, answer, parameters and allowed tokens."""
    logits = (rng.standard_normal(V) * rng.choice([0.0, 0.3, 3.0, 40.0])).astype(np.float32)
    if rng.random() < 0.5:
        logits = np.round(logits)  # equal logits: the order of ids decides
    parameters = Parameters(
        temperature=float(rng.choice([0.0, 1e-3, 0.7, 1.0, 3.0, 1e-320, 1e308])),
        top_k=int(rng.choice([0, 0, 1, 7, V + 5, 2**32 + 1])),
        top_p=float(rng.choice([1.0, 1.0, 0.9, 0.3, 1e-9])),
        min_p=float(rng.choice([0.0, 0.0, 0.05, 1.0])),
        repetition_penalty=float(rng.choice([1.0, 1.3, 0.6])),
        presence_penalty=float(rng.choice([0.0, 0.7, -1.5])),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
    )
    prompt = [-1, *rng.integers(0, V, 30).tolist()]
    allowed = np.unique(rng.integers(0, V, 40)) if rng.random() < 0.3 else None
    return logits, int(rng.choice([0, 5, 2**33 + 1])), prompt, [3, 3, 9], parameters, allowed


def on_device(case: tuple[Any, ...], device: str) -> tuple[int, int]:
    from edge_runtime.kernels.cuda.sampling import Settings, sample

    logits, position, prompt, answer, p, allowed = case
    V = len(logits)
    seen = torch.zeros(1, V, dtype=torch.uint8)
    seen[0, [i for i in (*prompt, *answer) if i >= 0]] |= 1
    seen[0, answer] |= 2
    padded = torch.full((1, V + 3), float("nan"))
    padded[0, :V] = torch.from_numpy(logits)
    result = sample(
        padded.to(device), V, Settings.of([p], [position], device),
        truncate=bool(p.top_k or p.top_p < 1), seen=seen.to(device),
        allowed=None if allowed is None else packed(allowed, V).to(device),
    )  # fmt: skip
    return int(result.index[0]), int(result.finite[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("V", [317, 1317])
def test_the_same_token(V: int, device: str) -> None:
    device_of(device)
    rng = np.random.default_rng(V)
    for _ in range(60 if device == "cpu" else 400):
        case = random_case(rng, V)
        assert on_device(case, device) == (choose(*case[:5], case[5]), 1), case[1:]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_have_their_own_parameters(device: str) -> None:
    device_of(device)
    from edge_runtime.kernels.cuda.sampling import Settings, sample

    rng = np.random.default_rng(1)
    V, rows = 1500, 3
    logits = (rng.standard_normal((rows, V)) * 2).astype(np.float32)
    parameters = [
        Parameters(temperature=0.8, seed=1, min_p=0.01),
        Parameters(temperature=0.0),
        Parameters(temperature=2.0, seed=2**64 - 1, top_p=0.7, top_k=50),
    ]
    positions = [4, 5, 6]
    given = torch.from_numpy(logits).to(device)
    settings = Settings.of(parameters, positions, device)
    want = [
        choose(x, at, (), (), p) for x, at, p in zip(logits, positions, parameters, strict=True)
    ]
    assert sample(given, V, settings, truncate=True).index.tolist() == want
    plain = sample(given[:2], V, Settings.of(parameters[:2], positions[:2], device), truncate=False)
    assert plain.index.tolist() == want[:2]
    given[1, 7] = float("nan")
    assert sample(given, V, settings, truncate=True).finite.tolist() == [1, 0, 1]
    assert sample(given, V, settings, truncate=False).finite.tolist() == [1, 0, 1]


@pytest.mark.parametrize("device", DEVICES)
def test_a_sum_too_close_to_call_runs_on_to_the_end(device: str) -> None:
    """Equal logits and top_p = i / n: the exact running sum meets the line exactly."""
    device_of(device)
    for n, i in ((4, 1), (4, 3), (512, 128), (512, 129), (1000, 250)):
        parameters = Parameters(temperature=1.0, top_p=i / n, seed=5)
        case = (np.zeros(n, np.float32), 3, (), [0], parameters, None)
        assert on_device(case, device) == (choose(*case[:5], case[5]), 1)


@pytest.mark.parametrize("device", DEVICES)
def test_noise_and_functions_have_the_bits_of_the_definition(device: str) -> None:
    device_of(device)
    from triton_noise import functions_kernel

    from edge_runtime.kernels.cuda.launch import EXACT

    n, seed, position = 4096, 2**63 + 12345, 2**32 + 77
    ids = np.arange(n)
    x = np.resize(np.concatenate([F64_CASES["exp"], [0.0, -700.0, -700.0001, -np.inf]]), n)
    y = np.resize(F64_CASES["log"], n)
    out = torch.full((5, n), 99.0, dtype=torch.float64, device=device)
    ints = torch.tensor([seed - 2**64, position], dtype=torch.int64, device=device)
    given = torch.from_numpy(np.stack([x, y])).to(device)
    functions_kernel[(n // 512,)](given, ints, out, n, BLOCK=512, **EXACT)
    exp, log, exact, rough, near = out.cpu().numpy()
    assert np.array_equal(exp, sampling.exp(x))
    assert (np.abs(near - exp) <= 1e-12 * exp).all()
    assert np.array_equal(log, sampling.log(y))
    want = sampling.gumbel(seed, position, ids)
    assert np.array_equal(exact, want)
    assert np.abs(rough - want).max() < 2e-4  # the kernels allow for 1e-3
