"""Bytes, products and speeds: against counting by hand, and what no choice may change."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given
from random_weights import random_spec

from edge_runtime.plan import cost
from edge_runtime.profiles import DeviceProfile, Mode

SPEC = random_spec(num_layers=3, hidden_size=128, intermediate_size=256, head_dim=32)
ALPHAS = st.floats(0, 1)


def roof(**fields: float | None) -> cost.Roof:
    return cost.Roof(**({"bytes_s": 1e9, "read_share": 0.5, "mac_s": None} | fields))


def test_kv_read_per_token() -> None:
    """LLaMA-2-7B, counted by hand: 32 layers, K and V, 32 heads of 128."""
    spec = random_spec(num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128)
    vectors = 32 * 2 * 32
    assert cost.kv_read_per_token(spec) == {
        "kv8": vectors * (64 + 64 + 2),
        "kv4": vectors * (64 + 2),
        "fp16": vectors * 256,
    }


def test_step_bytes_grow_by_the_cache_alone() -> None:
    read = cost.kv_read_per_token(SPEC)
    for view in ("w4", "w8", "fp16"):
        start = cost.step_bytes(SPEC, 64, view, 0)
        for kv, size in read.items():
            assert cost.step_bytes(SPEC, 64, view, 1000, kv) == start + 1000 * size
    w4, w8, fp16 = (cost.weight_bytes(SPEC, 64, v) for v in ("w4", "w8", "fp16"))
    assert w4 < w8 < fp16
    assert w8 < 2 * w4  # scales are read by both


@given(ALPHAS, st.integers(0, 20))
def test_expected_tokens_is_the_mean_of_the_cycle(alpha: float, gamma: int) -> None:
    """Against the distribution itself: k drafted tokens are kept with α^k (1 - α), all with α^γ."""
    mean = sum((k + 1) * alpha**k * (1 - alpha) for k in range(gamma)) + (gamma + 1) * alpha**gamma
    assert math.isclose(cost.expected_tokens(alpha, gamma), mean, rel_tol=1e-9)


@given(ALPHAS, st.integers(0, 100_000))
def test_drafting_is_never_chosen_to_lose(alpha: float, position: int) -> None:
    found = cost.speculate(roof(), SPEC, 64, position, alpha)
    alone = cost.step_seconds(roof(), SPEC, 64, "w8", position)
    assert found is not None
    assert alone is not None
    assert 0 <= found.gamma <= 7
    assert found.tok_s >= 1 / alone
    assert found.tok_s * alone <= found.tokens_per_cycle + 1e-9


def test_nothing_is_gained_without_acceptance_and_never_more_than_w4() -> None:
    alone = cost.step_seconds(roof(), SPEC, 64, "w8", 0)
    draft = cost.step_seconds(roof(), SPEC, 64, "w4", 0)
    none, all_ = (cost.speculate(roof(), SPEC, 64, 0, alpha) for alpha in (0.0, 1.0))
    assert none is not None
    assert all_ is not None
    assert alone is not None
    assert draft is not None
    assert (none.gamma, none.tok_s) == (0, 1 / alone)
    assert all_.gamma == 7
    assert 1 / alone < all_.tok_s < 1 / draft


@given(st.floats(0.01, 0.99), st.integers(0, 50_000))
def test_more_acceptance_is_never_slower(alpha: float, position: int) -> None:
    low, high = (cost.speculate(roof(), SPEC, 64, position, a) for a in (alpha, alpha + 0.01))
    assert low is not None
    assert high is not None
    assert high.tok_s >= low.tok_s


def test_rows_cost_nothing_until_the_products_do() -> None:
    memory = cost.step_seconds(roof(), SPEC, 64, "w8", 100)
    assert cost.step_seconds(roof(mac_s=1e15), SPEC, 64, "w8", 100, rows=8) == memory
    slow = roof(mac_s=1e6)
    one, eight = (cost.step_seconds(slow, SPEC, 64, "w8", 100, rows=r) for r in (1, 8))
    assert one is not None
    assert eight is not None
    assert math.isclose(eight, 8 * one)
    half = cost.step_seconds(slow, SPEC, 64, "fp16", 100)
    assert half is not None
    assert math.isclose(half, 2 * one)


def test_what_is_not_known_is_none() -> None:
    unknown = roof(bytes_s=None)
    assert cost.step_seconds(unknown, SPEC, 64, "w8", 0) is None
    assert cost.speculate(unknown, SPEC, 64, 0, 0.8) is None
    assert cost.prefill_tok_s(roof(), SPEC, 64, "w8", 512) is None  # no rate of products
    device = DeviceProfile(name="x", title="X", backend="cuda")
    top = cost.roof(device, None)
    assert (top.bytes_s, top.mac_s) == (None, None)
    half_known = cost.roof(device, Mode(name="m", bandwidth_gb_s=100.0, sm_count=8))
    assert (half_known.bytes_s, half_known.mac_s) == (100e9, None)


def test_roof_of_a_mode() -> None:
    device = DeviceProfile(
        name="x", title="X", backend="cuda", read_share=0.7, int8_mac_per_clk_sm=2048
    )
    top = cost.roof(device, Mode(name="m", bandwidth_gb_s=102.4, sm_count=8, gpu_max_mhz=918))
    assert top.read_share == 0.7
    assert top.mac_s == pytest.approx(15.04e12, rel=1e-3)  # 30 dense TOPS


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 4000])
def test_prefill_is_bound_by_its_products_or_its_bytes(tokens: int) -> None:
    fast, slow = roof(mac_s=1e18), roof(mac_s=1e6)
    chunks = -(-tokens // 256)
    by_bytes = cost.prefill_tok_s(fast, SPEC, 64, "w8", tokens)
    assert by_bytes is not None
    assert by_bytes <= tokens / chunks / (cost.weight_bytes(SPEC, 64, "w8") / 0.5e9)
    by_products = cost.prefill_tok_s(slow, SPEC, 64, "w8", tokens)
    assert by_products is not None
    assert by_products < by_bytes
