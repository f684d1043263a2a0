"""The account: it sums, it is exact at its limit, and it is what the backends really allocate."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from random_weights import random_spec, random_weights

from edge_runtime import machine
from edge_runtime.decode import memory
from edge_runtime.decode.pressure import MemoryWatch
from edge_runtime.errors import BackendUnavailable, BudgetError
from edge_runtime.format.manifest import DTYPES, expected_planes
from edge_runtime.format.spec import ModelSpec
from edge_runtime.kernels.cpu import library
from edge_runtime.kernels.cpu.backend import CpuBackend
from edge_runtime.kernels.layout import CHUNK_ROWS
from edge_runtime.kernels.reference.cache import NestedCache
from edge_runtime.model.runner import Model
from edge_runtime.model.transformer import geometry
from edge_runtime.plan import footprint as fp

BACKENDS = ("cpu", "reference", "cuda")


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    kv_heads = draw(st.integers(1, 4))
    return random_spec(
        num_layers=draw(st.integers(1, 40)),
        hidden_size=draw(st.integers(1, 200)) * 8,
        intermediate_size=draw(st.integers(1, 500)) * 8,
        num_heads=kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 128)) * 2,
        vocab_size=draw(st.integers(1, 200_000)),
        qkv_bias=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        tied_embedding=draw(st.booleans()),
    )


@st.composite
def accounts(draw: st.DrawFn) -> fp.Footprint:
    backend = draw(st.sampled_from(BACKENDS))
    layouts = ("nest", "fp") if backend == "reference" else fp.LAYOUTS
    return fp.footprint(
        draw(specs()),
        layout=draw(st.sampled_from(layouts)),
        backend=backend,
        group_size=draw(st.sampled_from([None, 32, 64, 128])),
        threads=draw(st.integers(1, 8)),
        reserve_bytes=draw(st.integers(0, 1 << 30)),
    )


@given(accounts(), st.integers(1, 100_000))
def test_lines_are_whole_bytes_and_sum(account: fp.Footprint, context: int) -> None:
    lines = account.lines(context)
    assert all(type(size) is int and size >= 0 for size in lines.values())
    assert sum(lines.values()) == account.total_bytes(context)
    assert set(lines) == set(account.fixed)


@given(accounts(), st.integers(0, 1 << 40))
def test_the_longest_context_fits_and_a_block_more_does_not(
    account: fp.Footprint, limit: int
) -> None:
    most = account.max_context(limit)
    assert most % account.block == 0
    if most:
        assert account.total_bytes(most) <= limit
        assert account.total_bytes(most - 1) <= limit
    assert account.total_bytes(most + 1) > limit


@given(specs(), st.sampled_from([32, 64, 128]), st.integers(1, 200_000))
def test_layouts_in_order(spec: ModelSpec, group_size: int, context: int) -> None:
    total = {}
    for layout in fp.LAYOUTS:
        account = fp.footprint(spec, layout=layout, backend="cuda", group_size=group_size)
        lines = account.lines(context)
        total[layout] = account.total_bytes(context) - lines["workspace"]
    assert total["w4"] < total["nest"] < total["two_copies"]
    if spec.head_dim > 2:  # a scale is 16 bits, like a number of KV16
        assert total["nest"] < total["w8"]


@pytest.mark.parametrize("name", ["llama", "biases", "head norms"])
def test_the_nest_is_the_planes_of_a_checkpoint(name: str) -> None:
    """Where no row is padded the account is what a checkpoint's planes take on disk."""
    fields = {
        "llama": {},
        "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
        "head norms": {"architecture": "qwen3", "qk_norm": True},
    }[name]
    spec = random_spec(vocab_size=320, **fields)
    planes = expected_planes(spec, 32, "none")
    size = 0
    for _, (dtype, shape) in planes:
        count = DTYPES[dtype]
        for n in shape:
            count *= n
        size += count
    assert fp.footprint(spec, backend="cpu", group_size=32).weights_bytes == size


def native() -> str:
    try:
        return library.choose_isa()
    except BackendUnavailable as error:  # installed without a compiler: nothing is allocated
        pytest.skip(error.message)


def cpu_backend(spec: ModelSpec, group_size: int, context: int, threads: int) -> CpuBackend:
    weights = random_weights(spec, group_size, context)
    return CpuBackend(weights, geometry(spec, spec.vocab_size), threads, native())


@pytest.mark.parametrize("head_dim", [2, 6, 10, 16, 24, 34, 64, 80, 96, 112, 128, 256])
def test_a_token_takes_what_the_cpu_backend_allocates(head_dim: int) -> None:
    spec = random_spec(head_dim=head_dim, num_layers=3)
    backend = cpu_backend(spec, 32, 64, 1)
    for blocks in (1, 2, 5):
        per_token = fp.kv_per_token_bytes(spec, "nest", "cpu")
        assert backend.new_cache(64 * blocks).num_bytes == 64 * blocks * per_token
        assert backend.new_cache(64 * blocks - 63).num_bytes == 64 * blocks * per_token
    backend.close()


@pytest.mark.parametrize("head_dim", [2, 6, 16, 34, 80, 128])
def test_a_token_takes_what_the_reference_backend_allocates(head_dim: int) -> None:
    spec = random_spec(head_dim=head_dim)
    cache = NestedCache(geometry(spec, spec.vocab_size), 192)
    assert cache.num_bytes == 192 * fp.kv_per_token_bytes(spec, "nest", "reference")


@pytest.mark.parametrize(
    ("group_size", "fields"),
    [
        (32, {}),
        (64, {"hidden_size": 200, "num_heads": 3, "num_kv_heads": 1, "head_dim": 64}),
        (128, {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "vocab_size": 1000}),
    ],
)
def test_the_cpu_backend_takes_what_is_planned(group_size: int, fields: dict) -> None:
    spec, context, threads = random_spec(**fields), 512, 2
    account = fp.footprint(spec, backend="cpu", group_size=group_size, threads=threads)
    lines = account.lines(context)
    backend = cpu_backend(spec, group_size, context, threads)
    assert backend.weights_bytes == account.weights_bytes + lines["rope"]
    model, cache = Model(spec, backend), backend.new_cache(context)
    assert cache.num_bytes == lines["kv"]
    start = 0
    for rows in (CHUNK_ROWS, context - CHUNK_ROWS - 8, 8):
        model.forward("w8", [1] * rows, start, cache, num_logits=1 if rows > 8 else rows)
        start += rows
    logits = 8 * -(-spec.vocab_size // 32) * 32 * 4
    used = backend.workspace_bytes
    planned = lines["workspace"] - logits
    assert 0.95 * planned <= used <= planned, (used, planned)
    backend.close()


@pytest.mark.parametrize("reserve", [0, 1 << 30])
def test_engine_and_plan_agree(reserve: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = random_spec(max_position=1 << 24)
    monkeypatch.setattr(machine, "available_bytes", lambda: 3 << 30)
    monkeypatch.setattr(machine, "total_bytes", lambda: 8 << 30)
    monkeypatch.setattr(memory, "anonymous_bytes", lambda: 0)
    found = memory.fit_context(spec, "auto", "cpu", None, reserve, group_size=32, threads=2)
    kept = fp.reserve_bytes(reserve, 8 << 30)
    account = fp.footprint(spec, backend="cpu", group_size=32, threads=2, reserve_bytes=kept)
    assert found == account.max_context(3 << 30)
    memory.fit_context(spec, found, "cpu", None, reserve, group_size=32, threads=2)
    with pytest.raises(BudgetError):
        memory.fit_context(spec, found + 1, "cpu", None, reserve, group_size=32, threads=2)
    limit = account.total_bytes(640) - kept
    found = memory.fit_context(spec, "auto", "cpu", limit, reserve, group_size=32, threads=2)
    assert found == 640  # a budget that lies beside the reserve


@pytest.mark.parametrize("asked", [0, 1, 1 << 33])
def test_what_is_left_free_is_what_the_engine_watches(asked: int) -> None:
    assert MemoryWatch(asked).reserve_bytes == fp.reserve_bytes(asked, machine.total_bytes())
