"""The native backend equals the reference in logits and cache, for every instruction set here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from random_weights import random_spec, random_weights

from edge_runtime.cache.policy import KV8, parse_policy
from edge_runtime.errors import BackendUnavailable, NumericError
from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels import ops
from edge_runtime.kernels.cpu import library
from edge_runtime.kernels.cpu.backend import CpuBackend
from edge_runtime.kernels.reference.ops import ReferenceBackend
from edge_runtime.model.runner import Model
from edge_runtime.model.transformer import geometry

CONTEXT = 384
NUM_TOKENS = 317  # of 331 rows: the rest is padding
Planes = dict[str, np.ndarray[Any, Any]]

MODELS: dict[str, tuple[ModelSpec, int, bool]] = {  # spec, group size, R3
    "D16": (random_spec(), 32, False),
    "D16-R3-biases": (random_spec(qkv_bias=True, o_bias=True, mlp_bias=True), 32, True),
    "D64-R3-group3": (
        random_spec(hidden_size=200, num_heads=3, num_kv_heads=1, head_dim=64),
        64,
        True,
    ),
    "D80-head-norms-group7": (
        random_spec(
            architecture="qwen3", qk_norm=True, hidden_size=72, num_heads=7, num_kv_heads=1,
            head_dim=80, intermediate_size=200,
        ),
        128,
        False,
    ),
    "D24-group1": (random_spec(num_heads=3, num_kv_heads=3, head_dim=24, num_layers=1), 64, False),
}  # fmt: skip
# one after the other: rows 1…20 and 70, over block ends at 64, 128, …; every view and policy
PASSES = [("w8", 70, "kv8"), ("w8", 57, "kv8"), ("w4", 1, "kv4"), ("w8", 1, "kv8")] + [
    (("w8", "w4")[i % 2], rows, ("kv8", "recent:64", "kv4")[i % 3])
    for i, rows in enumerate(range(1, 21))
]
WRITTEN = sum(rows for _, rows, _ in PASSES)


def numbers(name: str) -> tuple[ops.ModelWeights, ops.Geometry]:
    spec, group_size, rotate_kv = MODELS[name]
    weights = random_weights(spec, group_size, CONTEXT)
    return weights, geometry(spec, NUM_TOKENS, rotate_kv=rotate_kv)


def play(model: Model, kv: Any, seed: int = 0) -> Iterator[tuple[str, ops.F32, list[int]]]:
    """Run all passes and give what each returns."""
    rng, start = np.random.default_rng(seed), 0
    for view, rows, policy in PASSES:
        ids = rng.integers(0, NUM_TOKENS, rows).tolist()
        logits = model.forward(
            view, ids, start, kv, policy=parse_policy(policy), num_logits=rng.integers(1, rows + 1)
        )
        yield f"{view} {rows} rows at {start} {policy}", logits.numpy(), logits.argmax()
        start += rows


@cache
def reference(name: str) -> tuple[list[tuple[str, ops.F32, list[int]]], Planes]:
    backend = ReferenceBackend(*numbers(name))
    kv = backend.new_cache(CONTEXT)
    return list(play(Model(MODELS[name][0], backend), kv)), kv.planes(WRITTEN)


@pytest.fixture(scope="session", autouse=True)
def _library(give_up: Callable[[str, str], None]) -> None:
    try:
        library.load()
    except BackendUnavailable as error:
        give_up("native", str(error))


def isas() -> list[str]:
    try:
        return library.available_isas()
    except BackendUnavailable:
        return ["none"]  # and `_library` says why


@pytest.fixture(params=isas())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def same_planes(got: Planes, want: Planes) -> None:
    assert got.keys() == want.keys()
    for name, plane in want.items():
        assert got[name].shape == plane.shape
        assert got[name].tobytes() == plane.tobytes(), name


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_bits_of_the_reference(name: str, threads: int, isa: str) -> None:
    wanted, planes = reference(name)
    backend = CpuBackend(*numbers(name), threads, isa)
    kv = backend.new_cache(CONTEXT)
    for got, want in zip(play(Model(MODELS[name][0], backend), kv), wanted, strict=True):
        assert got[0] == want[0]
        assert got[1].shape == want[1].shape, got[0]
        assert got[1].tobytes() == want[1].tobytes(), got[0]
        assert got[2] == want[2], got[0]
    same_planes(kv.planes(WRITTEN), planes)
    backend.close()


@pytest.mark.parametrize("chunk", [1, 7, 64, 130])
def test_prompts_in_chunks(chunk: int, isa: str) -> None:
    """However a prompt is cut, ids and embedding rows alike."""
    name = "D64-R3-group3"
    weights, sizes = numbers(name)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, NUM_TOKENS, 61).tolist()
    rows = rng.standard_normal((69, sizes.hidden_size)).astype(np.float32)
    found = []
    backends = (
        (ReferenceBackend(weights, sizes), 130),
        (CpuBackend(weights, sizes, 2, isa), chunk),
    )
    for backend, n in backends:
        model, kv = Model(MODELS[name][0], backend), backend.new_cache(130)
        model.prefill("w8", ids, 0, kv, chunk=n, want_logits=False)
        done, logits = model.prefill("w8", rows, 61, kv, chunk=n, want_logits=True)
        assert done == 69
        assert logits is not None
        found.append((logits.numpy(), logits.argmax(), kv.planes(130)))
        backend.close()
    (want, want_best, want_planes), (got, best, planes) = found
    assert got.tobytes() == want.tobytes()
    assert best == want_best
    same_planes(planes, want_planes)


def test_a_program_without_logits(isa: str) -> None:
    """It returns nothing, and its last linear is no head: there are more outputs than tokens."""
    spec = random_spec(hidden_size=200, vocab_size=5)
    backend = CpuBackend(random_weights(spec, 32, 64), geometry(spec, 3), 2, isa)
    model, kv = Model(spec, backend), backend.new_cache(64)
    positions = np.arange(20)
    batch = ops.Batch(ids=positions % 3, positions=positions, full_from=0 * positions)
    assert backend.run(model.program("w8", logits=False), batch, kv) is None
    assert backend.run(model.program("w8"), batch, kv) is not None


def test_a_cache_moves_between_backends(isa: str) -> None:
    name = "D80-head-norms-group7"
    weights, sizes = numbers(name)
    spec = MODELS[name][0]
    reference, cpu = ReferenceBackend(weights, sizes), CpuBackend(weights, sizes, 2, isa)
    here, there = reference.new_cache(200), cpu.new_cache(130)
    ids = np.random.default_rng(2).integers(0, NUM_TOKENS, 100).tolist()
    Model(spec, reference).forward("w8", ids, 0, here)
    planes = here.planes(100)
    for part in planes.values():
        part.flags.writeable = False  # as from a file that is mapped
    there.load(planes)
    same_planes(there.planes(100), planes)
    same_planes(there.planes(0), here.planes(0))
    third = cpu.new_cache(100)
    third.load(there.planes(67))  # a part of a block
    same_planes(third.planes(67), here.planes(67))
    by_layer = cpu.new_cache(100)
    for layer in range(spec.num_layers):
        by_layer.load(here.planes(67, layer), layer)
    same_planes(by_layer.planes(67), here.planes(67))
    for name, part in by_layer.planes(67, 1).items():
        assert part.tobytes() == planes[name][1:2, :, :67].tobytes()
    for view, policy in (("w8", "kv8"), ("w4", "kv4"), ("w4", "recent:64")):
        a, b = (
            Model(spec, backend).forward(view, [5, 6], 100, kv, policy=parse_policy(policy))
            for backend, kv in ((reference, here), (cpu, there))
        )
        assert a.numpy().tobytes() == b.numpy().tobytes()
    assert there.num_bytes >= sum(part.nbytes for part in there.planes(130).values())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("rows", [1, 20])
def test_rows_that_are_not_numbers_are_an_error(bad: float, rows: int, isa: str) -> None:
    weights, sizes = numbers("D16")
    backend = CpuBackend(weights, sizes, 2, isa)
    model, kv = Model(MODELS["D16"][0], backend), backend.new_cache(64)
    x = np.random.default_rng(3).standard_normal((rows, sizes.hidden_size)).astype(np.float32)
    x[rows - 1, 7] = bad
    positions = np.arange(rows)
    batch = ops.Batch(ids=None, rows=x, positions=positions, full_from=KV8.full_from(positions))
    logits = backend.run(model.program("w8"), batch, kv)
    assert logits is not None
    for read in (logits.argmax, logits.numpy, lambda: logits.argmax([1, 2])):
        with pytest.raises(NumericError, match="NaN or infinity"):
            read()
    # the next pass is a new one
    assert np.isfinite(model.forward("w8", [1], 0, kv).numpy()).all()


def test_a_broken_value_row_is_an_error(isa: str) -> None:
    """One V output of NaN in a layer: K is fine, so only the values can tell."""
    weights, sizes = numbers("D16")
    qkv = weights.linears["layers.0.qkv"]
    qkv.scale[sizes.head_dim * (sizes.num_heads + sizes.num_kv_heads) + 3] = np.nan
    for backend in (ReferenceBackend(weights, sizes), CpuBackend(weights, sizes, 1, isa)):
        logits = Model(MODELS["D16"][0], backend).forward("w8", [1, 2], 0, backend.new_cache(8))
        with pytest.raises(NumericError):
            logits.numpy()


def test_logits_stay_while_later_passes_run(isa: str) -> None:
    weights, sizes = numbers("D16")
    backend = CpuBackend(weights, sizes, 2, isa)
    model, kv = Model(MODELS["D16"][0], backend), backend.new_cache(64)
    first = model.forward("w8", [1, 2, 3], 0, kv, num_logits=3)
    before, best = first.numpy(), first.argmax()
    second = model.forward("w8", [4], 3, kv)
    third = model.forward("w4", [5, 6], 4, kv, num_logits=2)
    assert first.numpy().tobytes() == before.tobytes()
    assert first.argmax() == best == before.argmax(-1).tolist()
    assert second.argmax() == second.numpy().argmax(-1).tolist()
    allowed = [316, 9, 30, 9]
    rows = third.numpy()[:, sorted(set(allowed))]
    assert third.argmax(allowed) == [sorted(set(allowed))[i] for i in rows.argmax(-1)]


@pytest.mark.parametrize("num_tokens", [317, 150])  # with 150 whole chunks of the head are padding
def test_equal_maxima_and_padding_rows(num_tokens: int, isa: str) -> None:
    """Every logit is the bias: ties go to the lowest id, rows past the vocabulary never win."""
    name = "D64-R3-group3"
    spec = MODELS[name][0]
    weights, _ = numbers(name)
    head = weights.linears["head"]
    bias = np.zeros(spec.vocab_size, np.float32)
    bias[[40, 41, 100, 149, 200]] = 2
    bias[num_tokens:] = np.where(np.arange(spec.vocab_size - num_tokens) % 2, 9, np.nan)
    flat = ops.LinearWeights(
        base=head.base, refine=head.refine, mult=head.mult, scale=0 * head.scale, bias=bias,
        num_inputs=head.num_inputs, group_size=head.group_size,
    )  # fmt: skip
    weights = ops.ModelWeights(
        linears={**weights.linears, "head": flat}, embedding=weights.embedding,
        embedding_scale=weights.embedding_scale, cos=weights.cos, sin=weights.sin,
    )  # fmt: skip
    backend = CpuBackend(weights, geometry(spec, num_tokens, rotate_kv=True), 3, isa)
    logits = Model(spec, backend).forward("w8", [1, 2], 0, backend.new_cache(8), num_logits=2)
    assert logits.argmax() == [40, 40]
    assert logits.argmax([149, 100]) == [100, 100]
    assert logits.numpy().shape == (2, num_tokens)


def test_a_hundred_repeats_under_load(isa: str) -> None:
    """More threads than cores: the same bits every time."""
    weights, sizes = numbers("D16-R3-biases")
    backend = CpuBackend(weights, sizes, 7, isa)
    model, kv = Model(MODELS["D16-R3-biases"][0], backend), backend.new_cache(CONTEXT)
    ids = np.random.default_rng(4).integers(0, NUM_TOKENS, 33).tolist()
    want = model.forward("w8", ids, 0, kv, num_logits=33).numpy().tobytes()
    planes = kv.planes(33)
    for _ in range(100):
        assert model.forward("w8", ids, 0, kv, num_logits=33).numpy().tobytes() == want
    same_planes(kv.planes(33), planes)
