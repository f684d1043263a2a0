"""The CUDA backend equals the reference in logits, choices and cache; memory, graphs, errors.

In the interpreter a pass of a tiny model takes a second, so that few passes run there; on a GPU
every one of `PASSES` runs three times: as launches, captured, and replayed.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from random_weights import random_spec, random_weights
from triton_devices import DEVICES, device_of

from edge_runtime.cache.policy import KV8, parse_policy
from edge_runtime.errors import BudgetError, NumericError, UsageError
from edge_runtime.kernels import ops
from edge_runtime.kernels.reference.ops import ReferenceBackend
from edge_runtime.kernels.sampling import Parameters, choose
from edge_runtime.model.runner import Model
from edge_runtime.model.transformer import geometry

CONTEXT = 384
NUM_TOKENS = 317  # of 331 rows: the rest is padding
Planes = dict[str, np.ndarray[Any, Any]]
MODELS: dict[str, tuple[Any, int, bool]] = {  # spec, group size, R3
    "D16-R3-biases": (
        random_spec(num_layers=1, qkv_bias=True, o_bias=True, mlp_bias=True), 32, True
    ),
    "D64-group3": (
        random_spec(num_layers=1, hidden_size=200, num_heads=3, num_kv_heads=1, head_dim=64),
        64,
        False,
    ),
    "D80-head-norms-group7": (
        random_spec(
            architecture="qwen3", qk_norm=True, hidden_size=72, num_heads=7, num_kv_heads=1,
            head_dim=80, intermediate_size=200,
        ),
        128,
        False,
    ),
}  # fmt: skip
# one after the other, from position 58, over the end of the block at 64
FEW = [("w4", 1, "kv4"), ("w8", 3, "kv8"), ("w4", 7, "recent:64"), ("w8", 20, "kv8")]
PASSES = [("w4", 1, "kv8"), ("w8", 70, "kv8"), *FEW] + [
    (("w8", "w4")[i % 2], rows, ("kv8", "recent:64", "kv4")[i % 3])
    for i, rows in enumerate(range(1, 19))
]
START = 58


def numbers(name: str) -> tuple[ops.ModelWeights, ops.Geometry]:
    spec, group_size, rotate_kv = MODELS[name]
    weights = random_weights(spec, group_size, CONTEXT)
    return weights, geometry(spec, NUM_TOKENS, rotate_kv=rotate_kv)


def cuda(name: str, device: str) -> Any:
    from edge_runtime.kernels.cuda.backend import CudaBackend

    return CudaBackend(*numbers(name), torch.device(device_of(device)))


def play(model: Model, kv: Any, passes: list[Any]) -> Iterator[tuple[str, ops.F32, list[int]]]:
    """Run passes and give what each returns."""
    rng, start = np.random.default_rng(0), START
    for view, rows, policy in passes:
        ids = rng.integers(0, NUM_TOKENS, rows).tolist()
        logits = model.forward(
            view, ids, start, kv, policy=parse_policy(policy), num_logits=rng.integers(1, rows + 1)
        )
        yield f"{view} {rows} rows at {start} {policy}", logits.numpy(), logits.argmax()
        start += rows


@cache
def reference(name: str, few: bool) -> tuple[Planes, list[Any], Planes]:
    """The cache before, what passes return, the cache after."""
    backend = ReferenceBackend(*numbers(name))
    model, kv = Model(MODELS[name][0], backend), backend.new_cache(CONTEXT)
    model.forward("w8", np.random.default_rng(1).integers(0, 317, START).tolist(), 0, kv)
    before = kv.planes(START)
    passes = FEW if few else PASSES
    found = list(play(model, kv, passes))
    return before, found, kv.planes(START + sum(rows for _, rows, _ in passes))


def same_planes(got: Planes, want: Planes) -> None:
    assert got.keys() == want.keys()
    for name, plane in want.items():
        assert got[name].tobytes() == plane.tobytes(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_bits_of_the_reference(name: str, device: str) -> None:
    backend = cuda(name, device)
    few = device == "cpu"
    before, wanted, after = reference(name, few)
    kv = backend.new_cache(CONTEXT)
    kv.load(before)
    model = Model(MODELS[name][0], backend)
    for _ in range(1 if few else 3):
        for got, want in zip(play(model, kv, FEW if few else PASSES), wanted, strict=True):
            assert got[0] == want[0]
            assert got[1].tobytes() == want[1].tobytes(), got[0]
            assert got[2] == want[2], got[0]
        same_planes(kv.planes(after["scale"].shape[2]), after)
    if not few:
        assert len(kv.graphs) > 15
    backend.close()
    with pytest.raises(UsageError, match="closed"):
        model.forward("w8", [1], 0, kv)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [5, 300])
def test_parts_of_a_batch_and_embedding_rows(
    chunk: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than the registers have go through in parts; logits may lie in several."""
    from edge_runtime.kernels.cuda import sizes

    name, rows, wanted = "D64-group3", 8, 7
    if device == "cuda":
        rows, wanted = 300, 280
    elif chunk == 300:
        pytest.skip("one part, which the other tests have")
    monkeypatch.setattr(sizes, "chunk_rows", lambda arch: min(chunk, 256))
    x = np.random.default_rng(3).standard_normal((rows, 200)).astype(np.float32)
    positions = np.arange(rows)
    found = []
    for backend in (ReferenceBackend(*numbers(name)), cuda(name, device)):
        model, kv = Model(MODELS[name][0], backend), backend.new_cache(rows)
        batch = ops.Batch(
            ids=None, rows=x, positions=positions, full_from=KV8.full_from(positions),
            num_logits=wanted,
        )  # fmt: skip
        logits = backend.run(model.program("w8"), batch, kv)
        assert logits is not None
        found.append((logits.numpy().tobytes(), logits.argmax(), kv.planes(rows)))
        assert backend.run(model.program("w8", logits=False), batch, kv) is None
    assert found[0][:2] == found[1][:2]
    same_planes(found[1][2], found[0][2])


@pytest.mark.parametrize("device", DEVICES)
def test_choices_and_logits_that_are_held(device: str) -> None:
    backend = cuda("D16-R3-biases", device)
    model, kv = Model(MODELS["D16-R3-biases"][0], backend), backend.new_cache(64)
    first = model.forward("w8", [1, 2, 3], 0, kv, num_logits=3)
    before, best = first.numpy(), first.argmax()
    second = model.forward("w8", [4], 3, kv)
    last = model.forward("w8", [5], 4, kv)
    assert first.numpy().tobytes() == before.tobytes()
    assert first.argmax() == best == before.argmax(-1).tolist()
    assert second.argmax() == second.numpy().argmax(-1).tolist()
    allowed = np.array([9, 30, 316])
    assert first.argmax([316, 9, 30, 9]) == allowed[before[:, allowed].argmax(-1)].tolist()
    prompt, answer = [-1, 3, 3, 9], [5, best[0]]
    for parameters in (
        Parameters(temperature=0.8, seed=7),
        Parameters(temperature=1.3, top_k=40, top_p=0.9, min_p=0.01, seed=2**63 + 5),
        Parameters(repetition_penalty=1.5, presence_penalty=0.4),
    ):
        for held, row in ((first, 1), (last, 0)):
            logits = held.numpy()[row]
            for ids in (None, allowed):
                got = held.sample(row, 77, prompt, answer, parameters, ids)
                assert got == choose(logits, 77, prompt, answer, parameters, ids)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_not_numbers_are_an_error(device: str) -> None:
    name = "D16-R3-biases"
    backend = cuda(name, device)
    model, kv = Model(MODELS[name][0], backend), backend.new_cache(64)
    x = np.random.default_rng(3).standard_normal((2, 64)).astype(np.float32)
    x[1, 7] = np.nan
    positions = np.arange(2)
    batch = ops.Batch(ids=None, rows=x, positions=positions, full_from=KV8.full_from(positions))
    logits = backend.run(model.program("w8"), batch, kv)
    assert logits is not None
    for read in (logits.argmax, logits.numpy, lambda: logits.argmax([1, 2])):
        with pytest.raises(NumericError, match="NaN or infinity"):
            read()
    assert np.isfinite(model.forward("w8", [1], 0, kv).numpy()).all()  # the next is a new one


@pytest.mark.parametrize("device", DEVICES)
def test_out_of_memory_is_said_and_survived(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "D16-R3-biases"
    backend = cuda(name, device)
    model, kv = Model(MODELS[name][0], backend), backend.new_cache(64)
    want = model.forward("w8", [1], 0, kv).numpy().tobytes()

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    backend.relieve(kv, 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        patch.setattr(torch, "zeros", full)
        with pytest.raises(BudgetError, match=r"a cache of 300 tokens takes 0\.\d MiB, .* free"):
            backend.new_cache(300)
        with pytest.raises(BudgetError, match="registers of a pass takes") as error:
            model.forward("w8", [1], 0, kv)
        assert "--ctx" in error.value.hint or "smaller" in error.value.hint
        with pytest.raises(BudgetError, match="the weights takes"):
            cuda(name, device)
    assert model.forward("w8", [1], 0, kv).numpy().tobytes() == want

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(backend, "prepare", broken)
    with pytest.raises(RuntimeError, match="illegal"):  # nothing else is called want of memory
        model.forward("w8", [1], 0, kv)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_of_the_account(name: str, device: str) -> None:
    from edge_runtime.kernels.cuda import sizes
    from edge_runtime.kernels.cuda.memory import pool
    from edge_runtime.plan.footprint import footprint

    backend = cuda(name, device)
    spec, group_size, _ = MODELS[name]
    account = footprint(spec, backend="cuda", group_size=group_size, arch=pool(backend.device).arch)
    lines = account.lines(CONTEXT)
    assert backend.weights_bytes == account.weights_bytes + lines["rope"]
    kv = backend.new_cache(CONTEXT)
    assert kv.num_bytes == lines["kv"]
    backend.prepare(Model(spec, backend).program("w8"))
    used = backend.workspace_bytes
    block = account.per_block["workspace"]
    of_attention = block * (CONTEXT // account.block + 15)  # blocks are padded to 16
    # choosing with top-k has its room where it is first used
    planned = lines["workspace"] - of_attention - sizes.sampling(spec.vocab_size)
    assert planned <= used <= planned + 16 * 1024  # the batch, and room of the argmax
    assert of_attention - 16 * block < kv.workspace.num_bytes <= of_attention
    backend.prepare(Model(spec, backend).program("w4"))
    assert backend.workspace_bytes == used
    backend.close()


def test_a_pass_allocates_nothing_after_the_first_of_its_kind() -> None:
    device_of("cuda")
    backend = cuda("D80-head-norms-group7", "cuda")
    model, kv = Model(MODELS["D80-head-norms-group7"][0], backend), backend.new_cache(CONTEXT)

    def passes() -> None:
        for start, (view, rows) in enumerate([("w4", 1), ("w8", 5), ("w8", 40)]):
            model.forward(view, [7] * rows, 60 * start, kv, num_logits=min(rows, 8)).argmax()

    for _ in range(2):  # launches, then capture
        passes()
    before = torch.cuda.memory_stats()
    for _ in range(3):
        passes()
    after = torch.cuda.memory_stats()
    for name in ("allocation.all.allocated", "segment.all.allocated"):
        assert after[name] == before[name], name


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_given_back_is_gone(device: str) -> None:
    """Registers, graphs and samplers' rooms, those of cycles too; what runs keeps them."""
    backend = cuda("D16-R3-biases", device)
    model, kv = Model(MODELS["D16-R3-biases"][0], backend), backend.new_cache(64)
    cycles = backend.cycles(model.program("w8"), model.program("w4"), kv, None)
    cycles.begin([1, 2], Parameters(temperature=0.8, top_k=5))
    for _ in range(3 if device == "cuda" else 1):
        cycles.launch(1, 0, 8)
        cycles.read()
        model.forward("w8", [1], 0, kv)
    kept = [weakref.ref(backend.passes.registers), weakref.ref(cycles._rooms[True].index)]
    backend.relieve(kv, 1, running=True)
    assert all(ref() is not None for ref in kept)
    backend.relieve(kv, 1)
    gc.collect()
    assert all(ref() is None for ref in kept)
    cycles.launch(1, 0, 8)
    assert cycles.read().tokens


@pytest.mark.parametrize("device", DEVICES)
def test_closing_gives_the_memory_back_at_once(device: str) -> None:
    backend = cuda("D16-R3-biases", device)
    kv = backend.new_cache(CONTEXT)
    Model(MODELS["D16-R3-biases"][0], backend).forward("w8", [1, 2], 0, kv)
    kept = [weakref.ref(backend.passes), weakref.ref(backend.passes.registers)]
    gc.collect()
    gc.disable()  # a collection may come long after a GPU has run out of memory
    try:
        del kv  # its graphs hold what they write to
        backend.close()
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("device", DEVICES)
def test_logits_that_someone_holds_outlive_a_cycle(device: str) -> None:
    backend = cuda("D16-R3-biases", device)
    model, kv = Model(MODELS["D16-R3-biases"][0], backend), backend.new_cache(64)
    cycles = backend.cycles(model.program("w8"), model.program("w4"), kv, None)
    cycles.begin([1, 2], Parameters())
    want = model.forward("w8", [3, 4], 0, kv, num_logits=2).numpy()
    held = model.forward("w8", [3, 4], 0, kv, num_logits=2)
    cycles.launch(1, 0, 8)
    cycles.read()
    assert np.array_equal(held.numpy(), want)


@pytest.mark.parametrize("device", DEVICES)
def test_want_of_memory_in_a_cycle(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = cuda("D16-R3-biases", device)
    model, kv = Model(MODELS["D16-R3-biases"][0], backend), backend.new_cache(64)
    cycles = backend.cycles(model.program("w8"), model.program("w4"), kv, None)
    cycles.begin([1, 2], Parameters(temperature=0.8, top_k=5))

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        with pytest.raises(BudgetError, match="takes"):
            cycles.launch(1, 0, 8)
    cycles.begin([1, 2], Parameters(temperature=0.8, top_k=5))
    cycles.launch(1, 0, 8)
    assert cycles.read().tokens
